"""``verify``: compare a user's function with its trace before the trace is used, and count what PyTorch keeps of it.

The function is called at about 4096 numbers of another shape than the one that was traced. What a trace cannot express
is refused: sizes that are read, changing state, random numbers, a result of another dtype. Values and gradients must
be the trace's. That takes some milliseconds.

What it does not do: a branch that none of the compared numbers takes goes unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import refuses_hooks
from ..utils.caching import in_clean_state
from ..utils.formatting import first_line
from ..utils.storages import sizes_of
from .free_variables import FreeVariables, find_variables
from .partition import Split
from .tracing import NotPointwise

#: Special values, and about how many values are compared in all.
_EDGES = (0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, math.inf, -math.inf, math.nan)
_SWEEP = 4096
_DIFFERS = {
    "value": "its operations do not give its value, which depends on something else (a shape, changing state)",
    "gradient": "its operations do not give its gradient: autograd does not see some (no_grad, .data), or PyTorch's "
    "formula for the gradient of one gives other values than that of its parts",
}
#: The accepted difference in units of the dtype's eps. Both sides run the same operations; only the order of a few sums
#: may differ.
_UNITS = 64
#: Of the values and gradients that are compared, the gradient of z; those of tensors, which are sums, follow.
_OF_Z = 1
#: What a trace holds of the example alone.
_OF_EXAMPLE = frozenset(
    {
        *("shape", "size", "numel", "nelement", "__len__", "nbytes", "is_cuda", "is_cpu"),
        *("is_contiguous", "stride", "storage_offset", "data_ptr"),
    }
)


@in_clean_state
def verify(
    variables: FreeVariables, split: Split, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> tuple[float, float]:
    """Compare the function with its trace. Returns how often z's bytes PyTorch saves for backward, and how often with
    the output, which the next layer saves.

    Raises:
        NotPointwise: they differ; or the function raises, reads sizes, changes what it reads, is random, or returns
            another dtype than its argument's. (Under autocast it may return any dtype.)
    """
    shape = _other_shape(example, split.dims)
    kept = _called(variables, shape, dtype, autocast)
    try:
        with torch.no_grad():
            for tried in (torch.float32, torch.float64):  # in which derivatives are found
                split.body(*torch.zeros(1 + len(split.dims), 4, 6, dtype=tried).unbind())
    except Exception as error:  # what operations raise on constants of another dtype than the argument's
        raise NotPointwise(f"it computes in one dtype alone: {first_line(error)}") from error
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [t.detach() for t in own_tensors(variables, wide)]
    count = math.prod(shape)
    moderate = torch.linspace(-8, 8, max(1, count), dtype=wide).reshape(shape)
    extreme = torch.tensor(_EDGES, dtype=wide).repeat(count // len(_EDGES) + 1)[:count].reshape(shape)
    trained = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    # No gradients of the tensors at extreme values: a sum over these says nothing.
    for leaves in ([moderate.requires_grad_(), *trained], [extreme.requires_grad_(), *tensors]):
        differs = _first_difference(variables, split, leaves)
        if differs is not None and differs > _OF_Z:  # a sum whose terms may cancel: in float64 it has digits enough
            doubles = [t.detach().double() if t.is_floating_point() else t for t in leaves]
            doubles = [d.requires_grad_(t.requires_grad) for d, t in zip(doubles, leaves, strict=True)]
            differs = _first_difference(variables, split, doubles, terms=count)
        if differs is not None:
            raise NotPointwise(_DIFFERS["gradient" if differs else "value"])
    return kept


def _called(
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
        with _Watching(own), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = function(z.clone().requires_grad_() * 1)  # not a leaf: the function may overwrite its argument
        with torch.no_grad():
            without_gradients = function(z.clone())
    except NotPointwise:
        raise
    except Exception as error:  # whatever a user's function may raise
        if isinstance(error, RuntimeError) and refuses_hooks(error):
            raise NotPointwise("it refuses saved-tensor hooks, as torch.func does") from error
        raise _raised(error) from error
    if find_variables(function).key != before:
        raise NotPointwise("it changes what it reads from call to call")
    if not torch.equal(y.detach().nan_to_num(), without_gradients.nan_to_num()):
        raise NotPointwise("what it computes depends on whether gradients are wanted, or on chance")
    if y.dtype is not dtype and not autocast:
        raise NotPointwise(f"it returns {y.dtype} for {dtype}; its tensors may have another dtype than the layer")
    given = sizes_of(own)
    saved, with_output = (
        sum(size for storage, size in sizes_of(found).items() if storage not in given) / max(1, z.nbytes)
        for found in (kept, [*kept, y.detach()])
    )
    return saved, with_output


class _Watching(TorchFunctionMode):
    """Refuses a function that reads the size of a tensor that is none of ``own``, or where it lies in memory."""

    def __init__(self, own: Sequence[Tensor]) -> None:
        super().__init__()
        self.own = own

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
        if name in _OF_EXAMPLE and not any(args[0] is tensor for tensor in self.own):
            raise NotPointwise(f"it reads its argument's {name.strip('_')}, of which a trace holds one value")
        return function(*args, **kwargs or {})


def _first_difference(variables: FreeVariables, split: Split, leaves: Sequence[Tensor], terms: int = 0) -> int | None:
    """The first of the values and gradients that differs, or None. ``terms``: sums of so many, of the size of z's
    gradients, may differ by what these are rounded by."""
    theirs = _values_and_gradients(lambda z, *t: variables.rebind(t)(z), leaves)
    ours = _values_and_gradients(lambda z, *t: split.body(z, *split.prologue(*t)), leaves)
    tolerance = _UNITS * torch.finfo(leaves[0].dtype).eps
    of_sums = math.sqrt(terms) * _largest(theirs[_OF_Z]) if len(theirs) > _OF_Z else 0.0
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        scale = max(_largest(a), of_sums if i > _OF_Z else 0.0)
        if i == _OF_Z:
            # Of infinity PyTorch's formula may give an infinite gradient, and that of its parts NaN.
            real = leaves[0].isfinite()
            a, b = (t.where(real | t.isfinite(), math.nan) for t in (a, b))
        if a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=scale * tolerance, equal_nan=True):
            return i
    return None


def _values_and_gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        y = function(leaves[0] * 1, *leaves[1:])
        weight = torch.linspace(0.5, 1.5, max(1, y.numel()), dtype=y.dtype).reshape(y.shape)
        grads = torch.autograd.grad(y, wanted, weight, allow_unused=True) if y.requires_grad else [None] * len(wanted)
    except Exception as error:  # whatever a user's function may raise
        raise _raised(error) from error
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True))]


def _largest(values: Tensor) -> float:
    """The largest size of a finite one."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


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
