"""How many kernels a call launches, and what memory a launch needs beside its arguments: by a driver that compiles for
Hopper and launches nothing (``bench/fake_gpu.py``)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a driver of its own")

SCRIPT = Path(__file__).with_name("launches.py")

#: Name -> launches of forward and of backward, at most: Triton's kernels and torch's operators. 8192 rows of 256
#: features in bfloat16, 1024 hidden.
LAUNCHES = {
    "dense gelu": (2, 6),
    "dense relu": (2, 6),
    "bias_act": (1, 4),
    "gelu": (1, 1),
    "scalar parameter": (3, 5),
    "mlp": (3, 326),
    "mlp, one chunk": (3, 9),
    "layer norm": (1, 2),
    "rms norm": (1, 2),
    "gate and product": (2, 5),
    "gated mlp": (50, 311),
    "dense gelu, epilogues": (1, 6),
    "dense relu, epilogues": (1, 6),
    "bias_act, epilogues": (1, 4),
    "gelu, epilogues": (1, 1),
    "scalar parameter, epilogues": (3, 5),
    "mlp, epilogues": (2, 7),
    "mlp, one chunk, epilogues": (2, 7),
    "layer norm, epilogues": (1, 2),
    "rms norm, epilogues": (1, 2),
    "gate and product, epilogues": (2, 5),
    "gated mlp, epilogues": (50, 295),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=600)
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
    ours = [found for name, found in measured.items() if not name.startswith("layer norm")]  # whose forward is torch's
    assert all(sum(found["forward"]["kernels"].values()) >= 1 for found in ours)
    assert measured["dense gelu, epilogues"]["forward"]["kernels"] == {"linear_act_kernel": 1}
    assert measured["mlp, epilogues"]["backward"]["kernels"] == {"linear_gradient_kernel": 1}


def test_scratch(measured: dict[str, Any]) -> None:
    hidden = 8192 * 1024 * 2
    for name, found in measured.items():
        # A number of an activation's own is packed.
        hidden_buffers = 2 if name.startswith("gated") else name.startswith(("mlp", "gate "))
        statistics = 2 * 8192 * 4 if "norm" in name else 0
        assert found["forward"]["scratch_bytes"] <= hidden_buffers * (hidden + (512 << 10)) + statistics + 4, name
    # Partial sums of the bias's gradient, beside dz where nothing may be overwritten.
    assert measured["bias_act"]["backward"]["scratch_bytes"] <= 2 << 20
    assert measured["gelu"]["backward"]["scratch_bytes"] == 0
