"""The plans of a call: what it decides is noted, as if nothing had been decided before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

from fusedlayers import functional
from fusedlayers.calls import plan
from fusedlayers.utils.caching import BoundedCache


def plans_of(function: Callable[..., Any], *args: Any, compiled: bool = False, **kwargs: Any) -> list[Any]:
    """In order: that of a block, and those of its layers where these decide. ``compiled``: as ``torch.compile`` sees
    the call."""
    found: list[Any] = []
    if compiled:  # dynamo keeps what it finds as ``torch.compiler.is_compiling`` when it is imported
        importlib.import_module("fusedlayers.ops.compiled_act")

    def noting(decide: Callable[..., Any]) -> Callable[..., Any]:
        def decided(*arguments: Any) -> Any:
            made, *rest = decide(*arguments)
            found.append(made)
            return made, *rest

        return decided

    with (
        mock.patch.object(plan, "_plans", BoundedCache(64)),
        mock.patch.object(plan, "plan_for", noting(plan.plan_for)),
        mock.patch.object(functional, "plan_for", noting(functional.plan_for)),
        mock.patch("torch.compiler.is_compiling", return_value=True) if compiled else nullcontext(),
    ):
        function(*args, **kwargs)
    return found
