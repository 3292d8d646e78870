"""What is checked before a model is measured, and the budget that was meant."""

from __future__ import annotations

import math
from typing import Any, get_args

from torch import nn

from ..fusion.example import check_model, does_not_run
from ..profiling.step import Step
from ..validation import budget_from
from .training import Of


def check_arguments(
    step: Step, memory_budget_bytes: object, fraction: object, of: object, on_stage: object
) -> nn.Module:
    """Return the model; raise where it is none, or where there is not one budget that makes sense."""
    function = step.function
    check_model(function, step.model)
    assert isinstance(step.model, nn.Module)
    if (memory_budget_bytes is None) == (fraction is None):
        given = "neither" if fraction is None else "both"
        raise ValueError(f"{function}: give one of memory_budget_bytes and fraction, got {given}")
    if memory_budget_bytes is not None:
        budget_from(function, memory_budget_bytes)
    if fraction is not None and not (
        isinstance(fraction, int | float) and not isinstance(fraction, bool) and 0 < fraction <= 1
    ):
        hint = ""
        if isinstance(fraction, int | float) and 1 < fraction <= 100:
            hint = f"; {fraction:g} % are fraction={fraction / 100:g}"
        raise ValueError(f"{function}: fraction must be a number above 0 and at most 1, got {fraction!r}{hint}")
    if of not in get_args(Of):
        raise ValueError(f"{function}: of must be one of {', '.join(map(repr, get_args(Of)))}, got {of!r}")
    if on_stage is not None and not callable(on_stage):
        raise TypeError(
            f"{function}: on_stage must be a function of a text and a number, such as print, got {on_stage!r}"
        )
    step.check_loss()
    return step.model


def allowed_bytes(step: Step, memory_budget_bytes: int | str | None, fraction: float | None, taken: int) -> int:
    """The budget, for a model that takes so much as it is."""
    if fraction is not None:
        return math.floor(fraction * taken)
    return budget_from(step.function, memory_budget_bytes)


def readable(error: Exception, function: str, args: tuple[Any, ...] = ()) -> Exception:
    """An error of ours as it is, of the user's code as one of ours."""
    text = str(error)
    if isinstance(error, ValueError) and text.startswith((f"{function}: ", "memory_report: ")):
        return ValueError(text.replace("memory_report: ", f"{function}: ", 1))
    return does_not_run(function, error, args)
