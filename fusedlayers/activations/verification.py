"""``verify``: compare a user's function with its trace before the trace is used, and count what PyTorch keeps of it.

The function is called at about 4096 numbers of another shape than the one that was traced. What a trace cannot express
is refused: changing state, a result of another dtype. Values and gradients must be the trace's, in float64, in which
sums whose terms cancel have digits enough. That takes some milliseconds.

``recognise`` finds the row of the table that a trace is equal to, such as another library's ``gelu``. The function is
then replaced by the row, with the row's kernels, derivatives and name.

What it does not do: a branch that none of the compared numbers takes goes unnoticed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._torch import refuses_hooks
from ..derivative.features import round_numbers, value_and_slope
from ..utils.formatting import first_line
from ..utils.isolation import in_clean_state
from ..utils.storages import sizes_of
from .free_variables import FreeVariables, find_variables
from .partition import Split
from .record import Activation
from .table import by_name
from .tracing import NotPointwise

#: Special values, and about how many values are compared in all.
_EDGES = (0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4)
_SWEEP = 4096
#: The accepted difference. Both sides run the same operations, some of them perhaps in float32.
_TOLERANCE = 64 * torch.finfo(torch.float32).eps


@in_clean_state
def verify(
    variables: FreeVariables, split: Split, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> tuple[float, float]:
    """Compare the function with its trace. Returns how often z's bytes PyTorch saves for backward, and how often with
    the output, which the next layer saves.

    Raises:
        NotPointwise: they differ; or the function raises, changes what it reads, or returns another dtype than its
            argument's. (Under autocast it may return any dtype.)
    """
    shape = _other_shape(example, split.dims)
    kept = _kept_bytes(variables, shape, dtype, autocast)
    count = math.prod(shape)
    moderate = torch.linspace(-8, 8, max(1, count // 2, count - len(_EDGES)), dtype=torch.float64)
    z = torch.cat([moderate, torch.tensor(_EDGES).double()])[:count]
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in own_tensors(variables, torch.float64)]
    leaves = [z.reshape(shape).requires_grad_(), *tensors]
    theirs = _values_and_gradients(lambda z, *t: variables.rebind(t)(z), leaves)
    try:
        ours = _values_and_gradients(lambda z, *t: split.body(z, *split.prologue(*t)), leaves)
    except NotPointwise as error:  # as operations raise on constants of another dtype than the argument's
        raise NotPointwise(f"it computes in one dtype alone: {first_line(error)}") from error
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        finite = a[a.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True):
            raise NotPointwise(_DIFFERS["gradient" if i else "value"])
    return kept


_DIFFERS = {
    "value": "its operations do not give its value, which depends on something else (a shape, changing state)",
    "gradient": "its operations do not give its gradient: autograd does not see some (no_grad, .data), or PyTorch's "
    "formula for the gradient of one gives other values than that of its parts",
}


def _kept_bytes(
    variables: FreeVariables, shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> tuple[float, float]:
    own = own_tensors(variables, None)
    function = variables.rebind(own)
    before = find_variables(function).key
    z = torch.linspace(-4, 4, math.prod(shape)).reshape(shape).to(dtype)
    kept: list[Tensor] = []  # held: an address stands for a storage only while that is alive

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = function(z.clone().requires_grad_() * 1)
    except Exception as error:  # whatever a user's function may raise
        if isinstance(error, RuntimeError) and refuses_hooks(error):
            raise NotPointwise("it refuses saved-tensor hooks, as torch.func does") from error
        raise _raised(error) from error
    if find_variables(function).key != before:
        raise NotPointwise("it changes what it reads from call to call")
    if y.dtype is not dtype and not autocast:
        raise NotPointwise(f"it returns {y.dtype} for {dtype}; its tensors may have another dtype than the layer")
    given = sizes_of(own)
    saved, with_output = (
        sum(size for storage, size in sizes_of(found).items() if storage not in given) / max(1, z.nbytes)
        for found in (kept, [*kept, y.detach()])
    )
    return saved, with_output


def _values_and_gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The value and the gradients, in float64, of a function that may overwrite its first argument."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        y = function(leaves[0] * 1, *leaves[1:]).double()
        weight = torch.linspace(0.5, 1.5, max(1, y.numel()), dtype=y.dtype).reshape(y.shape)
        grads = torch.autograd.grad(y, wanted, weight, allow_unused=True) if y.requires_grad else [None] * len(wanted)
    except Exception as error:  # whatever a user's function may raise
        raise _raised(error) from error
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True))]


def own_tensors(variables: FreeVariables, dtype: torch.dtype | None) -> list[Tensor]:
    """The function's tensors as leaves on the CPU, floating ones in this dtype; arbitrary values for the meta
    device's."""
    found = []
    for tensor in variables.tensors:
        values = torch.full(tensor.shape, 0.5).to(tensor.dtype) if tensor.is_meta else tensor.detach()
        values = values.to("cpu", dtype if tensor.is_floating_point() else None)
        found.append(values.detach().requires_grad_(tensor.requires_grad))
    return found


def _raised(error: Exception) -> NotPointwise:
    return NotPointwise(f"it raised {type(error).__name__} when it was tried: {first_line(error)}")


def _other_shape(example: tuple[int, ...], dims: Sequence[int | None]) -> tuple[int, ...]:
    """A shape with about ``_SWEEP`` elements that differs from the example in all dimensions but that of operands."""
    along = {len(example) + dim for dim in dims if dim is not None}
    free = [i for i in range(len(example)) if i not in along]
    shape = [size if i in along else 2 for i, size in enumerate(example)]
    if free:
        shape[free[0]] = max(2, _SWEEP * 2 // max(1, math.prod(shape)))
    return tuple(shape)


# --- equal to a row ---------------------------------------------------------------------------------------------------

#: The accepted difference of values and slopes from a row's, times |z| where that is above 1. Constants are often
#: written with ten digits.
_EQUAL = 2e-9
#: The numbers compared are dense up to here. They reach as far as float32, because a function may be clamped.
NEAR = 40.0


@in_clean_state
def recognise(body: GraphModule) -> Activation | None:
    """The activation of the table, with its default parameters, that the trace ``body`` is equal to; or None.

    Values and slopes in float64 must agree with the row's to more digits than float32 holds (``z * sigmoid(z)`` for
    silu), also at round numbers, where rows have their kinks. Values alone do not suffice: a straight-through estimator
    (``z.detach() * sigmoid(z)``) has the values of another function.
    """
    z, known = _of_rows()
    y, slope = value_and_slope(body, z)
    if y.dtype is not z.dtype:
        return None
    found = torch.stack([y, slope])
    # Far from zero some formulas overflow where the row does not, as ``z / (1 + exp(-z))`` does.
    overflowed = found.isnan() & (z.abs() > NEAR)
    for activation, expected in known:
        is_near = (found - expected).abs() <= _EQUAL * z.abs().clamp(min=1)
        if bool((is_near | (found == expected) | (found.isnan() & expected.isnan()) | overflowed).all()):
            return activation
    return None


@functools.cache
def _of_rows() -> tuple[Tensor, list[tuple[Activation, Tensor]]]:
    """The numbers compared, and the values and slopes there of the table's own activations."""
    far = torch.logspace(math.log10(NEAR), 30, 120, dtype=torch.float64)
    small = torch.logspace(-30, 0, 150, dtype=torch.float64)
    near = torch.linspace(-NEAR, NEAR, 4001, dtype=torch.float64), small, -small, torch.tensor([math.nan]).double()
    z = torch.cat([*near, round_numbers(), far, -far])
    known = [found for found in by_name.values() if found.row is not None and not found.is_identity]
    return z, [(activation, torch.stack(value_and_slope(activation.plain, z))) for activation in known]
