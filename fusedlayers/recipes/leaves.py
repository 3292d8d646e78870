"""Leaves: a user's module that has no children and no matrices is one operation, which backward runs again.

Idea: such a module (an activation or a norm that is spelled out, a Function of a user's own) does arithmetic along
rows. Where its nodes have saved more than recipes give back, one value replaces all of that: the module's forward pass,
run again on its arguments, under hooks that hand out what its nodes save, in order. The nodes stay PyTorch's, so
gradients are the same bits. The module's result is a recipe in the same way, whatever made it.

Nothing is decided before it is known: what is saved within the module is looked at when its forward pass ends, and
becomes a part of the second run where more bytes go than its arguments take. Where the first step of a kind (shapes,
dtypes, how many parameters are trained) has had no second run, the next are called as they are.

Cost: the module's operators once more in a backward pass, for all readers together, and the host's work. The second run
finds the module's attributes, and autocast, as the first one did. Left alone, while they hold the same, are modules
that draw random numbers, compute gradients, write to buffers, parameters or arguments, multiply matrices, or have
arguments or attributes, or name variables, that may change in themselves, as a dict; for ever those that set
attributes; and what a CUDA graph captures. Limits: one tensor is returned. What a module reads besides (a clock, a
number of a class) may differ the second time: an error where the shapes of what is saved show it.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import math
import pickle
import random
import sys
import weakref
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._torch import AccumulateGrad, OpOverload, forward_ad_level, number_of, results_of, sequence_number, storage_id
from ..calls.validation import PLAIN_TYPES
from ..utils.reading import code_reached_by
from .recipe import Stored, Value, View
from .second_run import RESULT, Frame, LeafCall, Log, Part

if TYPE_CHECKING:
    from .region import Region

#: A second run frees more than this part of its largest argument. A norm's statistics, of a number a row, are less.
WORTH = 16
#: Where the metadata of the node that made a leaf's result has: its version, the call, weakly the values of the
#: arguments, and weakly the second run, if there is one already.
_MADE = "fusedlayers.leaf"
#: What a node's name has in it that multiplies matrices, or writes to statistics whose versions stay, or that another
#: compiler runs, which may save something else the second time.
_HEAVY = ("MmB", "mmB", "MvB", "mvB", "Convolution", "Attention", "Rnn", "BatchNorm", "Cpp", ":", "Compiled")
#: What arguments beside tensors may be: what cannot change.
_ARGUMENTS = type(None), bool, int, float, str, torch.dtype, torch.device
#: What attributes of a leaf may be, beside tensors and tuples of these: what cannot change in itself.
_CONSTANTS = frozenset({*_ARGUMENTS, FunctionType, BuiltinFunctionType, functools.partial, type})
#: What a leaf's code may read besides: code.
_READ = (MethodType, type, ModuleType, OpOverload, property, staticmethod, classmethod)
#: The attributes that every module has, and those of a patch.
_OF_MODULES = frozenset({*vars(nn.Module()), "forward", "__prepare_scriptable__"})
_HOOKS: dict[str, Any] = {name: {} for name in _OF_MODULES if name.endswith("hooks")}
#: What is in a name of what runs once: it draws random numbers, from anybody's generator, or all processes take part.
_ONCE = ("rand", "rng", "generator", "all_reduce", "all_gather", "batch_norm")
#: Names by which a forward pass computes gradients, which takes what its nodes have saved.
_GRADIENTS = ("autograd", "grad")


def is_leaf(module: nn.Module) -> bool:
    """Whether it is a user's module without children, whose tensors have one dimension at most."""
    kind = type(module)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers."))
    if not is_users or isinstance(module, torch.jit.ScriptModule) or any(True for _ in module.children()):
        return False
    return all(map(_is_vector, (*module.parameters(), *module.buffers())))


class Leaf:
    """A leaf as its calls find it: all that it holds, and how it is called. It is looked at once for all calls that
    find the same. It belongs to the module's patch, and holds nothing of a module that is left alone.

    Attributes:
        module: the module as it was, without its hooks, which may hold what it has made; ``function``: its forward.
        tensors: its parameters and buffers, and tensors among its attributes.
        args, kwargs: the arguments, with None in the place of tensors; ``places``: where these are.
        is_known: whether a call has shown that it may be run again.
        is_left_alone: whether it may not.
        is_changing: whether a call has set attributes, so that it is left alone for ever.
        tried: by the kind of a call (shapes, dtypes, what is trained), the first region that looked at one.
        paying: the kinds of calls that have had a second run.
    """

    is_known = is_left_alone = is_changing = False

    def __init__(self, region: Region, module: nn.Module, run: functools.partial[Any], state: list[Any]) -> None:
        own = {**vars(module), "_parameters": {**module._parameters}, "_buffers": {**module._buffers}}
        own.pop("forward", None)
        self.function: Any = getattr(run.func, "__func__", None)
        self.module: Any = object.__new__(type(module))
        self.module.__dict__ = {**own, **_HOOKS}
        self.state, self.tried, self.paying = state, dict[Any, int](), set[Any]()
        held = [value for name, value in own.items() if name not in _OF_MODULES]
        held += [*own["_parameters"].values(), *own["_buffers"].values()]
        self.tensors = [t for t in held if type(t) not in _CONSTANTS and isinstance(t, Tensor)]
        self.args = [None if isinstance(value, Tensor) else value for value in run.args]
        self.kwargs = {name: None if isinstance(v, Tensor) else v for name, v in run.keywords.items()}
        self.places: list[Any] = [i for i, value in enumerate(run.args) if isinstance(value, Tensor)]
        self.places += [name for name, value in run.keywords.items() if isinstance(value, Tensor)]
        if not (
            type(run.func) is MethodType
            and run.func.__self__ is module
            and not module._modules
            and all(map(_is_constant, held))
            and all(_is_simple(t) and _is_vector(t) for t in self.tensors)
            and all(isinstance(value, _ARGUMENTS) for value in (*self.args, *self.kwargs.values()))
            and not any(region.may_free(t) for t in self.tensors if t.requires_grad)
        ):
            self.leave_alone()

    def may_pay(self, kinds: Any, region: Region) -> bool:
        """Whether such a call has had a second run, or this region is the first that looks, which takes it 80 us."""
        return self.tried.setdefault(kinds, region.number) == region.number or kinds in self.paying

    def leave_alone(self) -> None:
        """Run it once from now on, and hold nothing: what a module holds may reach the whole model."""
        self.is_left_alone = True
        self.module, self.tensors, self.args, self.kwargs = None, [], [], {}

    def with_tensors(self, tensors: Sequence[Tensor], trained: Sequence[bool]) -> Any:
        """The module with other tensors, trained or not as they were: users freeze some between the passes."""
        others: dict[int, Tensor] = {}
        for t, other, needs in zip(self.tensors, tensors, trained, strict=True):
            if t is not other or t.requires_grad != needs:
                others[id(t)] = other.detach().requires_grad_(needs)
        if not others:
            return self.module
        own, module = vars(self.module), object.__new__(type(self.module))
        for name in ("_parameters", "_buffers"):
            own = {**own, name: {key: others.get(id(value), value) for key, value in own[name].items()}}
        vars(module).update({name: others.get(id(value), value) for name, value in own.items()})
        return module

    def look_at_code(self, tensors: Sequence[Tensor], node: Any, first: int) -> None:
        """Whether it may be run again, by a call that began with this node: it multiplies no matrices, names nothing
        random, computes no gradients, reads no tensors with a graph that are neither arguments nor the module's, nor
        variables that may change in themselves, and is no other compiler's."""
        names, read = code_reached_by((self.function, *vars(self.module).values()), type(self.module))
        names |= {str(getattr(value, "__name__", "")) for value in (*read, *vars(self.module).values())}
        names |= {type(getattr(value, "__self__", None)).__name__ for value in read}
        given = [*tensors, *self.tensors]
        sources = {t.grad_fn for t in given}
        pending, seen, is_elsewhere = [node], set[Any](), False
        for node in pending:
            if node is None or node in seen or node in sources:
                continue
            if type(node) is AccumulateGrad:
                is_elsewhere |= not any(node.variable is t for t in given)
            elif number_of(node) >= first:
                seen.add(node)
                pending += [source for source, _ in node.next_functions]
            else:
                is_elsewhere = True
        if (
            is_elsewhere
            or any(name in node.name() for node in seen for name in _HEAVY)
            or any(word in name.lower() for name in names for word in _ONCE)
            or not names.isdisjoint(_GRADIENTS)
            or any(isinstance(value, Tensor) or not (_is_constant(value) or isinstance(value, _READ)) for value in read)
        ):
            self.leave_alone()
        self.is_known = True


def _state_of(module: nn.Module, run: functools.partial[Any]) -> list[Any]:
    """The identities of all that a module holds, of its code, and of arguments but tensors; and how it is called."""
    function = getattr(run.func, "__func__", None)
    code = type(module), function, getattr(function, "__code__", None)
    held = *code, *vars(module).values(), *module._parameters.values(), *module._buffers.values()
    given = [0 if isinstance(value, Tensor) else id(value) for value in (*run.args, *run.keywords.values())]
    return [*map(id, held), *given, *run.keywords]


def run_leaf(region: Region, owner: Any, module: nn.Module, run: functools.partial[Any]) -> Any:
    """The result of a leaf's forward pass; what its nodes save may be made again in backward. The ``owner`` is the
    module's patch, which holds the leaf."""
    tensors = [value for value in (*run.args, *run.keywords.values()) if isinstance(value, Tensor)]
    is_saved = torch.is_grad_enabled() and bool(tensors) and region.is_worth_a_replay(tensors[0])
    if region.log is not None or not is_saved or forward_ad_level() >= 0:
        return run()
    leaf: Leaf | None = owner.leaf
    if leaf is None or not leaf.is_changing:
        state = _state_of(module, run)
        if leaf is None or leaf.state != state:
            leaf = owner.leaf = Leaf(region, module, run, state)
    is_left_alone = leaf.is_left_alone or not all(map(_is_simple, tensors))
    kinds = region.phase, *[(t.shape, t.dtype, t.requires_grad) for t in tensors]
    is_given_up = is_left_alone or (region.hooks is None and not leaf.may_pay(kinds, region))
    if is_given_up and not region.is_checkpointed:
        return run()
    versions = [] if is_left_alone else [t._version for t in (*leaf.tensors, *tensors)]
    first, random_state = 0 if leaf.is_known else sequence_number(), _random_state(tensors[0], leaf.is_known)
    log = region.log = Log([t for t in tensors if _is_simple(t)])
    try:
        y = run()
    finally:
        region.log = None
    if is_left_alone:
        return y
    is_changing = _state_of(module, run) != leaf.state
    # It may depend on anything whether it draws.
    if is_changing or _random_state(tensors[0], leaf.is_known) != random_state:
        leaf = owner.leaf = copy.copy(leaf)  # backward passes may need this one
        leaf.is_changing = is_changing
        leaf.leave_alone()
    elif type(y) in PLAIN_TYPES and y.grad_fn is not None:
        whole = y if y._base is None else y._base
        if not leaf.is_known:
            leaf.look_at_code(tensors, whole.grad_fn, first)
        if not leaf.is_left_alone and [t._version for t in (*leaf.tensors, *tensors)] == versions:
            _replace(region, LeafCall(leaf, tensors, kinds), tensors, whole, log)
    return y


def _replace(region: Region, call: LeafCall, tensors: Sequence[Tensor], whole: Tensor, log: Log) -> None:
    """Let what the leaf's nodes have saved, and its result, be made by a second run, where that takes fewer bytes."""
    given = *tensors, *call.leaf.tensors
    held, own, own_ids = {*map(_storage, given)}, _storage(whole), {*map(id, given)}
    found: list[tuple[int, int, Stored, Any]] = []
    for number, (value, tensor) in enumerate(log):
        if id(tensor) in own_ids:
            continue
        stored: Any = value.operands[0] if isinstance(value, View) else value
        if not region.is_worth_a_replay(tensor) or stored.version != tensor._version:  # written to, it is eager's error
            held.add(_storage(tensor))  # it stays, and holds all of it
        elif type(stored) is Stored and not stored.operands and (storage := _storage(tensor)) not in held:
            found.append((storage, number, stored, tensor if stored is value else tensor._base))
    replaced = [each for each in found if each[0] not in held]
    sizes = {storage: tensor.untyped_storage().nbytes() for storage, _, _, tensor in replaced}
    gained = sum(sizes.values()) - sizes.get(own, 0)  # the next layer saves the result, as a rule
    frame, saved = None, {id(tensor): value for value, tensor in log}
    arguments: list[Any] = [saved.get(id(t)) or region.known(t) for t in tensors]
    least = max(t.nbytes for t in tensors) // WORTH
    if gained > least:
        needed = log.arguments or [region.value_of(t) for t in tensors]
        taken = sum([value.nbytes for value in _stored_in(needed) if not value.readers])
        # Of a slice all of its storage stays.
        views = [t for t in tensors if t.grad_fn is None or region.hooks]
        slices = {_storage(t): max(0, t.untyped_storage().nbytes() - t.nbytes) for t in views}
        if gained > taken + sum(slices.values()) + least:
            arguments, frame = needed, Frame(call, needed, region, log)
            call.leaf.paying.add(call.kinds)
            for _, number, stored, tensor in replaced:
                if not stored.operands:  # several nodes may have saved it
                    stored.become(Part(frame, number, tensor, "saved in it"))
                    frame.wholes |= {number} if tensor is not log[number][1] else set()
    if whole.output_nr == 0 and own not in held and None not in arguments:
        region.has_leaves = True
        node: Any = whole.grad_fn
        found_again = None if frame is None else weakref.ref(frame)
        node.metadata[_MADE] = whole._version, call, [*map(weakref.ref, arguments)], found_again


def result_of_leaf(region: Region, node: Any, result: Tensor | None) -> Part | None:
    """The result of a leaf by a second run, if this node has made one, and its arguments are there."""
    version, call, references, found = node.metadata.get(_MADE, (0, None, (), None))
    if call is None or (result is not None and result._version != version):
        return None
    frame: Frame | None = None if found is None else found()
    if frame is None:
        arguments: Any = [region.usable(reference()) for reference in references]
        made = results_of(node)[0]
        nbytes = math.prod(made.shape) * made.dtype.itemsize
        if None in arguments or sum(value.nbytes for value in _stored_in(arguments)) > nbytes:
            return None  # what others save may be dropped before
        frame = Frame(call, arguments, region)
        call.leaf.paying.add(call.kinds)
    return None if frame.region is not region else Part(frame, RESULT, result, node.name())


def _is_constant(value: Any) -> bool:
    return (
        type(value) in _CONSTANTS
        or isinstance(value, (Tensor, *_ARGUMENTS))
        or (isinstance(value, tuple) and all(type(item) in _CONSTANTS for item in value))
    )


def _is_vector(tensor: Tensor) -> bool:
    return sum([size > 1 for size in tensor.shape]) <= 1


def _is_simple(tensor: Tensor) -> bool:
    is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return is_plain and not tensor.is_nested and not tensor.is_inference()


def _stored_in(values: Sequence[Value | None]) -> list[Stored]:
    """The tensors that are stored for these values, each once."""
    wholes = [v.operands[0].source if isinstance(v, View) else v.source for v in values if v is not None]
    return [*dict.fromkeys(whole for whole in wholes if isinstance(whole, Stored))]


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _random_state(tensor: Tensor, is_known: bool) -> bytes:
    """The states of the CPU's generator and of that of the tensor's device, and of Python's and NumPy's for a leaf that
    is not known yet; others each time while a CUDA graph captures it."""
    states = [torch.default_generator.get_state()]
    if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.default_generators[tensor.get_device()].get_state())
    elif not tensor.is_cpu:
        return bytes(tensor.device.type + str(next(_counter)), "ascii")  # equal to no other
    found = [ctypes.string_at(state.data_ptr(), state.nbytes) for state in states]
    if not is_known:
        numpy: Any = sys.modules.get("numpy")
        found.append(pickle.dumps((random.getstate(), numpy and numpy.random.get_state())))
    return b"".join(found)


_counter = itertools.count()
