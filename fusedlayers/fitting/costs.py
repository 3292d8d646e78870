"""What blocks save, hold and cost, in each way to train them: measured on one block of each kind, by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..fusion.timing import now
from ..memory import device_of, peak_bytes
from ..profiling.step import Step
from ..utils.autograd_graph import checkpoints_of, nodes_of, saved_by
from ..utils.formatting import first_line
from ..utils.module_state import isolated_gradients
from ..utils.storages import storages_of, tensors_in
from .blocks import Block, Mode

#: How often each way is timed, in turns: so often at least, and for so many milliseconds.
ROUNDS, TIME_MS = 5, 60.0


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


class Measured(NamedTuple):
    """The costs of a kind of blocks by mode; and of the others, why they cannot be trained so."""

    costs: dict[Mode, Costs]
    failed: dict[Mode, str]


def measure(block: Block, *, with_peaks: bool, reset_random: Callable[[], None]) -> Measured:
    """The block is left trained as PyTorch does."""
    assert block.first is not None
    failed: dict[Mode, str] = {}
    saved: dict[Mode, tuple[int, int, int]] = {}
    peaks: dict[Mode, int] = {}
    times: dict[Mode, list[float]] = {}
    try:
        for mode in block.modes:
            block.train_as(mode)
            try:
                with block.first.autocasting():
                    _step(block)  # makes plans, compiles, and shows whether it runs
                    saved[mode] = _saved(block)
                    peaks[mode] = _peak(block) if with_peaks else 0
            except Exception as error:  # whatever the block's code does with what it is not used to
                failed[mode] = f"{type(error).__name__}: {first_line(error)}"
                continue
            times[mode] = []
        spent = 0.0
        while times and (len(times["eager"]) < ROUNDS or (spent < TIME_MS * len(times) and len(times["eager"]) < 100)):
            for mode, found in times.items():
                block.train_as(mode)
                reset_random()
                with block.first.autocasting():
                    found.append(_step(block))
                spent += found[-1]
    finally:
        block.train_as("eager")
    costs = {mode: Costs(*saved[mode], peaks[mode], statistics.median(found)) for mode, found in times.items()}
    return Measured(costs, failed)


def _step(block: Block) -> float:
    """The milliseconds of a forward and a backward pass. No gradient is accumulated."""
    step, sources = _fresh(block)
    leaves = [*(p for p in block.module.parameters() if p.requires_grad), *sources]
    start = now()
    torch.autograd.grad(step.forward(), leaves, allow_unused=True)
    return 1e3 * (now() - start)


def _peak(block: Block) -> int:
    step, _ = _fresh(block)
    return step_peak(step, [p for p in block.module.parameters() if p.requires_grad])


def step_peak(step: Step, parameters: Sequence[Tensor]) -> int:
    """The most that a forward and a backward pass have allocated. The gradients of parameters are there before."""
    with isolated_gradients(parameters, zeros=True):
        return peak_bytes(step.run, device=device_of((step.model, step.args, step.kwargs)))


def _saved(block: Block) -> tuple[int, int, int]:
    """What a call saves: of its own, of its input, and of its output."""
    step, _ = _fresh(block)
    output = block.module(*step.args, **step.kwargs)
    given = [*tensors_in((step.args, step.kwargs))]
    owned = _storages([*tensors_in(block.module), *(t for t in given if not t.requires_grad)])
    inputs, outputs = _storages(t for t in given if t.requires_grad), _storages(tensors_in(output))
    saved = {key: size for key, size in saved_storages(tensors_in(output)).items() if key not in owned}
    of_input = sum(size for key, size in saved.items() if key in inputs)
    of_output = sum(size for key, size in saved.items() if key in outputs.keys() - inputs.keys())
    return sum(saved.values()) - of_input - of_output, of_input, of_output


def saved_storages(outputs: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the storages that the graph of these tensors keeps, by address."""
    nodes = nodes_of(outputs)
    found = [tensor for node in nodes for tensor in saved_by(node)]
    found += [tensor for _, tensors in checkpoints_of(nodes) for tensor in tensors]
    return _storages(found)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {storage._cdata: storage.nbytes() for storage in storages_of(tensors)}


def _fresh(block: Block) -> tuple[Step, Sequence[Tensor]]:
    assert block.first is not None
    args, kwargs, sources = block.first.arguments()
    return Step(block.module, args, kwargs, function="fit"), sources
