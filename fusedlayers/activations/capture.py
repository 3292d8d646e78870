"""What a function reads besides its argument: the tensors, and everything else.

A user's activation may be a lambda over a parameter, a partial, a bound method, a module. Two such functions that were
made by the same lines of code and read the same numbers compute the same from their tensors: a trace of one serves the
other. ``capture`` finds both, by looking where Python looks: in closures, defaults, the globals and attributes that the
code names, a module's parameters and buffers.

What it cannot see are values behind a call or a property; tensors there make the trace fail, which is noticed.
"""

from __future__ import annotations

import copy
import functools
import os
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Make = Callable[[Sequence[Tensor]], Any]


class Captured(NamedTuple):
    """A function, taken apart.

    ``key`` is equal for functions that compute the same from equally shaped tensors. ``on(tensors)`` is the function
    with its ``tensors`` replaced by others.
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    on: Callable[[Sequence[Tensor]], Callable[..., Any]]


def capture(function: Callable[..., Any]) -> Captured:
    visitor = _Visitor()
    key, make = visitor.visit(function, _NO_NAMES)
    return Captured(key, tuple(visitor.tensors), make)


_NO_NAMES: frozenset[str] = frozenset()
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
_CONTAINERS = (tuple, list, dict)
#: Containers and modules larger than this are taken as they are, or looked into by name.
_LARGE = 64
#: What ``nn.Module`` keeps for itself and does not change what a module computes.
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_MODULE_OWN = frozenset(vars(nn.Module())) - {"training"}


class _Same:
    """An object that equals nothing but itself; holding it keeps its address its own."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


class _Visitor:
    """Walks over what a function reads. A visit gives the value's part of the key, and how to make the value anew."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, tuple[int, Make]] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no address is that of two objects

    def visit(self, value: Any, names: frozenset[str]) -> tuple[Hashable, Make]:
        kind = type(value)
        if kind in _VALUES:
            return (kind, repr(value)), lambda tensors: value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) in self._seen:
            number, make = self._seen[id(value)]
            return ("again", number), make
        visit = self._how(value)
        if visit is None:
            return _Same(value), lambda tensors: value
        number = len(self._seen)
        self._seen[id(value)] = number, lambda tensors: value  # in a cycle it stays what it is
        self._alive.append(value)
        key, make = visit(value, names)
        self._seen[id(value)] = number, make
        return key, make

    def _how(self, value: Any) -> Callable[[Any, frozenset[str]], tuple[Hashable, Make]] | None:
        if isinstance(value, types.FunctionType):
            return None if self._alive and _is_librarys(value) else self._function
        if isinstance(value, functools.partial):
            return self._partial
        if isinstance(value, types.MethodType):
            return self._method
        if isinstance(value, nn.Module):
            return self._module
        if type(value) in _CONTAINERS:
            return self._container if len(value) <= _LARGE else None
        if isinstance(value, types.ModuleType):
            return None if _is_fixed(value) else self._python_module
        if isinstance(value, (type, types.BuiltinFunctionType)) or not hasattr(value, "__dict__"):
            return None
        return self._object

    def _tensor(self, tensor: Tensor) -> tuple[Hashable, Make]:
        index = self._numbers.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        key = (index, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        return key, lambda tensors: tensors[index]

    def _parts(self, parts: Mapping[Any, Any], names: frozenset[str]) -> tuple[Hashable, Callable[..., dict[Any, Any]]]:
        """Visit the values of a dict, which is made anew as a dict."""
        key: list[Hashable] = []
        makes: dict[Any, Make] = {}
        for name, value in parts.items():
            kind = type(value)
            if kind in _VALUES:  # most are, and this is walked at every call
                key.append((name, kind, repr(value)))
            else:
                of_value, makes[name] = self.visit(value, names)
                key.append((name, of_value))
        return tuple(key), lambda tensors: {**parts, **{name: make(tensors) for name, make in makes.items()}}

    def _function(self, function: types.FunctionType, _: frozenset[str]) -> tuple[Hashable, Make]:
        code = function.__code__
        names = _names(code)
        scope = function.__globals__
        cells = function.__closure__ or ()
        closure = {i: c.cell_contents for i, c in enumerate(cells) if _is_filled(c)}
        read = {name: scope[name] for name in names & scope.keys() if not _is_fixed(scope[name])}
        defaults = dict(enumerate(function.__defaults__ or ()))
        keywords = function.__kwdefaults__ or {}
        if not (closure or read or defaults or keywords):
            return code, lambda tensors: function
        parts = [self._parts(part, names) for part in (closure, read, defaults, keywords)]

        def on(tensors: Sequence[Tensor]) -> Any:
            cells_of, globals_of, defaults_of, keywords_of = (make(tensors) for _, make in parts)
            made = types.FunctionType(
                code,
                {**scope, **globals_of} if globals_of else scope,
                function.__name__,
                tuple(defaults_of.values()) or None,
                tuple(types.CellType(cells_of[i]) if i in cells_of else cell for i, cell in enumerate(cells)),
            )
            made.__kwdefaults__ = keywords_of or None
            return made

        return (code, *(key for key, _ in parts)), on

    def _partial(self, partial: functools.partial[Any], names: frozenset[str]) -> tuple[Hashable, Make]:
        key, make = self._parts({0: partial.func, 1: partial.args, 2: partial.keywords}, names)

        def on(tensors: Sequence[Tensor]) -> Any:
            function, arguments, keywords = make(tensors).values()
            return functools.partial(function, *arguments, **keywords)

        return ("partial", key), on

    def _method(self, method: types.MethodType, _: frozenset[str]) -> tuple[Hashable, Make]:
        function: Any = method.__func__
        key, make = self._parts({0: function, 1: method.__self__}, _names_of(function))
        return ("method", key), lambda tensors: types.MethodType(*make(tensors).values())

    def _module(self, module: nn.Module, names: frozenset[str]) -> tuple[Hashable, Make]:
        """All that a module has; of a large one, a whole network say, what the code names."""
        own = {name: value for name, value in vars(module).items() if name not in _MODULE_OWN}
        has = [vars(module)[part] for part in _MODULE_PARTS]
        if module._modules and sum(1 for _ in module.parameters()) > _LARGE:
            has = [{k: v for k, v in part.items() if k in names} for part in has]
            own = {name: value for name, value in own.items() if name in names}
        parts = [self._parts(part, names) for part in (own, *has, _methods(type(module), names))]  # type: ignore[arg-type]  # a class is hashable

        def on(tensors: Sequence[Tensor]) -> Any:
            made = object.__new__(type(module))
            own_of, *has_of, _ = (make(tensors) for _, make in parts)
            registered = {n: {**vars(module)[n], **of} for n, of in zip(_MODULE_PARTS, has_of, strict=True)}
            vars(made).update({**vars(module), **own_of, **registered})
            return made

        return (type(module), *(key for key, _ in parts)), on

    def _container(self, container: Any, names: frozenset[str]) -> tuple[Hashable, Make]:
        kind = type(container)
        parts = container if kind is dict else dict(enumerate(container))
        key, make = self._parts(parts, names)

        def on(tensors: Sequence[Tensor]) -> Any:
            made = make(tensors)
            return made if kind is dict else kind(made.values())

        return (kind, key), on

    def _python_module(self, module: types.ModuleType, names: frozenset[str]) -> tuple[Hashable, Make]:
        """What the code may name of a user's Python module. It cannot be made anew, for there is one."""
        read = {name: value for name, value in vars(module).items() if name in names and not _is_fixed(value)}
        return (_Same(module), self._parts(read, names)[0]), lambda tensors: module

    def _object(self, value: Any, names: frozenset[str]) -> tuple[Hashable, Make]:
        """What the code names of an instance of a user's class; what its ``__call__`` names, if it is called."""
        names = names | _names_of(vars(type(value)).get("__call__"))
        found = {name: part for name, part in vars(value).items() if name in names}
        key, make = self._parts(found, names)

        def on(tensors: Sequence[Tensor]) -> Any:
            made = copy.copy(value)
            vars(made).update(make(tensors))
            return made

        if not found:
            return _Same(value), lambda tensors: value
        return (type(value), key), on


@functools.lru_cache(1024)
def _methods(kind: type[nn.Module], names: frozenset[str]) -> Mapping[str, types.FunctionType]:
    """The methods that a user's class defines and its ``forward`` names: they may read globals."""
    wanted = {"forward"} | names | _names_of(kind.forward)
    found = {name: getattr(kind, name, None) for name in wanted}
    return {n: m for n, m in found.items() if isinstance(m, types.FunctionType) and not _is_librarys(m)}


def _names_of(function: object) -> frozenset[str]:
    return _names(function.__code__) if isinstance(function, types.FunctionType) else _NO_NAMES


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that the code names, that of the functions defined in it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _is_fixed(value: object) -> bool:
    """Whether a global is of the kind that programs define once."""
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        return file is None or file.startswith(_LIBRARIES)
    return isinstance(value, (type, types.BuiltinFunctionType)) or _is_librarys(value)


def _is_librarys(value: object) -> bool:
    """Whether it is a function of torch, of Python or of another installed package."""
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(_LIBRARIES)


_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the variable has not been set
    except ValueError:
        return False
    return True
