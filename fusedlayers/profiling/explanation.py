"""``explain``: everything the library knows of an activation, measured where it can be measured."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..activations import Activation, resolve
from ..activations.free_variables import find_variables
from ..call import with_operands
from ..functional import bias_act
from ..memory import saved_bytes
from ..nn.base import WithActivation
from ..nn.conv import CONV_TYPES
from ..nn.dense import LINEAR_TYPES
from ..nn.mlp import FusedBlock, FusedGatedMLP
from ..plan import describe
from ..sizes import SMALL_BYTES
from ..utils.isolation import in_clean_state
from ..utils.reports import DrawnReport, NothingToDrawError
from . import explanation_plot
from .explanation_plot import FAR, Curves, inputs_within
from .model_explanation import ModelExplanation, explain_model, is_model, said_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Inputs that derivatives are compared on: fewer of 16 bits would be left to PyTorch.
COUNT = SMALL_BYTES // 2


@dataclass(frozen=True)
class Accuracy:
    """Errors of the derivative for z ~ N(0, 1), against float64: the norm of the error over that of the derivative, and
    the largest. ``eager`` is PyTorch's own in the same dtype; ``floor`` is what rounding the exact one to it costs."""

    rms: float
    largest: float
    eager_rms: float
    eager_largest: float
    floor_rms: float


@dataclass(frozen=True)
class Explanation(DrawnReport):
    """What ``explain`` found. ``str()`` is a table, ``source`` the generated code, ``plot(path)`` a picture.

    Attributes:
        name: of the activation.
        kind: "monotone", the output determines the derivative; "folded", it does with a branch bit; "needs input", the
            pre-activation is kept; "fallback", plain PyTorch computes it.
        reason: why.
        saves: what a layer keeps, by dtype.
        saved_bytes: kept for each element between two layers, by dtype: (eager, here).
        accuracy: of the derivative, by dtype.
        source: the generated Triton code; empty where there is none.
        layer: what a layer or a block says of itself: what it keeps, and on a GPU which kernels multiply; empty for an
            activation.
    """

    name: str
    kind: str
    reason: str
    saves: Mapping[str, str]
    saved_bytes: Mapping[str, tuple[float, float]]
    accuracy: Mapping[str, Accuracy]
    source: str
    layer: str = ""
    curves: Curves | None = field(repr=False, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "reason": self.reason,
            "saves": dict(self.saves),
            "saved_bytes": {dtype: {"eager": a, "here": b} for dtype, (a, b) in self.saved_bytes.items()},
            "accuracy": {
                dtype: {name: value if math.isfinite(value) else None for name, value in vars(errors).items()}
                for dtype, errors in self.accuracy.items()
            },
            "source": self.source,
            "layer": self.layer,
        }

    def figure(self) -> Figure:
        """The function, its derivative over what is saved, the derivative's errors, and bytes.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: PyTorch computes the function, or it raises an error.
        """
        if self.kind == "fallback":
            raise NothingToDrawError(f"explain: {self.name} is left to PyTorch, so that there is nothing to draw")
        if self.curves is None or not self.accuracy:
            raise NothingToDrawError(
                f"explain: {self.name} or its derivative raises an error, so that there is nothing to draw"
            )
        return explanation_plot.draw(self, self.curves)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(activation: object) -> Explanation | ModelExplanation:
    """Say what a layer keeps of an activation, and why; measure what that costs; show the generated code.

    Args:
        activation: as for ``fusedlayers.dense_bias_act``: a name, a module, any callable. Or a fused layer or block,
            for what it keeps, and its own activation. Or a model, for a table of its fused places and of what each
            keeps.

    Raises:
        ValueError, TypeError: as ``fusedlayers.dense_bias_act``, for what is not an activation.

    >>> import torch, fusedlayers as fl
    >>> fl.explain(torch.tanh).kind
    'monotone'
    """
    if isinstance(activation, nn.Module) and is_model(activation):
        return explain_model(activation)
    layer = activation if isinstance(activation, WithActivation) else None
    if layer is None and isinstance(activation, (*LINEAR_TYPES, *CONV_TYPES)):
        raise TypeError(
            f"explain: {type(activation).__name__} is a layer without an activation; pass an activation, a layer with "
            "one, or a model that fuse has changed"
        )
    resolved = resolve(activation if layer is None else layer.activation, "explain")
    shape = _shape(resolved)
    record = _specialised(resolved, shape)
    kind, reason = _kind(record)
    given = _evaluated_from(record, layer)
    if layer is not None and given == "input" and kind in ("monotone", "folded"):
        again = layer.save == "recompute"
        verb = "computes its input again" if again else "keeps its input"
        reason = f"the layer {verb}, which determines the derivative"
    cpu = torch.device("cpu")  # where all is measured
    bytes_, accuracy = {}, {}
    for dtype in DTYPES:
        with contextlib.suppress(Exception):  # a user's function need not work in every dtype
            bytes_[dtype], accuracy[dtype] = _measure(resolved, shape, dtype, layer)
    return Explanation(
        repr(record),
        kind,
        reason,
        {_name(d): describe(record, "auto", d, cpu) if layer is None else layer.keeps(record, d) for d in DTYPES},
        {_name(dtype): saved for dtype, saved in bytes_.items()},
        {_name(dtype): errors for dtype, errors in accuracy.items()} if kind != "fallback" else {},
        "" if kind == "fallback" or record.is_identity else _source(record, given),
        "" if layer is None else said_of(layer),
        None if kind == "fallback" else _curves(resolved, record, shape, layer, given),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(record: Activation) -> tuple[str, str]:
    if record.fallback_reason is not None:
        return "fallback", record.fallback_reason.partition(" because ")[2]
    if record.is_identity:
        return "monotone", "the derivative is 1"
    refused = record.output_refusal(torch.float32)
    if refused is not None:
        return "needs input", refused
    if record.fold is None:
        return "monotone", "the output determines the derivative"
    turn = f"it turns once, at z = {record.fold.position:.6g}"
    return "folded", f"{turn}; negative outputs carry the branch in their last bit"


# --- measuring --------------------------------------------------------------------------------------------------------


def _specialised(record: Activation, shape: tuple[int, ...]) -> Activation:
    """As a layer in float32 uses it, whatever the dtypes of the function's own tensors."""
    if not record.needs_tracing:
        return record
    return with_operands(resolve(_in_dtype(record, torch.float32)[1]), shape, torch.float32).activation


def _shape(record: Activation) -> tuple[int, ...]:
    """A shape that the function takes. Channels are tried as the last dimension, and as the second of three to five;
    that first if a tensor has dimensions behind them."""
    from ..activations.custom import without_logging  # whose import takes a second

    tensors = find_variables(record.function).tensors
    sizes = {size for tensor in tensors for size in tensor.shape if size > 1}
    as_second = any(tensor.numel() > 1 and tensor.shape[-1] == 1 for tensor in tensors)
    # No fewer dimensions than a tensor has, which would add its own to the result.
    more = [1] * max((tensor.dim() - 2 for tensor in tensors), default=0)
    for channels in sorted(sizes, reverse=True):
        rest = -(-COUNT // channels)
        images = [(8, channels, *[4] * dims, -(-rest // (8 * 4**dims))) for dims in range(3)]
        shapes = [(*more, rest, channels), *images]
        for shape in shapes[::-1] if as_second else shapes:
            with without_logging():
                if _specialised(record, shape).is_fusible:
                    return shape
    return (*more, COUNT // 64, 64)


def _in_dtype(record: Activation, dtype: torch.dtype) -> tuple[Callable[..., Tensor], object]:
    """The function as PyTorch computes it, and what to hand to a layer; what it reads, in this dtype."""
    if not record.needs_tracing or record.row is not None:
        return record.plain, record
    from ..activations.verification import own_tensors  # with it come parts of torch whose import takes a second

    variables = find_variables(record.function)
    function = variables.rebind(own_tensors(variables, dtype))
    return function, function


def _errors(record: Activation, z: Tensor, layer: WithActivation | None) -> tuple[Tensor, list[Tensor]]:
    """The derivative in float64; and how far from it are the layer's, PyTorch's, and itself rounded to z's dtype."""
    function, activation = _in_dtype(record, z.dtype)
    exact = _derivative(_in_dtype(record, torch.float64)[0], z.double())
    here = _derivative(functools.partial(_applied, activation, _save(layer)), z)
    slopes = here, _derivative(function, z), exact.to(z.dtype)
    return exact, [(slope.double() - exact).abs() for slope in slopes]


def _save(layer: WithActivation | None) -> str:
    """What of ``bias_act`` has the derivative that the layer has."""
    if layer is None or layer.save != "auto":
        return "auto" if layer is None else layer.save
    return "input" if isinstance(layer, FusedGatedMLP) else "auto"


@in_clean_state
def _measure(
    record: Activation, shape: tuple[int, ...], dtype: torch.dtype, layer: WithActivation | None
) -> tuple[tuple[float, float], Accuracy]:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, errors = _errors(record, z, layer)
    real = exact.isfinite()  # elsewhere there is nothing to compare with
    scale = float(exact[real].norm()) or 1.0
    here, eager, floor = ((float(error[real].norm()) / scale, float(error[real].max())) for error in errors)

    function, activation = _in_dtype(record, dtype)
    fused = functools.partial(_applied, activation, _save(layer))
    if isinstance(layer, FusedBlock):
        kept = _kept_by_block(layer, function, activation, z.flatten(0, -2), dtype)
    else:
        kept = tuple(_kept_bytes(f, z, dtype) / z.numel() for f in (function, fused))
    return (kept[0], kept[1]), Accuracy(*here, *eager, floor[0])


def _kept_by_block(
    layer: FusedBlock, function: Callable[[Tensor], Tensor], activation: object, hidden: Tensor, dtype: torch.dtype
) -> tuple[float, ...]:
    """Bytes saved for each hidden element, by eager PyTorch and by the block."""
    rows, size = hidden.shape
    block = type(layer)(8, size, 8, activation, save=layer.save, dtype=dtype)
    x = torch.randn(rows, 8, dtype=dtype)
    return tuple(
        saved_bytes(f, x, exclude=[block, x]) / hidden.numel()
        for f in (functools.partial(block.by_calls, function=function), block)
    )


def _applied(activation: object, save: str, z: Tensor) -> Tensor:
    return bias_act(z, None, activation, save=save)


def _derivative(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    y = function(z)
    return torch.autograd.grad(y, z, torch.ones_like(y))[0]


def _kept_bytes(function: Callable[[Tensor], Tensor], z: Tensor, dtype: torch.dtype) -> int:
    """Between an operation that keeps nothing, as a matmul does not keep its result, and one that keeps its input."""
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    return saved_bytes(lambda z: function(z + 1) * weight, z.clone().requires_grad_(), exclude=[weight])


@in_clean_state
def _curves(
    resolved: Activation, record: Activation, shape: tuple[int, ...], layer: WithActivation | None, given: str
) -> Curves | None:
    """What the picture shows, of the first channel. None if the function raises an error."""
    fold = record.fold if given == "output" else None
    # One number for each channel along which the function's tensors run, or some channels.
    along = next((dim for dim in record.operand_dims if dim is not None), 1 - len(shape)) % len(shape)
    points = min(4096, max(64, 4 * COUNT // shape[along]))
    copies = -(-COUNT // (points * shape[along]))  # less would be left to PyTorch
    line = torch.linspace(*inputs_within(FAR, fold), points)
    sizes = [size if dim == along else 1 for dim, size in enumerate(shape)]
    z = line.repeat(copies).view(-1, *[1] * (len(shape) - 1)).repeat(1, *sizes[1:])

    def first(values: Tensor) -> Tensor:
        return values.detach()[:points].flatten(1)[:, 0]

    try:
        function = _in_dtype(resolved, torch.float64)[0]
        y, slope = function(z.double()), _derivative(function, z.double())
        errors = {}
        for dtype in (torch.float32, torch.bfloat16):
            here, eager, rounding = map(first, _errors(resolved, z.to(dtype), layer)[1])
            errors[_name(dtype)] = here, eager, rounding
        return Curves(line.double(), first(y), first(slope), errors, given, fold)
    except Exception:  # a user's function may raise anything
        return None


def _evaluated_from(record: Activation, layer: WithActivation | None) -> str:
    """What the derivative is evaluated from: "output" or "input"."""
    if record.output_refusal(torch.float32) is not None or isinstance(layer, FusedGatedMLP):
        return "input"
    return "input" if layer is not None and layer.save in ("input", "recompute") else "output"


def _source(record: Activation, given: str) -> str:
    if importlib.util.find_spec("triton") is None:
        return "# Triton is not installed; torch operations do the work."
    from ..activations.tracing import NotPointwise
    from ..backends.triton.codegen import source

    needs = (True,) * len(record.operand_dims)
    try:
        parts = [
            source(record, "forward", given=given, dtype=torch.float32),
            source(record, "gradient", given=given, dtype=torch.float32, needs=needs),
        ]
    except NotPointwise as reason:
        return f"# On GPUs it is left to torch operations: {reason}."
    return "\n\n".join(parts)


# --- printing ---------------------------------------------------------------------------------------------------------


#: The table: titles, what is under them, and the widths of the columns.
_GROUPS = (("", 1), ("a layer keeps", 1), ("bytes per element", 2), ("derivative, rms error", 3), ("largest error", 2))
_TITLES = ("", "", "eager", "here", "eager", "here", "rounding", "eager", "here")
_WIDTHS = (10, 41, 7, 12, 10, 10, 14, 10, 10)


def _lines(found: Explanation) -> Iterator[str]:
    if found.layer:
        yield found.layer
    yield f"{found.name}: {found.kind}"
    yield f"  {found.reason}"
    if not found.saved_bytes:
        yield "  nothing is measured: PyTorch raises an error for it, or it returns no tensor of its argument's shape"
        return
    yield ""
    widths = iter(_WIDTHS)
    yield _row((title, sum(itertools.islice(widths, columns))) for title, columns in _GROUPS)
    yield _row(zip(_TITLES, _WIDTHS, strict=True))
    for dtype, (eager, here) in found.saved_bytes.items():
        cells = [dtype, _kept(found, dtype), f"{eager:.3g}", f"{here:.3g}"]
        if (errors := found.accuracy.get(dtype)) is not None:
            rms = errors.eager_rms, errors.rms, errors.floor_rms
            cells += [f"{value:.1e}" if value else "0" for value in (*rms, errors.eager_largest, errors.largest)]
        yield _row(zip(cells, _WIDTHS, strict=False))
    yield ""
    yield "  bytes: saved for backward between two layers that save nothing else"
    if found.accuracy:
        yield "  errors: for z ~ N(0, 1), against float64; rounding: of the exact derivative to the dtype"
    for reason in dict.fromkeys(_reason(saves) for saves in found.saves.values()):
        if reason and reason not in found.reason and found.reason not in reason:
            dtypes = [dtype for dtype, saves in found.saves.items() if _reason(saves) == reason]
            yield f"  {', '.join(dtypes)}: {reason}"


def _row(cells: Iterable[tuple[str, int]]) -> str:
    return "  " + "".join(f"{text:<{width}}" for text, width in cells).rstrip()


def _kept(found: Explanation, dtype: str) -> str:
    if found.kind == "fallback" or found.saves[dtype].startswith("not fused"):
        return "what PyTorch does"
    return found.saves[dtype].partition(":")[0].removeprefix("saves ")


def _reason(saves: str) -> str:
    return saves.partition(": ")[2]
