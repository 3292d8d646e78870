"""What a function finds when it runs, so that it finds the same when it runs again for the backward pass.

* Random numbers: the generators of PyTorch (of the CPU and of every device that tensors are on) and of Python. A state
  is kept only of those that the function drew from. NumPy's is not looked at: that takes longer than all else that a
  call costs, 56 microseconds each time.
* Autocast, for each kind of device.
* The buffers of the modules in it. The first run updates them, as the statistics of a batch norm, or the vectors of a
  spectral norm: a second one starts from what the first one found, and what it writes is thrown away.
* The attributes of these modules: whether they are in training, a cache, a hidden state, a list that is appended to. A
  second run finds what the first one found, and leaves what there is.
* The parameters of these modules: ``torch.func.functional_call`` lends them others for the first run alone, and what
  requires a gradient may have changed. Where a parameter was edited since, by the step of an optimizer say, a second
  run raises, as plain autograd does; but not where it is only known that the function can reach the module, which may
  be as large as a program. So it does where a tensor was edited that the function closes over.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..nn.norm import NORM_TYPES
from .free_state import FreeState


class StateSnapshot:
    """Those of one call. ``recording`` is what the first run is under, ``restored`` is for all that follow.

    Args:
        free_state: what the function runs, or may run.
        tensors: what it is given.
        seed: whether later runs find the random numbers of the first.
    """

    def __init__(self, free_state: FreeState, tensors: Iterable[Tensor], *, seed: bool = True) -> None:
        self._modules, self._runs_all = tuple(free_state.modules), free_state.runs_all
        self._closed_over = [(tensor, tensor._version) for tensor in free_state.tensors if not tensor.is_inference()]
        # Nobody asks hundreds of parameters where they are for the sake of a machine without accelerators.
        devices = {tensor.device for tensor in tensors}
        if torch.accelerator.is_available():
            devices |= {p.device for module in self._modules for p in module._parameters.values() if p is not None}
        devices = {device for device in devices if device.type not in ("cpu", "meta")}
        self._autocast = [_Autocast.now(kind) for kind in sorted({"cpu", *(device.type for device in devices)})]
        held = [g for module in self._modules for g in vars(module).values() if isinstance(g, torch.Generator)]
        own = [_Generator(g.get_state, g.set_state) for g in dict.fromkeys([*free_state.generators, *held])]
        self._generators = [*_GENERATORS, *map(_of_device, devices), *own] if seed else []
        self._states: list[tuple[_Generator, Any]] = []
        self._buffers: list[_Buffer] = []
        self._parameters: list[_Parameter] = []
        self._attributes: list[_Attributes] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        states = [(generator, generator.get()) for generator in self._generators]
        self._buffers = list(_buffers_of(self._modules))
        self._attributes = [_Attributes.of(module) for module in self._modules]
        try:
            with recomputed_region():
                yield
        finally:
            self._states = [(generator, state) for generator, state in states if generator.has_moved(state)]
            for held in self._buffers:
                held.record_writes()
            self._parameters = list(_parameters_of(self._modules))
            self._generators, self._modules = [], ()

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for generator, state in self._states:
                stack.callback(generator.set, generator.get())
                generator.set(state)
            for held in self._buffers:
                held.restore(stack)
            for parameter in self._parameters:
                if self._runs_all:
                    parameter.check()
                parameter.restore(stack)
            for tensor, version in self._closed_over:
                if tensor._version != version:
                    raise RuntimeError(
                        f"a tensor of shape {tuple(tensor.shape)}, which a function that runs again closes over, was "
                        "modified by an in-place operation after the forward pass"
                    )
            for attributes in self._attributes:
                attributes.restore(stack)
            for autocast in self._autocast:
                stack.enter_context(autocast.context())
            stack.enter_context(recomputed_region())
            yield


class _Region(threading.local):
    depth: int = 0


_region = _Region()


@contextmanager
def recomputed_region() -> Iterator[None]:
    _region.depth += 1
    try:
        yield
    finally:
        _region.depth -= 1


@contextmanager
def outside_recomputed_region() -> Iterator[None]:
    before, _region.depth = _region.depth, 0
    try:
        yield
    finally:
        _region.depth = before


def in_recomputed_region() -> bool:
    """Whether a function runs that will run again, or does so: a module in it need spare nothing, for nothing of it is
    kept, and what it held for itself would be."""
    return _region.depth > 0


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


class _Buffer:
    """A buffer as a run finds it, and all modules that have it."""

    def __init__(self, tensor: Tensor, values: Tensor | None, is_surely_written: bool) -> None:
        self._tensor, self._version = tensor, tensor._version
        #: A copy; None where nothing is written, or where a second run may find any.
        self._values = values
        self._is_written = is_surely_written
        self._places: list[tuple[dict[str, Any], str]] = []

    def add(self, holders: dict[str, Any], name: str) -> None:
        self._places.append((holders, name))

    def record_writes(self) -> None:
        replaced = any(holders.get(name) is not self._tensor for holders, name in self._places)
        self._is_written = self._is_written or replaced or self._tensor._version != self._version
        if not self._is_written:
            self._values = None

    def restore(self, stack: ExitStack) -> None:
        holders, name = self._places[0]
        now = holders[name]
        if not self._is_written and now is self._tensor:
            return
        before = (now if self._values is None else self._values).detach().clone() if self._is_written else self._tensor
        for holders, name in self._places:
            stack.callback(holders.__setitem__, name, holders[name])
            holders[name] = before


def _buffers_of(modules: Iterable[nn.Module]) -> Iterable[_Buffer]:
    found: dict[int, _Buffer] = {}
    for module in modules:
        writes_unread = _writes_unread(module)
        for name, tensor in module._buffers.items():
            if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
                held = found.get(id(tensor))
                if held is None:
                    # ``F.batch_norm`` counts no version up, whoever calls it.
                    is_statistic = tensor.dim() == 1 and tensor.is_floating_point()
                    values = None if writes_unread else tensor.detach().clone()
                    held = found[id(tensor)] = _Buffer(tensor, values, writes_unread or is_statistic)
                held.add(module._buffers, name)
    return found.values()


def _writes_unread(module: nn.Module) -> bool:
    """Torch's batch norms, and ours, do not read in training what they write; one that is derived from them may."""
    return (
        isinstance(module, (_NormBase, *NORM_TYPES))
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
    requires_grad: bool

    def check(self) -> None:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{type(self.module).__name__}: the parameter {self.name} was modified by an in-place operation after "
                "the forward pass, and the backward pass runs the module again; take the optimizer's step afterwards"
            )

    def restore(self, stack: ExitStack) -> None:
        own = self.module._parameters
        now = own.get(self.name)
        # Not what an engine shards, and its hooks in the second run see to.
        if now is None or is_traceable_wrapper_subclass(now) or is_traceable_wrapper_subclass(self.tensor):
            return
        if now is not self.tensor:
            stack.callback(own.__setitem__, self.name, now)
            own[self.name] = self.tensor
        elif self.tensor.is_leaf and self.tensor.requires_grad != self.requires_grad:
            stack.callback(self.tensor.requires_grad_, self.tensor.requires_grad)
            self.tensor.requires_grad_(self.requires_grad)


def _parameters_of(modules: Iterable[nn.Module]) -> Iterator[_Parameter]:
    for module in modules:
        for name, tensor in module._parameters.items():
            if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
                yield _Parameter(module, name, tensor, tensor._version, tensor.requires_grad)


# --- attributes -------------------------------------------------------------------------------------------------------

#: What each module has: its parameters, buffers, hooks. The first is looked at like what users set.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class _Attributes(NamedTuple):
    """What a module's attributes are, and, of lists, dicts and sets, what is in them."""

    module: nn.Module
    values: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        values = cls._now(module)
        contents = {name: value.copy() for name, value in values.items() if type(value) in (list, dict, set)}
        return cls(module, values, contents)

    @staticmethod
    def _now(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}

    def restore(self, stack: ExitStack) -> None:
        """Set them to what they were, until the stack is left; lists and the like to copies."""
        stack.callback(self._set, self._now(self.module))
        self._set({**self.values, **{name: contents.copy() for name, contents in self.contents.items()}})

    def restore_contents(self) -> None:
        """Set them to what they were, and fill lists and the like with what was in them."""
        self._set(self.values)
        for name, contents in self.contents.items():
            held = self.values[name]
            held.clear()
            held.extend(contents) if isinstance(held, list) else held.update(contents)

    def _set(self, values: dict[str, Any]) -> None:
        own = vars(self.module)
        for name in [name for name in own if name not in values and name not in _OF_EVERY_MODULE]:
            del own[name]
        own.update(values)


@contextmanager
def attributes_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what a run sets."""
    before = [_Attributes.of(module) for module in modules]
    try:
        yield
    finally:
        for attributes in before:
            attributes.restore_contents()
