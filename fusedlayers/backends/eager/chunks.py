"""Large tensors, walked in chunks, so that the temporaries of a function of several operations stay small.

Each operation is a pass, and a meeting of torch's threads at its end. Short chunks stay in the caches but have many
meetings, which cost 5 us on an idle machine and milliseconds where another program holds a core; long chunks need memory
for temporaries. A sixteenth of the tensor, within bounds, was best or next to it at 2 and 4 threads of a Zen 4 machine.
(Handing short chunks to Python threads of our own, to be rid of the meetings, was slower: they contend for the GIL.)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

CHUNKS = 16
#: What torch gives to a single thread anyway (``at::internal::GRAIN_SIZE``).
SMALLEST = 1 << 15
LARGEST = 1 << 20


def for_each(job: Callable[..., object], *tensors: Tensor) -> None:
    """Call ``job`` with corresponding chunks of the tensors, which are dense and laid out alike."""
    count = tensors[0].numel()
    flat = [_flat(tensor) for tensor in tensors]
    size = min(LARGEST, max(SMALLEST, count // CHUNKS))
    if count <= size:
        job(*flat)
        return
    for chunks in zip(*(tensor.split(size) for tensor in flat), strict=True):
        job(*chunks)


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
