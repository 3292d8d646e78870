"""What blocks save, hold and cost, in each way to train them: measured on one block of each kind, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..profiling.step import Step
from ..profiling.timing import medians, step_time
from ..utils.autograd_graph import checkpoints_of, nodes_of, saved_by
from ..utils.storages import sizes_of, tensors_in
from .agreement import agreed
from .blocks import Block, Mode, Way
from .training import Training, step_peak

#: How often each way is timed, in turns: so often at least and at most, and for so many milliseconds.
ROUNDS, MOST_ROUNDS, TIME_MS = 7, 100, 60.0


class Costs(NamedTuple):
    """Of one call.

    Attributes:
        saved_bytes: what it saves besides its input and output.
        input_bytes, output_bytes: what it saves of these. Inputs that need no gradient (a mask) are not counted: all
            blocks share them.
        peak_bytes: the most it has allocated in forward and backward; 0 where nobody asks.
        time_ms: of forward and backward.
    """

    saved_bytes: int
    input_bytes: int
    output_bytes: int
    peak_bytes: int
    time_ms: float

    @property
    def extra_bytes(self) -> int:
        """What it holds at its peak besides what is saved."""
        return max(0, self.peak_bytes - self.saved_bytes - self.output_bytes)


#: By how the rest of the model is trained, and by how the block is.
BlockCosts = dict[Mode, dict[Mode, Costs]]


def measure(block: Block, training: Training, rests: Sequence[Mode]) -> BlockCosts:
    """The costs in each way to train the block. Where it shares modules with the rest of the model, they depend on how
    that is trained. The block is left trained as PyTorch does."""
    assert block.call is not None
    parts: dict[Way, tuple[int, int, int]] = {}
    peaks: dict[Way, int] = {}
    times: dict[Way, list[float]] = {
        (mode, rest): [] for rest in (rests if block.shared else rests[:1]) for mode in block.modes_beside(rest)
    }
    try:
        for way in times:
            block.train_as(*way)
            _step_ms(block)  # makes plans, and compiles
            parts[way] = saved_parts(block)
            peaks[way] = _peak(block) if training.of == "peak" else 0
        while not agreed(_is_timed([*times.values()])):
            for way, of_way in times.items():
                block.train_as(*way)
                training.reset_random()
                of_way.append(_step_ms(block))
    finally:
        block.train_as("eager", "eager")
    each = zip(times, medians([*times.values()]), strict=True)
    found: BlockCosts = {rest: {} for rest in rests}
    for (mode, rest), time_ms in each:
        found[rest][mode] = Costs(*parts[mode, rest], peaks[mode, rest], time_ms)
    return found if block.shared else dict.fromkeys(rests, found[rests[0]])


def _is_timed(times: Sequence[list[float]]) -> bool:
    rounds = len(times[0])
    is_long = sum(map(sum, times)) >= TIME_MS * len(times)
    return rounds >= ROUNDS and (is_long or rounds >= MOST_ROUNDS)


def _step_ms(block: Block) -> float:
    return step_time(_fresh(block), [*block.module.parameters()])


def _peak(block: Block) -> int:
    step = _fresh(block)
    return step_peak(step, [p for p in block.module.parameters() if p.requires_grad])


def saved_parts(block: Block) -> tuple[int, int, int]:
    """What a call saves: of its own, of its input, and of its output."""
    step = _fresh(block)
    output = block.module(*step.args, **step.kwargs)
    given = [*tensors_in((step.args, step.kwargs))]
    nodes = nodes_of(tensors_in(output))
    kept = [tensor for node in nodes for tensor in saved_by(node)]
    kept += [tensor for _, tensors in checkpoints_of(nodes) for tensor in tensors]
    owned = sizes_of([*tensors_in(block.module), *(t for t in given if not t.requires_grad)])
    inputs, outputs = sizes_of(t for t in given if t.requires_grad), sizes_of(tensors_in(output))
    saved = {key: size for key, size in sizes_of(kept).items() if key not in owned}
    of_input = sum(size for key, size in saved.items() if key in inputs)
    of_output = sum(size for key, size in saved.items() if key in outputs.keys() - inputs.keys())
    return sum(saved.values()) - of_input - of_output, of_input, of_output


def _fresh(block: Block) -> Step:
    assert block.call is not None
    return Step(block.module, *block.call.arguments(), function="fit")
