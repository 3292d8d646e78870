"""Which kernels a matmul and its activation get: the vendor's matmul and a pass after it, or ours with an epilogue.

Idea: neither always wins. The pass costs relatively more the shorter the inner dimension is, and the lead of a vendor's
matmul over ours varies. So all candidates are timed on first use, on scratch numbers; never on the caller's, which some
of them overwrite. A candidate whose results differ from the vendor's is ruled out. Times are cached for the device, the
dtype, the activation and the sizes (rows by powers of two), and on disk for the next process.

Cost: at most ``ROUNDS`` times ``CALLS`` runs of each candidate on up to ``MOST_ROWS`` rows, once. Limits: two processes
may time differently, choose differently, and then round differently. So nothing is timed where torch is asked for
deterministic algorithms, nor while a CUDA graph is captured: there a rule decides, from published figures.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from ..._torch import gpu_sleep

_log = logging.getLogger(__name__)

#: The vendor's matmul and an elementwise kernel after it: always a candidate, and the first.
LIBRARY = "library"
#: Multiplications below which a launch takes as long as all the rest.
SMALL = 1 << 31
#: Scratch rows, at most: a few waves of tiles, by which longer matrices run as fast.
MOST_ROWS = 1 << 14
#: The time is the median of so many samples, of so many calls each.
ROUNDS, CALLS = 7, 3
#: How far results may be from the vendor's, in units of rounding (of TF32 for float32): all of them, and any row, by
#: their norms.
UNITS, ROW_UNITS = 4, 16

Run = Callable[[str], Sequence[Tensor]]
"""Runs a candidate on scratch numbers, and returns its results."""


class Job(Protocol):
    """A computation for which there are several candidates."""

    @property
    def candidates(self) -> Sequence[str]:
        """Their names, first ``LIBRARY``."""
        ...

    def scratch(self, rows: int) -> Run:
        """The same on so many rows of other numbers."""
        ...


class Question(NamedTuple):
    """What is decided: kernels for ``f((rows, inner) @ (inner, columns))``, or for its gradient."""

    role: str
    activation: str
    dtype: torch.dtype
    rows: int
    columns: int
    inner: int

    @property
    def in_general(self) -> Question:
        """The same for all rows that share its answer."""
        rows = min(MOST_ROWS, 1 << max(0, self.rows - 1).bit_length())
        return self._replace(rows=rows)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.role} {self.activation} {dtype} {self.rows}x{self.columns}x{self.inner}"


Times = dict[str, float | None]
"""Microseconds for each candidate; None for those that fail, or are wrong."""


class Answer(NamedTuple):
    candidate: str
    because: str

    def __str__(self) -> str:
        return f"{self.candidate} ({self.because})"


def choose(question: Question, device: torch.device, job: Job) -> str:
    """The candidate for a job."""
    if question.rows * question.columns * question.inner < SMALL:
        return LIBRARY
    candidates = job.candidates
    if len(candidates) == 1:
        return LIBRARY
    if torch.are_deterministic_algorithms_enabled():
        return by_rule(question, device, candidates)
    question = question.in_general
    answers = _answers(device)
    if (answer := answers.get(question)) is None:
        if _is_capturing(device):
            return by_rule(question, device, candidates)
        answer = answers[question] = _measured(question, device, job)
        _log.info("%s on %s: %s", question, _name(device), answer)
    return answer.candidate if answer.candidate in candidates else LIBRARY


def answers_for(activation: str, columns: int, inner: int, device: torch.device) -> list[str]:
    """Lines for people: what this process has chosen for an activation and a weight of these sizes."""
    found = []
    for question, answer in _answers(device).items():
        if question.activation == activation and {question.columns, question.inner} == {columns, inner}:
            dtype = str(question.dtype).removeprefix("torch.")
            found.append(f"{question.role}, up to {question.rows} rows of {dtype}: {answer}")
    return sorted(found)


def by_rule(question: Question, device: torch.device, candidates: Sequence[str]) -> str:
    """The choice without measurements. A pass over memory costs 467 / inner of a 16-bit matmul's time on an H100, and
    persistent kernels that fetch by the copy engine are reported at 0.88 to 0.97 of the vendor's speed: up to an inner
    dimension of 1024 that is a gain in any case. For other GPUs there are no such figures."""
    is_known = device.type == "cuda" and torch.version.hip is None
    is_known = is_known and torch.cuda.get_device_capability(device)[0] in (9, 10)
    if is_known and question.dtype.itemsize == 2 and question.inner <= 1024:
        return candidates[-1]
    return LIBRARY


def tf32_is_allowed() -> bool:
    """The kernels multiply float32 as TF32, or not at all."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(question: Question, device: torch.device, job: Job) -> Answer:
    candidates = job.candidates
    remembered = _Remembered.of(device)
    times = remembered.get(str(question))
    if times is None or not set(candidates) <= set(times):
        try:
            with _on(device):
                times = _time_all(job.scratch(question.rows), candidates, question.dtype)
        except torch.OutOfMemoryError:
            return Answer(by_rule(question, device, candidates), "by rule: no memory was left to measure")
        remembered.put(str(question), times)
    best = min(candidates, key=lambda candidate: _or_never(times[candidate]))
    ratio = _or_never(times[best]) / _or_never(times[LIBRARY])
    if best == LIBRARY:
        others = [_or_never(times[c]) / _or_never(times[LIBRARY]) for c in candidates[1:]]
        return Answer(LIBRARY, f"measured: the next takes {min(others):.2f}x its time")
    return Answer(best, f"measured: {ratio:.2f}x the library's time")


def _or_never(time_us: float | None) -> float:
    return math.inf if time_us is None else time_us


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
            times[candidate].append(_time(lambda candidate=candidate: run(candidate)))  # type: ignore[misc]
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
    return start.elapsed_time(end) * 1e3 / CALLS


def _is_capturing(device: torch.device) -> bool:
    with _on(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on(device: torch.device) -> Any:
    """Events and streams are the current device's, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# --- remembering ------------------------------------------------------------------------------------------------------


@functools.cache
def _answers(device: torch.device) -> dict[Question, Answer]:
    return {}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def cache_folder() -> Path:
    """Where times are kept.

    Raises:
        RuntimeError: there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedlayers"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class _Remembered:
    """Times on disk, for one device and one set of versions."""

    def __init__(self, device: torch.device) -> None:
        self.path: Path | None
        self.about = {
            "device": _name(device),
            "kernels": _digest(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda or torch.version.hip,
        }
        try:
            folder = cache_folder()
        except RuntimeError as error:
            _log.info("times of matmuls are not kept for the next process: %s", error)
            self.path = None
        else:
            self.path = folder / f"matmuls-{_digest(json.dumps(self.about).encode())}.json"
        self.times = self._read()

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> _Remembered:
        return _Remembered(device)

    def get(self, question: str) -> Times | None:
        return self.times.get(question)

    def put(self, question: str, times: Times) -> None:
        # Other processes write too. What one of them adds between reading and writing is lost, and measured again.
        self.times = {**self._read(), **self.times, question: times}
        if self.path is None:
            return
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**self.about, "times_us": self.times}, indent=1), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            _log.info("times of matmuls are not kept for the next process: %s", error)
            with suppress(OSError):
                temporary.unlink()

    def _read(self) -> dict[str, Times]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))["times_us"] if self.path is not None else {}
            return {question: times for question, times in found.items() if _are_times(times)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # none yet, or broken
            return {}


def _are_times(times: Any) -> bool:
    """Whether somebody has measured that."""
    if not isinstance(times, dict) or times.get(LIBRARY) is None:
        return False
    return all(t is None or (type(t) in (int, float) and 0 < t < math.inf) for t in times.values())
