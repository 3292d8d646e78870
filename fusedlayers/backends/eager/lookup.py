"""Tables, looked up by an index for each element."""

from __future__ import annotations

import torch
from torch import Tensor

#: ``index_select`` works on one thread, ``take`` on all of them, but at half the speed and with 64-bit indices.
THREADS_FOR_TAKE = 4


def scratch() -> list[torch.dtype]:
    """What ``lookup`` needs besides its arguments."""
    return [] if torch.get_num_threads() < THREADS_FOR_TAKE else [torch.int64]


def lookup(table: Tensor, index: Tensor, *temporaries: Tensor, out: Tensor) -> Tensor:
    """``table[index]`` for 1-d tensors, ``index`` int32; ``temporaries`` as ``scratch`` says."""
    if not temporaries:
        return torch.index_select(table, 0, index, out=out)
    (wide,) = temporaries
    return torch.take(table, wide.copy_(index), out=out)
