"""What a function finds when it runs, so that it finds the same when it runs again for the backward pass.

* Random numbers: the generators of PyTorch (of the CPU and of every device that tensors are on) and of Python. A state
  is kept only of those that the function drew from. NumPy's is not looked at: that takes longer than all else that a
  call costs, 56 microseconds each time.
* Autocast, for each kind of device.
* The buffers of the modules in it. The first run updates them, as the statistics of a batch norm, or the vectors of a
  spectral norm: a second one starts from what the first one found, and what it writes is thrown away.
* The parameters of these modules: ``torch.func.functional_call`` lends them others for the first run alone. Where one
  was edited since, by the step of an optimizer say, a second run raises, as plain autograd does; but not where it is
  only known that the function can reach the module, which may be as large as a program.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Circumstances:
    """Those of one call. ``noting`` is what the first run is under, ``again`` is for all that follow.

    Args:
        modules: those that the function runs, or may run.
        tensors: what it is given.
        seed: whether later runs find the random numbers of the first.
        runs_all: whether it runs all of the modules.
    """

    def __init__(
        self, modules: Iterable[nn.Module], tensors: Iterable[Tensor], *, seed: bool = True, runs_all: bool = True
    ) -> None:
        self._modules, self._runs_all = tuple(modules), runs_all
        # Nobody asks hundreds of parameters where they are for the sake of a machine without accelerators.
        devices = {tensor.device for tensor in tensors}
        if torch.accelerator.is_available():
            devices |= {p.device for module in self._modules for p in module._parameters.values() if p is not None}
        devices = {device for device in devices if device.type not in ("cpu", "meta")}
        self._autocast = [_Autocast.now(kind) for kind in sorted({"cpu", *(device.type for device in devices)})]
        self._generators = [*_GENERATORS, *(_of_device(device) for device in devices)] if seed else []
        self._states: list[tuple[_Generator, Any]] = []
        self._held: list[_Held] = []
        self._parameters: list[_Parameter] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        states = [(generator, generator.get()) for generator in self._generators]
        self._held = list(_held_by(self._modules))
        try:
            yield
        finally:
            self._states = [(generator, state) for generator, state in states if generator.has_moved(state)]
            for held in self._held:
                held.see_whether_written()
            self._parameters = list(_parameters_of(self._modules))
            self._generators, self._modules = [], ()

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            for generator, state in self._states:
                stack.callback(generator.set, generator.get())
                generator.set(state)
            for held in self._held:
                held.put_in_place(stack)
            for parameter in self._parameters:
                if self._runs_all:
                    parameter.check()
                if parameter.is_another():
                    own = parameter.module._parameters
                    stack.callback(own.__setitem__, parameter.name, own[parameter.name])
                    own[parameter.name] = parameter.tensor
            for autocast in self._autocast:
                stack.enter_context(autocast.context())
            yield


# --- random numbers ---------------------------------------------------------------------------------------------------


class _Generator(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def has_moved(self, state: Any) -> bool:
        now = self.get()
        with no_dispatch():  # states are real tensors, also for who works with fake ones
            return not torch.equal(now, state) if isinstance(now, Tensor) else now != state


_GENERATORS = (
    _Generator(torch.get_rng_state, torch.set_rng_state),
    _Generator(random.getstate, random.setstate),
)


def _of_device(device: torch.device) -> _Generator:
    module = torch.get_device_module(device)
    return _Generator(
        functools.partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)
    )


# --- autocast ---------------------------------------------------------------------------------------------------------


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: torch.dtype | None
    cache: bool

    @classmethod
    def now(cls, kind: str) -> _Autocast:
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, None, False)
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        )

    def context(self) -> Any:
        if self.dtype is None:
            return ExitStack()
        return torch.autocast(self.kind, self.dtype, self.enabled, self.cache)


# --- buffers ----------------------------------------------------------------------------------------------------------


class _Held:
    """A buffer as a run finds it, and all modules that have it."""

    def __init__(self, tensor: Tensor, values: Tensor | None, is_surely_written: bool) -> None:
        self._tensor, self._version = tensor, tensor._version
        #: A copy; None where nothing is written, or where a second run may find any.
        self._values = values
        self._is_written = is_surely_written
        self._places: list[tuple[dict[str, Any], str]] = []

    def add(self, holders: dict[str, Any], name: str) -> None:
        self._places.append((holders, name))

    def see_whether_written(self) -> None:
        replaced = any(holders.get(name) is not self._tensor for holders, name in self._places)
        self._is_written = self._is_written or replaced or self._tensor._version != self._version
        if not self._is_written:
            self._values = None

    def put_in_place(self, stack: ExitStack) -> None:
        holders, name = self._places[0]
        now = holders[name]
        if not self._is_written and now is self._tensor:
            return
        before = (now if self._values is None else self._values).detach().clone() if self._is_written else self._tensor
        for holders, name in self._places:
            stack.callback(holders.__setitem__, name, holders[name])
            holders[name] = before


def _held_by(modules: Iterable[nn.Module]) -> Iterable[_Held]:
    found: dict[int, _Held] = {}
    for module in modules:
        writes_unread = _writes_unread(module)
        for name, tensor in module._buffers.items():
            if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
                held = found.get(id(tensor))
                if held is None:
                    # ``F.batch_norm`` counts no version up, whoever calls it.
                    is_statistic = tensor.dim() == 1 and tensor.is_floating_point()
                    values = None if writes_unread else tensor.detach().clone()
                    held = found[id(tensor)] = _Held(tensor, values, writes_unread or is_statistic)
                held.add(module._buffers, name)
    return found.values()


def _writes_unread(module: nn.Module) -> bool:
    """Torch's batch norms, and ours, do not read in training what they write; one that is derived from them may."""
    return (
        isinstance(module, _NormBase)
        and module.training
        and type(module).forward.__module__.startswith(("torch.nn.", "fusedlayers."))
    )


# --- parameters -------------------------------------------------------------------------------------------------------


class _Parameter(NamedTuple):
    """A parameter as the first run has left it."""

    module: nn.Module
    name: str
    tensor: Any  # an nn.Parameter, but for functional_call's
    version: int

    def check(self) -> None:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{type(self.module).__name__}: the parameter {self.name} was modified by an in-place operation after "
                "the forward pass, and the backward pass runs the module again; take the optimizer's step afterwards"
            )

    def is_another(self) -> bool:
        """Whether the module has another one now, and not by an engine that shards parameters, and whose hooks in the
        second run see to it."""
        now = self.module._parameters.get(self.name)
        return (
            now is not None
            and now is not self.tensor
            and not is_traceable_wrapper_subclass(now)
            and not is_traceable_wrapper_subclass(self.tensor)
        )


def _parameters_of(modules: Iterable[nn.Module]) -> Iterator[_Parameter]:
    for module in modules:
        for name, tensor in module._parameters.items():
            if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
                yield _Parameter(module, name, tensor, tensor._version)


# --- what is in a function --------------------------------------------------------------------------------------------


def modules_in(function: object, *arguments: object) -> list[nn.Module]:
    """All modules that a call can reach: the function itself, what it is bound to, what a ``partial`` holds, what it
    closes over or has as defaults, what its code names among its globals, and the arguments; functions among these in
    the same way."""
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    pending: list[object] = [function, *arguments]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            found.update(dict.fromkeys(thing.modules()))
        elif isinstance(thing, functools.partial):
            pending += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.MethodType):
            pending += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType):
            if not (thing.__module__ or "").startswith("torch."):
                pending += _named_in(thing)
        elif isinstance(thing, list | tuple | dict | set):
            pending += [leaf for leaf in tree_leaves(list(thing) if isinstance(thing, set) else thing)]
        elif hasattr(thing, "__dict__") and not isinstance(thing, Tensor):
            # Of other objects what they hold themselves, and not what those hold: that may be a whole program.
            pending += [held for held in vars(thing).values() if isinstance(held, nn.Module | list | tuple | dict)]
    return list(found)


def _named_in(function: types.FunctionType) -> list[object]:
    found: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a name that has no value yet
            continue
    names = {name for code in _codes_in(function.__code__) for name in code.co_names}
    named = (function.__globals__[name] for name in names if name in function.__globals__)
    return found + [thing for thing in named if not isinstance(thing, types.ModuleType | type)]


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)
