"""Large tensors, walked in chunks, so that the temporaries of a function of several operations stay small."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...utils.layout import Layout

#: A chunk is this part of the tensor, so that a few temporaries are well below one hidden-sized buffer, within limits:
#: with fewer elements a call takes longer than what it computes, with more the temporaries do not fit a core's cache.
PARTS = 16
LEAST, MOST = 1 << 15, 1 << 18
#: The elements of a block for each thread; with fewer torch would use fewer threads.
PER_THREAD = 1 << 17
#: Chunks are multiples of this. Vectorised and scalar code round differently, and what is left over for the latter is
#: then the same however the tensor was cut up.
VECTOR = 64


def for_each(function: Callable[..., object], *tensors: Tensor) -> None:
    """Call ``function`` with corresponding chunks of the tensors, which are dense and laid out alike."""
    count = tensors[0].numel()
    flat = [tensor.as_strided((count,), (1,)) for tensor in tensors]  # all elements in the order of memory
    size = max(LEAST, min(MOST, count // PARTS)) // VECTOR * VECTOR
    for start in range(0, count, size):
        function(*(tensor[start : start + size] for tensor in flat))


def blocks(layout: Layout) -> Iterator[tuple[slice, slice, slice]]:
    """The parts, contiguous in memory, in which a tensor is walked where sums are taken. Fixed boundaries keep the
    order of summation deterministic, and so the rounding. Blocks are long, because each takes many operations."""
    outer, channels, inner = layout
    size = torch.get_num_threads() * PER_THREAD
    of_outer = max(1, size // (channels * inner))
    of_channels = max(1, min(channels, size // inner))
    of_inner = min(inner, size)
    for i in range(0, outer, of_outer):
        for j in range(0, channels, of_channels):
            for k in range(0, inner, of_inner):
                yield slice(i, i + of_outer), slice(j, j + of_channels), slice(k, k + of_inner)
