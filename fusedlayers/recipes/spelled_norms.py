"""Modules that spell an RMS norm out in plain operations, as the models of transformers do, run as one node.

Idea: the forward pass of such a module is followed once, on small examples: it may call nothing but arithmetic, and
must compute a norm. Its gradients are then a norm's. It may read the module's weight and plain attributes, methods of
its class, and plain numbers and libraries among its globals; at each call all of that is compared with what it was.

Cost: 5 us for a call of a module that was seen before, and 4 ms for a norm that was not. Limits: norms over the last
dimension, with one weight; what the module returns has the dtype of its input. A module whose code reads
anything else (a closure, a container, another function) runs as it is, and is replayed by recipes.
"""

from __future__ import annotations

import builtins
import dis
import itertools
from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import autocast_is_active
from ..calls import sizes
from ..calls.casts import is_autocast
from ..calls.tracers import followed_by
from ..calls.validation import unusual_because
from ..kernels import choose
from ..kernels.interface import RmsNormOptions
from ..ops.replayed_nodes import RmsNorm
from ..utils.caching import BoundedCache, in_clean_state


def spelled_norm(module: nn.Module, x: Tensor) -> Tensor | None:
    """The norm that a user's module computes of x, or None where its own code is to run: where it is no norm, for small
    and unusual tensors, under transforms, and for 16-bit inputs under autocast, which computes in float32 what a norm
    calls, and returns that."""
    if followed_by() or unusual_because(x) is not None or not x.requires_grad:  # PyTorch saves less then
        return None
    if x.dim() == 0 or not x.is_contiguous() or x.nbytes < sizes.SPELLED_NORM_BYTES:
        return None
    if x.dtype is not torch.float32 and autocast_is_active() and is_autocast(x.device.type):
        return None
    parameters = [*module._parameters.values()]
    w = parameters[0] if len(parameters) == 1 else None
    if w is None or w.shape != x.shape[-1:] or w.device != x.device or unusual_because(w) is not None:
        return None
    options = _options_of(module, w, x.dtype)
    return None if options is None else RmsNorm.apply(options, choose(x), x, w)


def twin(module: nn.Module) -> Any:
    """The module as it would be without its patch, and without hooks: who calls the module runs these."""
    found: Any = object.__new__(type(module))
    found.__dict__ = {**vars(module), **_NO_HOOKS}
    for name in ("forward", "__prepare_scriptable__"):
        found.__dict__.pop(name, None)
    return found


_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}


# --- what a module reads ----------------------------------------------------------------------------------------------


class _Code:
    """The functions that the forward pass of a class enters, and what they read beside the module.

    Attributes:
        recognised: the norm by what a module holds, and the dtype of its input; None where it computes another thing.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind
        self._members: dict[str, Any] = {}
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._codes: list[tuple[FunctionType, CodeType]] = []
        self.recognised: dict[Hashable, RmsNormOptions | None] = {}
        self.is_known = self._follow("forward")

    def is_current(self) -> bool:
        """Whether all of it is as it was."""
        return (
            all(getattr(self._kind, name, None) is member for name, member in self._members.items())
            and all(scope.get(name) is value for scope, name, value in self._globals)
            and all(function.__code__ is code for function, code in self._codes)
        )

    def _follow(self, name: str) -> bool:
        """Note a member of the class, and what it reads; False where that may change unseen."""
        if name in self._members:
            return True
        member = self._members[name] = getattr(self._kind, name)
        if not isinstance(member, FunctionType):
            return _is_plain(member)
        code = member.__code__
        self._codes.append((member, code))
        nested = any(isinstance(constant, CodeType) for constant in code.co_consts)
        if nested or set(code.co_freevars) - {"__class__"} or member.__kwdefaults__ or member.__defaults__:
            return False
        return all(self._reads(member, step) for step in dis.get_instructions(code))

    def _reads(self, function: FunctionType, step: dis.Instruction) -> bool:
        name = step.argval
        if step.opname == "LOAD_GLOBAL":
            scope = function.__globals__
            self._globals.append((scope, name, scope.get(name)))
            return _is_plain(scope[name]) or _is_of_library(scope[name]) if name in scope else hasattr(builtins, name)
        is_member = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and hasattr(self._kind, name)
        return not is_member or hasattr(nn.Module, name) or self._follow(name)


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change in place."""
    return (
        value is None or isinstance(value, int | float | str) or (type(value) is tuple and all(map(_is_plain, value)))
    )


def _is_of_library(value: Any) -> bool:
    return isinstance(value, ModuleType) or str(getattr(value, "__module__", "")).partition(".")[0] == "torch"


_codes: BoundedCache[_Code] = BoundedCache(256)
#: What every module has, but for its mode; ``fuse`` replaces the forward passes of modules.
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) | {"forward", "extra_repr", "__prepare_scriptable__"}) - {"training"}


def _options_of(module: nn.Module, w: Tensor, dtype: torch.dtype) -> RmsNormOptions | None:
    kind: Any = type(module)
    code = _codes.get(kind)
    if code is None or (code.is_known and not code.is_current()):
        code = _codes.put(kind, _Code(kind))
    held = _plain_attributes(module)
    if not code.is_known or held is None or module._buffers:
        return None
    key: Hashable = held, dtype, w.dtype, w.shape
    if key not in code.recognised:
        code.recognised[key] = _recognise(module, w, dtype)
    return code.recognised[key]


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """What a module holds beside what every module has; None where that may change in place."""
    own = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    return tuple(own) if all(_is_plain(value) for _, value in own) else None


# --- recognition ------------------------------------------------------------------------------------------------------

_COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


@in_clean_state
def _recognise(module: nn.Module, given: Tensor, dtype: torch.dtype) -> RmsNormOptions | None:
    """The norm with which a module agrees, to the last bit but for sums that are rounded in another order."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.rand(given.shape, generator=generator).add_(0.5).to(given.dtype))
    example = twin(module)
    example.__dict__["_parameters"] = dict.fromkeys(module._parameters, w)
    shapes = {1.0: (2, 3, len(w)), 1e-3: (6, len(w)), 30.0: (1, 2, 3, len(w))}  # their number may be in the code
    inputs = [(scale * torch.randn(shape, generator=generator)).to(dtype) for scale, shape in shapes.items()]
    before, followed = _plain_attributes(example), _Followed()
    try:
        with followed:
            expected = [example.forward(x) for x in inputs]
    except Exception:  # whatever code does with what it is not made for
        return None
    if not followed.is_arithmetic or _plain_attributes(example) != before:
        return None
    pairs = [*zip(inputs, expected, strict=True)]
    if any(not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, dtype) for x, y in pairs):
        return None
    for options in _candidates(example):
        if all(_agree(options(x, w), y) for x, y in pairs):
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
