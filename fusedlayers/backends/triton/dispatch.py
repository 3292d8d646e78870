"""Which kernels a matmul and its activation get: the vendor's matmul and a pass after it, or ours with an epilogue.

Neither always wins. The pass costs relatively more the shorter the inner dimension is, and the lead of a vendor's
matmul over ours varies. A training step never measures that: processes that train together, and runs that are
continued, must take the same kernels. So the table ``RULES`` decides, which is the same everywhere; and before it a
file, if ``fusedlayers tune`` has written one for this device and these versions (``tuning.py``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from .. import gpu_settings

_log = logging.getLogger(__name__)

#: The vendor's matmul and an elementwise kernel after it: always a candidate, and the first.
LIBRARY = "library"
#: Multiplications below which a launch takes as long as all the rest.
SMALL = 1 << 31
#: Scratch rows, at most: a few waves of tiles, by which longer matrices run as fast.
MOST_ROWS = 1 << 14

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

    @classmethod
    def parse(cls, text: str) -> Question:
        """The question that ``str`` has written.

        Raises:
            ValueError: it is none.
        """
        *role, activation, dtype, sizes = text.split(" ")
        rows, columns, inner = map(int, sizes.split("x"))
        found = getattr(torch, dtype, None)
        if not role or not isinstance(found, torch.dtype):
            raise ValueError(text)
        return cls(" ".join(role), activation, found, rows, columns, inner)


class Rule(NamedTuple):
    """Where the last candidate, a matmul with an epilogue, is taken although nobody has tuned."""

    #: As in ``gemm.TILINGS``.
    architecture: str
    itemsize: int
    most_inner: int


#: Empty: on an H100 (torch 2.11, Triton 3.6, bfloat16) the vendor's matmul and a pass after it took less time than the
#: best epilogue in 10 of 12 layers and gradients of models, the same in one, and 3 % more in one (``bench matmul``).
RULES: tuple[Rule, ...] = ()

BY_RULE = "matmuls by rule"

Times = dict[str, float | None]
"""Microseconds for each candidate; None for those that fail, or are wrong."""


class Choice(NamedTuple):
    """What was measured, and which candidate was chosen."""

    candidate: str
    times_us: Times

    def __str__(self) -> str:
        known = {name: time for name, time in self.times_us.items() if time is not None}
        ratios = {name: time / known[LIBRARY] for name, time in known.items() if name != LIBRARY}
        if self.candidate != LIBRARY:
            return f"{self.candidate} (tuned: {ratios[self.candidate]:.2f}x the library's time)"
        return f"{LIBRARY} (tuned: " + (f"the next takes {min(ratios.values()):.2f}x its time)" if ratios else "alone)")


def is_settled(device: torch.device) -> bool:
    """Whether all products are the library's: nobody need ask."""
    return not (RULES or _asked or (gpu_settings.allowed() == "tuned" and tuned(device)))


def choose(question: Question, device: torch.device, job: Job) -> str:
    """The candidate for a job."""
    choices = tuned(device) if gpu_settings.allowed() == "tuned" else {}
    if question.rows * question.columns * question.inner < SMALL:
        return LIBRARY
    candidates = job.candidates
    if len(candidates) == 1:
        return LIBRARY
    general = question.in_general
    for ask in _asked:
        ask(general, device, job)
    choice = choices.get(general)
    if choice is not None and choice.candidate in candidates:
        return choice.candidate
    return by_rule(general, device, candidates)


def by_rule(question: Question, device: torch.device, candidates: Sequence[str]) -> str:
    """The choice without measurements."""
    here = architecture(device)
    for rule in RULES:
        is_met = rule.architecture == here and rule.itemsize == question.dtype.itemsize
        if is_met and question.inner <= rule.most_inner:
            return candidates[-1]
    return LIBRARY


def architecture(device: torch.device) -> str:
    """The compute capability's first number, or "cdna"; "" for AMD's other GPUs, and what is no GPU."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "cdna" if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx9") else ""
    return str(torch.cuda.get_device_capability(device)[0])


def answers_for(activation: str, columns: int, inner: int, device: torch.device) -> list[str]:
    """Lines for people: what was tuned for an activation and a weight of these sizes; else, that the rule decides."""
    if gpu_settings.allowed() != "tuned":
        return [BY_RULE]
    found = []
    for question, choice in tuned(device).items():
        if question.activation == activation and {question.columns, question.inner} == {columns, inner}:
            dtype = str(question.dtype).removeprefix("torch.")
            found.append(f"{question.role}, up to {question.rows} rows of {dtype}: {choice}")
    return sorted(found) or [f"{BY_RULE}, nothing is tuned"]


def tf32_is_allowed() -> bool:
    """The kernels multiply float32 as TF32, or not at all."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


#: Who wants to know what is asked: ``tuning.py``, for as long as it measures.
_asked: list[Callable[[Question, torch.device, Job], None]] = []


@contextmanager
def asking(ask: Callable[[Question, torch.device, Job], None]) -> Iterator[None]:
    """``ask`` is called with each question, before it is answered."""
    _asked.append(ask)
    try:
        yield
    finally:
        _asked.remove(ask)


# --- what was tuned ---------------------------------------------------------------------------------------------------


@functools.cache
def tuned(device: torch.device) -> Mapping[Question, Choice]:
    """What the file says, which is read once; nothing where there is none, or it is of no use."""
    path = tuned_path(device)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = dict(content["about"])
        choices = {Question.parse(text): _choice(entry) for text, entry in content["choices"].items()}
    except FileNotFoundError:
        if gpu_settings.FILE_VARIABLE in os.environ:
            _log.warning("%s, which %s names, is not there: run fusedlayers tune", path, gpu_settings.FILE_VARIABLE)
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("%s cannot be read (%s), and is not used: run fusedlayers tune", path, type(error).__name__)
        return {}
    here = about_device(device)
    differing = [f"{name} {about.get(name)}, here {value}" for name, value in here.items() if about.get(name) != value]
    if differing:
        _log.warning("%s is not used, for it was tuned with %s: run fusedlayers tune", path, "; ".join(differing))
        return {}
    return choices


def _choice(entry: Any) -> Choice:
    """The entry of a file, if somebody has measured that."""
    times = {str(name): time for name, time in entry["times_us"].items()}
    if times[LIBRARY] is None or times[entry["candidate"]] is None:
        raise ValueError
    if not all(time is None or (type(time) in (int, float) and 0 < time < math.inf) for time in times.values()):
        raise ValueError
    return Choice(entry["candidate"], times)


def about_device(device: torch.device) -> dict[str, Any]:
    """What measurements hold for."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "kernels": _digest(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
    }


def tuned_path(device: torch.device) -> Path | None:
    """The file for a device; None where there is no home folder."""
    if named := os.environ.get(gpu_settings.FILE_VARIABLE):
        return Path(named)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedlayers"
    except RuntimeError:
        return None
    return folder / f"tuned-{_digest(json.dumps(about_device(device)).encode())}.json"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
