"""Where the Triton kernels run in the tests, and for which activations."""

import os

import torch

from fusedlayers.activations import Activation, definitions

#: Without a GPU the kernels are interpreted, on CPU tensors (``conftest.py``).
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _variants() -> list[Activation]:
    """Every row with its default parameters, and once with others."""
    found = []
    for row in definitions():
        found.append(row.bind())
        if row.parameters:
            found.append(row.bind(**{name: 2 * value for name, value in row.parameters.items()}))
    return found


ACTIVATIONS: tuple[Activation, ...] = tuple(_variants())

#: numpy's remarks on values that the interpreted kernels compute and then do not select: both sides of a ``where`` are
#: evaluated, with 0 / 0 and log(0) on the side that does not count, and infinities are among the inputs.
INTERPRETER_WARNINGS = (
    r"ignore:(divide by zero|invalid value|overflow) encountered in:RuntimeWarning:triton\.runtime\.interpreter",
)
