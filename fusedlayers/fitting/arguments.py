"""What is checked before a model is measured, and the budget that was meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from torch import nn

from ..fusion.example import check_model, does_not_run
from ..profiling.step import Step
from ..validation import budget_from
from .training import Of


def check_arguments(
    step: Step, memory_budget_bytes: object, fraction: object, of: object, on_stage: object
) -> tuple[nn.Module, Callable[[int], int]]:
    """Raise where the model is none, or where there is not one budget that makes sense.

    Returns:
        the model; and the budget, as a function of the bytes that the model takes as it is.
    """
    function = step.function
    check_model(function, step.model)
    assert isinstance(step.model, nn.Module)
    if (memory_budget_bytes is None) == (fraction is None):
        given = "neither" if fraction is None else "both"
        raise ValueError(f"{function}: give one of memory_budget_bytes and fraction, got {given}")
    allowed = _budget(function, memory_budget_bytes) if fraction is None else _part(function, fraction)
    if of not in get_args(Of):
        raise ValueError(f"{function}: of must be one of {', '.join(map(repr, get_args(Of)))}, got {of!r}")
    if on_stage is not None and not callable(on_stage):
        raise TypeError(
            f"{function}: on_stage must be a function of a text and a number, such as print, got {on_stage!r}"
        )
    step.check_loss()
    return step.model, allowed


def _budget(function: str, memory_budget_bytes: object) -> Callable[[int], int]:
    budget = budget_from(function, memory_budget_bytes)
    return lambda taken: budget


def _part(function: str, fraction: object) -> Callable[[int], int]:
    hint = ""
    if isinstance(fraction, int | float) and not isinstance(fraction, bool):
        if 0 < fraction <= 1:
            return lambda taken: math.floor(fraction * taken)
        if 1 < fraction <= 100:
            hint = f"; {fraction:g} % are fraction={fraction / 100:g}"
    raise ValueError(f"{function}: fraction must be a number above 0 and at most 1, got {fraction!r}{hint}")


def readable(error: Exception, function: str, args: tuple[Any, ...] = ()) -> Exception:
    """An error of ours as it is, of the user's code as one of ours."""
    text = str(error)
    if isinstance(error, ValueError) and text.startswith((f"{function}: ", "memory_report: ")):
        return ValueError(text.replace("memory_report: ", f"{function}: ", 1))
    return does_not_run(function, error, args)
