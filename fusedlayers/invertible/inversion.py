"""Calls of invertible functions, which save their outputs instead of their inputs (Gomez et al. 2017, "The Reversible
Residual Network: Backpropagation Without Storing Activations").

A call is a checkpoint (``recompute/recompute.py``) that does not save its inputs. When the backward pass needs what
autograd would have saved, the inputs are computed from the outputs, and the function is recomputed on them. So the
graph is PyTorch's own: hooks, second derivatives, ``inputs=`` and gradients of what a function closes over work as
ever.

In a chain of calls only the last output is held. A call whose input is the output of another call, its producer, makes
that one let go of it: in the backward pass the consumer computes it (``InvertibleCall.recover_outputs``). No tensor is
freed that somebody else holds, be it a variable of the caller, an operation that saved it, or a view: it is only not
held for the backward pass. So nothing can be read after it was freed.

Backward costs the inverse and a second forward pass. Computed inputs differ from the inputs by rounding, which adds up
over a chain, and fast where a function shrinks its input; ``check.py`` measures it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from ..recompute.recompute import run_checkpointed
from ..recompute.snapshot import Snapshot


@dataclass(frozen=True)
class InvertibleFunction:
    """A function and its inverse.

    Attributes:
        name: for messages.
        forward: from inputs to a tuple of outputs.
        inverse: from all outputs to a tuple of inputs.
        num_outputs: how many outputs the caller sees, the first ones; None: all; negative: all but so many.
        modules, tensors, runs_all: what it depends on besides its inputs, as for ``Snapshot``.
        recompute: replaces the inverse and the recomputation of ``forward``, for functions that can share work between
            the two. It saves what ``forward`` saves, in the same order, and passes the inputs to their producers.
    """

    name: str
    forward: Callable[..., tuple[Any, ...]]
    inverse: Callable[..., tuple[Any, ...]]
    num_outputs: int | None = None
    modules: Sequence[nn.Module] = ()
    tensors: Sequence[Tensor] = ()
    runs_all: bool = True
    recompute: Callable[[InvertibleCall], None] | None = None


class RunState(Snapshot):
    """A snapshot with autocast and PyTorch's random numbers: an inverse runs in the recomputation of another call, and
    torch's checkpoint replays that one's."""

    def __init__(self, function: InvertibleFunction, args: tuple[Any, ...]) -> None:
        super().__init__(function.modules, function.tensors, runs_all=function.runs_all)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._device = max(kinds - {"cpu"}, default="cuda")
        self._devices, self._device_states = get_device_states(*tensors)
        #: None where the first run drew no numbers: a state is 5 KiB.
        self._cpu_state: Tensor | None = torch.get_rng_state()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context around the first run."""
        with super().recording():
            yield
        if self._cpu_state is not None and torch.equal(torch.get_rng_state(), self._cpu_state):
            self._cpu_state = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context around the inverse, and around recomputations."""
        with ExitStack() as stack:
            stack.enter_context(super().again())
            for autocast in self._autocast:
                stack.enter_context(torch.autocast(*autocast))
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._device))
            if self._cpu_state is not None:
                torch.set_rng_state(self._cpu_state)
            set_device_states(self._devices, self._device_states, device_type=self._device)
            yield


class Versioned(NamedTuple):
    """A value, and, if it is a tensor, the version that it had."""

    value: Any
    version: int | None

    @classmethod
    def of(cls, value: Any) -> Versioned:
        return cls(value, value._version if isinstance(value, Tensor) else None)

    def unedited(self, name: str, advice: str) -> Any:
        """The value. Raises where it was modified by an in-place operation since."""
        if self.version is not None and self.value._version != self.version:
            raise RuntimeError(f"{name} was modified by an in-place operation{advice}")
        return self.value


#: Numbers of calls: a consumer's is larger than its producers'.
_numbers = itertools.count()


class InvertibleCall:
    """One call. It lives as long as the graph, and holds its outputs, or says which calls compute them.

    Attributes:
        saved_inputs: by position, those that are no floating-point tensors.
        producers: of inputs that are outputs of other calls, by position: which call, and which of its outputs. The
            call is held weakly, because it refers to its consumers: a cycle would outlive the graph.
        held: outputs that the caller sees, by position, but for those that consumers compute.
        consumers: the calls that compute the others.
        recovered: outputs that a consumer has computed, until they are read.
        extra_outputs: those that the caller does not see.
    """

    def __init__(self, function: InvertibleFunction, args: tuple[Any, ...]) -> None:
        self.number, self.function, self.state = next(_numbers), function, RunState(function, args)
        self.saved_inputs = {i: Versioned.of(arg) for i, arg in enumerate(args) if not is_float(arg)}
        self.requires_grad = [_requires_grad(arg) for arg in args]
        self.dtypes = [arg.dtype if isinstance(arg, Tensor) else None for arg in args]
        found = {i: _producer_of(arg) for i, arg in enumerate(args) if is_float(arg)}
        self.producers = {i: producer for i, producer in found.items() if producer is not None}
        self.held: dict[int, Versioned] = {}
        self.consumers: dict[int, InvertibleCall] = {}
        self.recovered: dict[int, Tensor] = {}
        self.extra_outputs: tuple[Any, ...] = ()
        self._args: tuple[Any, ...] | None = args

    def run(self) -> tuple[Any, ...]:
        """The outputs that the caller sees."""
        results: tuple[Any, ...] = run_checkpointed(
            # With ``recompute``, the work after the last saved tensor must be done too.
            self._run_or_recompute, (), {}, self.state,
            early_stop=self.function.recompute is None, preserve_rng_state=False,
        )  # fmt: skip
        self._args = None
        visible = results[: self.function.num_outputs]
        if not any(map(_requires_grad, results)):
            return visible
        self.held.update({i: Versioned.of(_detached(result)) for i, result in enumerate(visible)})
        self.extra_outputs = tuple(map(_detached, results[len(visible) :]))
        positions = [i for i, result in enumerate(visible) if _requires_grad(result)]
        marked = InvertibleOutput.apply(self, positions, *(visible[i] for i in positions))
        for reference, position in self.producers.values():
            if (producer := reference()) is not None:
                producer.held.pop(position, None)
                producer.consumers[position] = self
        passed = dict(zip(positions, marked, strict=True))
        return tuple(passed.get(i, result) for i, result in enumerate(visible))

    def _run_or_recompute(self) -> tuple[Any, ...] | None:
        with in_mode(None):
            if self._args is not None:
                return self.function.forward(*self._args)
            if self.function.recompute is not None:
                self.function.recompute(self)
                return None
            inputs = self.recover_inputs()
            self.pass_to_producers(inputs)
            return self.function.forward(*inputs)

    def recover_outputs(self) -> tuple[Any, ...]:
        """All outputs. Those that consumers compute are not held afterwards."""
        for consumer in self._pending_consumers():
            consumer.pass_to_producers(consumer.recover_inputs())
        values: dict[int, Any] = self.recovered
        self.recovered = {}
        advice = (
            ", and its inputs are to be computed from it. Modify a clone instead, or set checkpoint=False, which "
            "leaves the module to autograd"
        )
        for position, output in self.held.items():
            values[position] = output.unedited(f"{self.function.name}: output {position}", advice)
        return (*(values[position] for position in sorted(values)), *self.extra_outputs)

    def _pending_consumers(self) -> list[InvertibleCall]:
        """The calls that compute outputs which are not recovered yet, and those that compute theirs, the last one
        first. (No recursion, which would be as deep as the chain, deeper than Python's stack.)"""
        found, pending = set[InvertibleCall](), [self]
        while pending:
            call = pending.pop()
            missing = {consumer for i, consumer in call.consumers.items() if i not in call.recovered} - found
            found |= missing
            pending += missing
        return sorted(found, key=lambda call: call.number, reverse=True)

    def recover_inputs(self) -> tuple[Any, ...]:
        """The inputs, without a graph, computed from the outputs."""
        outputs = self.recover_outputs()
        # The hooks keep torch's checkpoint, which is recomputing, from counting what the inverse saves.
        with self.state.again(), torch.no_grad(), saved_tensors_hooks(_unchanged, _unchanged):
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
            self.saved_inputs[i].unedited(f"{self.function.name}: input {i}, which is saved,", "; modify a clone")
            if i in self.saved_inputs
            else computed[i].detach().to(self.dtypes[i]).requires_grad_(self.requires_grad[i])
            for i in range(count)
        )

    def pass_to_producers(self, inputs: tuple[Any, ...]) -> None:
        """Give inputs to the calls whose outputs they are, which come next in the backward pass."""
        for i, (reference, position) in self.producers.items():
            if (producer := reference()) is not None:
                producer.recovered[position] = inputs[i].detach()


class InvertibleOutput(Function):
    """Returns outputs as they are. The node holds the call, and so the outputs until consumers compute them."""

    @staticmethod
    def forward(ctx: Any, call: InvertibleCall, positions: list[int], *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.positions = call, positions
        # Attributes, so that saved memory can be counted. The first is the call's own dict, which changes with it.
        ctx.held = call.held
        ctx.others = [*call.extra_outputs, *(saved.value for saved in call.saved_inputs.values())]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *grads


def _producer_of(arg: Tensor) -> tuple[weakref.ref[InvertibleCall], int] | None:
    """The call that returned a tensor, and which output it is, if the output is still held there, and unmodified."""
    node: Any = arg.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, InvertibleCall):
        return None
    position = node.positions[arg.output_nr]
    output = call.held.get(position)
    return (weakref.ref(call), position) if output is not None and output.version == arg._version else None


def is_float(arg: Any) -> bool:
    """Whether this is a tensor that can have a gradient."""
    return isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


# --- modes ------------------------------------------------------------------------------------------------------------


#: "plain": all is left to autograd; "chain": modules of a chain run, which hold one output instead of all where they
#: are recomputed too. A call runs its function in neither.
Mode = Literal["plain", "chain"]


class _State(threading.local):
    mode: Mode | None = None


_state = _State()


@contextmanager
def in_mode(mode: Mode | None) -> Iterator[None]:
    """Code inside runs in this mode, on this thread."""
    before, _state.mode = _state.mode, mode
    try:
        yield
    finally:
        _state.mode = before


def current_mode() -> Mode | None:
    """The mode of this thread."""
    return _state.mode
