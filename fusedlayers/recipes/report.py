"""What ``fuse`` returns: bytes and peaks before and after, and by which values they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..utils.progress import OnStage
from ..utils.reports import Report


@dataclass(frozen=True)
class FuseReport(Report):
    """What ``fuse`` returns; ``str()`` is a table.

    Attributes:
        name: of the model's class.
        exact: whether PyTorch's own nodes compute everything.
        notes: what to know of the report itself.
    """

    name: str
    exact: bool
    notes: tuple[str, ...] = ()


def measured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    exact: bool,
    time: bool,
    attach: Callable[[nn.Module, bool], tuple[str, ...]],
    detach: Callable[[nn.Module], None],
    on_stage: OnStage,
) -> FuseReport:
    """Fuse the model, and measure it before and after."""
    return FuseReport(type(model).__name__, exact, attach(model, exact))
