"""The kernels compiled for GPUs that need not be there: no spills; of the elementwise ones 16 bytes an access, of the
matmuls tensor cores.

And ``python -m bench aot``, which shows what the compiler makes of them.
"""

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedlayers.activations import activations, measure_inverse_error, resolve, rows

pytest.importorskip("triton")
from aot import CUSTOM, FITTED  # after the line that skips without it
from pairs import covering

from bench import aot, matmul_recipe
from bench.__main__ import main as bench_main
from fusedlayers.backends.triton import gemm

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

#: Each activation for each target, in dtypes and directions that make every pair of two of these.
GATES = covering(("silu", "gelu", "gelu_tanh", "relu", "sigmoid"), TARGETS, DTYPES)
BROUGHT = covering(
    CUSTOM, TARGETS, DTYPES, ("column", "row"), where=lambda *case: case[3] == "column" or case[0] not in FITTED
)

Reports = list[dict[str, Any]]


def compile_all(*runs: Iterable[str]) -> Reports:
    """What ``aot.py`` reports for each list of arguments."""
    return [report for run in runs for report in compiled(*run)]


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
    return start(str(SCRIPT), "--serve", stdin=subprocess.PIPE, stderr=None)


@pytest.fixture(scope="module", autouse=True)
def _ends_the_server() -> Iterator[None]:
    yield
    if _server.cache_info().currsize:
        server = _server()
        _server.cache_clear()
        with server:  # at the end of its input it ends
            pass


def start(*arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    """Python with these arguments and without the interpreter of kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent.parent), environment.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **pipes)


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


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


def test_gelu_takes_few_instructions() -> None:
    """A Hopper issues about 30 for each element while it reads and writes it."""
    most = {"forward": 35, "derivative_given_output": 40}
    cases = [f"sm_90/gelu/{kernel}/bfloat16/{bias}" for kernel in most for bias in ("none", "column")]
    for report in compiled("instructions", *cases):
        kernel = report["case"].split()[1]
        assert 10 < report["instructions"] <= most[kernel], report


def test_inverses_compile_without_spills() -> None:
    names = ["mish", "elu", "softplus"]
    cases = [f"{name}/float32/column/int32/inverse" for name in names]
    reports = compile_all(["sm_90", *cases], ["gfx942", *cases])
    assert [(r["activation"], r["kernel"]) for r in reports] == 2 * [(name, "inverse") for name in names]
    check(reports)


@pytest.mark.parametrize("target", TARGETS)
def test_gates_compile_without_spills(target: str) -> None:
    cases = [f"{name}/{dtype}/none/int32/gate*" for name, of, dtype in GATES if of == target]
    reports = compile_all([target, *cases])
    assert [r["kernel"] for r in reports] == len(cases) * ["gate", "gate_gradient"] and len(cases) >= 5
    check(reports)


@pytest.mark.parametrize("target", TARGETS)
def test_every_inverse_compiles_without_spills(target: str) -> None:
    names = [
        row.name
        for row in rows()
        if row.name != "identity" and measure_inverse_error(row.bind(), torch.float32) is not None
    ]
    reports = compile_all([target, *(f"{name}/float32/none/int32/inverse" for name in names)])
    assert [r["kernel"] for r in reports] == len(names) * ["inverse"] and len(names) >= 12
    check(reports)


@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_without_spills(target: str) -> None:
    cases = [*activations(), "gelu/float32", "gelu/float16", "tanh/float32", "hardswish/float16"]
    cases += [f"gelu/bfloat16/{bias}/{index}" for bias in ("none", "column", "row") for index in ("int32", "int64")]
    cases += ["relu/bfloat16/row/int64"]
    reports = compile_all([target, *cases])
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


@pytest.mark.parametrize("target", TARGETS)
def test_what_users_bring_compiles_without_spills(target: str) -> None:
    reports = compile_all([target, *(f"{name}/{dtype}/{bias}" for name, of, dtype, bias in BROUGHT if of == target)])
    assert {report["activation"] for report in reports} == {name.replace("-", "_") for name in CUSTOM}
    given_output = {r["activation"] for r in reports if r["kernel"] == "derivative_given_output"}
    assert given_output == set(FITTED)
    check(reports)


# --- python -m bench aot ----------------------------------------------------------------------------------------------


def test_the_command_shows_what_the_compiler_made(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "aot.json"
    kernels, targets = ["forward", "gate_gradient"], ["sm_90", "gfx942"]
    run = start("-m", "bench", "aot", "--kernel", *kernels, "--target", *targets, "--json", str(file))
    lines = output_of(run).splitlines()
    rows = json.loads(file.read_text())["kernels"]
    assert [(row["kernel"], row["target"]) for row in rows] == [(k, t) for k in kernels for t in targets]
    for row, line in zip(rows, lines[3:], strict=False):
        assert row["activation"] == "gelu" and row["dtype"] == "bfloat16"
        assert 0 < row["registers"] <= 255 and row["spill_bytes"] == row["kinds"]["local"] == 0
        kinds = row["kinds"]
        assert row["instructions"] == sum(kinds.values()) > 0
        # Eight elements a thread, each with an exponential.
        assert kinds["tensor"] == kinds["bulk_copies"] == 0 and kinds["fp32"] >= 8 and kinds["special"] >= 8
        # The tensors are read and written 16 bytes at a time, a bias 2.
        is_gate = row["kernel"] == "gate_gradient"
        assert row["global_loads"] == ({"16": 3} if is_gate else {"16": 2, "2": 1})
        assert row["global_stores"] == {"16": 2 if is_gate else 1}
        assert (row["shared_bytes"] > 0) == (kinds["shared_loads"] > 0) == (not is_gate)
        cells = line.replace("|", " ").split()
        assert cells[:4] == [row["kernel"], "gelu", "bfloat16", row["target"]]
        assert cells[4:8] == [str(row[k]) for k in ("registers", "shared_bytes", "spill_bytes", "instructions")]
        assert [int(cell) for cell in cells[8:17]] == [n for k, n in kinds.items() if not k.startswith("global")]
        assert cells[17:] == (["3x16", "2x16"] if is_gate else ["2x16", "1x2", "1x16"])


def test_both_readings_of_accesses_agree() -> None:
    kernels = ("forward", "derivative_given_output")
    assembled = [r for r in compiled("sm_80", "gelu/float32") if r["kernel"] in kernels]
    disassembled = compiled("bench", "--target", "sm_80", "--dtype", "float32", "--kernel", *kernels)
    # A tile of float32 is two accesses a thread; a residual is a tile, and a bias and its gradient a number each.
    expected = [("forward", {"16": 4, "4": 1}, {"16": 2}), ("derivative_given_output", {"16": 4}, {"16": 2, "4": 1})]
    for reports in (assembled, disassembled):
        assert [(r["kernel"], r["global_loads"], r["global_stores"]) for r in reports] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--target", "sm_9"],
            "no target is called 'sm_9'; there are ['sm_80', 'sm_89', 'sm_90', 'sm_100', 'gfx942', ",
        ),
        (["--kernel", "foward"], "no kernel is called 'foward'; there are ['forward', 'derivative_given_output',"),
        (
            ["--activation", "gelo"],
            "--activation: unknown activation 'gelo'; did you mean 'gelu'? The known ones are: identity, relu,",
        ),
        (["--kernel", "inverse"], "no kernel of ['inverse'] exists for ['gelu'] in ['bfloat16']"),
    ],
)
def test_the_command_says_what_there_is(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert bench_main(["aot", *arguments]) == 2
    assert f"bench aot: {message}" in capsys.readouterr().err


def test_all_activations_are_those_of_the_table() -> None:
    options = argparse.Namespace(activation=["all"], dtype=["float32", "bfloat16"], kernel=["inverse"], target=None)
    found = {(kernel, repr(activation), dtype) for _, kernel, activation, dtype, _ in aot._todo(options)}
    names = [row.name for row in rows() if row.name != "identity"]
    invertible = [
        (name, d)
        for name in names
        for d in options.dtype
        if measure_inverse_error(resolve(name), getattr(torch, d)) is not None
    ]
    assert found == {("inverse", *case) for case in invertible} and len(found) >= 12


def test_the_command_refuses_to_interpret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert bench_main(["aot"]) == 2
    assert "TRITON_INTERPRET is set, and what is interpreted is not compiled; unset it" in capsys.readouterr().err


def test_the_command_needs_triton(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert bench_main(["aot"]) == 2
    assert "bench aot: Triton is missing" in capsys.readouterr().err


# --- matmuls ----------------------------------------------------------------------------------------------------------

#: What a program may have of shared memory (NVIDIA's tuning guides; CDNA3's instruction set).
SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
#: The same of devices that are like one of those. (The others have no tilings.)
OTHER_SHARED_BYTES = {
    **{"sm_86": 99 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10},
    **{"gfx90a": 64 << 10, "gfx950": 160 << 10},
}
GRADIENTS = ("mlp_gradient_given_output", "mlp_gradient_given_output_2")
#: A kernel's dtype, and what its name ends in: the tilings of a GPU.
TILINGS = (("bfloat16", ""), ("bfloat16", "_2"), ("float32", ""))
#: Of matmuls for a target with a tiling every pair of two, and all that there are of the one with the most to hold.
MATMULS = {
    *covering(matmul_recipe.KERNELS, SHARED_BYTES, TILINGS),
    *itertools.product(["gated_mlp_gradient"], SHARED_BYTES, TILINGS),
}


def compile_matmuls(target: str, kernels: Iterable[str], dtypes: Iterable[str]) -> Reports:
    rows = compiled("bench", "--target", target, "--dtype", *dtypes, "--kernel", *kernels)
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert row["scalar_spills"] <= MOST_MATMUL_SCALAR_SPILLS, row
        assert row["kinds"]["tensor"] > 0, row
        assert 0 < row["shared_bytes"] <= (SHARED_BYTES | OTHER_SHARED_BYTES)[target], row
        if target in ("sm_90", "sm_100", "sm_103"):
            # At least the operands by the copy engine, and the results.
            assert row["kinds"]["bulk_copies"] >= 3, row
    return rows


#: Of AMD's scalar registers, which masks and sizes take.
MOST_MATMUL_SCALAR_SPILLS = 64


def test_matmuls_use_tensor_cores_and_do_not_spill() -> None:
    rows = compile_matmuls("sm_90", ["dense", "dense_2", *GRADIENTS], ["bfloat16"])
    assert len(rows) == 4
    tiling = gemm.TILINGS["9"][2][1]
    assert tiling.programs == 2
    for row in rows:
        if row["kernel"].endswith("_2"):  # two of these at a time
            assert 2 * row["registers"] * 32 * tiling.warps <= 1 << 16
            assert 2 * (row["shared_bytes"] + 1024) <= 228 << 10


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_tiling_uses_tensor_cores_and_does_not_spill(target: str) -> None:
    # GELU has the longest epilogues.
    for dtype in DTYPES:
        kernels = sorted(name + end for name, of, (its, end) in MATMULS if of == target and its == dtype)
        rows = compile_matmuls(target, kernels, [dtype])
        assert sorted(row["kernel"] for row in rows) == kernels != []


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_matmuls_fetch_ahead(target: str) -> None:
    """Operands go from memory to shared memory, and what a gradient's epilogue reads to the L2 cache before."""
    for kernel, dtype in itertools.product(("dense", GRADIENTS[0], "gated_mlp_gradient"), DTYPES):
        (found,) = compiled("fetches", f"{target}/relu/{kernel}/{dtype}")
        assert found["through_registers"] == 0
        spills = (target, kernel, dtype) == ("sm_90", "gated_mlp_gradient", "bfloat16")  # with gelu it would
        fetches = kernel != "dense" and target.startswith("sm_") and not spills
        assert (found["prefetches"] > 0) == fetches, (kernel, dtype)


@pytest.mark.parametrize("target", [*OTHER_SHARED_BYTES, "sm_75", "gfx1100"])
def test_other_devices(target: str) -> None:
    check(compile_all([target, "gelu", "gelu/float32", "silu/float16/row"]))
    if target in OTHER_SHARED_BYTES:
        has_tf32 = target not in ("gfx90a", "gfx950")
        compile_matmuls(target, ["dense", "gated_mlp_gradient"], ["bfloat16", *["float32"] * has_tf32])
