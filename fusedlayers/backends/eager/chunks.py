"""Large tensors, walked in chunks, so that the temporaries of a function of several operations stay small.

Temporaries are made once and lent to every chunk (``scratch``): memory that is allocated anew is handed out page by
page, which takes as long as five of these operations, and is in no cache.

Each operation is a pass, and ends with a meeting of torch's threads. On an idle machine that costs 5 us. Where another
program holds one of the cores it costs milliseconds, several hundred times a layer: a backward pass of 0.1 s then took
4 s. So a short chunk, which torch leaves to one thread, is timed against a long one, and whichever took less time per
element goes on. The result does not depend on it.

(Handing short chunks to Python threads of our own was slower than either: they contend for the GIL.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

#: What torch leaves to the calling thread (``at::internal::GRAIN_SIZE``): 128 KiB of float32, which stays in its cache.
SHORT = 1 << 15
#: A long chunk is this part of the tensor, so that a few temporaries are well below one hidden-sized buffer, but gives
#: every thread at least ``SHORT`` elements (with fewer torch would use fewer threads, and changing their number takes
#: it 30 us) and at most four times that (the temporaries then fit a core's cache).
PARTS = 16
LONG_PER_THREAD = 4 * SHORT
#: Where a long chunk took this many times as long, per element, none is tried for so many seconds.
MUCH_SLOWER = 3.0
RESPITE_SECONDS = 2.0

_busy_until = 0.0  # by time.perf_counter


class Chunkwise(NamedTuple):
    """A function of a chunk, and the dtypes of the temporaries that it takes after it."""

    function: Callable[..., Tensor]
    scratch: tuple[torch.dtype, ...] = ()


def for_each(job: Callable[..., object], *tensors: Tensor, scratch: Iterable[torch.dtype] = ()) -> None:
    """Call ``job`` with corresponding chunks of the tensors, which are dense and laid out alike.

    After the chunks ``job`` gets a temporary of a chunk's length for each dtype in ``scratch``, its contents undefined.
    """
    flat = [_flat(tensor) for tensor in tensors]
    count = flat[0].numel()
    seconds = {SHORT: 0.0}  # per element, as last measured; 0 to be tried
    threads = torch.get_num_threads()
    global _busy_until
    long = max(2 * threads * SHORT, min(threads * LONG_PER_THREAD, count // PARTS // SHORT * SHORT))
    if 1 < threads and 2 * SHORT < count and time.perf_counter() > _busy_until:
        seconds[long] = 0.0
    flat[0].new_empty(8 * max(seconds))
    buffers = [flat[0].new_empty(min(count, max(seconds)), dtype=dtype) for dtype in scratch]
    start = 0
    while start < count:
        size = min(seconds, key=seconds.__getitem__)
        length = min(size, count - start)
        began = time.perf_counter()
        job(*(tensor[start : start + length] for tensor in flat), *(buffer[:length] for buffer in buffers))
        ended = time.perf_counter()
        seconds[size] = (ended - began) / length
        if size == long and seconds[long] > MUCH_SLOWER * seconds[SHORT]:
            _busy_until = ended + RESPITE_SECONDS
        start += length


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
