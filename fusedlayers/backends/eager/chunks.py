"""Large tensors, walked in chunks, so that the temporaries of a function of several operations stay small.

Each operation is a pass, and ends with a meeting of torch's threads. On an idle machine that costs 5 us. Where another
program holds one of the cores it costs milliseconds, several hundred times a layer: a backward pass of 0.1 s then took
4 s. So a short chunk, which torch leaves to one thread, is timed against a long one, and whichever took less time per
element goes on. The result does not depend on it.

(Handing short chunks to Python threads of our own was slower than either: they contend for the GIL.)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

#: What torch leaves to the calling thread (``at::internal::GRAIN_SIZE``): 128 KiB of float32, which stays in its cache.
SHORT = 1 << 15
#: A long chunk is this part of the tensor, so that a few temporaries are well below one hidden-sized buffer, within
#: bounds: at least two threads' work, at most what caches hold. (2^19 to 2^20 was best at 2 and 4 threads of a Zen 4.)
PARTS = 16
SHORTEST_LONG, LONGEST = 1 << 16, 1 << 20
#: Where a long chunk took this many times as long, per element, none is tried for so many seconds.
MUCH_SLOWER = 3.0
RESPITE_SECONDS = 2.0

_busy_until = 0.0  # by time.perf_counter


def for_each(job: Callable[..., object], *tensors: Tensor) -> None:
    """Call ``job`` with corresponding chunks of the tensors, which are dense and laid out alike."""
    flat = [_flat(tensor) for tensor in tensors]
    count = flat[0].numel()
    if torch.get_num_threads() == 1 or count <= SHORTEST_LONG:
        for chunks in zip(*(tensor.split(SHORT) for tensor in flat), strict=True):
            job(*chunks)
        return

    long = min(LONGEST, max(SHORTEST_LONG, count // PARTS // SHORT * SHORT))
    global _busy_until
    seconds = {SHORT: 0.0}  # per element, as last measured; 0 to be tried
    if time.perf_counter() > _busy_until:
        seconds[long] = 0.0
    start = 0
    while start < count:
        size = min(seconds, key=seconds.__getitem__)
        began = time.perf_counter()
        job(*(tensor[start : start + size] for tensor in flat))
        ended = time.perf_counter()
        seconds[size] = (ended - began) / min(size, count - start)
        if size == long and seconds[long] > MUCH_SLOWER * seconds[SHORT]:
            _busy_until = ended + RESPITE_SECONDS
        start += size


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
