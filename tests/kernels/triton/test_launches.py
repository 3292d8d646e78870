"""How many kernels a call launches, and what memory a launch needs beside its arguments: by a driver that compiles for
Hopper and launches nothing (``bench/fake_gpu.py``)."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from settings import ROOT

pytest.importorskip("triton")
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a driver of its own")

SCRIPT = ROOT / "tests" / "support" / "launches.py"

#: Name -> launches of forward and of backward, at most: Triton's kernels and torch's operators. 4096 rows of 256
#: features in bfloat16, 3072 hidden. Eager PyTorch launches 6 for a dense layer, 10 for an MLP, 15 for a gated one.
LAUNCHES = {
    "dense gelu": (2, 4),
    "dense relu": (2, 4),
    "bias_act": (1, 2),
    "gelu": (1, 1),
    "scalar parameter": (3, 4),
    "mlp": (3, 7),
    "mlp, recomputing": (3, 9),
    "gated mlp": (4, 8),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _launches(found: dict[str, Any]) -> int:
    return sum(found["kernels"].values()) + sum(found["operators"].values())


def test_launches(measured: dict[str, Any]) -> None:
    assert measured.keys() == LAUNCHES.keys()
    counts = {name: (_launches(found["forward"]), _launches(found["backward"])) for name, found in measured.items()}
    more = {name: found for name, found in counts.items() if any(map(int.__gt__, found, LAUNCHES[name]))}
    assert more == {}, LAUNCHES
    # A driver that is asked for nothing would count nothing.
    assert all(sum(found["forward"]["kernels"].values()) >= 1 for found in measured.values())


def test_launches_that_are_kept_are_tritons(measured: dict[str, Any]) -> None:
    """The same grids, numbers and constants, in the same order."""
    assert [name for name, found in measured.items() if not found["is_launched_as_at_first"]] == []


def test_scratch(measured: dict[str, Any]) -> None:
    """Beside arguments and results a launch gets what was saved, the gradient of the hidden buffer, and 1 % of that."""
    hidden = 4096 * 3072 * 2
    buffers = {"mlp": (1, 2), "mlp, recomputing": (1, 2), "gated mlp": (3, 3)}
    buffers |= {"dense gelu": (0, 1), "dense relu": (0, 1)}  # y, over which dz is written
    for name, found in measured.items():
        in_forward, in_backward = buffers.get(name, (0, 0))
        assert found["forward"]["scratch_bytes"] <= (in_forward + 0.001) * hidden, name
        assert found["backward"]["scratch_bytes"] <= (in_backward + 0.01) * hidden, name
