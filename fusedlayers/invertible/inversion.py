"""Calls of invertible functions, which save their outputs instead of their inputs (Gomez et al. 2017, "The Reversible
Residual Network: Backpropagation Without Storing Activations").

A call is a checkpoint (``recompute/recompute.py``) that does not save its inputs. When the backward pass needs what
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        #: None where the first run drew no numbers.
        self._cpu_state: Tensor | None = torch.get_rng_state()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the first run."""
        with super().recording():
            yield
        if self._cpu_state is not None and torch.equal(torch.get_rng_state(), self._cpu_state):
            self._cpu_state = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the inverse, and around recomputations."""
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

    @property
    def is_edited(self) -> bool:
        """Whether it was modified by an in-place operation since."""
        return self.version is not None and self.value._version != self.version


class InvertibleCall:
    """One call. It lives as long as the graph, and holds its outputs, or says which call computes them."""

    def __init__(self, function: InvertibleFunction, args: tuple[Any, ...], keep: Iterable[Tensor] = ()) -> None:
        self.function = function
        self.state = RunState(function, args)
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
            self._run_or_recompute, (), {}, self.state,
            early_stop=self.function.recompute is None, preserve_rng_state=False,
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
                    "are to be computed from it. Modify a clone instead, or set checkpoint=False, which leaves "
                    "the module to autograd"
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


#: "dry": the first run; "backward": a recomputation or an inverse; "plain": all is left to autograd; "chain": modules
#: of a chain run, which hold one output instead of all where they are recomputed too.
Mode = Literal["dry", "backward", "plain", "chain"]


class _State(threading.local):
    mode: Mode | None = None


_state = _State()


@contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """What runs inside runs in this mode, on this thread."""
    before, _state.mode = _state.mode, mode
    try:
        yield
    finally:
        _state.mode = before


def current_mode() -> Mode | None:
    """Of this thread."""
    return _state.mode


def in_dry_mode() -> bool:
    """Whether a function runs for its outputs, and what it saves is dropped: the first run, before a backward pass."""
    return _state.mode == "dry"


def in_backward_mode() -> bool:
    """Whether a function is recomputed for its backward pass, or its inverse runs."""
    return _state.mode == "backward"


@contextmanager
def dry_mode() -> Iterator[None]:
    """Run functions for their outputs. Gradients are on, so that outputs have the right ``requires_grad``, but nothing
    is saved, and a backward pass raises."""

    def refuse(_: None) -> Tensor:
        raise RuntimeError("dry_mode: nothing was saved for the backward pass; run the function outside of dry_mode")

    with saved_tensors_hooks(lambda tensor: None, refuse), torch.enable_grad(), in_mode("dry"):
        yield
