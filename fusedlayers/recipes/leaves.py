"""Leaves: a user's module without children and matrices is one operation, which backward runs again.

Idea: such a module (an activation or a norm that is spelled out, a Function of a user's own) does arithmetic along
rows. Where its nodes have saved more than recipes give back, one value replaces all of that: the module's forward pass,
run again on its arguments, under hooks that hand out what its nodes save, in order. The nodes stay PyTorch's, so
gradients are the same bits. The module's result is a recipe in the same way, whatever made it.

Nothing is decided before it is known: what is saved within the module is looked at when its forward pass ends, and
becomes a part of the second run where more bytes go than its arguments take.

Cost: the module's operators once more in a backward pass, for all readers together, and the host's work. The second
run finds the module's attributes, and autocast, as the first one did. Left alone are modules that draw random numbers,
set attributes, write to buffers, parameters or arguments, multiply matrices, or have arguments or attributes that may
change in themselves, as a dict; and what a CUDA graph captures. Limits: one tensor is returned. What a module reads
besides (a clock, a global variable) may differ the second time: an error where the shapes of what is saved show it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._torch import (
    AccumulateGrad,
    autocast_is_active,
    backward_pass,
    number_of,
    queue_callback,
    results_of,
    sequence_number,
    storage_id,
)
from ..calls.validation import PLAIN_TYPES
from ..ops.saved_buffers import EDITED
from .norms import may_be_freed
from .recipe import Recipe, Stored, Value, View, laid_out, stream_of

if TYPE_CHECKING:
    from .region import Region

#: Where the metadata of the node that made a leaf's result has: its version, the call, weakly the values of the
#: arguments, and weakly the second run, if there is one already.
_MADE = "fusedlayers.leaf"
#: In the place of the number of a saved tensor: the result.
_RESULT = -1
#: What a node's name has in it that multiplies matrices, or that another compiler runs, which may save something else
#: the second time.
_HEAVY = ("MmBackward", "MvBackward", "AddmmBackward", "Bmm", "Convolution", "Attention", "Rnn", "Cpp", ":", "Compiled")
#: What arguments beside tensors may be: what cannot change.
_ARGUMENTS = type(None), bool, int, float, str, torch.dtype, torch.device
#: What attributes of a leaf may be, beside tensors and tuples of these: what cannot change in itself.
_CONSTANTS = frozenset({*_ARGUMENTS, FunctionType, BuiltinFunctionType, functools.partial, type})
#: The attributes that every module has, and those of a patch.
_OF_MODULES = frozenset({*vars(nn.Module()), "forward", "__prepare_scriptable__"})
_HOOKS: dict[str, Any] = {name: {} for name in _OF_MODULES if name.endswith("hooks")}
#: What is in a name of what draws random numbers, from a generator that may be anybody's.
_RANDOM = ("rand", "rng", "generator")


def is_leaf(module: nn.Module) -> bool:
    """Whether it is a user's module without children, whose tensors have one dimension at most."""
    kind = type(module)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers."))
    if not is_users or isinstance(module, torch.jit.ScriptModule) or any(True for _ in module.children()):
        return False
    tensors = (*module.parameters(), *module.buffers())
    return all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in tensors)


def run_leaf(region: Region, module: nn.Module, run: functools.partial[Any]) -> Any:
    """The result of a leaf's forward pass; what its nodes save may be made again in backward."""
    given = [*run.args, *run.keywords.values()]
    tensors = [value for value in given if isinstance(value, Tensor)]
    is_large = bool(tensors) and region.log is None and region.can_replay(tensors[0])
    if (
        not is_large
        or module in _changing
        or not all(type(v) in PLAIN_TYPES or isinstance(v, _ARGUMENTS) for v in given)
    ):
        return run()
    call = Call.of(module, run, tensors)
    if call is None:
        return run()
    began, state = sequence_number(), _random_state(tensors[0])
    log: list[Packed] = []
    region.log = log
    try:
        y = run()
    finally:
        region.log = None
    if not call.has_left_attributes(module):
        _changing.add(module)
    elif type(y) in PLAIN_TYPES and y.grad_fn is not None and call.is_unchanged(tensors):
        whole = y if y._base is None else y._base
        if _random_state(tensors[0]) == state and not _is_heavy(call, tensors, whole.grad_fn, began):
            _replace(region, call, tensors, whole, log)
    return y


def _replace(region: Region, call: Call, tensors: Sequence[Tensor], whole: Tensor, log: Log) -> None:
    """Let what the leaf's nodes have saved, and its result, be made by a second run, where that takes fewer bytes."""
    held, own = {*map(_storage, (*tensors, *call.tensors))}, _storage(whole)
    held |= {_storage(tensor) for _, tensor in log if not region.can_replay(tensor)}  # they stay, and hold all of it
    replaced = [
        (number, value, tensor)
        for number, (value, tensor) in enumerate(log)
        if _is_stored(value) and region.can_replay(tensor) and _storage(tensor) not in held
    ]
    sizes = {_storage(t): t.untyped_storage().nbytes() for _, _, t in replaced}
    gained = sum(sizes.values()) - sizes.get(own, 0)  # the next layer saves the result, as a rule
    packed = {id(tensor): value for value, tensor in log}
    arguments: Any = [region.value_of(t) if gained else packed.get(id(t)) or region.known(t) for t in tensors]
    frame = None
    # Of a slice all of its storage stays.
    views = {_storage(t): max(0, t.untyped_storage().nbytes() - t.nbytes) for t in tensors if t.grad_fn is None}
    if gained > sum(value.nbytes for value in _stored_in(arguments) if not value.readers) + sum(views.values()):
        frame = Frame(call, arguments, region, log)
        for number, value, tensor in replaced:
            stored: Any = value.operands[0] if isinstance(value, View) else value
            if not stored.operands:  # several nodes may have saved it
                stored.become(Part(frame, number, tensor if stored is value else tensor._base, "saved in it"))
                frame.wholes |= {number} if stored is not value else set()
    if whole.output_nr == 0 and own not in held and None not in arguments:
        found = None if frame is None else weakref.ref(frame)
        node: Any = whole.grad_fn
        region.has_leaves = True
        node.metadata[_MADE] = whole._version, call, [*map(weakref.ref, arguments)], found


def result_of_leaf(region: Region, node: Any, result: Tensor | None) -> Part | None:
    """The result of a leaf by a second run, if this node has made one, and its arguments are there."""
    version, call, references, found = node.metadata.get(_MADE, (0, None, (), None))
    if call is None or (result is not None and result._version != version):
        return None
    frame: Frame | None = None if found is None else found()
    if frame is None:
        arguments: Any = [region.usable(reference()) for reference in references]
        if None in arguments or sum(value.nbytes for value in _stored_in(arguments)) > _nbytes_of(node):
            return None  # what others save may be dropped before
        frame = Frame(call, arguments, region)
    return None if frame.region is not region else Part(frame, _RESULT, result, node.name())


class Call:
    """A leaf's call: its forward pass, and all that this finds in the module and around it.

    Attributes:
        function: the module's forward pass, a function of the module; ``tensors``: those that the module holds.
    """

    def __init__(
        self, module: nn.Module, state: dict[str, Any], run: functools.partial[Any], tensors: Sequence[Tensor]
    ) -> None:
        self.function: Any = run.func.__func__  # type: ignore[attr-defined]  # it is a method of the module
        own = {**vars(module), "_parameters": {**module._parameters}, "_buffers": {**module._buffers}}
        own.pop("forward", None)
        # The module as it is now, without its hooks, which may hold what it has made.
        self._module: Any = object.__new__(type(module))
        self._module.__dict__ = {**own, **_HOOKS}
        self._state = state
        self.tensors = _tensors_in(state)
        self._versions = [t._version for t in (*self.tensors, *tensors)]
        self._args = [None if isinstance(value, Tensor) else value for value in run.args]
        self._kwargs = {name: None if isinstance(v, Tensor) else v for name, v in run.keywords.items()}
        self._places: list[Any] = [i for i, value in enumerate(run.args) if isinstance(value, Tensor)]
        self._places += [name for name, value in run.keywords.items() if isinstance(value, Tensor)]
        self._trained = [t.requires_grad for t in tensors]
        self._autocast = None
        if autocast_is_active():
            kind = tensors[0].device.type
            self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @classmethod
    def of(cls, module: nn.Module, run: functools.partial[Any], tensors: Sequence[Tensor]) -> Call | None:
        """The call, or None where another object's function is the forward pass, or multiplies matrices, or where it
        may read what cannot be told, or what is not there in backward."""
        method = run.func
        if type(method) is not MethodType or method.__self__ is not module or _heavy.get(method.__code__):
            return None
        state = _state_of(module)
        if module._modules or not all(map(_is_constant, state.values())):
            return None
        if not all(map(_is_simple, (*tensors, *_tensors_in(state)))):
            return None
        call = cls(module, state, run, tensors)
        return None if any(may_be_freed(t) for t in call.tensors if t.requires_grad) else call

    def has_left_attributes(self, module: nn.Module) -> bool:
        """Whether the module has the attributes that it had when the call began."""
        now = _state_of(module)
        return len(now) == len(self._state) and all(now.get(name) is value for name, value in self._state.items())

    def is_unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether nothing has written to the tensors of the module, and these, since the call began."""
        return [t._version for t in (*self.tensors, *tensors)] == self._versions

    def again(self, tensors: Sequence[Tensor]) -> Any:
        """The result for these arguments.

        Raises:
            RuntimeError: a tensor of the module was written to since.
        """
        if [t._version for t in self.tensors] != self._versions[: len(self.tensors)]:
            raise RuntimeError(f"{EDITED}: it belongs to a {self.name}, which backward runs again. {_ADVICE}")
        args, kwargs = [*self._args], {**self._kwargs}
        for place, tensor, is_trained in zip(self._places, tensors, self._trained, strict=True):
            (args if isinstance(place, int) else kwargs)[place] = tensor.detach().requires_grad_(is_trained)
        is_on, dtype = self._autocast or (False, None)
        kind = tensors[0].device.type
        autocast = torch.autocast(kind, dtype, is_on) if self._autocast or autocast_is_active() else nullcontext()
        with torch.enable_grad(), autocast:
            return self.function(self._module, *args, **kwargs)

    @property
    def name(self) -> str:
        return type(self._module).__name__


class Frame(Value):
    """The second run of a leaf's call, for all who read what it makes: the tensors that its nodes save, by their
    numbers, and its result.

    Attributes:
        wholes: the numbers of views in whose place the whole tensor is handed out.
    """

    def __init__(self, call: Call, arguments: Sequence[Value], region: object, log: Log = ()) -> None:
        super().__init__(region)
        self.call, self.operands, self.depth = call, arguments, 1 + max([value.depth for value in arguments])
        self.readers_of: Counter[int] = Counter()
        self.wholes: set[int] = set()
        self._layouts = {number: (tensor.shape, tensor.dtype) for number, (_, tensor) in enumerate(log)}
        self._readers_left: Counter[int] = Counter()
        self._made: dict[int, Tensor] = {}

    def claim(self) -> None:
        self.readers += 1
        if self.readers == 1:  # one run reads its arguments once
            for value in self.operands:
                value.claim()

    def expect(self, number: int, tensor: Tensor) -> None:
        """The second run must make a tensor like this one."""
        self._layouts[number] = tensor.shape, tensor.dtype

    def part(self, number: int) -> Tensor:
        """One of the tensors, for one reader. A backward pass runs the leaf once."""
        current = backward_pass()
        if current == -1:
            return self._run({number})[number]
        if current != self._pass:
            self._pass, self._readers_left, self._made = current, self.readers_of.copy(), {}
            queue_callback(functools.partial(_forget, weakref.ref(self)))
        if number not in self._made:
            self._made |= self._run({number, *+self._readers_left})
            self._stream = stream_of(self._made[number])
        tensor = self._made[number]
        if stream_of(tensor) != self._stream:  # it may not be there yet for this reader's stream
            return self._run({number})[number]
        self._readers_left[number] -= 1
        if self._readers_left[number] <= 0:
            del self._made[number]
        return tensor

    def _run(self, wanted: set[int]) -> dict[int, Tensor]:
        """Run the leaf, until all of these are there."""
        found: dict[int, Tensor] = {}
        numbers, last = itertools.count(), max(wanted) if _RESULT not in wanted else None

        def pack(tensor: Tensor) -> None:
            number = next(numbers)
            self._check(number, tensor)
            if number in wanted:
                base = tensor._base if number in self.wholes else None
                found[number] = (tensor if base is None else base).detach()
            if number == last:
                raise _Enough

        given = [value.recorded() for value in self.operands]
        _running.is_again = True
        try:
            with saved_tensors_hooks(pack, _nothing):
                y = self.call.again(given)
            if isinstance(y, Tensor):
                found[_RESULT] = (y if y._base is None else y._base).detach()
                self._check(_RESULT, found[_RESULT])
        except _Enough:
            pass
        finally:
            _running.is_again = False
        for number in wanted - found.keys():
            self._check(number, None)
        return found

    def _check(self, number: int, tensor: Tensor | None) -> None:
        """Raise an error where the second run makes something else than the first."""
        expected, made = self._layouts.get(number), None if tensor is None else (tensor.shape, tensor.dtype)
        is_view = tensor is not None and tensor._base is not None
        if made != (expected or made) or made is None or (number in self.wholes and not is_view):
            raise RuntimeError(
                f"{self.call.name}: backward ran this module again, and it computed something else: "
                f"{made or 'nothing'} in the place of {expected}. {_ADVICE}"
            )


class Part(Recipe):
    """One tensor that a second run makes.

    Attributes:
        made_by: the leaf's class; ``layout``, ``nbytes``, ``dtype``: as a recipe's.
    """

    def __init__(self, frame: Frame, number: int, tensor: Tensor | None, made_by: str) -> None:
        self.region, self.depth, self.operands = frame.region, frame.depth, (frame,)
        self._frame, self._number, self.made_by = frame, number, f"{frame.call.name} ({made_by})"
        if tensor is not None:
            self.stands_for(tensor)
            frame.expect(number, tensor)

    def claim(self) -> None:
        self.readers += 1
        self._frame.readers_of[self._number] += 1
        self._frame.claim()

    def get(self) -> Tensor:
        return laid_out(self._frame.part(self._number), self.layout)


Packed = tuple[Value, Tensor]
Log = Sequence[Packed]
"""What was packed while a leaf ran, in order."""

_ADVICE = (
    "A module without children, as an activation, is run again where that frees memory, and has to compute the same; "
    "fl.unfuse(module) leaves it to PyTorch."
)


class _Enough(BaseException):  # no error, which code may catch: it ends a run
    """All that a backward pass reads is there."""


_running = threading.local()
#: Modules whose forward pass sets attributes: a second run would find others.
_changing: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_running_again() -> bool:
    """Whether a leaf is run again in this thread, so that nothing within it may be spared."""
    return getattr(_running, "is_again", False)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """What a leaf has of its own: attributes, parameters and buffers."""
    own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    return {**own, **module._parameters, **module._buffers}


def _tensors_in(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if type(value) not in _CONSTANTS and isinstance(value, Tensor)]


def _is_constant(value: Any) -> bool:
    return (
        type(value) in _CONSTANTS
        or isinstance(value, (Tensor, *_ARGUMENTS))
        or (isinstance(value, tuple) and all(type(item) in _CONSTANTS for item in value))
    )


def _is_simple(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_inference()


def _forget(reference: weakref.ref[Frame]) -> None:
    """Behind a backward pass."""
    frame = reference()
    if frame is not None:
        frame._made = {}


def _nothing(packed: Any) -> Any:
    raise AssertionError("nobody runs backward through a second run")


def _is_stored(value: Value) -> bool:
    whole = value.operands[0] if isinstance(value, View) else value
    return type(whole) is Stored and not whole.operands


def _stored_in(values: Sequence[Value | None]) -> list[Stored]:
    """The tensors that are stored for these values, each once."""
    wholes = [v.operands[0].source if isinstance(v, View) else v.source for v in values if v is not None]
    return [*dict.fromkeys(whole for whole in wholes if isinstance(whole, Stored))]


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _nbytes_of(node: Any) -> int:
    result = results_of(node)[0]
    return int(math.prod(result.shape) * result.dtype.itemsize)


def _random_state(tensor: Tensor) -> bytes | None:
    """The states of the CPU's generator and of that of the tensor's device; others each time while a CUDA graph
    captures it."""
    states = [torch.default_generator.get_state()]
    if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.default_generators[tensor.get_device()].get_state())
    elif not tensor.is_cpu:
        return bytes(tensor.device.type + str(next(_counter)), "ascii")  # equal to no other
    return b"".join([ctypes.string_at(state.data_ptr(), state.nbytes) for state in states])


_counter = itertools.count()
#: By the code of a forward pass, whether it is left alone: as far as its first call tells.
_heavy: dict[CodeType, bool] = {}


def _is_heavy(call: Call, tensors: Sequence[Tensor], node: Any, began: int) -> bool:
    """Whether a forward pass multiplies matrices, reads tensors with a graph that are neither arguments nor the
    module's, draws random numbers, or is another compiler's; by its code, and the nodes that were made since then."""
    code = call.function.__code__
    if code not in _heavy:
        given = [*tensors, *call.tensors]
        sources = {t.grad_fn for t in given}
        pending, seen, is_elsewhere = [node], set[Any](), False
        for node in pending:
            if node is None or node in seen or node in sources:
                continue
            if type(node) is AccumulateGrad:
                is_elsewhere |= not any(node.variable is t for t in given)
            elif number_of(node) >= began:
                seen.add(node)
                pending += [source for source, _ in node.next_functions]
            else:
                is_elsewhere = True
        scripted = [call.function.__globals__.get(name) for name in code.co_names]
        _heavy[code] = (
            is_elsewhere
            or any(name in node.name() for node in seen for name in _HEAVY)
            or any(word in name.lower() for name in code.co_names for word in _RANDOM)
            or any(isinstance(function, torch.jit.ScriptFunction) for function in scripted)
        )
    return _heavy[code]
