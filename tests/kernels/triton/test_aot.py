"""The kernels compiled for GPUs that need not be there: no spills, and 16 bytes an access."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from settings import ROOT

from fusedlayers.activations import activations

pytest.importorskip("triton")
from aot import CUSTOM, FITTED  # after the line that skips without it
from pairs import covering

SCRIPT = ROOT / "tests" / "support" / "aot.py"
DTYPES = ("float32", "bfloat16")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
#: Scalar registers beyond AMD's hundred move to lanes of vector registers: instructions, but no memory. A power and its
#: logarithm have a hundred coefficients, ten sums as many masks.
MOST_SCALAR_SPILLS = {"table": 16, "custom": 96}

#: With 64-bit offsets (for more than 2^31 elements) some versions of ptxas put a value or two aside around the loop.
MOST_SPILL_BYTES = {"int32": 0, "int64": 16}
#: Where libdevice's sine of Triton 3.6 takes large arguments apart, it uses an array.
SINE_BYTES = 40

#: Each activation for each target, in dtypes and directions that make every pair of two of these.
GATES = covering(("silu", "gelu", "gelu_tanh", "relu", "sigmoid"), TARGETS, DTYPES)
BROUGHT = covering(
    CUSTOM, TARGETS, DTYPES, ("column", "row"), where=lambda *case: case[3] == "column" or case[0] not in FITTED
)

Reports = list[dict[str, Any]]


def compiled(*arguments: str) -> Reports:
    """What ``aot.py`` reports, in the one process that serves all tests of this one: starting takes longer than most
    of what they ask for. Another takes its place when it dies."""
    server = _server()
    if server.poll() is not None:
        _server.cache_clear()
        server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(arguments) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, f"the compiling process ended: {server.wait()}"
    answer = json.loads(line)
    assert "error" not in answer, answer["error"]
    reports: Reports = answer["reports"]
    return reports


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Without the interpreter of kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), "--serve"]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture(scope="module", autouse=True)
def _ends_the_server() -> Iterator[None]:
    yield
    if _server.cache_info().currsize:
        server = _server()
        _server.cache_clear()
        with server:  # at the end of its input it ends
            pass


def check(reports: Reports) -> None:
    for report in reports:
        gradient = report["kernel"].startswith("derivative") or report["kernel"] == "gate_gradient"
        array = SINE_BYTES if report["activation"] == "snake" else 0
        assert report["spill_bytes"] <= MOST_SPILL_BYTES[report["index"]] + array, report
        assert report["scalar_spills"] <= MOST_SCALAR_SPILLS["custom" if report["custom"] else "table"], report
        if report["target"].startswith("gfx"):
            continue
        assert report["wide_loads"] >= report["least_wide_loads"] > 0, report
        assert report["wide_stores"] >= report["least_wide_stores"] > 0, report
        # Only a bias and operands are read, and only their gradients' partial sums are written, in smaller portions.
        # (What a sine reads are the digits of pi.)
        has_bias, operands = report["bias"] != "none", report["operands"]
        assert report["narrow_loads"] == 0 or (not gradient and has_bias) or operands, report
        assert report["narrow_stores"] == 0 or (gradient and (has_bias or operands)), report


@pytest.mark.parametrize("target", TARGETS)
def test_gates_compile_without_spills(target: str) -> None:
    cases = [f"{name}/{dtype}/none/int32/gate*" for name, of, dtype in GATES if of == target]
    reports = compiled(target, *cases)
    assert [r["kernel"] for r in reports] == len(cases) * ["gate", "gate_gradient"] and len(cases) >= 5
    check(reports)


@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_without_spills(target: str) -> None:
    """Each activation for AMD's target, and for one of NVIDIA's, whose compilers are one."""
    names = activations() if target == "gfx942" else activations()[TARGETS.index(target) :: 3]
    cases = [*names, "gelu/float32", "gelu/float16", "tanh/float32", "hardswish/float16"]
    cases += [f"gelu/bfloat16/{bias}/{index}" for bias in ("none", "column", "row") for index in ("int32", "int64")]
    cases += ["relu/bfloat16/row/int64"]
    reports = compiled(target, *cases)
    assert {report["activation"] for report in reports} >= {*names} - {"identity"}
    of_gelu = [r for r in reports if r["activation"] == "gelu"]
    assert len({(r["dtype"], r["bias"], r["index"]) for r in of_gelu}) == 8
    check(reports)


def test_many_sums_compile_without_spills() -> None:
    reports = [report for target in ("sm_100", "gfx942") for report in compiled(target, "pau_5_4/float32/row")]
    assert [report["operands"] for report in reports] == 4 * [10]
    check(reports)
    # Accumulators of a register for each element would take 204 of them, and half of the threads.
    assert all(report["registers"] <= 176 for report in reports)


@pytest.mark.parametrize("target", TARGETS)
def test_what_users_bring_compiles_without_spills(target: str) -> None:
    reports = compiled(target, *(f"{name}/{dtype}/{bias}" for name, of, dtype, bias in BROUGHT if of == target))
    assert {report["activation"] for report in reports} == {name.replace("-", "_") for name in CUSTOM}
    given_output = {r["activation"] for r in reports if r["kernel"] == "derivative_given_output"}
    assert given_output == set(FITTED)
    check(reports)


def test_accesses_are_of_16_bytes_but_for_a_bias() -> None:
    kernels = ("forward", "derivative_given_output")
    reports = [r for r in compiled("sm_80", "gelu/float32") if r["kernel"] in kernels]
    # A tile of float32 is two accesses a thread; a residual is a tile, and a bias and its gradient a number each.
    expected = [("forward", {"16": 4, "4": 1}, {"16": 2}), ("derivative_given_output", {"16": 4}, {"16": 2, "4": 1})]
    assert [(r["kernel"], r["global_loads"], r["global_stores"]) for r in reports] == expected


@pytest.mark.parametrize("target", ["sm_75", "sm_120", "gfx90a", "gfx1100"])
def test_other_devices(target: str) -> None:
    check(compiled(target, "gelu", "gelu/float32", "silu/float16/row"))
