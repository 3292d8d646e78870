"""Real text that every machine with Python has: the standard library's own source files, as bytes."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library_bytes(directory: str | Path | None = None) -> Tensor:
    """Join the `*.py` files of `directory` (default: the running interpreter's standard library), in order of name.

    Returns:
        bytes: (length,), uint8. About 5 million with CPython's standard library.

    Raises:
        FileNotFoundError: the directory holds no Python source (some embedded interpreters ship none).
    """
    directory = Path(directory or sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    if not text:
        raise FileNotFoundError(
            f"demo: found no *.py files in {directory}, expected the source of Python's standard library there; "
            "run with an interpreter that ships it"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(corpus: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random excerpts without end, the same ones for the same seed on every device.

    Args:
        corpus: (length,), uint8, on the CPU; longer than `context`.

    Yields:
        (inputs, targets): each (batch, context), int64; the targets are the bytes that follow the inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(corpus) - context, (batch, 1), generator=generator)
        excerpts = corpus[starts + window].long()
        yield excerpts[:, :-1], excerpts[:, 1:]
