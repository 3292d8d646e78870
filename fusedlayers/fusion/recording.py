"""What a forward pass calls: which modules call operations of which this package keeps less."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from .._torch import DisableTorchFunction, is_of_transform, saved_tensors_hooks_on_top
from ..activations import DTYPES, FLOAT64_IS_TORCHS, KEPT_BY_TORCH, Activation
from ..ops.dropout import tells_scaled
from .operations import (
    BATCH_NORM,
    GATE,
    OPERATIONS,
    PRODUCT,
    Given,
    Operation,
    activation_of,
    in_order,
    in_place_because,
    is_gate,
    reads_product,
    writes_over_input,
)
from .place import OTHERS, PLANNED, RESULT_IS_FREE, Place
from .stand_in import recognise

#: Norms that PyTorch computes faster on CPUs. Where only their statistics are freed, at most this part of a result, it
#: does.
_FASTER_BY_TORCH = frozenset({"layer_norm", "group_norm"})
_STATISTICS = 16
#: What puts hooks on a tensor, or on its node: a second run would put them once more.
_ONCE = frozenset({Tensor.register_hook, Tensor.retain_grad, Tensor.grad_fn.__get__})  # type: ignore[union-attr]
#: What a checkpoint of torch 2.11 calls besides its function: a node of its own keeps the inputs.
_OF_CHECKPOINTS = frozenset({torch.empty, Tensor.grad_fn.__get__})  # type: ignore[union-attr]


class Recording(NamedTuple):
    """Of a forward pass.

    Attributes:
        places: what it passed.
        without_gradient: what it passed only with inputs that need no gradient.
        functions: by the first path of a module, the names of PyTorch's functions that computed tensors in it, or put
            hooks on them.
        paths: by the first path of a module, those by which it was called.
    """

    places: list[Place]
    without_gradient: list[Place]
    functions: dict[str, list[str]]
    paths: dict[str, tuple[str, ...]]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """What ``model(*args, **kwargs)`` calls."""
    recorder = _Recorder()
    with recorder.watching(model), recorder, torch.enable_grad():
        model(*args, **kwargs)
    places, without_gradient = recorder.found(), recorder.without_gradient()
    paths = {path: tuple(of_calls) for path, of_calls in recorder.paths.items()}
    for place in (*places, *without_gradient):
        place.paths = paths[place.path]
    return Recording(places, without_gradient, recorder.functions, paths)


class _ByMemory:
    """Places of tensors, their views, and whatever else shares their memory."""

    def __init__(self) -> None:
        #: While a weak reference is held, no other storage has its address.
        self._places: dict[StorageWeakRef, list[Place]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._places

    def of(self, tensor: Tensor) -> list[Place]:
        key = self._key(tensor)
        return [] if key is None else self._places.get(key, [])

    def put(self, tensor: Tensor, places: list[Place]) -> None:
        key = self._key(tensor)
        if key is not None:
            self._places[key] = places

    @staticmethod
    def _key(tensor: Tensor) -> StorageWeakRef | None:
        if tensor.layout != torch.strided or is_of_transform(tensor):  # a transform's has no memory of its own
            return None
        with DisableTorchFunction():
            return StorageWeakRef(tensor.untyped_storage())


@dataclass(eq=False)
class _Running:
    """A module that is running."""

    path: str
    #: The path by which it was called.
    called: str
    module: nn.Module
    #: The saved-tensor hooks that it began under.
    hooks: Any
    #: What it was given.
    given: Given | None
    #: How many tensors its own code has computed.
    computed: int = 0
    #: By which functions it, and what it called, has.
    functions: list[str] = field(default_factory=list)

    @property
    def is_recomputed(self) -> bool:
        """Whether it runs under a checkpoint around it."""
        return self.hooks is not None or not torch.is_grad_enabled()


class _Alone(NamedTuple):
    """A module that computes a tensor like its input, by several operations; and how many calls had such inputs."""

    place: Place
    calls: Counter[tuple[torch.Size, torch.dtype, torch.device]]


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        #: The places that made a result.
        self._makers = _ByMemory()
        #: Of a product of which some was dropped, those that made the product.
        self._makers_of_product = _ByMemory()
        self.functions: dict[str, list[str]] = {}
        self._running: list[_Running] = []
        self._places: dict[tuple[str, str], Place] = {}
        self._alone: dict[str, _Alone] = {}
        #: Of calls whose input needs no gradient.
        self._without_gradient: dict[tuple[str, str], Place] = {}
        #: By the first path of each module, the paths by which it was called, as keys.
        self.paths: dict[str, dict[str, None]] = {}

    def without_gradient(self) -> list[Place]:
        """Activations and norms that no call gave an input that needs a gradient."""
        return [place for key, place in self._without_gradient.items() if key not in self._places]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """By hooks, which module is running."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                handle = module.register_forward_pre_hook(self._enter_as(path), with_kwargs=True)
                stack.callback(handle.remove)
                handle = module.register_forward_hook(self._leave, prepend=True, with_kwargs=True, always_call=True)
                stack.callback(handle.remove)
            yield

    def found(self) -> list[Place]:
        """The places; of modules that are recognised as a whole in the place of those in them."""
        places = [*self._places.values()]
        for path, (whole, calls) in self._alone.items():
            shape, dtype, _ = next(iter(calls))
            stand_in = recognise(whole.module, dtype, shape)
            if stand_in is None:
                continue
            whole.stand_in, whole.kind, whole.name = stand_in, stand_in.kind, stand_in.name
            for given, number in calls.items():
                whole.count(functools.partial(Place.note_whole, given=given), number)
            places = [place for place in places if place.path != path] + [whole]
        for place in places:
            if place.kind == "dropout" and place.saves is None:
                place.saves, place.keeps_output = _of_dropout(place, places)
        return places

    def _enter_as(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            called = self._called_path(path, module)
            self.paths.setdefault(path, {})[called] = None
            hooks = saved_tensors_hooks_on_top(True)
            self._running.append(_Running(path, called, module, hooks, Given.of(args, kwargs)))

        return enter

    def _called_path(self, path: str, module: nn.Module) -> str:
        """The path by which a module is called, where it is a child of the one that calls it; else its first."""
        if not self._running:
            return path
        caller = self._running[-1]
        name = next((name for name, child in caller.module._modules.items() if child is module), None)
        return path if name is None else f"{caller.called}.{name}" if caller.called else name

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        running = self._ended(module)
        if running is None:
            return
        self.functions.setdefault(running.path, running.functions)
        if self._running:
            self._running[-1].functions += running.functions
        if len(args) == 1 and not kwargs and _is_like(args[0], result) and running.computed > 1:
            x = args[0]
            whole = Place(running.path, module, "", "", is_recomputed=running.is_recomputed)
            whole, calls = self._alone.setdefault(running.path, _Alone(whole, Counter()))
            calls[x.shape, x.dtype, x.device] += 1
            whole.is_recomputed &= running.is_recomputed
            # What reads the result of the last operation reads that of the module.
            self._makers.put(result, [*self._makers.of(result), whole])

    def _ended(self, module: nn.Module) -> _Running | None:
        """The module's run, off the stack, and with it those that an exception has ended."""
        while self._running:
            running = self._running.pop()
            if running.module is module:
                return running
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_CHECKPOINTS and sys._getframe(1).f_globals.get("__name__") == checkpoint.__name__:
            return func(*args, **kwargs)
        running, operation = self._running[-1] if self._running else None, OPERATIONS.get(func)
        place = None
        if operation is not None:
            args, kwargs = in_order(args, kwargs)
            if running is not None and args and isinstance(args[0], Tensor):
                place = self._noted(running, operation, func, args, kwargs)
        given = [*_tensors((*args, *kwargs.values()))]
        counting = [t for t in given if not t.is_inference()]  # those count no versions, and save nothing
        versions_before = [(maker, t, t._version) for t in counting for maker in self._makers.of(t)]
        result = func(*args, **kwargs)
        for maker, tensor, version in versions_before:
            if tensor._version != version and maker.kind not in RESULT_IS_FREE:
                maker.left_because = "its result is written over in place"
                if kwargs.get("inplace") is True:
                    maker.left_because += f" (by {func.__name__}, which would not with inplace=False)"
                else:
                    maker.left_because += "; code that makes a new tensor instead lets it be fused"
        name = getattr(func, "__name__", "")
        if running is not None and func in _ONCE:
            running.functions.append(name)
        elif running is not None and isinstance(result, Tensor):
            running.computed += 1
            running.functions.append(name)
            if place is not None:
                self._makers.put(result, [place])
            if func is F.dropout and args and _is_product(args[0]):
                self._makers_of_product.put(result, self._makers.of(args[0]))
        return result

    def _noted(self, running: _Running, operation: Operation, func: Any, args: Any, kwargs: Any) -> Place | None:
        """The place of a call, if it is of interest."""
        x, kind = args[0], operation.kind
        if type(running.module).__module__.startswith("fusedlayers.") or x.dtype not in DTYPES:
            return None
        activation = None if kind in OTHERS else activation_of(func, args, kwargs)
        if activation is None and kind not in OTHERS:
            return None
        name = kind if activation is None else activation.name
        because = _keeps_nothing_because(kind, x)
        if because is not None:
            left = Place(running.path, running.module, kind, name, left_because=because, activation=activation)
            if (activation is not None or kind in PLANNED) and name not in KEPT_BY_TORCH:  # else nothing could be freed
                self._without_gradient.setdefault((running.path, kind), left)
            return None
        is_in_place = activation is not None and writes_over_input(func, kwargs)
        if not self._is_of_interest(kind, activation, is_in_place, x, args, kwargs):
            return None
        place = self._places.get((running.path, kind))
        if place is None:
            place = self._places[running.path, kind] = Place(
                running.path, running.module, kind, name, dtype=x.dtype, given=running.given
            )
            place.activation, place.follows = activation, self._makers.of(x)
            place.is_recomputed = running.is_recomputed
            place.left_because = _left_because(running, kind, kwargs)
        if kind in _FASTER_BY_TORCH and x.is_cpu:
            place.least_bytes += x.nbytes // _STATISTICS
        place.is_recomputed &= running.is_recomputed
        if activation is not None:
            is_normalised = any(maker.kind == BATCH_NORM for maker in self._makers.of(x))
            place.note_form(is_kept=is_in_place and activation.in_place is not None, is_normalised=is_normalised)
        place.count(functools.partial(Place.note_call, operation=operation, function=func, args=args, kwargs=kwargs))
        if kind == GATE:
            factors = [*_tensors(args[:2])]
            place.gated += [maker for factor in factors for maker in self._makers.of(factor) if maker.is_activation]
        return place

    def _is_of_interest(
        self, kind: str, activation: Activation | None, is_in_place: bool, x: Tensor, args: Any, kwargs: Any
    ) -> bool:
        """Whether something may be freed. What made x gets to know who reads it."""
        if kind == PRODUCT:
            was_dropped = x in self._makers_of_product
            makers = self._makers_of_product if was_dropped else self._makers
            gates = [place for place in makers.of(x) if place.kind == GATE]
            for gate in gates:
                gate.readers.add(PRODUCT)
                for gated in gate.gated:
                    gated.readers.add(GATE)
            return was_dropped or _is_product(x)
        if kind == GATE:
            return is_gate(args)
        for maker in self._makers.of(x):
            if activation is None:
                maker.readers.add(kind)
            elif maker.kind == BATCH_NORM and activation.name not in KEPT_BY_TORCH:
                because = in_place_because(x) if is_in_place else None
                if because is None:
                    maker.note_activation(x, activation)
                else:
                    maker.unread_because = f"the activation behind it is left to PyTorch: {because}"
        if kind == "dropout":
            return bool(kwargs.get("training", True) and kwargs.get("p", 0.5))
        return kind != BATCH_NORM or bool(kwargs.get("training") or args[5:6] == (True,))


def _keeps_nothing_because(kind: str, x: Tensor) -> str | None:
    """Why nothing is kept of an operation on x, whoever computes it, or nobody but PyTorch can; or None."""
    if is_of_transform(x):
        return "a transform of torch.func runs it"
    if x.dtype is torch.float64:
        return FLOAT64_IS_TORCHS
    if kind not in (GATE, PRODUCT) and torch.is_grad_enabled() and not x.requires_grad:
        return "its input needs no gradient; once it does, call fuse again"
    return None


def _left_because(running: _Running, kind: str, kwargs: Any) -> str | None:
    """Why calls like this one are left to PyTorch, or None."""
    if kind == "dropout" and kwargs.get("inplace"):
        return "it drops in place"
    if torch.is_grad_enabled() and saved_tensors_hooks_on_top(True) != running.hooks:
        return "the module's code puts it under a checkpoint, or other saved-tensor hooks"
    return None


def _of_dropout(place: Place, places: list[Place]) -> tuple[str | None, bool]:
    """What a dropout keeps, None where the activation before it is one that only its call knows; and whether that is
    its output."""
    before = [
        maker for maker in place.follows if maker in places and maker.is_activation and maker.left_because is None
    ]
    if any(maker.activation is None for maker in before):
        return None, False
    for maker in before:
        if maker.keeps_output and maker.activation is not None and tells_scaled(maker.activation, place.dtype):
            return "saves the output, whose zeros show what was dropped", True
    return "saves one bit for each element", False


def _is_product(x: object) -> bool:
    return isinstance(x, Tensor) and reads_product((x,))


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple | list):
            yield from _tensors(arg)


def _is_like(x: object, y: object) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or (torch.is_grad_enabled() and not y.requires_grad):
        return False
    return x.shape == y.shape and x.dtype in DTYPES
