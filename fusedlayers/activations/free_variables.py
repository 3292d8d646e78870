"""The free variables of a function: the tensors, modules and plain numbers that it reads besides its argument.

``find_variables`` reads them off closures, defaults, a partial's arguments, and the globals and attributes that code
names: that of the function, and that of all functions and methods of the same program that it may call. It returns the
tensors, and a key. Two functions with one key compute the same from their tensors: the trace of one serves the other.
A call takes 25 us for a simple function.

Whatever else a function reads (an object, a dict, a generator of random numbers) is a refusal: PyTorch computes it.
Code of installed packages is not searched, and is assumed not to change its behaviour.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..utils.caching import BoundedCache
from ..utils.reading import names_in, read_by

#: Builds a value anew from other tensors.
Make = Callable[[Sequence[Tensor]], Any]


class FreeVariables(NamedTuple):
    """The free variables of a function.

    Attributes:
        code: the code that is called, or what identifies it; equal also for functions that read other numbers.
        key: equal for functions that compute the same from tensors of equal shapes and dtypes.
        tensors: the tensors that the function reads.
        rebind: ``rebind(tensors)`` is the function with its tensors replaced by others. It shares no state with it.
        refusal: why the key cannot be relied on, or None.
    """

    code: Hashable
    key: Hashable
    tensors: tuple[Tensor, ...]
    rebind: Callable[[Sequence[Tensor]], Callable[..., Any]]
    refusal: str | None


def find_variables(function: Callable[..., Any]) -> FreeVariables:
    """The free variables of a function, found without calling it."""
    code = _called_code(function)
    names = _names.get(code, _CALLED)
    while True:  # names select attributes, and are known after a first walk
        search = _Search(names)
        key, make = search.visit(function)
        if search.names_in_code == names:
            return FreeVariables(code, key, tuple(search.tensors), make, search.refusal)
        names = _names.put(code, search.names_in_code)


#: The names that were found in a function's code the last time, which avoids a second walk.
_names: BoundedCache[frozenset[str]] = BoundedCache()


def _called_code(function: Any) -> Any:
    """The code that is called; a module's class; or a built-in function."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):  # nn.Module.__getattr__ is slow to say that an attribute is missing
        return type(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if isinstance(code, types.CodeType):
        return code
    return function if isinstance(function, types.BuiltinFunctionType) else type(function)


def must_call_reason(*modules: nn.Module) -> str | None:
    """Why one of these modules does more than its class says, or None."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return "it has hooks"
        if "forward" in vars(module):
            return "its forward has been replaced"
    return None


_NUMBERS = frozenset(
    {
        *(type(None), bool, int, float, complex, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo),
    }
)
#: A longer tuple or list is refused, because every call would search it.
_LONGEST = 64
OWN_BACKWARD = "it calls an autograd.Function, whose backward pass is not traced; write it in torch's operations"
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
#: Attributes of ``nn.Module`` itself that do not change what a module computes.
_MODULE_OWN = frozenset(vars(nn.Module())) - {"training"}
#: What a function states of itself in terms of its output y, as attributes; a module by methods.
STATED = ("derivative_given_output", "input_given_output")
#: Methods that are called without their name in the code.
_CALLED = frozenset(
    {
        *("forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__", "__bool__"),
        *("__contains__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__matmul__"),
        *("__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__neg__"),
        *STATED,
    }
)
#: Code with one of these names reads what it does not name, or what a trace does not show: the process's state, sizes
#: (of which a trace holds one), a tensor's place in memory and in the graph, the hooks on it, and streams.
_UNTRACED = frozenset(
    {
        *("getattr", "hasattr", "setattr", "delattr", "attrgetter", "vars", "__dict__", "globals", "locals", "eval"),
        *("exec", "getenv"),
        *("children", "named_children", "modules", "named_modules", "_modules", "_buffers", "_parameters"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"),
        *("get_parameter", "get_buffer", "get_submodule"),
        *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "is_inference_mode_enabled"),
        *("is_compiling", "is_dynamo_compiling", "get_default_dtype", "get_default_device"),
        *("shape", "size", "numel", "nelement", "nbytes", "is_contiguous", "stride", "is_cuda", "is_cpu"),
        *("storage_offset", "data_ptr", "is_grad_enabled", "requires_grad", "is_leaf", "grad_fn", "retain_grad"),
        *("register_hook", "register_multi_grad_hook", "print", "write", "warn"),
    }
)


class _Search:
    """A walk over all that a function reads. ``visit`` returns a value's part of the key, and its ``Make``.

    ``names`` select attributes; ``names_in_code`` are those that the walk has met.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.names_in_code = names, names
        self.tensors: list[Tensor] = []
        self.refusal: str | None = None
        self._indices: dict[int, int] = {}
        self._seen: dict[int, tuple[int, Make]] = {}
        self._bypassed: set[int] = set()

    def visit(self, value: Any) -> tuple[Hashable, Make]:
        if type(value) in _NUMBERS or isinstance(value, (int, float, str)):
            return (type(value), repr(value)), lambda tensors: value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) in self._seen:
            number, make = self._seen[id(value)]
            return ("reference", number), make
        if _is_definition(value):
            return value, lambda tensors: value
        taken_apart = next((f for kind, f in _TAKEN_APART.items() if isinstance(value, kind)), _Search._refused)
        number = len(self._seen)
        self._seen[id(value)] = number, lambda tensors: value  # in a cycle the object itself
        own, parts, build = taken_apart(self, value)
        visited = [{name: self.visit(part) for name, part in named.items()} for named in parts]

        def rebuilt(tensors: Sequence[Tensor]) -> Any:
            return build(*({name: make(tensors) for name, (_, make) in named.items()} for named in visited))

        self._seen[id(value)] = number, rebuilt
        return (own, *(tuple((name, key) for name, (key, _) in named.items()) for named in visited)), rebuilt

    def _refuse(self, reason: str | None) -> None:
        self.refusal = self.refusal or reason

    def _tensor(self, tensor: Tensor) -> tuple[Hashable, Make]:
        if type(tensor) not in (Tensor, nn.Parameter):
            self._refuse(f"it reads a {type(tensor).__name__}")
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return (index, tuple(tensor.shape), tensor.dtype, tensor.requires_grad), lambda tensors: tensors[index]

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in sorted(self.names & values.keys())}

    # Each of these returns the value's own part of the key, its parts, and how it is built anew from such parts.

    def _function(self, function: types.FunctionType) -> _Apart:
        code, scope = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        # Of a package's function only the closure counts: a decorator's holds the function that it decorates.
        names = frozenset() if _is_installed(code) else names_in(code)
        self.names_in_code |= names
        if "_torchdynamo_orig_callable" in vars(function):
            self._refuse("torch.compile made it, or a function that it calls; pass what torch.compile was given")
        for name in sorted(names & _UNTRACED):
            self._refuse(f"its code names {name}, which a trace does not follow")

        def build(cells_of: Any, globals_of: Any, defaults_of: Any, keywords_of: Any, attributes_of: Any) -> Any:
            made = types.FunctionType(
                code,
                {**scope, **globals_of},
                function.__name__,
                tuple(defaults_of.values()),
                tuple(types.CellType(cells_of[n]) if n in cells_of else c for n, c in cells.items()),
            )
            made.__kwdefaults__ = keywords_of
            vars(made).update({**vars(function), **attributes_of})
            return made

        return code, (*read_by(function, names), self._named(vars(function))), build

    def _partial(self, partial: functools.partial[Any]) -> _Apart:
        positional = dict(enumerate((partial.func, *partial.args)))
        return "partial", (positional, partial.keywords), lambda p, k: functools.partial(*p.values(), **k)

    def _method(self, method: types.MethodType) -> _Apart:
        self._bypassed.add(id(method.__self__))  # a module whose method is called is not called itself
        return "method", ({0: method.__func__, 1: method.__self__},), lambda p: types.MethodType(*p.values())

    def _module(self, module: nn.Module) -> _Apart:
        """The attributes that the code of its class names; all of them, if a package's code may read them."""
        if id(module) not in self._bypassed:
            self._refuse(must_call_reason(module))
        kind: Any = type(module)
        own = {name: value for name, value in vars(module).items() if name not in _MODULE_OWN}
        held: list[Mapping[str, Any]] = [own, *(vars(module)[part] for part in _MODULE_PARTS)]
        if len(user_classes(kind)) == len(kind.__mro__) - 2:  # all but nn.Module and object
            held = [self._named(values) for values in held]

        def build(own_of: Any, *parts_of: Any) -> Any:
            made = object.__new__(kind)
            registered = {n: {**vars(module)[n], **of} for n, of in zip(_MODULE_PARTS, parts_of, strict=False)}
            vars(made).update({**vars(module), **own_of, **registered})
            return made

        return kind, (*held, *self._members(kind)), build

    def _class(self, kind: Any) -> _Apart:
        if issubclass(kind, torch.autograd.Function):
            self._refuse(OWN_BACKWARD)
        elif not issubclass(kind, nn.Module):
            self._refuse(f"it reads the class {kind.__name__}")
        return kind, self._members(kind), lambda *_: kind

    def _members(self, kind: type) -> Sequence[Mapping[str, Any]]:
        """The methods and attributes of the program's own classes that the code names."""
        # Looked up at every call, because they may be set like an object's.
        return [self._named(vars(base)) for base in user_classes(kind)]

    def _sequence(self, values: Any) -> _Apart:
        kind = type(values)
        if kind in (tuple, list) and len(values) <= _LONGEST:
            return kind.__name__, (dict(enumerate(values)),), lambda p: kind(p.values())
        self._refuse(f"it reads a {kind.__name__} of {len(values)} values; let it read a tensor")
        return None, (), lambda: values

    def _refused(self, value: object) -> _Apart:
        kind = type(getattr(value, "__self__", value)).__name__  # of a built-in method its object's
        self._refuse(f"it reads a {kind}, which is no tensor, module, function or plain number")
        return None, (), lambda: value


#: A value's own part of the key, its parts by their names, and a function that builds the value from such parts.
_Apart = tuple[Hashable, Sequence[Mapping[Any, Any]], Callable[..., Any]]

_TAKEN_APART: dict[Any, Callable[[_Search, Any], _Apart]] = {
    types.FunctionType: _Search._function,
    functools.partial: _Search._partial,
    types.MethodType: _Search._method,
    nn.Module: _Search._module,
    type: _Search._class,
    (tuple, list): _Search._sequence,
    types.ModuleType: lambda search, space: (space, (search._named(vars(space)),), lambda _: space),
}


@functools.lru_cache(1024)
def user_classes(kind: Any) -> tuple[type, ...]:
    """The classes of ``kind.__mro__`` that no installed package defines."""
    return tuple(base for base in kind.__mro__ if not _is_definition(base))


def _is_definition(value: Any) -> bool:
    """Whether torch, Python or an installed package defines it, so that programs do not change it."""
    if isinstance(value, types.FunctionType):  # one with a closure may be a user's, decorated by a package
        return value.__closure__ is None and _is_installed(value.__code__)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        file = getattr(module, "__file__", None)
        return value.__module__ in sys.builtin_module_names if file is None else file.startswith(_INSTALLED)
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math")
    # What torch and NumPy have in place of functions: operators of torch.ops, and NumPy's universal functions.
    is_operation = type(value).__module__.partition(".")[0] in ("torch", "numpy") and callable(value)
    return isinstance(value, types.MethodDescriptorType) or (is_operation and not isinstance(value, nn.Module))


def _is_installed(code: types.CodeType) -> bool:
    return code.co_filename.startswith((*_INSTALLED, "<frozen "))


#: The folders of Python's own modules, of installed packages, and of this one.
_INSTALLED = tuple(
    os.path.dirname(file) + os.sep for file in (os.__file__, os.path.dirname(torch.__file__), os.path.dirname(__file__))
)
