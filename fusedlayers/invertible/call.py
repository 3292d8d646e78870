"""Calls whose inputs are not kept: they are had again from the outputs (Gomez et al. 2017, "The Reversible Residual
Network: Backpropagation Without Storing Activations").

What autograd would save in a call is dropped, as a checkpoint does it; when the backward pass asks for it, the inputs
are computed from the outputs, and the function runs again on these. So the graph is PyTorch's own: hooks, second
derivatives, ``inputs=``, gradients of whatever a function closes over are as ever.

In a chain of calls no output is held but the last: a call whose input is the output of another one tells that one,
which then lets go of it, and asks for it in the backward pass (``Call.values``). Nothing is taken from anybody who
still holds the tensor, a variable of the caller, an operation that saved it, a view: it is only not held for the
backward pass. So there is nothing that could be read after it has been freed.
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
from torch.utils._pytree import tree_leaves

from ..checkpoint.free_state import NOTHING, Reached
from ..checkpoint.recompute import again
from ..checkpoint.state_snapshot import Circumstances

#: Where there was an output.
LET_GO = object()

Values = tuple[Any, ...]


def everything(values: Values) -> Values:
    return values


@dataclass(frozen=True)
class Inverted:
    """A function and its inverse.

    Attributes:
        name: for messages.
        function: from inputs to outputs, as a tuple, which may be more than the caller sees.
        inverse: from these to the inputs.
        shown: of the outputs those that the caller sees; they come first.
        reached: what it runs, or can reach.
        seed: whether later runs find the random numbers of the first.
        rerun: runs the function again, which saves what it did at first and in that order, and lends the inputs that it
            has found on the way: for those that can share work between the two.
    """

    name: str
    function: Callable[..., Values]
    inverse: Callable[..., Values]
    shown: Callable[[Values], Values] = everything
    reached: Reached = NOTHING
    seed: bool = True
    rerun: Callable[[Call], None] | None = None


class Call:
    """One call, as long as the graph lives: its outputs, or who can tell them."""

    def __init__(self, inverted: Inverted, args: Values, keep: Iterable[Tensor] = ()) -> None:
        self.inverted = inverted
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self.circumstances = Circumstances(inverted.reached, tensors, seed=inverted.seed)
        kept = {id(tensor) for tensor in keep}
        #: Inputs that are held, by their place: those that were asked for, and what is no tensor of numbers.
        self.held = {i: _KeptInput.of(arg) for i, arg in enumerate(args) if not is_float(arg) or id(arg) in kept}
        self.wanted = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]
        self.dtypes = [arg.dtype if isinstance(arg, Tensor) else None for arg in args]
        #: Of inputs that are outputs of other calls: which ones.
        self.sources = [None if i in self.held else _source(arg) for i, arg in enumerate(args)]
        self.outputs: list[Any] = []
        self.hidden: Values = ()
        self._versions: list[int | None] = []
        #: Of outputs that were let go, who tells them. (Who tells knows by a weak reference for whom: the graph holds
        #: both, and a circle would outlive it.)
        self._tellers: list[Call | None] = []
        self._lent: dict[int, Tensor] = {}
        self._args: Values | None = args

    def run(self) -> Values:
        """What the caller sees."""
        early_stop = self.inverted.rerun is None
        results: Values = again(self._first_or_again, (), {}, self.circumstances, early_stop=early_stop)
        self._args = None
        shown = self.inverted.shown(results)
        if not any(isinstance(result, Tensor) and result.requires_grad for result in results):
            return shown
        self.outputs = [result.detach() if isinstance(result, Tensor) else result for result in shown]
        self._versions = [out._version if isinstance(out, Tensor) else None for out in self.outputs]
        self._tellers = [None] * len(shown)
        self.hidden = tuple(h.detach() if isinstance(h, Tensor) else h for h in results[len(shown) :])
        places = [i for i, result in enumerate(shown) if isinstance(result, Tensor) and result.requires_grad]
        marked = InvertibleOutput.apply(self, places, *(shown[i] for i in places))
        for source in self.sources:
            if source is not None and (call := source.call()) is not None:
                call.let_go(source.place, self)
        passed = dict(zip(places, marked, strict=True))
        return tuple(passed.get(i, result) for i, result in enumerate(shown))

    def _first_or_again(self) -> Values | None:
        if self._args is not None:
            with in_mode("dry"):
                return self.inverted.function(*self._args)
        with in_mode("backward"):
            if self.inverted.rerun is not None:
                self.inverted.rerun(self)
                return None
            inputs = self.inputs()
            self.lend(inputs)
            return self.inverted.function(*inputs)

    # --- outputs ------------------------------------------------------------------------------------------------------

    def can_let_go(self, place: int, tensor: Tensor) -> bool:
        """Whether ``tensor`` is that output still, as it was, and nobody else tells it."""
        return self.outputs[place] is not LET_GO and tensor._version == self._versions[place]

    def let_go(self, place: int, teller: Call) -> None:
        self.outputs[place] = LET_GO
        self._tellers[place] = teller

    def values(self) -> Values:
        """The outputs, also those that the caller does not see; what others tell is not held afterwards either."""
        for teller in self._to_be_asked():
            teller.lend(teller.inputs())
        values = list(self.outputs)
        lent, self._lent = self._lent, {}
        for place, value in enumerate(values):
            if value is LET_GO:
                values[place] = lent[place]
            elif isinstance(value, Tensor) and value._version != self._versions[place]:
                raise RuntimeError(
                    f"{self.inverted.name}: output {place} was modified by an in-place operation, and its inputs are "
                    "to be computed from it. Modify a clone instead, or set invertible=False, which keeps the inputs"
                )
        return (*values, *self.hidden)

    def _to_be_asked(self) -> list[Call]:
        """Who tells the outputs that nobody has lent, and who tells theirs: each before those that ask it. (A list, for
        calls that ask each other would be as deep as the chain, deeper than Python's stack.)"""
        found: dict[Call, None] = {}
        pending: list[tuple[Call, bool]] = [(self, False)]
        while pending:
            call, is_told = pending.pop()
            if is_told:
                found[call] = None
            elif call not in found:
                pending.append((call, True))
                tellers = (teller for place, teller in enumerate(call._tellers) if place not in call._lent)
                pending += [(teller, False) for teller in tellers if teller is not None]
        del found[self]
        return list(found)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def inputs(self) -> Values:
        """The inputs, apart from any graph, computed from the outputs."""
        values = self.values()
        with self.circumstances.again(), torch.no_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            computed = self.inverted.inverse(*values)
        return self.finished(computed)

    def finished(self, computed: Values) -> Values:
        """Inputs as they were: with what is held, and the dtypes and the wish for gradients that they had."""
        count = len(self.wanted)
        if len(computed) < count and any(i not in self.held for i in range(len(computed), count)):
            raise RuntimeError(
                f"{self.inverted.name}: inverse returned {len(computed)} values for {count} inputs; it must return "
                "all, in order, but for the last ones if these are no floating-point tensors"
            )
        return tuple(
            self.held[i].value(self.inverted.name, i)
            if i in self.held
            else _as_input(computed[i], self.dtypes[i], self.wanted[i])
            for i in range(count)
        )

    def lend(self, inputs: Values) -> None:
        """Give inputs to the calls whose outputs they are, which come next."""
        for source, value in self.by_source(inputs):
            call = source.call()
            if call is not None:
                call._lent[source.place] = value.detach()

    def by_source(self, inputs: Values) -> Iterator[tuple[_Source, Tensor]]:
        for source, value in zip(self.sources, inputs, strict=True):
            if source is not None:
                yield source, value


class _KeptInput(NamedTuple):
    """An input that is held, at the version it had."""

    arg: Any
    version: int | None

    @classmethod
    def of(cls, arg: Any) -> _KeptInput:
        return cls(arg, arg._version if isinstance(arg, Tensor) else None)

    def value(self, name: str, place: int) -> Any:
        if self.version is not None and self.arg._version != self.version:
            raise RuntimeError(
                f"{name}: input {place}, which was to be kept, was modified by an in-place operation; modify a clone"
            )
        return self.arg


class _Source(NamedTuple):
    """Of which call an input is which output."""

    call: weakref.ref[Call]
    place: int


class InvertibleOutput(Function):
    """Outputs as they are; the node holds them, until another call tells them."""

    @staticmethod
    def forward(ctx: Any, call: Call, places: list[int], *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = call, places
        # For who counts what is saved. The first is the call's own list, which empties when it lets go.
        ctx.outputs, ctx.others = call.outputs, [*call.hidden, *(held.arg for held in call.held.values())]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *grads


def _source(arg: Tensor) -> _Source | None:
    node = arg.grad_fn
    call = getattr(node, "call", None)
    if not isinstance(call, Call):
        return None
    place = node.places[arg.output_nr]  # type: ignore[union-attr]
    return _Source(weakref.ref(call), place) if call.can_let_go(place, arg) else None


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
