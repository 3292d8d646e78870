"""The free variables of a function: the tensors and all other values that it reads besides its argument.

A user's activation may be a lambda over a parameter, a partial, a bound method or a module. Two functions with the same
code that read the same numbers compute the same from their tensors, so the trace of one serves the other.
``find_variables`` returns the tensors, and a key that is equal for two such functions. It searches where Python does:
closures, defaults, the globals and attributes that the code names, a module's parameters and buffers. It searches the
code of the function and of everything that it may call: methods and properties whose names occur, and functions of the
same program. A call takes 25 us for a simple function.

What it does not do: code of installed packages is not searched, and is assumed not to change its behaviour. State that
no attribute shows (a C extension's, a file's) is not seen; objects that may hide some are refused.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function

from .python_values import (
    RANDOM,
    UNTRACED,
    attributes_of,
    draws_random_numbers,
    is_buffer,
    is_constant,
    is_filled,
    is_fixed,
    is_installed_code,
    is_library,
    names_in,
    unwrapped,
    user_classes,
)

#: Builds a value anew from other tensors.
Make = Callable[[Sequence[Tensor]], Any]


class FreeVariables(NamedTuple):
    """The free variables of a function.

    Attributes:
        code: the code that is called, or what identifies it; equal also for functions that read other numbers.
        key: equal for functions that compute the same from tensors of equal shapes and dtypes.
        tensors: the tensors that the function reads.
        rebind: ``rebind(tensors)`` is the function with its tensors replaced by others.
        refusal: why the key cannot be relied on, or None.
        objects: the objects that were searched, the function first. Everything else that the function reads is an
            immutable value, or a definition that programs make once.
    """

    code: Hashable
    key: Hashable
    tensors: tuple[Tensor, ...]
    rebind: Callable[[Sequence[Tensor]], Callable[..., Any]]
    refusal: str | None
    objects: tuple[object, ...]


def find_variables(function: Callable[..., Any]) -> FreeVariables:
    """The free variables of a function, found without calling it."""
    called = _called_code(function)
    visitor = _Visitor(_cached_names.get(called, _CALLED))
    key, make = visitor.visit(function)
    while visitor.fewest < len(visitor.names):  # an object was searched before all names of the code had been found
        visitor = _Visitor(visitor.names)
        key, make = visitor.visit(function)
        if len(_cached_names) >= _CACHED:
            _cached_names.clear()
        _cached_names[called] = frozenset(visitor.names)
    return FreeVariables(called, key, tuple(visitor.tensors), make, visitor.refusal, tuple(visitor.searched))


def _called_code(function: Any) -> Hashable:
    """The code object that is called; or the class, with the name where one class serves many built-in functions."""
    while inner := function.func if isinstance(function, functools.partial) else _compiled_from(function):
        function = inner
    if isinstance(function, nn.Module):  # nn.Module.__getattr__ is slow to say that an attribute is missing
        return type(function), None
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, types.CodeType) else (type(function), getattr(function, "__name__", None))


def _compiled_from(function: Any) -> Any:
    """What ``torch.compile`` was given, if it returned ``function``; else None."""
    own = vars(function) if isinstance(function, types.FunctionType) else {}
    # functools.wraps copies attributes to functions that compute something else.
    return own.get("_torchdynamo_orig_callable") if own.get("_torchdynamo_wrapper_id") == id(function) else None


#: The names that were found in a function's code the last time, which avoids a second walk.
_cached_names: dict[Hashable, frozenset[str]] = {}
_CACHED = 512


def must_call_reason(*modules: nn.Module) -> str | None:
    """Why one of these modules does more than its class says, or None."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return "it has hooks"
        if "forward" in vars(module):
            return "its forward has been replaced"
    return None


_TENSORS = (Tensor, nn.Parameter)
_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
_CONTAINERS = (tuple, list, dict, set, frozenset, deque)
#: A container with more elements is refused, because every call would search it. Of a module with more parameters (a
#: whole network) only the attributes count that the code names.
_LARGE = 64
#: An array with more bytes is refused likewise.
_LARGE_BYTES = 4096
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
#: Attributes of ``nn.Module`` itself that do not change what a module computes.
_MODULE_OWN = frozenset(vars(nn.Module())) - {"training"}
#: Methods that are called without their name in the code, besides those with double underscores. Of these the ones in
#: ``_NOT_CALLED`` do not count: an ``__init__`` names every attribute, used or not.
_CALLED = frozenset({"forward", "backward"})
_NOT_CALLED = frozenset({"__init__", "__new__", "__del__", "__repr__", "__reduce__", "__getstate__", "__setstate__"})
#: Code with one of these names may read attributes that it does not name.
_ANY_NAME = frozenset({"getattr", "vars", "__dict__"})


class _Identity:
    """A key that equals only the key of the same object. It holds the object, so that no other one gets its address."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


class _Visitor:
    """Walks over everything that a function reads. ``visit`` returns a value's part of the key, and its ``Make``."""

    def __init__(self, names: Iterable[str]) -> None:
        self.tensors: list[Tensor] = []
        self.refusal: str | None = None
        #: The objects that were searched. Holding them keeps their addresses unique.
        self.searched: list[object] = []
        #: The globals and attributes that the code names, as far as it has been searched; and how many of them were
        #: known when attributes were first selected by name.
        self.names = set(names)
        self.fewest = sys.maxsize
        self._seen: dict[int, tuple[int, Make]] = {}
        self._numbers: dict[int, int] = {}
        self._bypassed: set[int] = set()

    def visit(self, value: Any) -> tuple[Hashable, Make]:
        kind = type(value)
        if kind in _VALUES:
            return (kind, repr(value)), lambda tensors: value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) in self._seen:
            number, make = self._seen[id(value)]
            return ("reference", number), make
        original = _compiled_from(value)
        if original is not None:  # it computes the same, and can be traced
            return self.visit(original)
        visit = self._visit_method(value)
        if visit is None:
            return _Identity(value), lambda tensors: value
        number = len(self._seen)
        self._seen[id(value)] = number, lambda tensors: value  # in a cycle the object itself
        self.searched.append(value)
        key, make = visit(value)
        self._seen[id(value)] = number, make
        return key, make

    def _visit_method(self, value: Any) -> Callable[[Any], tuple[Hashable, Make]] | None:
        if isinstance(value, types.FunctionType):
            return None if self.searched and is_library(value) else self._function
        if isinstance(value, types.BuiltinFunctionType):
            return self._bound_builtin if isinstance(value.__self__, (Tensor, random.Random)) else None
        for kind, visit in (
            (functools.partial, self._partial),
            (types.MethodType, self._method),
            (nn.Module, self._module),
            (_CONTAINERS, self._container),
        ):
            if isinstance(value, kind):
                return visit
        if isinstance(value, (type, types.ModuleType)):
            return None if is_library(value) else self._namespace
        if is_buffer(value):
            return self._buffer
        if isinstance(value, functools._lru_cache_wrapper):
            return self._cached
        return self._object

    def _tensor(self, tensor: Tensor) -> tuple[Hashable, Make]:
        index = self._numbers.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            if type(tensor) not in _TENSORS and not _is_ordinary(tensor):
                self.refusal = f"it reads a {type(tensor).__name__}"
                return _Identity(tensor), lambda tensors: tensor
            self.tensors.append(tensor)
        key = (index, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        return key, lambda tensors: tensors[index]

    def _parts(self, parts: Mapping[Any, Any]) -> tuple[Hashable, Callable[..., dict[Any, Any]]]:
        """Visit the values of a dict, which is made anew as a dict."""
        key: list[Hashable] = []
        makes: dict[Any, Make] = {}
        for name, value in parts.items():
            kind = type(value)
            if kind in _VALUES:  # most are, and this is walked at every call
                key.append((name, kind, repr(value)))
            else:
                of_value, makes[name] = self.visit(value)
                key.append((name, of_value))
        return tuple(key), lambda tensors: {**parts, **{name: make(tensors) for name, make in makes.items()}}

    def _function(self, function: types.FunctionType) -> tuple[Hashable, Make]:
        code = function.__code__
        # Of a package's function only the closure counts: a decorator's holds the function that it decorates.
        names = names_in(code) if len(self.searched) == 1 or not is_installed_code(function) else frozenset()
        self.names |= names
        scope = function.__globals__
        cells = function.__closure__ or ()
        closure = {i: c.cell_contents for i, c in enumerate(cells) if is_filled(c)}
        named = {name: scope[name] for name in sorted(names & scope.keys())}
        read = {name: value for name, value in named.items() if not is_fixed(value)}
        if any(draws_random_numbers(value, names) for value in named.values()):
            self.refusal = self.refusal or RANDOM
        for name in sorted(names & UNTRACED):
            self.refusal = self.refusal or f"its code names {name}, which a trace does not follow"
        defaults = dict(enumerate(function.__defaults__ or ()))
        keywords = function.__kwdefaults__ or {}
        attributes = vars(function)
        if not (closure or read or defaults or keywords or attributes):
            return code, lambda tensors: function
        parts = [self._parts(part) for part in (closure, read, defaults, keywords, attributes)]

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            cells_of, globals_of, defaults_of, keywords_of, attributes_of = (make(tensors) for _, make in parts)
            made = types.FunctionType(
                code,
                {**scope, **globals_of} if globals_of else scope,
                function.__name__,
                tuple(defaults_of.values()) or None,
                tuple(types.CellType(cells_of[i]) if i in cells_of else cell for i, cell in enumerate(cells)),
            )
            made.__kwdefaults__ = keywords_of or None
            vars(made).update(attributes_of)
            return made

        return (code, *(key for key, _ in parts)), rebuild

    def _bound_builtin(self, method: types.BuiltinFunctionType) -> tuple[Hashable, Make]:
        key, make = self.visit(method.__self__)
        return ("builtin", method.__name__, key), lambda tensors: getattr(make(tensors), method.__name__)

    def _partial(self, partial: functools.partial[Any]) -> tuple[Hashable, Make]:
        key, make = self._parts({0: partial.func, 1: partial.args, 2: partial.keywords})

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            function, arguments, keywords = make(tensors).values()
            return functools.partial(function, *arguments, **keywords)

        return ("partial", key), rebuild

    def _method(self, method: types.MethodType) -> tuple[Hashable, Make]:
        function: Any = method.__func__
        self._bypassed.add(id(method.__self__))  # a module whose method is called is not called itself
        key, make = self._parts({0: function, 1: method.__self__})
        return ("method", key), lambda tensors: types.MethodType(*make(tensors).values())

    def _module(self, module: nn.Module) -> tuple[Hashable, Make]:
        """All attributes of a module; of a large module only those that the code names."""
        if id(module) not in self._bypassed:
            self.refusal = self.refusal or must_call_reason(module)
        members = self._members(type(module))
        has = [vars(module)[part] for part in _MODULE_PARTS]
        own: Mapping[str, Any] = {name: value for name, value in vars(module).items() if name not in _MODULE_OWN}
        if module._modules and sum(1 for _ in module.parameters()) > _LARGE:
            has = [self._named(values) for values in has]
            own = self._named(own)
        parts = [self._parts(part) for part in (own, *has, members)]

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            made = object.__new__(type(module))
            own_of, *has_of, _ = (make(tensors) for _, make in parts)
            registered = {n: {**vars(module)[n], **of} for n, of in zip(_MODULE_PARTS, has_of, strict=True)}
            vars(made).update({**vars(module), **own_of, **registered})
            return made

        return (type(module), *(key for key, _ in parts)), rebuild

    def _container(self, container: Any) -> tuple[Hashable, Make]:
        kind = type(container)
        if len(container) > _LARGE:
            self.refusal = f"it reads a {kind.__name__} of {len(container)} values; let it read a tensor"
            return _Identity(container), lambda tensors: container
        if isinstance(container, (set, frozenset)):
            return (kind, frozenset(self.visit(value)[0] for value in container)), lambda tensors: copy.copy(container)
        is_dict = isinstance(container, dict)
        key, make = self._parts(container if is_dict else dict(enumerate(container)))

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            made = make(tensors)
            if isinstance(container, tuple):
                return tuple.__new__(kind, made.values())
            copied = copy.copy(container)
            if is_dict:
                copied.update(made)
            else:
                copied.clear()
                copied.extend(made.values())
            return copied

        return (kind, key), rebuild

    def _buffer(self, array: Any) -> tuple[Hashable, Make]:
        view = memoryview(array)
        if view.nbytes > _LARGE_BYTES:
            self.refusal = f"it reads a {type(array).__name__} of {view.nbytes} bytes; let it read a tensor"
            return _Identity(array), lambda tensors: array
        return (type(array), view.format, view.shape, view.tobytes()), lambda tensors: copy.copy(array)

    def _cached(self, function: Any) -> tuple[Hashable, Make]:
        """A function with a cache. Its cached results may stem from earlier values, so the object's identity counts."""
        return ("cached", _Identity(function), self.visit(function.__wrapped__)[0]), lambda tensors: function

    def _namespace(self, space: Any) -> tuple[Hashable, Make]:
        """The attributes that the code names of a class or of a Python module."""
        if isinstance(space, type):
            found = self._members(space, also=("__init__", "__new__"))
        else:
            found = {name: value for name, value in self._named(vars(space)).items() if not is_fixed(value)}
        return (_Identity(space), self._parts(found)[0]), lambda tensors: space

    def _object(self, value: Any) -> tuple[Hashable, Make]:
        """The attributes that the code names of an instance; all of them if a package's methods may read them."""
        kind: Any = type(value)
        if isinstance(value, random.Random):
            self.refusal = self.refusal or RANDOM
        members = self._members(kind)
        found = dict(attributes_of(value))
        if len(user_classes(kind)) == len(kind.__mro__) - 1:  # all but object
            found, identity = self._named(found), None
        else:
            identity = _Identity(value)
            if not (found or callable(value) or is_constant(value)):
                self.refusal = f"it reads a {kind.__name__}, which may change unseen; let it read a tensor or a number"
            if kind.__module__.partition(".")[0] == "torch":
                found = {}
            if len(found) > _LARGE:
                self.refusal = f"it reads a {kind.__name__} of {len(found)} attributes; let it read a tensor"
                found = {}
        if not found:
            return (kind, self._parts(members)[0], identity), lambda tensors: value
        key, make = self._parts(found)

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            made = copy.copy(value)
            for name, part in make(tensors).items():
                object.__setattr__(made, name, part)
            return made

        return (kind, key, self._parts(members)[0], identity), rebuild

    # --- names --------------------------------------------------------------------------------------------------------

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        self.fewest = min(self.fewest, len(self.names))
        names = self.names if self.names.isdisjoint(_ANY_NAME) else values.keys()
        return {name: value for name, value in values.items() if name in names}

    def _members(self, kind: Any, also: Iterable[str] = ()) -> dict[Any, Any]:
        """The members of an object's classes that may be called or read. Their code's names join ``names``."""
        bases = user_classes(kind)
        if not bases:
            return {}
        found, names = _found_members(bases, frozenset(self.names), frozenset(also))
        self.names |= names
        self.fewest = min(self.fewest, len(self.names))
        # Looked up at every call, because a class's attributes may be set like an object's.
        members = {at: unwrapped(vars(bases[at[0]])[at[1]]) for at in found}
        return {at: member for at, member in members.items() if not is_fixed(member)}


@functools.lru_cache(1024)
def _found_members(
    bases: tuple[type, ...], names: frozenset[str], also: frozenset[str]
) -> tuple[tuple[tuple[int, str], ...], frozenset[str]]:
    """The members (index of the class, name) that ``names`` reach, and ``names`` with all names in their code."""
    before: frozenset[str] = frozenset()
    found: dict[tuple[int, str], None] = {}
    while before != names:
        before = names
        for i, base in enumerate(bases):
            for name, member in vars(base).items():
                is_implicit = name.startswith("__") and name not in _NOT_CALLED
                if not (is_implicit or name in names or name in also):
                    continue
                value = unwrapped(member)
                if isinstance(value, types.FunctionType):
                    names = names | names_in(value.__code__)
                elif is_implicit:
                    continue
                found[i, name] = None
    return tuple(found), names


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a subclass of Tensor behaves like Tensor and has values: not a fake tensor, not a lazy parameter."""
    same = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not has_torch_function((tensor,))
    return same and not is_lazy(tensor)
