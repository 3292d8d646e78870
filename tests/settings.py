"""What every process of the tests settles: its random numbers, and how small the tensors are that are fused."""

import random
import zlib

import numpy as np
import torch

#: Tests compute little, which PyTorch would compute: in them it computes only results of less than 1 KiB.
SIZES = {
    "SMALL_BYTES": 1 << 10,
    "MEDIUM_BYTES": 1 << 10,
    "GPU_BYTES": 0,
    "GPU_MEDIUM_BYTES": 1 << 10,
}


def seed(name: str) -> None:
    """Make random numbers follow from ``name`` alone, whatever has drawn some before."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def fuse_little() -> dict[str, int]:
    """Set the sizes of the tests, and return those that ship. A size that there is not raises an AttributeError."""
    from fusedlayers.calls import sizes

    shipped = {name: getattr(sizes, name) for name in SIZES}
    vars(sizes).update(SIZES)
    return shipped
