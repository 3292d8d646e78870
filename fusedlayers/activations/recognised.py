"""A user's function that computes, operation by operation, what a row of the table does, such as a module of another
library that calls ``F.gelu``: it is that row, with the kernels, the derivatives and the name that it has there."""

from __future__ import annotations

import functools

import torch
from torch.fx import GraphModule

from .capture import capture
from .spec import Activation, named, rows
from .splitting import example_shape, split
from .trace import NotPointwise


def row_of(body: GraphModule, dtype: torch.dtype) -> Activation | None:
    """The activation of the table that a trace for ``dtype`` is of, with the parameters it has by default; or None."""
    return _programs(torch.promote_types(dtype, torch.float32)).get(body.code)


@functools.cache
def _programs(dtype: torch.dtype) -> dict[str, Activation]:
    """The table's functions as traces: as torch has them, and as they are written there."""
    found = {}
    for row in rows():
        activation = named[row.name]
        if row.is_users or activation.is_identity:
            continue
        for function in (activation.plain, activation.function):
            try:
                found[split(capture(function), example_shape((2, 3), ()), dtype).body.code] = activation
            except NotPointwise:
                continue  # a function of torch's that does not trace: nobody's trace is like it
    return found
