"""What the code of a module says of other calls than the recorded one: whether a block may stand for it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.python_values import PROCESS_STATE, names_in, unwrapped

#: By what the code of a block would decide what the recording does not show.
_DECIDES = PROCESS_STATE | {
    *("autocast", "random", "rand", "bernoulli", "is_grad_enabled", "is_inference", "is_compiling")
}
#: What stays what it is, or is looked at elsewhere: ``attributes.py`` compares numbers, strings and modules.
_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, types.ModuleType)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def codes_of(kind: type) -> list[types.CodeType]:
    """Of the methods that a class and its bases define, up to ``nn.Module``; its ``__init__`` is not called again."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    members = (unwrapped(member) for base in bases for name, member in vars(base).items() if name != "__init__")
    return [member.__code__ for member in members if isinstance(member, types.FunctionType)]


def depends_because(module: nn.Module) -> str | None:
    """Why a module with this code may compute something else another time, or None."""
    for code, scope in _forwards(type(module)):
        names = names_in(code)
        decides = sorted(names & _DECIDES)
        if decides:
            return f"its code asks for {decides[0]}"
        stored = next(_stored_in(code), None)
        if stored is not None:
            return f"its code changes {stored}"
        for name in sorted(names):
            if name in vars(module) and _may_change(vars(module)[name]):
                return f"its code reads {name}, a {type(vars(module)[name]).__name__}, which may change"
            if name in scope and _is_variable(scope[name]):
                return f"its code reads {name}, which may change"
    return None


def _forwards(kind: type) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    for base in kind.__mro__:
        member = unwrapped(vars(base).get("forward")) if base not in nn.Module.__mro__ else None
        if isinstance(member, types.FunctionType):
            yield member.__code__, member.__globals__


def _stored_in(code: types.CodeType) -> Iterator[str]:
    """The attributes and variables of others that it writes to."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"):
            yield str(instruction.argval) if instruction.argval is not None else "an item"


def _may_change(value: object) -> bool:
    return not isinstance(value, (*_FIXED, *_CALLED, Tensor, nn.Module))


def _is_variable(value: object) -> bool:
    """Whether a global is none of the things that programs define once."""
    return not isinstance(value, (*_CALLED, type, types.ModuleType)) and not callable(value)
