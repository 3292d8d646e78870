"""The peak of a training step, read off one profile.

The profiler records allocations, operators, and the nodes of the backward pass with the numbers that autograd gave
them. They say when most was allocated, what ran then, and which saved tensors were still held: a node lets go of them
when it has run. Compiled code, and what an operator allocates for itself, are in the profile as all else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..memory import is_allocation

#: The profiler's scope of nodes of a backward pass (``at::RecordScope``).
BACKWARD = 1
#: Events inside of the operator that a reader knows.
_INNER = ("aten::empty", "aten::resize", "autograd::")
#: How the event is called in which the engine runs a node.
_EVALUATION = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Peak:
    """The most that was allocated at once, and what had happened by then.

    Attributes:
        bytes: how much it was, over what was there before.
        moment: the pass, and what ran: an operator, for which node or module.
        made: nodes with lower numbers had been made.
        finished: the numbers of those that had run backward.
    """

    bytes: int
    moment: str
    made: float
    finished: frozenset[int]

    def holds(self, nodes: Iterable[int]) -> bool:
        """Whether one of the nodes with these numbers held then what it saves."""
        return any(number < self.made and number not in self.finished for number in nodes)


def peak_in(events: Sequence[Any], device: torch.device, module_at: Callable[[int], str]) -> Peak:
    """The peak in a profile (``memory.profile_events``) of a step. ``module_at`` names the module that ran when
    autograd gave out a number."""
    live = most = time = 0
    for event in events:
        if is_allocation(event, device):
            live += event.nbytes()
            if live > most:
                most, time = live, event.start_ns()
    begun = [event for event in events if event.name() != "[memory]" and event.start_ns() <= time]
    running = [event for event in begun if event.end_ns() >= time]
    operator = next((e.name() for e in reversed(running) if not e.name().startswith(_INNER)), "")
    # Each thread numbers its own nodes: those that a reentrant checkpoint makes in a GPU's backward thread are apart.
    nodes = [event for event in begun if event.scope() == BACKWARD]
    nodes = [event for event in nodes if event.fwd_thread_id() == nodes[0].fwd_thread_id()]
    if nodes:
        # The engine sums gradients and lets go of what a node has saved after the node's own event.
        start = max((event.start_ns() for event in running if event.name().startswith(_EVALUATION)), default=time)
        current = [event for event in nodes if event.start_ns() >= start or event.end_ns() >= time]
        place = ""
        if current:
            number = current[-1].sequence_nr()  # of a leaf's it is negative
            place = current[-1].name() + (f" of {module_at(number)}" if number >= 0 else "")
        where = " in ".join(dict.fromkeys(filter(None, (operator, place))))
        finished = {event.sequence_nr() for event in nodes} - {event.sequence_nr() for event in current}
        return Peak(most, f"backward pass, {where}", math.inf, frozenset(finished))
    numbers = [event.sequence_nr() for event in running if event.sequence_nr() >= 0]
    made = numbers[0] if numbers else 1 + max((event.sequence_nr() for event in begun), default=-1)
    return Peak(most, f"forward pass, {operator} in {module_at(made)}", made, frozenset())
