"""Tables, looked up by an index for each element."""

from __future__ import annotations

import torch
from torch import Tensor


def scratch() -> tuple[torch.dtype, ...]:
    """The temporaries that ``lookup`` takes."""
    return (torch.int64,) if _on_all_threads() else ()


def lookup(table: Tensor, index: Tensor, *temporaries: Tensor, out: Tensor) -> Tensor:
    """``table[index]`` for 1-d tensors, ``index`` int32; ``temporaries`` as ``scratch`` says."""
    if not temporaries:
        return torch.index_select(table, 0, index, out=out)
    (wide,) = temporaries
    return torch.take(table, wide.copy_(index), out=out)


def _on_all_threads() -> bool:
    # take works on all of torch's threads, but at a third of index_select's speed and with 64-bit indices. index_select
    # works on one: already with two its operands come out of the other's cache, which can double its time.
    return torch.get_num_threads() > 1
