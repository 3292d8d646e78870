"""Calls whose inputs are not kept: they are had again from the outputs (Gomez et al. 2017, "The Reversible Residual
Network: Backpropagation Without Storing Activations").

What autograd would save in a call is dropped, as a checkpoint does it; when the backward pass asks for it, the inputs
are computed from the outputs, and the function runs again on these. So the graph is PyTorch's own: hooks, second
derivatives, ``inputs=``, gradients of whatever a function closes over are as ever.

In a chain of calls no output is held but the last: a call whose input is the output of another one tells that one,
which then lets go of it, and asks for it in the backward pass (``InvertibleCall.recover_outputs``). Nothing is taken
from anybody who still holds the tensor, a variable of the caller, an operation that saved it, a view: it is only not
held for the backward pass. So there is nothing that could be read after it has been freed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from .._torch import tree_leaves
from ..checkpoint.free_state import NO_STATE, FreeState
from ..checkpoint.recompute import run_checkpointed
from ..checkpoint.state_snapshot import StateSnapshot

#: Where there was an output.
DEFERRED = object()


def _all(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values


@dataclass(frozen=True)
class InvertibleFunction:
    """A function and its inverse.

    Attributes:
        name: for messages.
        forward: from inputs to outputs, as a tuple, which may be more than the caller sees.
        inverse: from these to the inputs.
        shown: of the outputs those that the caller sees; they come first.
        free_state: what it runs, or can reach.
        seed: whether later runs find the random numbers of the first.
        recompute: runs the function again, which saves what it did at first and in that order, and lends the
            inputs that it has found on the way: for those that can share work between the two.
    """

    name: str
    forward: Callable[..., tuple[Any, ...]]
    inverse: Callable[..., tuple[Any, ...]]
    shown: Callable[[tuple[Any, ...]], tuple[Any, ...]] = _all
    free_state: FreeState = NO_STATE
    seed: bool = True
    recompute: Callable[[InvertibleCall], None] | None = None


class InvertibleCall:
    """One call, as long as the graph lives: its outputs, or who can tell them."""

    def __init__(self, function: InvertibleFunction, args: tuple[Any, ...], keep: Iterable[Tensor] = ()) -> None:
        self.function = function
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self.snapshot = StateSnapshot(function.free_state, tensors, seed=function.seed)
        kept = {id(tensor) for tensor in keep}
        #: Inputs that are held, by their place: those that were asked for, and what is no tensor of numbers.
        self.saved_inputs = {
            i: _SavedInput.of(arg) for i, arg in enumerate(args) if not is_float(arg) or id(arg) in kept
        }
        self.requires_grad = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]
        self.dtypes = [arg.dtype if isinstance(arg, Tensor) else None for arg in args]
        #: Of inputs that are outputs of other calls: which ones.
        self.producers = [None if i in self.saved_inputs else _producer_of(arg) for i, arg in enumerate(args)]
        self.outputs: list[Any] = []
        self.extra_outputs: tuple[Any, ...] = ()
        self._versions: list[int | None] = []
        #: Of outputs that were let go, who tells them. (Who tells knows by a weak reference for whom: the graph holds
        #: both, and a circle would outlive it.)
        self._consumers: list[InvertibleCall | None] = []
        self._recovered: dict[int, Tensor] = {}
        self._args: tuple[Any, ...] | None = args

    def run(self) -> tuple[Any, ...]:
        """What the caller sees."""
        early_stop = self.function.recompute is None
        results: tuple[Any, ...] = run_checkpointed(
            self._run_or_recompute, (), {}, self.snapshot, early_stop=early_stop
        )
        self._args = None
        shown = self.function.shown(results)
        if not any(isinstance(result, Tensor) and result.requires_grad for result in results):
            return shown
        self.outputs = [result.detach() if isinstance(result, Tensor) else result for result in shown]
        self._versions = [out._version if isinstance(out, Tensor) else None for out in self.outputs]
        self._consumers = [None] * len(shown)
        self.extra_outputs = tuple(h.detach() if isinstance(h, Tensor) else h for h in results[len(shown) :])
        places = [i for i, result in enumerate(shown) if isinstance(result, Tensor) and result.requires_grad]
        marked = InvertibleOutput.apply(self, places, *(shown[i] for i in places))
        for producer in self.producers:
            if producer is not None and (call := producer.call()) is not None:
                call.defer(producer.place, self)
        passed = dict(zip(places, marked, strict=True))
        return tuple(passed.get(i, result) for i, result in enumerate(shown))

    def _run_or_recompute(self) -> tuple[Any, ...] | None:
        if self._args is not None:
            with in_mode("dry"):
                return self.function.forward(*self._args)
        with in_mode("backward"):
            if self.function.recompute is not None:
                self.function.recompute(self)
                return None
            inputs = self.recover_inputs()
            self.pass_to_producers(inputs)
            return self.function.forward(*inputs)

    # --- outputs ------------------------------------------------------------------------------------------------------

    def can_defer(self, place: int, tensor: Tensor) -> bool:
        """Whether ``tensor`` is that output still, as it was, and nobody else tells it."""
        return self.outputs[place] is not DEFERRED and tensor._version == self._versions[place]

    def defer(self, place: int, consumer: InvertibleCall) -> None:
        self.outputs[place] = DEFERRED
        self._consumers[place] = consumer

    def recover_outputs(self) -> tuple[Any, ...]:
        """The outputs, also those that the caller does not see; what others tell is not held afterwards either."""
        for consumer in self._pending_consumers():
            consumer.pass_to_producers(consumer.recover_inputs())
        values = list(self.outputs)
        recovered, self._recovered = self._recovered, {}
        for place, value in enumerate(values):
            if value is DEFERRED:
                values[place] = recovered[place]
            elif isinstance(value, Tensor) and value._version != self._versions[place]:
                raise RuntimeError(
                    f"{self.function.name}: output {place} was modified by an in-place operation, and its inputs are "
                    "to be computed from it. Modify a clone instead, or set invertible=False, which keeps the inputs"
                )
        return (*values, *self.extra_outputs)

    def _pending_consumers(self) -> list[InvertibleCall]:
        """Who tells the outputs that nobody has recovered, and who tells theirs: each before those that ask it.
        (A list, for calls that ask each other would be as deep as the chain, deeper than Python's stack.)"""
        found: dict[InvertibleCall, None] = {}
        pending: list[tuple[InvertibleCall, bool]] = [(self, False)]
        while pending:
            call, is_expanded = pending.pop()
            if is_expanded:
                found[call] = None
            elif call not in found:
                pending.append((call, True))
                consumers = (consumer for place, consumer in enumerate(call._consumers) if place not in call._recovered)
                pending += [(consumer, False) for consumer in consumers if consumer is not None]
        del found[self]
        return list(found)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def recover_inputs(self) -> tuple[Any, ...]:
        """The inputs, apart from any graph, computed from the outputs."""
        values = self.recover_outputs()
        with self.snapshot.restored(), torch.no_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            computed = self.function.inverse(*values)
        return self.complete_inputs(computed)

    def complete_inputs(self, computed: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs as they were: with what is held, and the dtypes and the wish for gradients that they had."""
        count = len(self.requires_grad)
        if len(computed) < count and any(i not in self.saved_inputs for i in range(len(computed), count)):
            raise RuntimeError(
                f"{self.function.name}: inverse returned {len(computed)} values for {count} inputs; it must "
                "return all, in order, but for the last ones if these are no floating-point tensors"
            )
        return tuple(
            self.saved_inputs[i].value(self.function.name, i)
            if i in self.saved_inputs
            else _as_input(computed[i], self.dtypes[i], self.requires_grad[i])
            for i in range(count)
        )

    def pass_to_producers(self, inputs: tuple[Any, ...]) -> None:
        """Give inputs to the calls whose outputs they are, which come next."""
        for producer, value in self.by_producer(inputs):
            call = producer.call()
            if call is not None:
                call._recovered[producer.place] = value.detach()

    def by_producer(self, inputs: tuple[Any, ...]) -> Iterator[tuple[_Producer, Tensor]]:
        for producer, value in zip(self.producers, inputs, strict=True):
            if producer is not None:
                yield producer, value


class _SavedInput(NamedTuple):
    """An input that is held, at the version it had."""

    arg: Any
    version: int | None

    @classmethod
    def of(cls, arg: Any) -> _SavedInput:
        return cls(arg, arg._version if isinstance(arg, Tensor) else None)

    def value(self, name: str, place: int) -> Any:
        if self.version is not None and self.arg._version != self.version:
            raise RuntimeError(
                f"{name}: input {place}, which was to be kept, was modified by an in-place operation; modify a clone"
            )
        return self.arg


class _Producer(NamedTuple):
    """Of which call an input is which output."""

    call: weakref.ref[InvertibleCall]
    place: int


class InvertibleOutput(Function):
    """Outputs as they are; the node holds them, until another call tells them."""

    @staticmethod
    def forward(ctx: Any, call: InvertibleCall, places: list[int], *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = call, places
        # For who counts what is saved. The first is the call's own list, which empties when it lets go.
        ctx.outputs, ctx.others = (
            call.outputs,
            [*call.extra_outputs, *(held.arg for held in call.saved_inputs.values())],
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *grads


def _producer_of(arg: Tensor) -> _Producer | None:
    node = arg.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, InvertibleCall):
        return None
    place = node.places[arg.output_nr]  # type: ignore[union-attr]
    return _Producer(weakref.ref(call), place) if call.can_defer(place, arg) else None


def is_float(arg: Any) -> bool:
    return isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex())


def _as_input(value: Any, dtype: torch.dtype | None, wanted: bool) -> Any:
    return value.detach().to(dtype).requires_grad_(wanted)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# --- what a function can ask ------------------------------------------------------------------------------------------


class _State(threading.local):
    mode: Literal["dry", "backward", "plain"] | None = None


_state = _State()


@contextmanager
def in_mode(mode: Literal["dry", "backward", "plain"]) -> Iterator[None]:
    before, _state.mode = _state.mode, mode
    try:
        yield
    finally:
        _state.mode = before


def in_dry_mode() -> bool:
    """Whether a function runs for its outputs alone, and what it saves is dropped: for the first time, if a backward
    pass follows."""
    return _state.mode == "dry"


def in_backward_mode() -> bool:
    """Whether a function runs again, for its backward pass."""
    return _state.mode == "backward"


def in_plain_mode() -> bool:
    """Whether modules leave all to autograd, whatever their flags."""
    return _state.mode == "plain"


@contextmanager
def dry_mode() -> Iterator[None]:
    """Run functions for their outputs: gradients are on, so that outputs say whether they require some, but nothing is
    kept, and a backward pass is refused."""

    def refuse(_: None) -> Tensor:
        raise RuntimeError("dry_mode: nothing was kept for the backward pass of what ran in it; run it again outside")

    with saved_tensors_hooks(lambda tensor: None, refuse), torch.enable_grad(), in_mode("dry"):
        yield
