"""What the tests settle: random numbers, how small tensors are that are fused, and which warnings are torch's own."""

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")

ROOT = Path(__file__).parents[2]
#: Tests compute little, which PyTorch would compute: in them it computes only results of less than 1 KiB.
SIZES = {"SMALL_BYTES": 1 << 10, "MEDIUM_BYTES": 1 << 10, "GPU_BYTES": 0, "GPU_MEDIUM_BYTES": 1 << 10}


def seed(name: str) -> None:
    """Make random numbers follow from a test's ``name`` and its module's alone: from no folder, and whatever has drawn
    some before."""
    folder, _, _ = name.partition("::")[0].rpartition("/")
    number = zlib.crc32(f"tests/{name.removeprefix(folder + '/')}".encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def fuse_little() -> dict[str, int]:
    """Set the sizes of the tests, and return those that ship. A size that there is not raises an AttributeError."""
    from fusedlayers.calls import sizes

    shipped = {name: getattr(sizes, name) for name in SIZES}
    vars(sizes).update(SIZES)
    return shipped
