"""Modules that spell an RMS norm out in plain operations, as the models of transformers do, run as one node.

Idea: the forward pass of such a module is followed once, on small examples: it may call nothing but arithmetic, change
nothing that it reads, and must compute a norm. Its gradients are then a norm's. ``free_variables.py`` says what its
code reads. At each call all of that is compared, by identity, with what it was: a module that reads something else by
then, or whose class was given another forward pass, is looked at again.

Cost: 6 us for a call of a module that was seen before, and 4 ms for a norm that was not. Limits: norms over the last
dimension, with one weight at most; what the module returns has the dtype of its input. A module that reads a closure
or a container has its free variables found at each call, which takes 30 us.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import sizes
from .._torch import autocast_is_active
from ..activations.free_variables import FreeVariables, find_variables
from ..activations.python_values import names_in, user_classes
from ..backends import choose
from ..backends.rms_norm import RmsNormOptions
from ..call import followed_by
from ..ops.rms_norm import RmsNorm
from ..utils.bounded_cache import BoundedCache
from ..utils.isolation import in_clean_state
from ..validation import is_autocast, unusual_because
from .leaves import twin


class SpelledNorm(NamedTuple):
    """The RMS norm that a module spells out, and its weight at this call."""

    options: RmsNormOptions
    weight: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """What the module computes of the x for which it was recognised."""
        y: Tensor = RmsNorm.apply(self.options, choose(x), x, self.weight)
        return y


def spelled_norm(module: nn.Module, x: Tensor) -> SpelledNorm | None:
    """The norm that a candidate computes of x, or None where its own code is to run: where it is no norm, for small
    and unusual tensors, under transforms and compilers, and for 16-bit inputs under autocast, which computes in
    float32 what a norm calls, and returns that."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or followed_by() or unusual_because(x) is not None:
        return None
    if x.dim() == 0 or not x.is_contiguous() or x.nbytes < sizes.SPELLED_NORM_BYTES:
        return None
    if x.dtype is not torch.float32 and autocast_is_active() and is_autocast(x.device.type):
        return None
    norm = _norm_of(module, x.dtype)
    if norm is None or norm.weight is None:
        return norm
    w = norm.weight
    fits = w.shape[0] == x.shape[-1] and w.device == x.device and unusual_because(w) is None
    return norm if fits else None


# --- what is known of a module ----------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """What a module was found to compute, and all that this depends on."""

    norm: SpelledNorm | None
    given: Hashable
    scopes: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
    functions: tuple[types.FunctionType, ...]
    values: list[Any]


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
#: What a module has that does not change what it computes. ``fuse`` replaces the forward passes of modules.
_NOT_READ = (frozenset(vars(nn.Module())) | {"forward", "extra_repr", "__prepare_scriptable__"}) - {"training"}


def _norm_of(module: nn.Module, dtype: torch.dtype) -> SpelledNorm | None:
    known = _known.get(module)
    if known is not None:
        weight = None if known.norm is None else known.norm.weight
        values = _values(module, known.scopes, known.functions)
        is_same = len(values) == len(known.values) and all(map(operator.is_, values, known.values))
        if is_same and known.given == _given(dtype, weight):
            return known.norm
    variables = find_variables(twin(module))
    options = _options(variables, dtype)
    weight = next(iter(variables.tensors), None)
    norm = None if options is None else SpelledNorm(options, weight)
    own = (*module._parameters.values(), *module._buffers.values())
    functions = tuple(f for f in variables.objects[1:] if isinstance(f, types.FunctionType))
    is_all = len(functions) == len(variables.objects) - 1 and all(any(t is p for p in own) for t in variables.tensors)
    # What is compared is kept: an entry that held its module would keep it for ever.
    is_own = any(value is module or getattr(value, "__self__", None) is module for value in vars(module).values())
    if is_all and not is_own and not any(f.__closure__ or f.__kwdefaults__ or vars(f) for f in functions):
        scopes = tuple((f.__globals__, tuple(names_in(f.__code__) & f.__globals__.keys())) for f in functions)
        values = _values(module, scopes, functions)
        _known[module] = _Known(norm, _given(dtype, weight), scopes, functions, values)
    return norm


def _given(dtype: torch.dtype, weight: Tensor | None) -> Hashable:
    """What may change in place."""
    return dtype if weight is None else (dtype, weight.dtype, weight.shape)


def _values(module: nn.Module, scopes: Any, functions: tuple[types.FunctionType, ...]) -> list[Any]:
    """All that a module's code reads, in an order of its own."""
    kind: Any = type(module)
    values = [kind, *[value for name, value in vars(module).items() if name not in _NOT_READ]]
    values += module._parameters.values()
    values += module._buffers.values()
    for base in user_classes(kind):
        values += vars(base).values()
    for function in functions:
        values += function.__code__, function.__defaults__
    for scope, names in scopes:
        values += [scope.get(name) for name in names]
    return values


# --- recognition ------------------------------------------------------------------------------------------------------

#: By what a module reads, and the dtype of its input.
_recognised: BoundedCache[RmsNormOptions | bool] = BoundedCache(256)
_COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


def _options(variables: FreeVariables, dtype: torch.dtype) -> RmsNormOptions | None:
    if variables.refusal is not None or len(variables.tensors) > 1 or any(t.dim() != 1 for t in variables.tensors):
        return None
    key: Hashable = variables.key, dtype
    found = _recognised.get(key)
    if found is None:
        found = _recognised.put(key, _recognise(variables, dtype) or False)
    return found or None  # type: ignore[return-value]  # True is never put


@in_clean_state
def _recognise(variables: FreeVariables, dtype: torch.dtype) -> RmsNormOptions | None:
    """The norm with which a module agrees, to the last bit but for sums that are rounded in another order."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(t.shape, generator=generator).add_(0.5).to(t.dtype) for t in variables.tensors]
    # A number of dimensions, or of columns where no weight says it, may be in the code.
    widths = [weights[0].numel()] * 3 if weights else [64, 40, 72]
    shapes = {1.0: (2, 3, widths[0]), 1e-3: (6, widths[1]), 30.0: (1, 2, 3, widths[2])}
    made = [scale * torch.randn(shape, generator=generator) for scale, shape in shapes.items()]
    inputs = [x.to(dtype) for x in made]
    module = variables.rebind(weights)
    try:
        before, followed = find_variables(module).key, _Followed()
        with followed:
            expected = [module(x) for x in inputs]
        if not followed.is_arithmetic or find_variables(module).key != before:
            return None
        if any(
            not isinstance(y, Tensor) or y.shape != x.shape or y.dtype is not dtype
            for x, y in zip(inputs, expected, strict=True)
        ):
            return None
    except Exception:  # whatever code does with what it is not made for
        return None
    for options in _candidates(module):
        found = [options(x, next(iter(weights), None)) for x in inputs]
        if all(_agree(*pair) for pair in zip(found, expected, strict=True)):
            return options
    return None


#: What the forward pass of a norm may call, by name.
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


def _candidates(module: Any) -> Iterator[RmsNormOptions]:
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    for eps, offset, rounds_first in itertools.product((*numbers, *_COMMON_EPS), (0.0, 1.0), (True, False)):
        yield RmsNormOptions(eps, offset, rounds_first)


def _agree(found: Tensor, expected: Tensor) -> bool:
    unit = torch.finfo(found.dtype).eps
    difference = (found.double() - expected.double()).abs()
    is_near = bool((difference <= 4 * unit * expected.double().abs()).all())
    # In 16 bits another order of roundings shows in every third number.
    return is_near and (found.dtype.itemsize > 2 or float((difference > 0).double().mean()) < 0.02)
