"""What Python shows of a value: what its code names, what it holds, and whether a library or the user has made it."""

from __future__ import annotations

import copy
import functools
import os
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch


def attributes_of(value: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


@functools.lru_cache(1024)
def user_classes(kind: Any) -> tuple[type, ...]:
    return tuple(base for base in kind.__mro__ if not is_library(base))


def unwrapped(member: Any) -> Any:
    """The function in a property, a static method or a class method."""
    if isinstance(member, (property, functools.cached_property)):
        return member.fget if isinstance(member, property) else member.func
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


@functools.lru_cache(1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that the code names, that of the functions defined in it included."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def is_fixed(value: object) -> bool:
    """Whether a global or a member of a class is of the kind that programs define once."""
    return isinstance(value, _BUILT_IN) or is_library(value)


_BUILT_IN = (types.BuiltinFunctionType, types.MemberDescriptorType, types.GetSetDescriptorType)


#: What code names that asks for the state of the process, or for what a tensor does not show.
PROCESS_STATE = frozenset(
    {
        *("environ", "getenv"),
        *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "is_inference_mode_enabled"),
        *("get_default_dtype", "get_default_device", "storage_offset", "data_ptr"),
    }
)
RANDOM = "it draws random numbers from a generator that is not torch's"


def draws_random_numbers(value: Any, names: frozenset[str]) -> bool:
    """Whether code of these names draws random numbers, with what one of them stands for. What happens seldom does not
    show when a function is tried."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in ("random", "numpy.random") or (value.__name__ == "numpy" and "random" in names)
    of: Any = getattr(value, "__self__", None) if isinstance(value, types.BuiltinFunctionType) else None
    return isinstance(of, random.Random) or type(of).__module__.startswith("numpy.random")


def is_library(value: Any) -> bool:
    """Whether it is a function, class or module of torch, of Python, or of another installed package, and only that: a
    function that closes over others may be a user's function that has been decorated."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and is_installed_code(value)
    if isinstance(value, type):
        value = sys.modules.get(value.__module__)
    if not isinstance(value, types.ModuleType):
        return False
    file = getattr(value, "__file__", None)
    return value.__name__ in sys.builtin_module_names if file is None else file.startswith(_LIBRARIES)


def is_installed_code(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith((*_LIBRARIES, "<frozen "))


_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep for file in (os.__file__, os.path.dirname(torch.__file__), os.path.dirname(__file__))
)


def is_constant(value: object) -> bool:
    """Whether an object that shows no attributes is a value, as decimals and dates are, and not a place for one."""
    if type(value).__hash__ in (None, object.__hash__):
        return False
    try:
        return bool(copy.copy(value) == value)
    except TypeError:
        return False


def is_buffer(value: object) -> bool:
    try:
        memoryview(value)  # type: ignore[arg-type]  # raises if it is none
    except (TypeError, ValueError, BufferError):
        return False
    return True


def is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the variable has not been set
    except ValueError:
        return False
    return True
