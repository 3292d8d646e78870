"""Bias, activation, gates and their gradients on a CPU, each in one pass of the compiled loops.

``forward_kernel``, ``gradient_kernel`` and ``gate_kernel`` decide once for each activation and dtype what serves it:

* the loops, for 16-bit numbers by a table of all 65,536 values, which is computed in float64, and for float32 by the
  functions of ``loops.c`` and by tables of derivatives (``value_tables.py``);
* for everything else, a kernel of None, ``kernels/reference``: ATen's own kernels where the table of activations names
  them, users' functions from their input, and activations that read other tensors.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative import branch_bit
from ...derivative.folded import FoldedDerivative
from ...utils.caching import in_clean_state
from ...utils.layout import is_dense, laid_out_as, layout_along
from ...utils.storages import is_plain
from .. import reference
from ..interface import GradientRequest
from . import loops
from .loops import Kernel
from .value_tables import FoldTable, derivative_table

#: Kernels cached for each direction. Those of 16-bit dtypes hold a table of 128 or 256 KiB, and an activation whose
#: parameter changes from step to step has one for each value.
KERNELS = 64
#: Chunks of functions that torch computes, in elements: 256 KiB of float32 stay in a core's cache.
CHUNK = 1 << 16
#: Functions that the loops compute with their derivatives sooner than they find both in two tables of 16-bit numbers,
#: which together fill a second-level cache: 0.7 to 1.1 ns an element for 1.2 to 1.5 (AMD EPYC, one thread). Piecewise
#: ones are quicker still.
QUICKER_THAN_TABLES = ("swish", "gelu_tanh", "sigmoid")


# --- the backend's functions ------------------------------------------------------------------------------------------


def bias_act(
    z: Tensor,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor] = (),
    *,
    residual: Tensor | None = None,
    dim: int,
    encode: bool,
    out: Tensor | None,
) -> Tensor:
    """``Backend.bias_act`` by the compiled loops."""
    kernel = forward_kernel(activation, z.dtype, encode)
    if kernel is None or not z.numel():
        return reference.bias_act(z, b, activation, operands, residual=residual, dim=dim, encode=encode, out=out)
    y = out if out is not None and (out.is_contiguous() or is_dense(out)) else torch.empty_like(z)
    strides = y.stride()
    if z.stride() != strides:
        z = y.copy_(z)
    if residual is not None and (residual.stride() != strides or residual.dtype is not z.dtype):
        residual = torch.empty_like(y).copy_(residual)
    if kernel.has_function:
        loops.forward(kernel, z, b, residual, y, None if b is None else layout_along(y, dim))
    else:
        z = z if b is None and residual is None else reference.sum_of(z, b, residual, dim, out=y)
        _encode_chunks(z, y, activation, kernel)
    return y if out is None or y is out else out.copy_(y)


def gradient(
    dy: Tensor, saved: Tensor, activation: Activation, operands: Sequence[Tensor], request: GradientRequest, *, dim: int
) -> tuple[Tensor | None, ...]:
    """``Backend.gradient`` by the compiled loops."""
    kernel = gradient_kernel(activation, saved.dtype, request.saved)
    if kernel is None or not saved.numel() or not is_plain(dy):
        return reference.gradient(dy, saved, activation, operands, request, dim=dim)
    overwrite = request.overwrite
    if not (saved.is_contiguous() or is_dense(saved)):  # an output written over a view with gaps, or a user's input
        saved, overwrite = torch.empty_like(saved).copy_(saved), True
    dz = saved if overwrite else torch.empty_like(saved)
    dy = laid_out_as(dy, saved)
    along = layout_along(saved, dim) if request.needs_bias else None
    db = None if along is None else saved.new_empty(along.channels)
    return loops.gradient(kernel, dy, saved, dz, db, along), db


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``Backend.gate`` by the compiled loops."""
    kernel = gate_kernel(activation, z.dtype, gradient=False)
    if kernel is None or not z.numel():
        return reference.gate(z, up, activation, operands, out)
    return loops.gate(kernel, z, up, torch.empty_like(z) if out is None else out)


def gate_gradient(
    dy: Tensor, z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    """``Backend.gate_gradient`` by the compiled loops."""
    kernel = gate_kernel(activation, z.dtype, gradient=True)
    if kernel is None or not z.numel() or not is_plain(dy):
        return reference.gate_gradient(dy, z, up, activation, operands, needs)
    loops.gate_gradient(kernel, dy, z, up)
    return ()


def _encode_chunks(z: Tensor, y: Tensor, activation: Activation, kernel: Kernel) -> None:
    """The activation of dense z in y, which may be z: torch computes a chunk, and one pass puts the branch into it."""
    z_flat, y_flat = (t.as_strided((t.numel(),), (1,)) for t in (z, y))
    for part, result in zip(z_flat.split(CHUNK), y_flat.split(CHUNK), strict=True):
        loops.encode(kernel, part, activation.function(part), result)


# --- which kernel -----------------------------------------------------------------------------------------------------


@functools.lru_cache(KERNELS)
def forward_kernel(activation: Activation, dtype: torch.dtype, encode: bool) -> Kernel | None:
    """The kernel for z of a dtype; ``encode`` puts the branch of a folded activation into y."""
    encode = encode and activation.is_folded
    native = activation.native
    # ATen takes 0.5 to 1.9 ns for an exponential of 16 bits, and a look-up 0.4 (Intel Xeon with AVX-512, one thread).
    is_atens = native.activate_ is not None and (dtype.itemsize == 4 or native.is_piecewise)
    if activation.is_identity or activation.operand_dims or (is_atens and not encode) or not loops.serve(dtype):
        return None
    if dtype.itemsize == 2:
        return Kernel(dtype, values=_values(activation, dtype, encode))
    function = loops.function_of(activation)
    if function is not None:
        return Kernel(dtype, function, activation.fold if encode else None)
    return Kernel(dtype, fold=activation.fold) if encode else None


@functools.lru_cache(KERNELS)
def gradient_kernel(activation: Activation, dtype: torch.dtype, saved: str) -> Kernel | None:
    """The kernel for ``dy * f'`` from ``saved``, the "output" or the "input", of a dtype."""
    if activation.operand_dims or not loops.serve(dtype):
        return None
    if saved == "output" and activation.native.gradient is not None:
        return None
    formula = formula_kernel(activation, dtype) if saved == "output" else None
    if formula is not None:
        return formula
    if dtype.itemsize == 2:
        return Kernel(dtype, slopes=_slopes(activation, dtype, saved))
    if saved == "input":
        # Of the others ATen's kernels give 0 where the slope is 0, whatever dy is.
        function = loops.function_of(activation) if activation.is_folded else None
        return None if function is None else Kernel(dtype, function)
    table = derivative_table(activation)
    if table is None:
        return None
    return Kernel(dtype, slope=table) if isinstance(table, FoldTable) else Kernel(dtype, table=table)


def formula_kernel(activation: Activation, dtype: torch.dtype) -> Kernel | None:
    """The kernel where the loops have a formula for the derivative from outputs."""
    function = loops.function_of(activation)
    if function is None:
        return None
    if function[0] in loops.BY_FORMULA and dtype.itemsize == 4:
        return Kernel(dtype, function, is_from_output=True)
    fitted = activation.fitted_derivative()
    if function[0] not in loops.DERIVED_FROM_OUTPUTS or not isinstance(fitted, FoldedDerivative):
        return None
    return Kernel(dtype, (function[0], fitted.margin), is_from_output=True)


@functools.lru_cache(KERNELS)
def gate_kernel(activation: Activation, dtype: torch.dtype, *, gradient: bool) -> Kernel | None:
    """The kernel for gates of a dtype, or for their gradients."""
    if activation.operand_dims or not loops.serve(dtype):
        return None
    function = loops.function_of(activation)
    is_quick = (
        gradient and function is not None and (activation.native.is_piecewise or function[0] in QUICKER_THAN_TABLES)
    )
    if dtype.itemsize == 2 and not is_quick:
        slopes = _slopes(activation, dtype, "input") if gradient else None
        return Kernel(dtype, outputs=_outputs(activation, dtype), slopes=slopes)
    return None if function is None else Kernel(dtype, function)


# --- tables of all 16-bit values --------------------------------------------------------------------------------------


def all_values(dtype: torch.dtype) -> Tensor:
    """All numbers of a 16-bit dtype in the order of their bits, in float64."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).double()


@in_clean_state
def _values(activation: Activation, dtype: torch.dtype, encode: bool) -> Tensor:
    z = all_values(dtype)
    return (activation.encoded(z, dtype) if encode else activation.function(z)).to(dtype)


@in_clean_state
def _outputs(activation: Activation, dtype: torch.dtype) -> Tensor:
    return activation.function(all_values(dtype)).float()


@in_clean_state
def _slopes(activation: Activation, dtype: torch.dtype, saved: str) -> Tensor:
    # float32, not dtype: the product dy * f' is then rounded once.
    values = all_values(dtype)
    if saved == "input":
        return reference.derivative(activation, values).float()
    # A table costs the same whatever it holds: it takes the closest fit there is.
    fitted = activation.fitted_derivative(dtype, closest=True)
    if isinstance(fitted, FoldedDerivative):
        return fitted(values, branch_bit.decode(values.float(), dtype)).float()
    slope = activation.derivative_given_output(values, dtype) if fitted is None else fitted(values)
    return slope.float()
