"""What ``fuse`` returns: bytes, peaks and times before and after, and the values by which they differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..memory import device_of, peak_bytes, saved_bytes
from ..reports.module_tracker import ModuleTracker
from ..reports.step import Step, no_gradient_because, step_times, tensors_of
from ..utils.example import eagerly, evaluation_notes
from ..utils.formatting import counted_lines, path_text, pattern_of, size_text
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.progress import OnStage
from ..utils.report import Report
from ..utils.storages import tensors_in, trained_in
from .counting import Kept, Spared, count
from .region import LEAST_BYTES
from .replays import RESULTS, TABLE

#: Of what stays, the largest rows are listed, until so much of all bytes is.
LISTED = 0.9


@dataclass(frozen=True)
class Row:
    """Values that are alike, in all repeated blocks.

    Attributes:
        values: how many.
        call: what has made them, by autograd's name of it; "input or mask" where no gradient passes.
        read_by: the calls that need them in backward.
        modules: the paths of the modules in which these run.
        nbytes: of all.
        how: "replayed" or "output saved" of values that are spared; of those that stay, why.
    """

    values: int
    call: str
    read_by: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int
    how: str


@dataclass(frozen=True)
class FuseReport(Report):
    """What ``fuse`` returns; ``str()`` is a table.

    Attributes:
        name: of the model's class.
        exact: whether PyTorch's own nodes compute everything.
        spared: what is not saved, the most bytes first. A value that is spared may be one that PyTorch does not save
            either: another value is replayed from it.
        kept: what is, and why.
        saved_bytes: what a forward pass saves for backward, before and now, beside inputs and parameters.
        peak_bytes: the most that a forward and a backward pass have allocated at once, before and now.
        step_ms: how long they take; with ``time=True``.
        notes: what to know of the report itself.
    """

    name: str
    exact: bool
    spared: tuple[Row, ...] = ()
    kept: tuple[Row, ...] = ()
    saved_bytes: tuple[int, int] | None = None
    peak_bytes: tuple[int, int] | None = None
    step_ms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        mode = ", by PyTorch's own operations" if self.exact else ""
        advice = "" if self.saved_bytes else "; with inputs this report has bytes: fuse(model, inputs)"
        yield f"{self.name}: fused, every value is saved once{mode}{advice}"
        yield from (line for note in self.notes for line in ("", note))
        yield from self._totals()
        for title, rows, last in (("spares", self.spared, "how"), ("keeps", self.kept, "because")):
            if rows:
                yield ""
                texts = [
                    (str(r.values), r.call, ", ".join(r.read_by), path_text(r.modules), size_text(r.nbytes), r.how)
                    for r in rows
                ]
                yield from counted_lines([("values", "made by", "read by", "in module", title, last), *texts])

    def _totals(self) -> Iterator[str]:
        for title, pair in (("saved for backward", self.saved_bytes), ("peak of a step", self.peak_bytes)):
            if pair is not None:
                before, now = pair
                change = f" ({100 * (now - before) / before:+.1f} %)" if before else ""
                yield ""
                yield f"{title}, beside inputs and parameters: {size_text(before)} before, {size_text(now)} now{change}"
        if self.step_ms is not None:
            before_ms, now_ms = self.step_ms
            yield ""
            yield f"forward and backward: {before_ms:.3g} ms before, {now_ms:.3g} ms now ({now_ms / before_ms:.2f}x)"


def measured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_timed: bool,
    switches: tuple[Callable[[], None], Callable[[], None]],
    on_stage: OnStage,
) -> dict[str, Any]:
    """The fields of a report. ``switches`` make the model what it was, and fuse it; it is fused behind it."""
    unfuse, fuse = switches
    step, tracker, notes = Step(model, args, kwargs, function="fuse"), ModuleTracker(model), evaluation_notes(model)
    buffers = [*model.buffers()]
    with unchanged([*model.modules()], [*tensors_in((args, kwargs))]) as reset_random, torch.enable_grad(), eagerly():
        unfuse()
        on_stage("measuring the model", 0.0)
        with step.readable():
            result = model(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_of(result)):
            notes.append(f"Nothing is saved for a backward pass: {no_gradient_because(model)}.")
            fuse()
            return {"notes": notes, "saved_bytes": (0, 0)}
        del result
        leaves = trained_in((model, args, kwargs))

        def bytes_and_peak() -> tuple[int, int]:
            reset_random()
            saved = saved_bytes(step.forward, exclude=[buffers, args, kwargs])
            reset_random()
            with isolated_gradients(leaves, zeros=True):
                return saved, peak_bytes(step.run, device=device_of((model, args, kwargs)))

        before = bytes_and_peak()
        on_stage("measuring the fused model", 0.3)
        fuse()
        now = bytes_and_peak()
        on_stage("listing what is saved", 0.6)
        reset_random()
        with tracker.tracking():
            loss = step.forward()
        found = count(loss, exclude=[buffers, model, args, kwargs], module_of=tracker.module_of)
        del loss
        on_stage("timing steps", 0.7)
        times = step_times(step, [unfuse, fuse], reset_random) if is_timed else None
    on_stage("done", 1.0)
    return {
        "spared": _rows(found.spared, lambda value: "output saved" if value.by_output else "replayed"),
        "kept": _largest(_rows(found.kept, _because)),
        "saved_bytes": (before[0], now[0]),
        "peak_bytes": (before[1], now[1]),
        "step_ms": None if times is None else (times[0], times[1]),
        "notes": notes,
    }


def _rows(values: Iterable[Spared] | Iterable[Kept], how: Callable[[Any], str]) -> tuple[Row, ...]:
    """The values in groups of those that are alike but for the numbers in their modules' paths."""
    groups: dict[Any, list[Any]] = {}
    for value in values:
        modules = tuple(map(pattern_of, dict.fromkeys(value.modules)))
        groups.setdefault((value.made_by, tuple(dict.fromkeys(value.read_by)), modules, how(value)), []).append(value)
    rows = [
        Row(
            len(members),
            _call(made_by),
            tuple(dict.fromkeys(map(_call, readers))),
            tuple(dict.fromkeys(path for member in members for path in member.modules)),
            sum(member.nbytes for member in members),
            text,
        )
        for (made_by, readers, _, text), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _largest(rows: Sequence[Row]) -> tuple[Row, ...]:
    left = (1 - LISTED) * sum(row.nbytes for row in rows)
    smaller = list(rows)
    while smaller and smaller[-1].nbytes <= left:
        left -= smaller.pop().nbytes
    return tuple(smaller)


@functools.cache
def _call(node: str | None) -> str:
    """The call of a node: native_layer_norm of NativeLayerNormBackward0."""
    if node is None:
        return "input or mask"
    name = node.partition("Backward")[0]
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _because(value: Kept) -> str:
    """Why a value stays."""
    if value.nbytes < LEAST_BYTES:
        return "it is small"
    if value.made_by is None:
        return "no gradient: input or mask"
    if value.made_by == "BiasActBackward":
        return "backward reads this output"
    if value.made_by in TABLE or value.made_by in RESULTS or value.made_by in ("GateActBackward", "RmsNormBackward"):
        return "its operands are not saved"
    return "no single pass makes it"
