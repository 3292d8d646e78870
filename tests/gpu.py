"""Where the Triton kernels run in the tests, and for which activations."""

import os

import torch

from fusedlayers.activations import Activation, rows

#: Without a GPU the kernels are interpreted, on CPU tensors (``conftest.py``).
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _variants() -> list[Activation]:
    """Every row with its default parameters, and with others."""
    return [
        row.bind(**parameters)
        for row in rows()
        for parameters in ({}, {name: 2 * value for name, value in row.parameters.items()})
        if parameters or not row.parameters
    ]


ACTIVATIONS: tuple[Activation, ...] = tuple(_variants())
FOLDED = tuple(activation for activation in ACTIVATIONS if activation.is_folded)
