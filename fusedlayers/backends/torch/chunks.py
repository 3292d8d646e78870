"""Large tensors, walked in chunks, so that the temporaries of a function of several operations stay small.

Fresh memory is handed out page by page, which takes as long as five of these operations. So temporaries are allocated
once and lent to every chunk, and memory for those that a function allocates itself is reserved (``RESERVE``).

Each operation is a pass, and ends with a barrier of torch's threads. On an idle machine that costs 5 us. Where another
program holds one of the cores it costs milliseconds, several hundred times a layer: a backward pass of 0.1 s then took
4 s. So a short chunk, which torch leaves to one thread, is timed against two long ones (two, because one can be
unlucky), and the length that took less time per element is used from then on. Results do not depend on it.

(Handing short chunks to Python threads of our own was slower than either: they contend for the GIL.)

A tensor of one short chunk, the usual case of small layers, takes none of this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...utils.layout import Layout

#: What torch leaves to the calling thread (``at::internal::GRAIN_SIZE``): 128 KiB of float32, which stays in its cache.
SHORT = 1 << 15
#: A long chunk is this part of the tensor, so that a few temporaries are well below one hidden-sized buffer, but has
#: twice to four times ``SHORT`` elements for each thread: with fewer torch would use fewer threads, and changing their
#: number takes it 30 us; with more the temporaries do not fit a core's cache.
PARTS = 16
LEAST_PER_THREAD, MOST_PER_THREAD = 2 * SHORT, 4 * SHORT
#: Chunks, and threads' shares of them, are multiples of this. Vectorised and scalar code round differently, and what is
#: left over for the latter is then the same however the tensor was cut up.
VECTOR = 64
#: For a function that makes its own temporaries, memory for this many is taken and given back before the walk. glibc's
#: malloc returns freed blocks to the system, to fetch them anew, until one as large has been freed before.
RESERVE = 6
#: Where long chunks took this many times as long per element, none is tried for so many seconds.
MUCH_SLOWER = 3.0
RESPITE_SECONDS = 1.0

_busy_until = 0.0  # by time.perf_counter


class Chunkwise(NamedTuple):
    """A function of corresponding chunks and temporaries."""

    function: Callable[..., Tensor]
    #: The dtypes of the temporaries that it is lent, their contents undefined.
    scratch: tuple[torch.dtype, ...] = ()
    #: Whether it makes some itself.
    allocates: bool = False
    #: Whether it is lent, last, what ``lookup`` needs.
    looks_up: bool = False


def for_each(job: Chunkwise, *tensors: Tensor) -> None:
    """Call ``job`` with corresponding chunks of the tensors, which are dense and laid out alike."""
    first = tensors[0]
    count = first.numel()
    if first.is_contiguous():
        flat = list(map(torch.flatten, tensors))
    else:  # all elements in the order of memory
        flat = [tensor.as_strided((count,), (1,)) for tensor in tensors]
    scratch = job.scratch if not job.looks_up or torch.get_num_threads() == 1 else (*job.scratch, torch.int64)
    if count > SHORT:
        _walk(job, scratch, flat)
    elif count:
        for dtype in scratch:  # no comprehension, which is a function call to Python 3.11
            flat.append(first.new_empty(count, dtype=dtype))
        job.function(*flat)


def _walk(job: Chunkwise, scratch: Sequence[torch.dtype], flat: Sequence[Tensor]) -> None:
    """The same for more than one chunk."""
    count = len(flat[0])
    threads = torch.get_num_threads()
    whole = threads * VECTOR
    long = max(threads * LEAST_PER_THREAD, min(threads * MOST_PER_THREAD, count // PARTS // whole * whole))
    seconds = {SHORT: deque([0.0], maxlen=1)}  # per element, as last measured; 0 to be tried
    global _busy_until
    if threads > 1 and count > 2 * SHORT and time.perf_counter() > _busy_until:
        seconds[long] = deque([0.0, 0.0], maxlen=2)
    longest = min(count, max(seconds))
    if job.allocates:
        flat[0].new_empty(RESERVE * longest)
    buffers = [flat[0].new_empty(longest, dtype=dtype) for dtype in scratch]
    start = 0
    while start < count:
        size = min(seconds, key=lambda size: min(seconds[size]))
        length = min(size, count - start)
        if length > SHORT:
            length -= length % whole
        began = time.perf_counter()
        job.function(*(tensor[start : start + length] for tensor in flat), *(buffer[:length] for buffer in buffers))
        ended = time.perf_counter()
        seconds[size].append((ended - began) / length)
        if size == long and min(seconds[long]) > MUCH_SLOWER * seconds[SHORT][0]:
            _busy_until = ended + RESPITE_SECONDS
        start += length


def blocks(layout: Layout) -> Iterator[tuple[slice, slice, slice]]:
    """The parts, contiguous in memory, in which a tensor is walked where sums are taken. Fixed boundaries keep the
    order of summation deterministic, and so the rounding. Blocks are long, because each takes many operations."""
    outer, channels, inner = layout
    size = torch.get_num_threads() * MOST_PER_THREAD
    of_outer = max(1, size // (channels * inner))
    of_channels = max(1, min(channels, size // inner))
    of_inner = min(inner, size)
    for i in range(0, outer, of_outer):
        for j in range(0, channels, of_channels):
            for k in range(0, inner, of_inner):
                yield slice(i, i + of_outer), slice(j, j + of_channels), slice(k, k + of_inner)
