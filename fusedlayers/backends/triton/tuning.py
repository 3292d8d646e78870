"""Measures the candidates for the matmuls that a model asks for, and writes down which is the fastest.

Idea: while a session is open, each new question (``dispatch.choose``) is measured where it is asked, on scratch numbers
and never on the caller's, which some candidates overwrite. A candidate is taken if its results are the library's, and
it takes at most ``WIN`` of its time. What is chosen is written to a file at the end, and used from then on.

Cost: ``ROUNDS`` times ``CALLS`` runs of each candidate on up to ``dispatch.MOST_ROWS`` rows, and scratch memory, at
most a half of what is free.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._torch import gpu_sleep
from .. import gpu_settings
from . import dispatch
from .dispatch import LIBRARY, Choice, Job, Question, Run, Times

_log = logging.getLogger(__name__)

#: The time is the median of so many samples, of so many calls each.
ROUNDS, CALLS = 7, 3
#: Of the library's time, at most, for a candidate to be taken: less would be noise.
WIN = 0.97
#: How far results may be from the vendor's, in units of rounding (of TF32 for float32): all of them, and any row, by
#: their norms.
UNITS, ROW_UNITS = 4, 16
#: Rows with which a matmul is still one.
LEAST_ROWS = 256
#: Buffers as wide as the result that a measurement holds, at most: a gated block's gradient on copies, twice.
BUFFERS = 12


class Session:
    """Measures each question that is asked, once.

    Attributes:
        choices: what was found, by device.
        skipped: which questions could not be measured, and why.
    """

    def __init__(self, on_question: Callable[[Question], None] = lambda question: None) -> None:
        self.choices: dict[torch.device, dict[Question, Choice]] = {}
        self.skipped: dict[Question, str] = {}
        self._on_question = on_question

    def ask(self, question: Question, device: torch.device, job: Job) -> None:
        known = self.choices.setdefault(device, {})
        if question in known or question in self.skipped:
            return
        if _is_capturing(device):
            self.skipped[question] = "a CUDA graph is being captured"
            return
        self._on_question(question)
        try:
            with _on(device):
                times = _time_all(job.scratch(_rows(question, device)), job.candidates, question.dtype)
        except torch.OutOfMemoryError:
            self.skipped[question] = "there is no memory to measure it"
            return
        known[question] = Choice(_best(times), times)

    def save(self) -> list[Path]:
        """Write what was found beside what was known, and use it from now on; the files.

        Raises:
            OSError: a file cannot be written.
        """
        paths = []
        for device, choices in self.choices.items():
            path = check_target(device)
            dispatch.tuned.cache_clear()  # others may have written since
            entries = {
                str(question): {"candidate": choice.candidate, "times_us": choice.times_us}
                for question, choice in {**dispatch.tuned(device), **choices}.items()
            }
            _write(path, {"about": dispatch.about_device(device), "choices": entries})
            paths.append(path)
        dispatch.tuned.cache_clear()
        return paths


def check_target(device: torch.device) -> Path:
    """The file for a device.

    Raises:
        OSError: it cannot be written.
    """
    path = dispatch.tuned_path(device)
    if path is None:
        raise OSError(f"tune: there is no home folder; name a file in {gpu_settings.FILE_VARIABLE}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _temporary(path).touch()
        _temporary(path).unlink()
    except OSError as error:
        text = f"tune: {path} cannot be written ({error}); name another file in {gpu_settings.FILE_VARIABLE}"
        raise OSError(text) from error
    return path


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")


def _write(path: Path, content: Any) -> None:
    """Other processes see the whole file, or the one before."""
    temporary = _temporary(path)
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _best(times: Times) -> str:
    library = times[LIBRARY]
    assert library is not None
    found = {candidate: time for candidate, time in times.items() if time is not None and time <= WIN * library}
    return min(found, key=found.__getitem__, default=LIBRARY)


def _rows(question: Question, device: torch.device) -> int:
    """As many as are asked for, or as there is memory for."""
    rows = question.rows
    if device.type != "cuda":
        return rows
    free, _ = torch.cuda.mem_get_info(device)
    row_bytes = (BUFFERS * question.columns + 2 * question.inner) * question.dtype.itemsize
    spare = free // 2 - 2 * question.columns * question.inner * question.dtype.itemsize
    while rows > LEAST_ROWS and rows * row_bytes > spare:
        rows //= 2
    if rows * row_bytes > spare:
        raise torch.OutOfMemoryError
    return rows


def _time_all(run: Run, candidates: Sequence[str], dtype: torch.dtype) -> Times:
    expected = [result.clone() for result in run(LIBRARY)]
    good = [LIBRARY]
    for candidate in candidates[1:]:
        try:
            wrong = _differs(run(candidate), expected, dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler or of the driver: there is another candidate
            _log.warning("a fused matmul (%s) is not used: %s", candidate, error)
            continue
        if wrong is None:
            good.append(candidate)
        else:
            _log.warning(
                "a fused matmul (%s) is not used, for its results differ from the library's %s", candidate, wrong
            )
    times: dict[str, list[float]] = {candidate: [] for candidate in good}
    for number in range(ROUNDS):
        for candidate in good[number % len(good) :] + good[: number % len(good)]:
            times[candidate].append(_time(lambda candidate=candidate: run(candidate)))  # type: ignore[misc]  # a default
    return {c: statistics.median(times[c]) if c in times else None for c in candidates}


def _differs(results: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> str | None:
    unit = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2.0**-10
    for ours, theirs in zip(results, expected, strict=True):
        errors, sizes = [], []
        # A part at a time: nothing as large as the results is made.
        for a, b in zip(
            ours.view(-1, ours.shape[-1]).split(1024), theirs.view(-1, ours.shape[-1]).split(1024), strict=True
        ):
            if not torch.equal(a.isnan(), b.isnan()):
                return "in what is no number"
            a, b = a.float().nan_to_num(), b.float().nan_to_num()
            errors.append((a - b).norm(dim=1))
            sizes.append(b.norm(dim=1))
        error, size = torch.cat(errors), torch.cat(sizes)
        for limit, of_all, of_any in ((UNITS, error.norm(), size.norm()), (ROW_UNITS, error.max(), size.mean())):
            if not float(of_all) <= limit * unit * float(of_any):
                return f"by {float(of_all) / max(float(of_any), 1e-30):.1e} of their norm"
    return None


def _time(function: Callable[[], object]) -> float:
    """Microseconds of a call, on the caller's stream: what it runs there waits, and is not disturbed."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The device is kept busy while Python prepares the launches, whose time does not count.
    gpu_sleep(2_000_000)
    start.record()
    for _ in range(CALLS):
        function()
    end.record()
    end.synchronize()
    time_us: float = start.elapsed_time(end) * 1e3 / CALLS
    return time_us


def _is_capturing(device: torch.device) -> bool:
    with _on(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on(device: torch.device) -> Any:
    """Events and streams are the current device's, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
