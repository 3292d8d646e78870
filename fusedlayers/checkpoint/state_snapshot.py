"""Snapshot and restore the state that a recomputed function depends on.

* Random numbers: the generators of PyTorch (CPU and every device that tensors are on), of Python, and those that the
  function or its modules hold. A state is kept only of a generator that the function drew from. NumPy's generator is
  not looked at: that takes 56 microseconds for each call, more than all else.
* Autocast, for each kind of device.
* Buffers. The first run updates them, as the statistics of a batch norm or the vectors of a spectral norm. A
  recomputation starts from what the first run found, and what it writes is thrown away.
* Attributes of modules: the mode, a cache, a hidden state, a list that is appended to. A recomputation finds what the
  first run found, and leaves the current ones unchanged.
* Parameters. ``torch.func.functional_call`` may have lent others for the first run alone, and ``requires_grad`` may
  have changed since; the recomputation uses those of the first run. It raises where one was edited in place since, by
  an optimizer's step say, as plain autograd does. It does not where the module may not have run
  (``FreeState.runs_all``). It also raises where a tensor that the function closes over was edited.

Cost: one copy of every buffer that the modules may read after writing it, until the first run has shown that it was not
written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch import NormBase, is_traceable_wrapper_subclass
from ..utils.module_state import Attributes
from .free_state import FreeState
from .generators import GENERATORS, Generator


class StateSnapshot:
    """The state for one call: the first run is inside ``recording``, every recomputation inside ``restored``.

    Args:
        free_state: what the function depends on besides its arguments.
        inputs: the tensors among its arguments.
    """

    def __init__(self, free_state: FreeState, inputs: Iterable[Tensor]) -> None:
        self._free_state: FreeState | None = free_state
        self._inputs = inputs
        self._runs_all = free_state.runs_all
        self._autocast: Sequence[_Autocast] = ()
        self._states: Sequence[tuple[Generator, Any]] = ()
        self._buffers: Sequence[_Buffer] = ()
        self._tensors: Sequence[Versioned] = ()
        self._attributes, self._parameters = Attributes(()), _Parameters(())

    @contextmanager
    def recording(self) -> Iterator[None]:
        assert self._free_state is not None
        modules, generators, tensors, _, replays_rng = self._free_state
        devices = {tensor.device for tensor in self._inputs}
        if torch.accelerator.is_available():  # else hundreds of parameters would be asked for nothing
            devices |= {p.device for module in modules for p in module._parameters.values() if p is not None}
        devices = {device for device in devices if device.type not in ("cpu", "meta")}
        self._free_state, self._inputs = None, ()
        self._autocast = [_Autocast.current(kind) for kind in {"cpu", *(device.type for device in devices)}]
        self._tensors = [Versioned.of(tensor) for tensor in tensors if not tensor.is_inference()]
        self._buffers = _buffers_of(modules)
        self._attributes = Attributes(modules)
        states = []
        if replays_rng:
            held = self._attributes.of_type(torch.Generator)
            own = map(Generator.of, dict.fromkeys([*generators, *held]))
            states = [(g, g.get()) for g in [*GENERATORS, *map(Generator.of_device, devices), *own]]
        _region.depth += 1
        try:
            yield
        finally:
            _region.depth -= 1
            self._states = [(generator, state) for generator, state in states if generator.has_moved(state)]
            for buffer in self._buffers:
                buffer.record_writes()
            self._parameters = _Parameters(modules)

    @contextmanager
    def restored(self) -> Iterator[None]:
        _region.depth += 1
        with ExitStack() as stack:
            stack.callback(_leave)
            for generator, state in self._states:
                stack.callback(generator.set, generator.get())
                generator.set(state)
            for buffer in self._buffers:
                buffer.restore(stack)
            if self._runs_all:
                self._parameters.check()
            self._parameters.restore(stack)
            for tensor in self._tensors:
                if tensor.is_edited:
                    raise RuntimeError(
                        f"a tensor of shape {tuple(tensor.value.shape)}, which a recomputed function closes over, was "
                        "modified by an in-place operation after the forward pass"
                    )
            stack.enter_context(self._attributes.again())
            for autocast in self._autocast:
                if autocast != _Autocast.current(autocast.kind):  # torch's checkpoint restores most of them itself
                    stack.enter_context(autocast.context())
            yield


class Versioned(NamedTuple):
    """A value, and, if it is a tensor, the version counter that it had."""

    value: Any
    version: int | None

    @classmethod
    def of(cls, value: Any) -> Versioned:
        return cls(value, value._version if isinstance(value, Tensor) else None)

    @property
    def is_edited(self) -> bool:
        """Whether it was modified by an in-place operation since."""
        return self.version is not None and self.value._version != self.version


# --- whether a function runs that will be, or is being, recomputed ----------------------------------------------------


class _Region(threading.local):
    depth: int = 0


_region = _Region()


def _leave() -> None:
    _region.depth -= 1


@contextmanager
def _at_depth(depth: int) -> Iterator[None]:
    before, _region.depth = _region.depth, depth
    try:
        yield
    finally:
        _region.depth = before


def recomputed_region() -> Any:
    """What runs inside may be recomputed."""
    return _at_depth(_region.depth + 1)


def outside_recomputed_region() -> Any:
    """As if what runs inside were not recomputed."""
    return _at_depth(0)


def in_recomputed_region() -> bool:
    """Whether a function runs that will be, or is being, recomputed. A module inside need not save memory: nothing of
    it is kept, and what it held for itself would be."""
    return _region.depth > 0


# --- autocast ---------------------------------------------------------------------------------------------------------


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: torch.dtype | None
    cache: bool

    @classmethod
    def current(cls, kind: str) -> _Autocast:
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, None, False)
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        )

    def context(self) -> Any:
        assert self.dtype is not None
        return torch.autocast(self.kind, self.dtype, self.enabled, self.cache)


# --- buffers ----------------------------------------------------------------------------------------------------------


class _Buffer:
    """A buffer as the first run finds it, and all modules that have it."""

    def __init__(self, tensor: Tensor, values: Tensor | None, is_surely_written: bool) -> None:
        self._tensor = Versioned.of(tensor)
        #: A copy; None where nothing is written, or where a recomputation does not read it.
        self._values = values
        self._is_written = is_surely_written
        #: The dicts of buffers that it is in, and its names there.
        self._places: list[tuple[dict[str, Any], str]] = []

    def add(self, buffers: dict[str, Any], name: str) -> None:
        self._places.append((buffers, name))

    def record_writes(self) -> None:
        is_replaced = any(buffers.get(name) is not self._tensor.value for buffers, name in self._places)
        self._is_written = self._is_written or is_replaced or self._tensor.is_edited
        if not self._is_written:
            self._values = None

    def restore(self, stack: ExitStack) -> None:
        buffers, name = self._places[0]
        current = buffers[name]
        if self._is_written:
            # The count of batches too, which a norm with a cumulative average divides by.
            restored = (current if self._values is None else self._values).detach().clone()
        elif current is not self._tensor.value:
            restored = self._tensor.value
        else:
            return
        for buffers, name in self._places:
            stack.callback(buffers.__setitem__, name, buffers[name])
            buffers[name] = restored


def _buffers_of(modules: Iterable[nn.Module]) -> list[_Buffer]:
    found: dict[int, _Buffer] = {}
    for module in modules:
        if not module._buffers:
            continue
        writes_unread = _writes_unread(module)
        for name, tensor in module._buffers.items():
            if tensor is not None and not is_lazy(tensor) and not tensor.is_inference():
                if id(tensor) not in found:
                    # ``F.batch_norm`` does not increment the version counter, whoever calls it.
                    is_statistic = tensor.dim() == 1 and tensor.is_floating_point()
                    values = None if writes_unread else tensor.detach().clone()
                    found[id(tensor)] = _Buffer(tensor, values, writes_unread or is_statistic)
                found[id(tensor)].add(module._buffers, name)
    return list(found.values())


def _writes_unread(module: nn.Module) -> bool:
    """Torch's batch norms, and ours, do not read in training what they write; a class derived from them may."""
    return (
        isinstance(module, NormBase)
        and module.training
        and type(module).forward.__module__.startswith(("torch.nn.", "fusedlayers."))
    )


# --- parameters -------------------------------------------------------------------------------------------------------


class _Parameters:
    """The parameters of modules as the first run has left them."""

    __slots__ = ("_needs", "_places", "_tensors", "_versions")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # nn.Parameters, but for functional_call's.
        found = [
            (tensor, (module, name))
            for module in modules
            for name, tensor in module._parameters.items()
            if not (tensor is None or is_lazy(tensor) or tensor.is_inference())
        ]
        self._tensors, self._places = [tensor for tensor, _ in found], [place for _, place in found]
        self._versions = [tensor._version for tensor in self._tensors]
        self._needs = [tensor.requires_grad for tensor in self._tensors]

    def check(self) -> None:
        now = [tensor._version for tensor in self._tensors]
        if now == self._versions:
            return
        edited = next(i for i, version in enumerate(now) if version != self._versions[i])
        module, name = self._places[edited]
        raise RuntimeError(
            f"{type(module).__name__}: the parameter {name} was modified by an in-place operation after the forward "
            "pass, and the backward pass recomputes the module; take the optimizer's step afterwards"
        )

    def restore(self, stack: ExitStack) -> None:
        for (module, name), tensor, needs in zip(self._places, self._tensors, self._needs, strict=True):
            own = module._parameters
            current = own.get(name)
            if current is not tensor or current.requires_grad != needs:  # few are
                _restore(stack, own, name, current, tensor, needs)


def _restore(
    stack: ExitStack, own: dict[str, Any], name: str, current: Tensor | None, tensor: Tensor, needs: bool
) -> None:
    # Sharded parameters are left to the engine's hooks, which run in the recomputation too.
    if current is None or is_traceable_wrapper_subclass(current) or is_traceable_wrapper_subclass(tensor):
        return
    if current is not tensor:
        stack.callback(own.__setitem__, name, current)
        own[name] = tensor
    elif tensor.is_leaf:
        stack.callback(tensor.requires_grad_, tensor.requires_grad)
        tensor.requires_grad_(needs)
