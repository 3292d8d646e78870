"""What is checked before a model is measured, and the budget that was meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, get_args

from torch import nn

from ..profiling.step import Step
from ..utils.example import check_model, does_not_run
from ..utils.formatting import percent_from
from ..validation import budget_from
from .training import Of


def check_arguments(
    step: Step, memory_budget_bytes: object, fraction: object, of: object
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
    step.check_loss()
    return step.model, allowed


def _budget(function: str, memory_budget_bytes: object) -> Callable[[int], int]:
    share = None if isinstance(memory_budget_bytes, Integral) else _share(memory_budget_bytes)
    if share is not None and 0 < share <= 1:
        raise ValueError(
            f"{function}: memory_budget_bytes must be bytes, got {memory_budget_bytes!r}; for a part of what the model "
            f"takes write fraction={share:g}"
        )
    budget = budget_from(function, memory_budget_bytes)
    return lambda taken: budget


def _part(function: str, fraction: object) -> Callable[[int], int]:
    share = None if isinstance(fraction, str) else _share(fraction)
    if share is not None and 0 < share <= 1:
        return lambda taken: math.floor(share * taken)
    raise ValueError(f"{function}: fraction must be a number above 0 and at most 1 (30 % are 0.3), got {fraction!r}")


def _share(value: object) -> float | None:
    """A number, or what a percentage such as "30%" says; None of other things."""
    if isinstance(value, str):
        percent = percent_from(value)
        return None if percent is None else percent / 100
    try:
        return None if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.inf


def readable(error: Exception, function: str, args: tuple[Any, ...] = ()) -> Exception:
    """An error of ours as it is, of the user's code as one of ours."""
    text = str(error)
    if isinstance(error, ValueError) and text.startswith((f"{function}: ", "memory_report: ")):
        return ValueError(text.replace("memory_report: ", f"{function}: ", 1))
    return does_not_run(function, error, args)
