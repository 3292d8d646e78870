"""The elementwise kernels compiled for GPUs that need not be there: no spills, and 16 bytes an access."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedlayers.activations import activations, rows, told

pytest.importorskip("triton")
from aot import CUSTOM, FITTED  # after the line that skips without it

SCRIPT = Path(__file__).with_name("aot.py")
DTYPES = ("float32", "bfloat16")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
#: Scalar registers beyond AMD's hundred move to lanes of vector registers: instructions, but no memory. A power and its
#: logarithm have a hundred coefficients, ten sums as many masks.
MOST_SCALAR_SPILLS = {"table": 16, "custom": 96}

#: With 64-bit offsets (for more than 2^31 elements) some versions of ptxas put a value or two aside around the loop.
MOST_SPILL_BYTES = {"int32": 0, "int64": 16}
#: Where libdevice's sine of Triton 3.6 takes large arguments apart, it uses an array.
SINE_BYTES = 40

Reports = list[dict[str, Any]]


def compile_all(*runs: Iterable[str]) -> Reports:
    """What ``aot.py`` reports for each list of arguments: a process each, at the same time, without interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent.parent), environment.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *run],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for run in runs
    ]  # fmt: skip
    reports: Reports = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        reports += json.loads(output)
    return reports


def check(reports: Reports) -> None:
    for report in reports:
        gradient = report["kernel"].startswith("derivative") or report["kernel"] == "gate_gradient"
        array = SINE_BYTES if report["activation"] == "snake" else 0
        assert report["spill_bytes"] <= MOST_SPILL_BYTES[report["index"]] + array, report
        assert report["scalar_spills"] <= MOST_SCALAR_SPILLS["custom" if report["custom"] else "table"], report
        assert report["wide_loads"] >= report["least_wide_loads"] > 0, report
        assert report["wide_stores"] >= report["least_wide_stores"] > 0, report
        # Only a bias and operands are read, and only their gradients' partial sums are written, in smaller portions.
        # (What a sine reads are the digits of pi.)
        has_bias, operands = report["bias"] != "none", report["operands"]
        assert report["narrow_loads"] == 0 or (not gradient and has_bias) or operands, report
        assert report["narrow_stores"] == 0 or (gradient and (has_bias or operands)), report


def test_gelu_compiles_without_spills() -> None:
    reports = compile_all(["sm_90", "gelu"], ["gfx942", "gelu"])
    assert [report["kernel"] for report in reports] == 2 * [
        "forward",
        "derivative_given_output",
        "derivative_given_input",
    ]
    check(reports)


def test_inverses_compile_without_spills() -> None:
    cases = ["mish/float32", "elu/float32", "softplus/float32"]
    reports = [r for r in compile_all(["sm_90", *cases], ["gfx942", *cases]) if r["kernel"] == "inverse"]
    assert [(r["activation"], r["dtype"]) for r in reports] == 2 * [tuple(case.split("/")) for case in cases]
    check(reports)


@pytest.mark.parametrize("target", TARGETS)
def test_gates_compile_without_spills(target: str) -> None:
    cases = [f"{name}/{dtype}/none" for name in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid") for dtype in DTYPES]
    reports = [r for r in compile_all([target, *cases]) if r["kernel"].startswith("gate")]
    assert len(reports) == 2 * len(cases)
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_inverse_compiles_without_spills(target: str) -> None:
    names = [row.name for row in rows() if row.name != "identity" and told(row.bind(), torch.float32) is not None]
    cases = [f"{name}/float32/none" for name in names]
    reports = [r for r in compile_all([target, *cases]) if r["kernel"] == "inverse"]
    assert len(reports) == len(cases) >= 12
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_without_spills(target: str) -> None:
    cases = [*activations(), "gelu/float32", "gelu/float16", "tanh/float32", "hardswish/float16"]
    cases += [f"gelu/bfloat16/{bias}/{index}" for bias in ("none", "column", "row") for index in ("int32", "int64")]
    cases += ["relu/bfloat16/row/int64"]
    runs = [target, *cases[::2]], [target, *cases[1::2]]
    one_by_one = "PYTEST_XDIST_WORKER" in os.environ  # the workers are processes enough
    reports = compile_all(runs[0]) + compile_all(runs[1]) if one_by_one else compile_all(*runs)
    assert {report["activation"] for report in reports} == set(activations()) - {"identity"}
    of_gelu = [r for r in reports if r["activation"] == "gelu" and r["kernel"] != "inverse"]
    assert len({(r["dtype"], r["bias"], r["index"]) for r in of_gelu}) == 8
    check(reports)


def test_many_sums_compile_without_spills() -> None:
    reports = compile_all(["sm_100", "pau_5_4/float32/row"], ["gfx942", "pau_5_4/float32/row"])
    assert [report["operands"] for report in reports] == 4 * [10]
    check(reports)
    # Accumulators of a register for each element would take 204 of them, and half of the threads.
    assert all(report["registers"] <= 176 for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_users_bring_compiles_without_spills(target: str) -> None:
    cases = [f"{name}/{dtype}/column" for name in CUSTOM for dtype in DTYPES]
    cases += [f"{name}/{dtype}/row" for name in CUSTOM if name not in FITTED for dtype in DTYPES]
    reports = compile_all([target, *cases])
    assert {report["activation"] for report in reports} == {name.replace("-", "_") for name in CUSTOM}
    given_output = {r["activation"] for r in reports if r["kernel"] == "derivative_given_output"}
    assert given_output == set(FITTED)
    check(reports)
