"""A leaf's second run (``leaves.py``): the call, and the tensors that backward reads of it.

The module's forward pass runs again on its arguments, under hooks that hand out what its nodes save, in order. It may
stop after the last tensor that is needed, and runs once in a backward pass, for all readers together.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch import autocast_is_active, backward_pass, outside_of_transforms, queue_callback
from ..ops.saved_buffers import EDITED
from .recipe import Recipe, Value, laid_out, stream_of

if TYPE_CHECKING:
    from .leaves import Leaf

Packed = tuple[Value, Tensor]


class Log(list[Packed]):
    """What was packed while a leaf ran, in order; its arguments' values, under a checkpoint."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.tensors, self.arguments = tensors, list[Value]()


#: A run on smaller tensors goes on to its end: an exception through C++ costs the host 20 us (AMD EPYC).
STOPPED_BYTES = 1 << 20
#: In the place of the number of a saved tensor: the result.
RESULT = -1
_ADVICE = (
    "A module without children, as an activation, is run again where that frees memory, and has to compute the same; "
    "fl.unfuse(module) leaves it to PyTorch."
)
_running = threading.local()


def is_running_again() -> bool:
    """Whether a leaf is run again in this thread, so that nothing within it may be spared."""
    return getattr(_running, "is_again", False)


class LeafCall:
    """A call of a leaf: what it has found in the module (``leaf``), and how it was called."""

    def __init__(self, leaf: Leaf, tensors: Sequence[Tensor], kinds: Any) -> None:
        self.leaf, self.kinds = leaf, kinds
        # Optimizers that step in backward write to a parameter before the leaf has run again.
        self._tensors = [t.detach().clone() if t._post_accumulate_grad_hooks else t for t in leaf.tensors]
        self._versions = [t._version for t in self._tensors]
        self._trained = [t.requires_grad for t in (*leaf.tensors, *tensors)]
        kind = tensors[0].device.type
        facts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._autocast = facts if autocast_is_active() else None

    def again(self, tensors: Sequence[Tensor]) -> Any:
        """The result for these arguments.

        Raises:
            RuntimeError: a tensor of the module was written to since.
        """
        if [t._version for t in self._tensors] != self._versions:
            raise RuntimeError(f"{EDITED}: it belongs to a {self.name}, which backward runs again. {_ADVICE}")
        args, kwargs, held = [*self.leaf.args], {**self.leaf.kwargs}, len(self._tensors)
        for place, tensor, is_trained in zip(self.leaf.places, tensors, self._trained[held:], strict=True):
            (args if isinstance(place, int) else kwargs)[place] = tensor.detach().requires_grad_(is_trained)
        module = self.leaf.with_tensors(self._tensors, self._trained[:held])
        is_on, dtype = self._autocast or (False, None)
        kind = tensors[0].device.type
        is_cast = self._autocast or autocast_is_active()
        # A cache would hold copies of the arguments until the context around backward, if there is one, ends.
        autocast = torch.autocast(kind, dtype, is_on, cache_enabled=False) if is_cast else nullcontext()
        with torch.enable_grad(), autocast:
            return self.leaf.function(module, *args, **kwargs)

    @property
    def name(self) -> str:
        return type(self.leaf.module).__name__


class Frame(Value):
    """The second run of a leaf's call, for all who read what it makes: the tensors that its nodes save, by their
    numbers, and its result.

    Attributes:
        wholes: the numbers of views in whose place the whole tensor is handed out.
        layouts: by number, the shape and dtype that the second run must make.
    """

    is_kept = True

    def __init__(self, call: LeafCall, arguments: Sequence[Value], region: object, log: Sequence[Packed] = ()) -> None:
        super().__init__(region)
        self.call, self.operands, self.depth = call, arguments, 1 + max([value.depth for value in arguments])
        self.readers_of: Counter[int] = Counter()
        self.wholes: set[int] = set()
        self.layouts = {number: (tensor.shape, tensor.dtype) for number, (_, tensor) in enumerate(log)}
        self._readers_left: Counter[int] = Counter()
        self._made: dict[int, Tensor] = {}

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
        numbers, last = itertools.count(), max(wanted) if RESULT not in wanted else None

        def pack(tensor: Tensor) -> None:
            number = next(numbers)
            whole = tensor._base if number in self.wholes else tensor
            self._check(number, whole)
            if number in wanted:
                found[number] = whole.detach()  # type: ignore[union-attr]  # it has been checked
            if number == last and tensor.nbytes >= STOPPED_BYTES:
                raise _Enough

        try:
            given = [value.recorded() for value in self.operands]
        except RuntimeError as error:
            if EDITED not in str(error):  # as where memory runs out
                raise
            raise RuntimeError(f"{error} A {self.call.name} has it as its argument. {_ADVICE}") from error
        _running.is_again = True
        try:
            with outside_of_transforms(), saved_tensors_hooks(pack, _nothing):
                y = self.call.again(given)
            if isinstance(y, Tensor):
                found[RESULT] = (y if y._base is None else y._base).detach()
                self._check(RESULT, found[RESULT])
        except _Enough:
            pass
        finally:
            _running.is_again = False
        for number in wanted - found.keys():
            self._check(number, None)
        return found

    def _check(self, number: int, tensor: Tensor | None) -> None:
        """Raise an error where the second run makes something else than the first."""
        expected, made = self.layouts.get(number), None if tensor is None else (tensor.shape, tensor.dtype)
        if made is None or made != (expected or made):
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
            frame.layouts[number] = tensor.shape, tensor.dtype

    def claim(self) -> None:
        self.readers += 1
        self._frame.readers_of[self._number] += 1
        self._frame.claim()

    def get(self) -> Tensor:
        return laid_out(self._frame.part(self._number), self.layout)


class _Enough(BaseException):  # no error, which code may catch: it ends a run
    """All that a backward pass reads is there."""


def _forget(reference: weakref.ref[Frame]) -> None:
    """Forget the tensors, after a backward pass."""
    frame = reference()
    if frame is not None:
        frame._made = {}


def _nothing(packed: Any) -> Any:
    raise AssertionError("nobody runs backward through a second run")
