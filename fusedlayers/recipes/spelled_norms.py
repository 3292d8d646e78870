"""Modules that spell an RMS norm out in plain operations, as the models of transformers do, run as one node.

Idea: the forward pass of such a module is followed once, on small examples: it may call nothing but arithmetic, and
must compute a norm. Its gradients are then a norm's. At each call the tensors and numbers that it reads are found anew
(``activations/free_variables.py``): the weight is one of them, and where a number or the code has changed, the module
is followed again.

Cost: 20 us for a call of a module that was seen before, and 4 ms for a norm that was not. Limits: norms over the last
dimension, with one weight; what the module returns has the dtype of its input. A module that reads anything else runs
as it is, and is replayed by recipes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import sizes
from .._torch import autocast_is_active
from ..activations.free_variables import FreeVariables, find_variables
from ..call import followed_by
from ..kernels import choose
from ..kernels.interface import RmsNormOptions
from ..ops.replayed_nodes import RmsNorm
from ..utils.caching import BoundedCache, in_clean_state
from ..validation import is_autocast, unusual_because

#: The norms by their free variables and the dtype of the input; None for functions that compute another thing.
_recognised: BoundedCache[RmsNormOptions | None] = BoundedCache()


def spelled_norm(function: Callable[[Tensor], Any], x: Tensor) -> Tensor | None:
    """The norm that a module's forward pass computes of x, or None where that is to run: where it is no norm, for small
    and unusual tensors, under transforms, and for 16-bit inputs under autocast, which computes in
    float32 what a norm calls, and returns that."""
    if followed_by() or unusual_because(x) is not None:
        return None
    if x.dim() == 0 or not x.is_contiguous() or x.nbytes < sizes.SPELLED_NORM_BYTES:
        return None
    if x.dtype is not torch.float32 and autocast_is_active() and is_autocast(x.device.type):
        return None
    variables = find_variables(function)
    if variables.refusal is not None or variables.has_lists or len(variables.tensors) != 1:
        return None
    (w,) = variables.tensors
    if w.shape != x.shape[-1:] or w.device != x.device or unusual_because(w) is not None:
        return None
    key = variables.key, x.dtype
    options = _recognised[key] if key in _recognised else _recognised.put(key, _recognise(variables, x.dtype))
    return None if options is None else RmsNorm.apply(options, choose(x), x, w)


_COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


@in_clean_state
def _recognise(variables: FreeVariables, dtype: torch.dtype) -> RmsNormOptions | None:
    """The norm with which a function agrees, to the last bit but for sums that are rounded in another order."""
    generator = torch.Generator().manual_seed(0)
    (given,) = variables.tensors
    w = torch.rand(given.shape, generator=generator).add_(0.5).to(given.dtype).requires_grad_(given.requires_grad)
    shapes = {1.0: (2, 3, len(w)), 1e-3: (6, len(w)), 30.0: (1, 2, 3, len(w))}  # their number may be in the code
    inputs = [(scale * torch.randn(shape, generator=generator)).to(dtype) for scale, shape in shapes.items()]
    example: Any = variables.rebind([w])
    before, followed = find_variables(example).key, _Followed()
    try:
        with followed:
            expected = [example(x) for x in inputs]
    except Exception:  # whatever code does with what it is not made for
        return None
    if not followed.is_arithmetic or find_variables(example).key != before:
        return None
    pairs = [*zip(inputs, expected, strict=True)]
    if any(not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, dtype) for x, y in pairs):
        return None
    for options in _candidates(example.__self__):
        if all(_agree(options(x, w), y) for x, y in pairs):
            return options
    return None


#: The functions that the forward pass of a norm may call, by name.
_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "multiply", "divide", "true_divide", "pow", "square", "sqrt", "rsqrt"),
        *("__rdiv__", "__rpow__", "__rsub__", "reciprocal", "mean", "sum", "norm", "vector_norm"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
    }
)


class _Followed(TorchFunctionMode):
    """Sees what code calls of PyTorch. A Function of its own calls something with gradients switched off."""

    is_arithmetic = True

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_known = getattr(func, "__name__", "") in _ARITHMETIC or func == Tensor.dtype.__get__  # type: ignore[attr-defined]
        if not (is_known and torch.is_grad_enabled()):
            self.is_arithmetic = False
        return func(*args, **(kwargs or {}))


def _candidates(module: nn.Module) -> Iterator[RmsNormOptions]:
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    for eps, offset, rounds_first in itertools.product((*numbers, *_COMMON_EPS), (0.0, 1.0), (True, False)):
        yield RmsNormOptions(eps, offset, rounds_first)


def _agree(found: Tensor, expected: Tensor) -> bool:
    unit = torch.finfo(found.dtype).eps
    difference = (found.double() - expected.double()).abs()
    is_near = bool((difference <= 4 * unit * expected.double().abs()).all())
    # In 16 bits another order of roundings shows in every third number.
    return is_near and (found.dtype.itemsize > 2 or float((difference > 0).double().mean()) < 0.02)
