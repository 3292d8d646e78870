"""Tables, looked up by an index for each element."""

from __future__ import annotations

import torch
from torch import Tensor

#: ``index_select`` works on one thread, ``take`` on all of them, but at half the speed and with 64-bit indices.
THREADS_FOR_TAKE = 4


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for 1-d tensors, ``index`` int32."""
    if torch.get_num_threads() < THREADS_FOR_TAKE:
        return table.index_select(0, index)
    return table.take(index.to(torch.int64))
