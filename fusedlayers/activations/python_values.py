"""Introspection of Python values: the names in code, an object's attributes, library code or the user's."""

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
    """The attributes of an instance, also those in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


@functools.lru_cache(1024)
def user_classes(kind: Any) -> tuple[type, ...]:
    """The classes of ``kind.__mro__`` that no library defines."""
    return tuple(base for base in kind.__mro__ if not is_library(base))


def unwrapped(member: Any) -> Any:
    """The function inside a property, a static method or a class method; other members as they are."""
    if isinstance(member, (property, functools.cached_property)):
        return member.fget if isinstance(member, property) else member.func
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


@functools.lru_cache(1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that the code and the functions defined in it name."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def is_fixed(value: object) -> bool:
    """Whether a global or a class member is of a kind that programs do not change after defining it."""
    return isinstance(value, _BUILT_IN) or is_library(value)


_BUILT_IN = (types.BuiltinFunctionType, types.MemberDescriptorType, types.GetSetDescriptorType)


#: Names of functions and attributes that a trace does not show: the process's state, a tensor's place in the graph and
#: the hooks on it, and streams that are written to.
UNTRACED = frozenset(
    {
        *("environ", "getenv"),
        *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "is_inference_mode_enabled"),
        *("is_compiling", "is_dynamo_compiling"),
        *("get_default_dtype", "get_default_device", "storage_offset", "data_ptr"),
        *("is_grad_enabled", "requires_grad", "is_leaf", "grad_fn", "retain_grad"),
        *("register_hook", "register_multi_grad_hook", "print", "write", "warn"),
    }
)
RANDOM = "it draws random numbers from a generator that is not torch's"


def draws_random_numbers(value: Any, names: frozenset[str]) -> bool:
    """Whether code with these names draws random numbers from ``value``, the global that one of the names stands for.

    Found by name, because a call need not show a random branch that is seldom taken.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__ in ("random", "numpy.random") or (value.__name__ == "numpy" and "random" in names)
    of: Any = getattr(value, "__self__", None) if isinstance(value, types.BuiltinFunctionType) else None
    return isinstance(of, random.Random) or type(of).__module__.startswith("numpy.random")


def is_library(value: Any) -> bool:
    """Whether a function, class or module belongs to torch, Python or another installed package.

    A function with a closure does not count: it may be a user's function inside a package's decorator.
    """
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and is_installed_code(value)
    if isinstance(value, type):
        value = sys.modules.get(value.__module__)
    if not isinstance(value, types.ModuleType):
        return False
    file = getattr(value, "__file__", None)
    return value.__name__ in sys.builtin_module_names if file is None else file.startswith(_LIBRARIES)


def is_installed_code(function: types.FunctionType) -> bool:
    """Whether Python, torch or this package brought the function along."""
    return function.__code__.co_filename.startswith((*_LIBRARIES, "<frozen "))


_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep for file in (os.__file__, os.path.dirname(torch.__file__), os.path.dirname(__file__))
)


def is_constant(value: object) -> bool:
    """Whether an object without attributes is an immutable value, such as a decimal or a date."""
    if type(value).__hash__ in (None, object.__hash__):
        return False
    try:
        return bool(copy.copy(value) == value)
    except TypeError:
        return False


def is_buffer(value: object) -> bool:
    """Whether the memory of a value can be written to behind its back."""
    try:
        memoryview(value)  # type: ignore[arg-type]  # raises if it is none
    except (TypeError, ValueError, BufferError):
        return False
    return True


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable of a closure has been set."""
    try:
        cell.cell_contents  # noqa: B018  # raises if the variable has not been set
    except ValueError:
        return False
    return True
