"""Calls of ``loops.c``: its structures, tensors as matrices, and tables of cubics.

A ``Kernel`` is made once for an activation, a dtype and a direction (``elementwise.py``); a call then passes
addresses.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...derivative.features import Fold
from ...utils.caching import in_clean_state
from ...utils.layout import Layout
from . import build

if TYPE_CHECKING:
    from ...activations import Activation
    from .value_tables import FoldTable, MonotoneTable

#: Fewer numbers are left to the calling thread, as torch does (``at::internal::GRAIN_SIZE``).
GRAIN = 1 << 15
#: A block of ``loops.c``. Rows that are shorter are joined, so that blocks are filled.
BLOCK = 256
#: Rows are joined to so many columns at most, and so that at least so many are left.
COLUMNS, ROWS = 2048, 128

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Functions of float32 numbers, as ``Native.loop`` names them.
_PLAIN = ("relu", "sigmoid", "tanh", "leaky_relu", "elu", "softplus", "logsigmoid", "squared_relu", "hardsigmoid")
FUNCTIONS = ("gelu", "gelu_tanh", "swish", "mish", "hardswish", *_PLAIN)
#: Those with a fold whose derivative it computes from outputs by a formula. The others have tables.
DERIVED_FROM_OUTPUTS = ("hardswish",)
#: Those without a fold whose derivative it has a formula for, from outputs.
BY_FORMULA = _PLAIN
_NO_AXIS, _ALONG_COLUMNS, _ALONG_ROWS = range(3)


class _Mark(ctypes.Structure):
    _fields_ = (("is_folded", c_int32), ("position", c_float))


class _Table(ctypes.Structure):
    _fields_ = (
        *((name, c_float) for name in ("rises", "middle", "at_middle", "lower_high", "lower_low", "lower_sign")),
        *((name, c_float) for name in ("upper_high", "upper_low", "upper_sign")),
        ("cubics", c_void_p),
    )


class _FoldTable(ctypes.Structure):
    _fields_ = (
        *((name, c_float) for name in ("origin_high", "origin_low", "nearest", "tail", "down")),
        ("cubics", c_void_p),
    )


class _Normal(ctypes.Structure):
    _fields_ = (("steps", c_float), ("first", c_float), ("last", c_float), ("cubics", c_void_p))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("function", c_int32),
        ("parameter", c_float),
        ("is_from_output", c_int32),
        ("mark", _Mark),
        ("table", _Table),
        ("slope", _FoldTable),
        *((name, c_void_p) for name in ("values", "outputs", "slopes")),
        ("normal", _Normal),
    )


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("count", "columns", "channels")),
        ("axis", c_int32),
        ("threads", c_int32),
    )


class Kernel:
    """The function of a pass, with its tables."""

    def __init__(
        self,
        dtype: torch.dtype,
        function: tuple[str, float] | None = None,
        fold: Fold | None = None,
        table: MonotoneTable | None = None,
        slope: FoldTable | None = None,
        values: Tensor | None = None,
        outputs: Tensor | None = None,
        slopes: Tensor | None = None,
        *,
        is_from_output: bool = False,
    ) -> None:
        """``fold`` asks for the branch bit. The derivative comes from ``table``, ``slope`` or ``slopes``, or is that of
        ``function``, from its input or by a formula from its output. ``values`` (the dtype's), ``outputs`` and
        ``slopes`` (float32) hold one number for each of the 65,536 of a 16-bit dtype, in the order of their bits."""
        #: Whether a pass computes outputs, and not only puts the branch into them.
        self.has_function = function is not None or values is not None
        name, parameter = function or (FUNCTIONS[0], 0.0)
        mark = _Mark()
        if fold is not None:
            mark = _Mark(True, fold.position)
        below = normal() if function is not None and name == "gelu" else None
        self._kept = table, slope, values, outputs, slopes, below  # whose addresses follow
        addresses = (None if t is None else t.data_ptr() for t in (values, outputs, slopes))
        self._kernel = _Kernel(
            DTYPES[dtype],
            FUNCTIONS.index(name),
            parameter,
            is_from_output,
            mark,
            _Table() if table is None else _Table(*table.numbers, table.cubics.data_ptr()),
            _FoldTable() if slope is None else _FoldTable(*slope.numbers, slope.cubics.data_ptr()),
            *addresses,
            _Normal() if below is None else _Normal(*below[:3], below.cubics.data_ptr()),
        )
        self.address = ctypes.addressof(self._kernel)


def serve(dtype: torch.dtype) -> bool:
    """Whether the loops read it, and are there."""
    return dtype in DTYPES and build.shared_object() is not None


def function_of(activation: Activation) -> tuple[str, float] | None:
    """The loops' name of the activation, and its parameter; None where they have none for its parameters."""
    if activation.native.loop is None or activation.needs_input_reason is not None:
        return None
    name, parameter = activation.native.loop
    return name, activation.parameters[parameter] if isinstance(parameter, str) else parameter


# --- passes over dense tensors, which are laid out alike --------------------------------------------------------------


def forward(
    kernel: Kernel, z: Tensor, b: Tensor | None, residual: Tensor | None, y: Tensor, along: Layout | None
) -> Tensor:
    """The activation of ``z + b + residual`` in y, which may be z."""
    bias = None if b is None or along is None else channel_vector(b, along)
    bias_address = None if bias is None else bias.data_ptr()
    residual_address = None if residual is None else residual.data_ptr()
    call("forward", kernel, y, along, z.data_ptr(), bias_address, residual_address, y.data_ptr())
    return y


def encode(kernel: Kernel, z: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Float32 outputs y of z with their branch bit, in ``out``, which may be either."""
    call("encode_outputs", kernel, out, None, z.data_ptr(), y.data_ptr(), out.data_ptr())
    return out


def gradient(kernel: Kernel, dy: Tensor, saved: Tensor, dz: Tensor, db: Tensor | None, along: Layout | None) -> Tensor:
    """``dz = dy * f'`` in dz, which may be ``saved``, and its sums along the channels in db."""
    sums = None if db is None else db.data_ptr()
    call("gradient", kernel, dz, along, dy.data_ptr(), saved.data_ptr(), dz.data_ptr(), sums)
    return dz


def gate(kernel: Kernel, z: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """The activation of z times ``up``, in ``out``, which may be either."""
    call("gate", kernel, out, None, z.data_ptr(), up.data_ptr(), out.data_ptr())
    return out


def gate_gradient(kernel: Kernel, dy: Tensor, z: Tensor, up: Tensor) -> None:
    """The gradients of z and ``up``, in these."""
    call("gate_gradient", kernel, z, None, dy.data_ptr(), z.data_ptr(), up.data_ptr())
    torch.autograd.graph.increment_version(up)


def call(name: str, kernel: Kernel, tensor: Tensor, along: Layout | None, *addresses: Any) -> None:
    """A pass over ``tensor``, and what is laid out alike."""
    count = tensor.numel()
    if not count:
        return
    threads = 1 if count <= GRAIN else torch.get_num_threads()
    address, _layout = _matrix(count, along, threads)  # which must live as long as the call
    failed = functions()[name](kernel.address, *addresses, address)
    if failed:
        raise MemoryError(f"{name}: no memory for sums")
    torch.autograd.graph.increment_version(tensor)


def channel_vector(numbers: Tensor, along: Layout) -> Tensor:
    """Numbers along the channels as ``loops.c`` takes them, repeated where rows of a tensor with this layout are
    joined."""
    if numbers.dtype is not torch.float32 or not numbers.is_contiguous():  # usually they are, and detach() takes 2 us
        numbers = numbers.detach().float().contiguous()
    joined = 1 if along.inner > 1 else _joined(along)
    return numbers if joined == 1 else numbers.repeat(joined)


@functools.lru_cache(1024)
def _joined(along: Layout) -> int:
    """How many rows are taken as one, so that few of its blocks are padded, and there are rows for several threads."""
    channels = along.channels
    least = -(-BLOCK // channels)
    most = max(least, min(COLUMNS // channels, along.outer // ROWS))
    padded = lambda rows: -(-rows * channels // BLOCK) * BLOCK / (rows * channels)
    return min(range(least, most + 1), key=padded)


@functools.lru_cache(1024)
def _matrix(count: int, along: Layout | None, threads: int) -> tuple[int, _Layout]:
    """The address of the tensor's description, and what must live as long as that."""
    if along is None:
        found = _Layout(count, count, 1, _NO_AXIS, threads)
    elif along.inner == 1:
        found = _Layout(count, along.channels * _joined(along), along.channels, _ALONG_COLUMNS, threads)
    else:
        found = _Layout(count, along.inner, along.channels, _ALONG_ROWS, threads)
    return ctypes.addressof(found), found


@functools.cache
def functions() -> dict[str, Any]:
    """The functions of ``loops.c``, by name."""
    library = build.shared_object()
    assert library is not None
    pointers = {"forward": 6, "encode_outputs": 5, "gradient": 6, "gate": 5, "gate_gradient": 5}
    found = {}
    for name, count in pointers.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (c_void_p,) * count, c_int32
        found[name] = function
    return found


# --- tables of cubics -------------------------------------------------------------------------------------------------

#: Four places within an interval, from 0 to 1, not at its ends: what is fitted may jump there.
PLACES = 0.5 - 0.49 * torch.tensor([math.cos(k * math.pi / 8) for k in (1, 3, 5, 7)], dtype=torch.float64)


#: Values in a smaller part of an interval than this have a line: a cubic through them would be mostly rounding error.
NARROW = 0.1


def cubics(values: Tensor, places: Tensor = PLACES) -> Tensor:
    """The coefficients of the cubics through values at four places of each interval, as a rule the same of all."""
    places = places.expand_as(values)
    width = places[:, -1] - places[:, 0]
    slope = torch.where(width > 1e-6, (values[:, -1] - values[:, 0]) / width, 0.0)
    found = torch.stack([values[:, 0] - slope * places[:, 0], slope, *torch.zeros(2, len(slope))], 1)
    is_wide = width > NARROW
    powers = places[is_wide].unsqueeze(-1) ** torch.arange(4)
    found[is_wide] = torch.linalg.solve(powers, values[is_wide].unsqueeze(-1)).squeeze(-1)
    return found.float()


class Normal(NamedTuple):
    """The part of a normal distribution below z, as cubics about ``z = i / steps``, from i = first to last. Below these
    it is 0 in float32, and above 1.

    A cubic errs by 5e-9 of its values where |z| < 4, and by 5e-7 in the tail, where rounding an exponential's argument
    does more. All cubics take 20 KiB; inputs of ordinary size need a third of them.
    """

    steps: int
    first: int
    last: int
    cubics: Tensor


@functools.cache
@in_clean_state
def normal() -> Normal:
    """The table of the normal distribution."""
    steps = 64  # a power of two, so that places are exact
    first, last = round(-14.25 * steps), round(5.75 * steps)
    places = PLACES - 0.5
    z = (torch.arange(first, last + 1, dtype=torch.float64).unsqueeze(1) + places) / steps
    return Normal(steps, first, last, cubics(torch.erfc(z * -math.sqrt(0.5)) / 2, places).contiguous())
