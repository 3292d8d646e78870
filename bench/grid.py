"""Cases that are measured one after the other until the time is up, and the file of what is known by then."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fusedlayers.utils import progress

from . import machine

Case = TypeVar("Case")


def begin(subject: str, device: torch.device, definitions: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """A result without cases yet: what it is of, where and when it was measured, and what its numbers are."""
    return {
        "schema": 1,
        "subject": subject,
        **machine.describe(device),
        "definitions": definitions,
        **more,
        "cases": [],
    }


def until(end: float, todo: Sequence[Case]) -> Iterator[tuple[Case, float, int]]:
    """Each case that can start before ``end``, with the seconds that are left and the cases that share them.

    Shows how far the run has come: by its cases, or by its seconds where these are used up first.
    """
    begun = time.monotonic()
    with progress.shown() as on_stage:
        for number, case in enumerate(todo):
            now = time.monotonic()
            if now >= end:
                return
            on_stage(str(getattr(case, "id", case)), max(number / len(todo), (now - begun) / (end - begun)))
            yield case, end - now, len(todo) - number


def add(result: dict[str, Any], row: dict[str, Any], out: Path | None) -> None:
    """A case is done: it moves from what was not run to the cases, in the file too."""
    result["cases"].append(row)
    result["not_run"].remove(row["id"])
    if out is not None:
        write(result, out)


def failed(error: Exception) -> dict[str, str]:
    """The row of a variant that raised an error, which is a finding too, and no reason to lose the others."""
    first_line, *_ = str(error).strip().splitlines() or ["no message"]
    return {"error": f"{type(error).__name__}: {first_line[:300]}"}


def write(result: dict[str, Any], out: Path) -> None:
    """Write ``out/<subject>.json``, a case a line. It is replaced as a whole, for the process may be stopped."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{result['subject']}.json"
    partial = path.with_suffix(".json.tmp")
    head = json.dumps({**result, "cases": []}, indent=1)
    cases = ",\n".join(f"  {json.dumps(case)}" for case in result["cases"])
    text = head.replace('"cases": []', f'"cases": [\n{cases}\n ]')
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
