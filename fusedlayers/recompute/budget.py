"""The budget that a user gives, and the errors of budgets that make no sense or cannot be met."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple, get_args

from ..reports.step import Step
from ..utils.example import check_model
from ..utils.formatting import size_from, size_text
from ..validation import is_whole
from .steps import Of


class Budget(NamedTuple):
    """Bytes, or a part of what the model takes as it is; and the text that was given."""

    text: str
    bytes: int | None
    fraction: float

    def allowed(self, taken: int) -> int:
        """The bytes, where the model takes so many."""
        return math.floor(self.fraction * taken) if self.bytes is None else self.bytes


def check_arguments(step: Step, memory_budget_bytes: object, fraction: object, of: object) -> Budget:
    """The budget. Raises where the model is none, or where there is not one budget that makes sense."""
    check_model(function := step.function, step.model)
    if (memory_budget_bytes is None) == (fraction is None):
        both = "neither" if fraction is None else "both"
        raise ValueError(f"{function}: give one of memory_budget_bytes and fraction, got {both}")
    if of not in get_args(Of):
        raise ValueError(f"{function}: of must be one of {', '.join(map(repr, get_args(Of)))}, got {of!r}")
    step.check_loss()
    if fraction is None:
        return Budget(f"memory_budget_bytes={memory_budget_bytes!r}", budget_from(function, memory_budget_bytes), 1.0)
    if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < float(fraction) <= 1:
        raise ValueError(f"{function}: fraction must be above 0 and at most 1 (30 % are 0.3), got {fraction!r}")
    return Budget(f"fraction={fraction!r}", None, float(fraction))


def budget_from(function: str, memory_budget_bytes: object) -> int:
    """The bytes that a number, or a size such as "8GiB", says.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(memory_budget_bytes, str):
        try:
            return size_from(memory_budget_bytes)
        except ValueError as error:
            raise ValueError(f"{function}: memory_budget_bytes: {error}") from None
    if not is_whole(memory_budget_bytes) or memory_budget_bytes < 0:
        raise ValueError(
            f'{function}: memory_budget_bytes must be a number of bytes, 0 or more, or a size such as "8GiB", got '
            f"{memory_budget_bytes!r}"
        )
    return int(memory_budget_bytes)


def unmet(function: str, budget: Budget, of: Of, taken: int | None, least: int, way: str) -> ValueError:
    """The error of a budget that is too small. ``taken``: by the model as it is; ``way``: how it takes least."""
    verb = "saves" if of == "saved" else "allocates"
    as_it_is = "" if taken is None else f"as it is the model {verb} {size_text(taken)}, "
    part = "" if taken is None else f", fraction={math.ceil(1e4 * least / taken) / 1e4:g}"
    return ValueError(
        f"{function}: {budget.text} ({size_text(budget.allowed(taken or 0))}) cannot be met: {as_it_is}{way} it {verb} "
        f"{size_text(least)} ({least} bytes{part}); ask for that, or pass a smaller batch"
    )
