"""Calls of invertible functions, which save their outputs instead of their inputs (Gomez et al. 2017, "The Reversible
Residual Network: Backpropagation Without Storing Activations").

A call is a checkpoint (``checkpoint/recompute.py``) that does not save its inputs. When the backward pass needs what
autograd would have saved, the inputs are computed from the outputs, and the function is recomputed on them. So the
graph is PyTorch's own: hooks, second derivatives, ``inputs=`` and gradients of what a function closes over work as
ever.

In a chain of calls only the last output is held. A call whose input is the output of another call makes that one
replace the output by a ``DeferredOutput``: in the backward pass the later call computes it
(``InvertibleCall.recover_outputs``). No tensor is freed that somebody else holds, be it a variable of the caller, an
operation that saved it, or a view: it is only not held for the backward pass. So nothing can be read after it was
freed.

Backward costs the inverse and a second forward pass. Computed inputs differ from the inputs by rounding, which adds up
over a chain, and fast where a function shrinks its input; ``check.py`` measures it.
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

from ..checkpoint.free_state import NO_STATE, FreeState
from ..checkpoint.recompute import Arguments, run_checkpointed
from ..checkpoint.state_snapshot import StateSnapshot, Versioned


@dataclass(frozen=True)
class InvertibleFunction:
    """A function and its inverse.

    Attributes:
        name: for messages.
        forward: from inputs to a tuple of outputs.
        inverse: from all outputs to a tuple of inputs.
        num_outputs: how many outputs the caller sees, the first ones; None: all; negative: all but so many.
        free_state: what it depends on besides its inputs.
        recompute: replaces the inverse and the recomputation of ``forward``, for functions that can share work between
            the two. It saves what ``forward`` saves, in the same order, and passes the inputs to their producers.
    """

    name: str
    forward: Callable[..., tuple[Any, ...]]
    inverse: Callable[..., tuple[Any, ...]]
    num_outputs: int | None = None
    free_state: FreeState = NO_STATE
    recompute: Callable[[InvertibleCall], None] | None = None


class InvertibleCall:
    """One call. It lives as long as the graph, and holds its outputs, or says which call computes them."""

    def __init__(self, function: InvertibleFunction, args: tuple[Any, ...], keep: Iterable[Tensor] = ()) -> None:
        self.function = function
        self.snapshot = StateSnapshot(function.free_state, Arguments.of(args).tensors)
        kept = {id(tensor) for tensor in keep}
        #: Inputs that are saved, by their position: those that were asked for, and what is no floating-point tensor.
        self.saved_inputs = {i: Versioned.of(arg) for i, arg in enumerate(args) if not is_float(arg) or id(arg) in kept}
        self.requires_grad = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]
        self.dtypes = [arg.dtype if isinstance(arg, Tensor) else None for arg in args]
        #: Of inputs that are outputs of other calls, by their position: which ones.
        self.producers = {
            i: producer
            for i, arg in enumerate(args)
            if i not in self.saved_inputs and (producer := _producer_of(arg)) is not None
        }
        self.outputs: list[Versioned | DeferredOutput] = []
        #: Those that the caller does not see.
        self.extra_outputs: tuple[Any, ...] = ()
        #: Deferred outputs that the consumers have computed already.
        self._recovered: dict[int, Tensor] = {}
        self._args: tuple[Any, ...] | None = args

    def run(self) -> tuple[Any, ...]:
        """The outputs that the caller sees."""
        results: tuple[Any, ...] = run_checkpointed(
            # With ``recompute``, the work after the last saved tensor must be done too.
            self._run_or_recompute, Arguments.of(()), self.snapshot, early_stop=self.function.recompute is None
        )  # fmt: skip
        self._args = None
        visible = results[: self.function.num_outputs]
        if not any(_requires_grad(result) for result in results):
            return visible
        self.outputs = [Versioned.of(_detached(result)) for result in visible]
        self.extra_outputs = tuple(map(_detached, results[len(visible) :]))
        positions = [i for i, result in enumerate(visible) if _requires_grad(result)]
        marked = InvertibleOutput.apply(self, positions, *(visible[i] for i in positions))
        for producer in self.producers.values():
            if (call := producer.call()) is not None:
                call.outputs[producer.position] = DeferredOutput(self)
        passed = dict(zip(positions, marked, strict=True))
        return tuple(passed.get(i, result) for i, result in enumerate(visible))

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

    def recover_outputs(self) -> tuple[Any, ...]:
        """All outputs. Those that are deferred are computed, and not held afterwards."""
        for consumer in self._pending_consumers():
            consumer.pass_to_producers(consumer.recover_inputs())
        recovered, self._recovered = self._recovered, {}
        values = []
        for position, output in enumerate(self.outputs):
            if isinstance(output, DeferredOutput):
                values.append(recovered[position])
            elif output.is_edited:
                raise RuntimeError(
                    f"{self.function.name}: output {position} was modified by an in-place operation, and its inputs "
                    "are to be computed from it. Modify a clone instead, or set invertible=False, which saves the "
                    "inputs"
                )
            else:
                values.append(output.value)
        return (*values, *self.extra_outputs)

    def _pending_consumers(self) -> list[InvertibleCall]:
        """The calls that compute the deferred outputs which are not recovered yet, and those that compute theirs; each
        after those that it depends on. (A list, because a recursion would be as deep as the chain, deeper than Python's
        stack.)"""
        found: dict[InvertibleCall, None] = {}
        pending: list[tuple[InvertibleCall, bool]] = [(self, False)]
        while pending:
            call, is_expanded = pending.pop()
            if is_expanded:
                found[call] = None
            elif call not in found:
                pending.append((call, True))
                for position, output in enumerate(call.outputs):
                    if isinstance(output, DeferredOutput) and position not in call._recovered:
                        pending.append((output.consumer, False))
        del found[self]
        return list(found)

    def recover_inputs(self) -> tuple[Any, ...]:
        """The inputs, without a graph, computed from the outputs."""
        outputs = self.recover_outputs()
        # The hooks keep torch's checkpoint, which is recomputing, from counting what the inverse saves.
        with self.snapshot.restored(), torch.no_grad(), saved_tensors_hooks(_unchanged, _unchanged):
            computed = self.function.inverse(*outputs)
        return self.complete_inputs(computed)

    def complete_inputs(self, computed: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs as they were: with the saved ones, and with their dtypes and ``requires_grad``."""
        count = len(self.requires_grad)
        if len(computed) < count and any(i not in self.saved_inputs for i in range(len(computed), count)):
            raise RuntimeError(
                f"{self.function.name}: inverse returned {len(computed)} values for {count} inputs; it must return "
                "all, in order, but for the last ones if these are no floating-point tensors"
            )
        return tuple(
            self._saved_input(i)
            if i in self.saved_inputs
            else computed[i].detach().to(self.dtypes[i]).requires_grad_(self.requires_grad[i])
            for i in range(count)
        )

    def _saved_input(self, position: int) -> Any:
        saved = self.saved_inputs[position]
        if saved.is_edited:
            raise RuntimeError(
                f"{self.function.name}: input {position}, which is saved, was modified by an in-place operation; "
                "modify a clone"
            )
        return saved.value

    def pass_to_producers(self, inputs: tuple[Any, ...]) -> None:
        """Give inputs to the calls whose outputs they are, which come next in the backward pass."""
        for i, producer in self.producers.items():
            call = producer.call()
            if call is not None:
                call._recovered[producer.position] = inputs[i].detach()


@dataclass(frozen=True)
class DeferredOutput:
    """An output that is not held: it is an input of ``consumer``, whose inverse computes it in the backward pass."""

    consumer: InvertibleCall


class _Producer(NamedTuple):
    """The call that returned a tensor, and the tensor's position among its outputs."""

    #: Weak, because the producer refers to its consumer: a cycle would outlive the graph.
    call: weakref.ref[InvertibleCall]
    position: int


class InvertibleOutput(Function):
    """Returns outputs as they are. The node holds the call, and so the outputs until they are deferred."""

    @staticmethod
    def forward(ctx: Any, call: InvertibleCall, positions: list[int], *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.positions = call, positions
        # Attributes, so that saved memory can be counted. The first is the call's own list, which changes with it.
        ctx.outputs = call.outputs
        ctx.others = [*call.extra_outputs, *(saved.value for saved in call.saved_inputs.values())]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *grads


def _producer_of(arg: Tensor) -> _Producer | None:
    """The call that returned it, if the output is still held there, and unmodified."""
    node: Any = arg.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, InvertibleCall):
        return None
    position = node.positions[arg.output_nr]
    output = call.outputs[position]
    is_held = isinstance(output, Versioned) and output.version == arg._version
    return _Producer(weakref.ref(call), position) if is_held else None


def is_float(arg: Any) -> bool:
    """Whether this is a tensor that can have a gradient."""
    return isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


# --- what a function can ask for --------------------------------------------------------------------------------------


class _State(threading.local):
    mode: Literal["dry", "backward", "plain"] | None = None


_state = _State()


@contextmanager
def in_mode(mode: Literal["dry", "backward", "plain"]) -> Iterator[None]:
    """What runs inside runs in this mode, on this thread."""
    before, _state.mode = _state.mode, mode
    try:
        yield
    finally:
        _state.mode = before


def in_dry_mode() -> bool:
    """Whether a function runs for its outputs, and what it saves is dropped: the first run, before a backward pass."""
    return _state.mode == "dry"


def in_backward_mode() -> bool:
    """Whether a function is recomputed for its backward pass, or its inverse runs."""
    return _state.mode == "backward"


def in_plain_mode() -> bool:
    """Whether modules leave everything to autograd, whatever their flags."""
    return _state.mode == "plain"


@contextmanager
def dry_mode() -> Iterator[None]:
    """Run functions for their outputs. Gradients are on, so that outputs have the right ``requires_grad``, but nothing
    is saved, and a backward pass raises."""

    def refuse(_: None) -> Tensor:
        raise RuntimeError("dry_mode: nothing was saved for the backward pass; run the function outside of dry_mode")

    with saved_tensors_hooks(lambda tensor: None, refuse), torch.enable_grad(), in_mode("dry"):
        yield
