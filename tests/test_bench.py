"""The benchmarks' own machinery, on shapes too small to measure anything."""

import importlib.metadata
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import (
    MAIN_FORMAT,
    conv,
    custom,
    dense,
    grid,
    layers,
    machine,
    measure,
    mlp,
    models,
    overhead,
    plot,
    pointwise,
    saved,
    shapes,
    tables,
)
from bench.__main__ import main as bench_main
from bench.reference import CUSTOM_ACTIVATIONS, BatchNormAct, resnet
from fusedlayers.memory import saved_bytes

CPU = torch.device("cpu")
TINY = shapes.Shape("Tiny", 8, 64, {"cpu": 12})  # 4 rows of it, when quick: not below sizes.SMALL_BYTES in tests
CASE = shapes.Case("model", TINY, "relu", "float32")


def tiny_run(**options: Any) -> dict[str, Any]:
    return dense.run([CASE], CPU, **{"variants": ("eager", "fusedlayers"), "quick": True, **options})


# --- measure ----------------------------------------------------------------------------------------------------------


def test_variants_take_turns_and_the_order_rotates() -> None:
    calls: list[str] = []

    def slow(name: str) -> None:
        calls.append(name)
        time.sleep(1e-3)  # longer than a sample, so that each sample is one call

    functions = {name: (lambda name=name: slow(name)) for name in "abc"}
    times = measure.interleave(functions, CPU, seconds=0, min_rounds=4)
    assert "".join(calls[-12:]) == "abcbcacababc"
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(value >= 1000 for values in times.values() for value in values)  # microseconds


def test_fast_functions_are_timed_over_many_calls() -> None:
    (values,) = measure.interleave({"nothing": lambda: None}, CPU, seconds=0.01, min_rounds=3).values()
    assert 0 < min(values) < 50


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
def test_compiled_variants_do_not_run_each_others_code() -> None:
    from torch._functorch import config

    up, down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
    x = torch.randn(16, 8)
    saved = {}
    variants = {
        part: measure.compiled(torch.nn.Sequential(up, torch.nn.GELU(), down), backend="aot_eager_decomp_partition")
        for part in (1.0, 0.1)
    }
    for _ in range(2):
        for part, run in variants.items():
            with config.patch(activation_memory_budget=part):
                run(x)
                saved[part] = saved_bytes(run, x, exclude=x)
    assert saved[0.1] < saved[1.0]


def test_a_busy_machine_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    description = {**machine.describe(CPU), "load_average": 2.5}
    machine.warn_if_busy(description)
    assert "warning: the load average is 2.5" in capsys.readouterr().out
    machine.warn_if_busy({**description, "load_average": 0.1})
    assert capsys.readouterr().out == ""


def test_a_drift_of_the_machine_leaves_the_ratio_alone() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    ratios = measure.ratios([3 * factor for factor in drift], [2 * factor for factor in drift])
    assert measure.spread(ratios) == {"median": 1.5, "q1": 1.5, "q3": 1.5}
    assert measure.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3, "q1": 2, "q3": 4}
    assert measure.spread([7.0]) == {"median": 7, "q1": 7, "q3": 7}


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("AMD EPYC 7R13 Processor", "amd-epyc-7r13-avx2-4-threads"),
        ("AMD EPYC", "amd-epyc-avx2-4-threads"),
        ("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "intel-xeon-platinum-8488c-avx2-4-threads"),
    ],
)
def test_slugs_name_the_device(name: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_instructions", lambda: "avx2")
    monkeypatch.setattr(machine, "device_name", lambda device: name)
    assert machine.slug(torch.device("cuda" if "NVIDIA" in name else "cpu"), 4) == slug


# --- grid -------------------------------------------------------------------------------------------------------------


def test_a_result_grows_by_a_case_at_a_time(tmp_path: Path) -> None:
    result = grid.begin("letters", CPU, {}, not_run=["a", "b", "c"])
    seen = []
    for case, left, sharing in grid.until(time.monotonic() + 60, "abc"):
        assert 59 < left <= 60
        seen.append((case, sharing))
        grid.add(result, {"id": case}, tmp_path)
        written = json.loads((tmp_path / "letters.json").read_text())
        assert written == result and [row["id"] for row in written["cases"]] + written["not_run"] == ["a", "b", "c"]
        assert f'  {{"id": "{case}"}}' in (tmp_path / "letters.json").read_text().splitlines()  # a case a line
    assert seen == [("a", 3), ("b", 2), ("c", 1)] and result["not_run"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["letters.json"]


def test_no_case_starts_after_the_end() -> None:
    assert list(grid.until(time.monotonic(), "abc")) == []
    end = time.monotonic() + 0.05
    for case, _, _ in grid.until(end, "abc"):
        time.sleep(0.06)
        assert case == "a"


def test_what_was_written_survives_an_end_in_the_middle_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path, text: str, **options: Any) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    result = grid.begin("letters", CPU, {}, not_run=["a", "b"])
    grid.add(result, {"id": "a"}, tmp_path)
    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        grid.add(result, {"id": "b"}, tmp_path)
    assert json.loads((tmp_path / "letters.json").read_text())["not_run"] == ["b"]


def test_the_row_of_a_variant_that_fails() -> None:
    assert grid.failed(ValueError("\nfirst\nsecond")) == {"error": "ValueError: first"}
    assert grid.failed(AssertionError()) == {"error": "AssertionError: no message"}
    assert len(grid.failed(ValueError("x" * 1000))["error"]) == len("ValueError: ") + 300


# --- dense ------------------------------------------------------------------------------------------------------------


def test_a_result_has_everything_a_reader_needs(tmp_path: Path) -> None:
    result = tiny_run(out=tmp_path)
    assert json.loads((tmp_path / "dense.json").read_text())["cases"] == result["cases"]
    assert [path.name for path in tmp_path.iterdir()] == ["dense.json"]  # no leftover of the atomic write
    assert result["versions"]["torch"] == torch.__version__
    assert result["threads"] == torch.get_num_threads()
    assert result["device"]["name"] and result["device"]["slug"] and result["date"]
    assert result["not_run"] == []

    (row,) = result["cases"]
    assert row["id"] == "model/tiny/relu/float32"
    assert (row["tokens"], row["in_features"], row["hidden_features"]) == (4, 8, 64)
    assert row["hidden_bytes"] == 4 * 64 * 4
    for variant in ("eager", "fusedlayers"):
        values = row["variants"][variant]
        for mode in ("forward", "forward_backward"):
            assert 0 < values[mode]["q1_us"] <= values[mode]["median_us"] <= values[mode]["q3_us"]
            assert values[mode]["ratio_q1"] <= values[mode]["ratio"] <= values[mode]["ratio_q3"]
            assert values[mode]["rounds"] >= 5
        assert values["saved_bytes"] == row["hidden_bytes"]  # relu: its output serves the next Linear too
        assert values["peak_bytes"] > row["hidden_bytes"]
    assert row["variants"]["eager"]["forward_backward"]["ratio"] == 1


# torch's compiler uses deprecated parts of torch itself.
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
def test_saved_bytes_of_gelu_halve() -> None:
    (row,) = dense.run([shapes.Case("model", TINY, "gelu", "float32")], CPU, variants=dense.VARIANTS, quick=True)[
        "cases"
    ]
    saved = {name: variant["saved_bytes"] / row["hidden_bytes"] for name, variant in row["variants"].items()}
    assert saved == {"eager": 2, "compile": 2, "fusedlayers": 1}


def test_what_fails_is_recorded_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("out of luck\nwith a second line")

    monkeypatch.setattr(dense.fl, "dense_bias_act", broken)
    (row,) = tiny_run()["cases"]
    assert row["variants"]["fusedlayers"] == {"error": "RuntimeError: out of luck"}
    assert row["variants"]["eager"]["forward"]["ratio"] == 1

    monkeypatch.setattr(dense.fl, "dense_bias_act", lambda x, w, b, activation: torch.relu(x @ w.t() + b) * 1.1)
    (row,) = tiny_run()["cases"]
    assert row["variants"]["fusedlayers"]["error"].startswith("ArithmeticError: differs from eager by 1.0e-01")


def test_a_spent_budget_leaves_a_partial_result(tmp_path: Path) -> None:
    result = tiny_run(budget_seconds=0, out=tmp_path)
    assert result["cases"] == [] and result["not_run"] == [CASE.id]


def test_compiling_goes_first_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_load_compiler", lambda device: None)
    (row,) = tiny_run(variants=dense.VARIANTS, budget_seconds=4.0)["cases"]  # a compilation is guessed at 5 s
    assert row["variants"]["compile"] == {"skipped": "time budget"}
    assert "forward" in row["variants"]["fusedlayers"]


def test_what_is_measured_by_default() -> None:
    def left_out(subject: layers.Subject, quick: bool) -> set[str]:
        return {*subject.variants} - {*subject.default_variants(quick)}

    assert left_out(dense.SUBJECT, False) == left_out(mlp.SUBJECT, False) == set()
    assert left_out(dense.SUBJECT, True) == left_out(mlp.SUBJECT, True) == {"compile"}


def test_a_full_run_by_default_replaces_the_committed_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Path | None] = []

    def run(subject: Any, todo: Any, device: Any, *, out: Path | None, **options: Any) -> dict[str, Any]:
        written.append(out)
        return {"device": {"kind": "cpu"}, "quick": False, "cases": []}

    monkeypatch.setattr(layers, "run", run)
    monkeypatch.setattr(layers, "RESULTS", tmp_path)
    for arguments in ([], ["--variants", "compile,fusedlayers,recompute"], ["--variants", "fusedlayers"]):
        assert bench_main(["mlp", "--device", "cpu", *arguments]) == 0
    assert [path is not None and path.parent == tmp_path for path in written] == [True, False, False]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_grid_covers_every_shape_activation_and_dtype(kind: str) -> None:
    cases = list(shapes.cases(kind))
    assert len({case.id for case in cases}) == len(cases)
    assert len(cases) == len(shapes.MODELS) * len(shapes.ACTIVATIONS) * len(shapes.DTYPES[kind])


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench_main(["dense", "--device", "cpu", "--only", "no such case"]) == 2
    assert "no case matches --only 'no such case'" in capsys.readouterr().out
    arguments = ["--only", "bert-base/relu/float32", "--variants", "fusedlayers", "--quick", "--out", str(tmp_path)]
    assert bench_main(["dense", "--device", "cpu", *arguments]) == 0
    out = capsys.readouterr().out
    assert "model/bert-base/relu/float32" in out and "saved bytes at most eager's: 1 of 1 cases" in out
    assert json.loads((tmp_path / "dense.json").read_text())["quick"] is True


def test_a_part_of_the_grid_replaces_no_committed_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "RESULTS", tmp_path)
    assert bench_main(["dense", "--device", "cpu", "--only", "bert-base/relu/float32", "--quick"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = tiny_run()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot.plot_dense(result, tmp_path / "dense.png")
    assert "matplotlib is missing" in capsys.readouterr().out
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert plot.plot_dense(result, tmp_path / "dense.png")
    assert (tmp_path / "dense.png").read_bytes().startswith(b"\x89PNG")
    assert not plot.plot_dense({**result, "cases": []}, tmp_path / "empty.png")


def test_yardsticks_have_times_and_no_bytes_in_a_plot_and_nothing_hides_another(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    times = {"ratio": 0.9, "ratio_q1": 0.8, "ratio_q3": 5.0}
    variant = {"forward": times, "saved_bytes": 50}
    far = {"forward": {**times, "ratio": 4.0}, "saved_bytes": 50}
    row = {
        "activation": "gelu",
        "variants": {"eager": {"saved_bytes": 100}, "matmuls": variant, "fusedlayers": variant},
    }
    for key, positions in (("forward", {0.0, -0.15}), ("saved_bytes", {-0.15})):
        axis = figure.subplots()
        styles = {name: plot.MLP.styles[name] for name in ("matmuls", "compile", "recompute", "fusedlayers")}
        plot._panel(axis, [{**row, "variants": {**row["variants"], "compile": far, "recompute": {}}}], key, styles, 0.3)
        marks = {line.get_marker(): float(line.get_ydata()[0]) for line in axis.lines if len(line.get_xdata()) == 1}
        assert {marks["o"], *([marks["|"]] if "|" in marks else [])} == positions and "s" not in marks
        assert axis.get_xlim()[1] <= 3
        assert [text.get_text() for text in axis.texts] == (["4.0x "] if key == "forward" else [])


# --- conv -------------------------------------------------------------------------------------------------------------


def conv_run(*ids: str, **options: Any) -> dict[str, Any]:
    found = {case.id: case for case in shapes.conv_cases("cpu")}
    return conv.run([found[id] for id in ids], CPU, **{"variants": ("eager", "fusedlayers"), "quick": True, **options})


def test_conv_results_have_everything_a_reader_needs(tmp_path: Path) -> None:
    ids = ("model/resnet-50-3x3-stride-2/channels_last/relu/float32", "model/wavenet/contiguous/tanh/float32")
    result = conv_run(*ids, out=tmp_path)
    assert json.loads((tmp_path / "conv.json").read_text())["cases"] == result["cases"]
    assert [path.name for path in tmp_path.iterdir()] == ["conv.json"]
    assert result["subject"] == "conv" and "1x1 convolution" in result["definitions"]["saved_bytes"]
    assert [row["id"] for row in result["cases"]] == list(ids)
    row = result["cases"][0]
    assert row["shape"] == "ResNet-50 3x3 stride 2" and row["format"] == "channels_last"
    assert row["input"] == [1, 128, 8, 8] and row["output"] == [1, 128, 4, 4]
    assert row["hidden_bytes"] == 128 * 4 * 4 * 4
    for row in result["cases"]:
        for variant in row["variants"].values():
            assert {"forward", "forward_backward"} < set(variant) and variant["peak_bytes"] > row["hidden_bytes"]
            assert variant["saved_bytes"] == row["hidden_bytes"]  # the next convolution keeps the output anyway
    assert conv.acceptance(result) == ["saved bytes at most eager's: 2 of 2 cases"]  # quick: nothing about time


@pytest.mark.parametrize("dtype", shapes.DTYPES["cpu"])
@pytest.mark.parametrize("shape", shapes.CONVOLUTIONS, ids=lambda shape: shape.name)
def test_convolutions_save_one_buffer_of_every_activation(shape: shapes.ConvShape, dtype: str) -> None:
    one = {"relu", "tanh"}  # of which eager keeps the output only
    for name in shapes.FORMATS[len(shape.kernel)]:
        for activation in {*shapes.CONV_ACTIVATIONS, shape.activation}:
            case = shapes.ConvCase("model", shape, name, activation, dtype)
            work = conv.SUBJECT.build(case, CPU, True)
            (_, block), hidden = work.operands, work.hidden_bytes
            saved = [layers.saved_bytes(function, block[0], *block[1]) for _, function in (work.eager, work.ours)]
            assert saved == [hidden if activation in one else 2 * hidden, hidden], case.id


def test_convolutions_are_measured_in_both_formats() -> None:
    for case in shapes.conv_cases("cpu", ("float32",)):
        if case.group == "model" and math.prod(case.shape.kernel) > 1:
            work = conv.SUBJECT.build(case, CPU, True)
            x, parameters, dy = work.operands[0]
            format = shapes.FORMATS[len(case.shape.kernel)][case.format]
            assert x.is_contiguous(memory_format=format) and parameters[0].is_contiguous(memory_format=format), case.id
            if x.dim() == 4:  # torch's convolution of three dimensions may give the other format
                assert dy.is_contiguous(memory_format=format), case.id
            assert [function(x, *parameters).stride() for function in (work.eager[0], work.ours[0])] == [
                dy.stride()
            ] * 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_conv_grid_covers_every_shape_format_activation_and_dtype(kind: str) -> None:
    cases = list(shapes.conv_cases(kind))
    assert len({case.id for case in cases}) == len(cases)
    found = {(case.shape.name, case.format, case.activation, case.dtype) for case in cases}
    for shape in shapes.CONVOLUTIONS:
        for name in shapes.FORMATS[len(shape.kernel)]:
            for dtype in shapes.DTYPES[kind]:
                assert {(shape.name, name, a, dtype) for a in (*shapes.CONV_ACTIVATIONS, shape.activation)} <= found
    assert {len(shape.kernel) for shape in shapes.CONVOLUTIONS} == {1, 2, 3}
    groups = [case.group for case in cases]
    assert groups == sorted(groups), "the models' own activations come first"
    first = cases[: len(shapes.CONVOLUTIONS)]
    assert [case.shape for case in first] == list(shapes.CONVOLUTIONS), "every shape before any second format"
    assert {case.format for case in first if len(case.shape.kernel) > 1} == {MAIN_FORMAT[kind]}
    names = {shape.name: shape.activation for shape in shapes.CONVOLUTIONS}
    assert all(names[row.shape] == row.activation for row in tables.CONV_ROWS)


def test_conv_acceptance() -> None:
    def row(name: str, dtype: str, saved: int, ratio: float) -> dict[str, Any]:
        times = {"ratio": ratio, "ratio_q1": ratio - 0.01, "ratio_q3": ratio + 0.01}
        variants = {"eager": {"saved_bytes": 100}, "fusedlayers": {"saved_bytes": saved, "forward_backward": times}}
        return {"id": name, "dtype": dtype, "variants": variants}

    cases = [
        row("a", "float32", 50, 1.05),
        row("b", "float32", 101, 1.06),
        row("c", "bfloat16", 100, 2.0),
        {"id": "d", "dtype": "float32", "variants": {"fusedlayers": {"error": "RuntimeError: no"}}},
    ]
    result = {"device": {"kind": "cpu"}, "quick": False, "cases": cases}
    assert conv.acceptance(result) == [
        "saved bytes at most eager's: 2 of 3 cases",
        "float32: at most 1.05x eager: 1 of 2 cases",
        "b: 1.01x eager's saved bytes: MISSED",
        "b: 1.06x eager (1.05 to 1.07): MISSED",
        "d: MISSED: RuntimeError: no",
    ]
    assert conv.acceptance({**result, "device": {"kind": "cuda"}})[1:] == [
        "b: 1.01x eager's saved bytes: MISSED",
        "d: MISSED: RuntimeError: no",
    ]


def test_conv_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "RESULTS", tmp_path / "results")
    assert bench_main(["conv", "--device", "cpu", "--only", "no such case"]) == 2
    assert "bench conv: no case matches --only 'no such case'; ids look like 'other/" in capsys.readouterr().out
    arguments = ["conv", "--device", "cpu", "--only", "other/wavenet/.*/relu/float32", "--quick"]
    assert bench_main(arguments) == 0 and list(tmp_path.iterdir()) == []  # a part replaces no committed result
    assert bench_main([*arguments, "--out", str(tmp_path)]) == 0
    assert "saved bytes at most eager's: 1 of 1 cases" in capsys.readouterr().out
    result = json.loads((tmp_path / "conv.json").read_text())
    assert result["quick"] is True and set(result["cases"][0]["variants"]) == {"eager", "fusedlayers"}


def test_a_quick_run_is_of_the_models_own_layers_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[set[str], list[str]]] = []

    def run(subject: Any, todo: Any, device: Any, *, variants: Any, quick: bool, **options: Any) -> dict[str, Any]:
        asked.append(({case.group for case in todo}, variants))
        return {"device": {"kind": "cpu"}, "quick": quick, "cases": []}

    monkeypatch.setattr(layers, "run", run)
    for arguments in (["--quick"], ["--quick", "--variants", "compile"], ["--only", "/wavenet/"]):
        assert bench_main(["conv", "--device", "cpu", *arguments]) == 0
    assert asked == [
        ({"model"}, ["eager", "fusedlayers"]),
        ({"model"}, ["eager", "compile"]),
        ({"model", "other"}, list(layers.VARIANTS)),
    ]


# --- mlp --------------------------------------------------------------------------------------------------------------

#: Hidden buffers that eager PyTorch keeps of a block.
EAGER_BUFFERS = {(False, "gelu"): 2, (True, "silu"): 4, (True, "gelu"): 4}


@pytest.mark.parametrize("dtype", shapes.DTYPES["cpu"])
def test_blocks_keep_what_is_promised(dtype: str) -> None:
    for case in shapes.block_cases("cpu", (dtype,)):
        if case.shape.hidden_features > 8000:
            continue
        work = mlp.SUBJECT.build(case, CPU, True)
        x, parameters, _ = work.operands[0]
        functions = {"eager": work.eager, "fusedlayers": work.ours, **work.others}
        kept = {
            name: layers.saved_bytes(found[0], x, *parameters) / work.hidden_bytes for name, found in functions.items()
        }
        assert math.floor(kept["eager"]) == EAGER_BUFFERS[case.is_gated, case.activation], case.id
        assert (kept["fusedlayers"], kept["recompute"]) == (1 + case.is_gated, 0), case.id


@pytest.mark.parametrize("gated", [False, True])
def test_the_yardstick_is_the_bare_matmuls(gated: bool) -> None:
    case = next(case for case in shapes.block_cases("cpu") if case.is_gated == gated and "ase" in case.shape.name)
    work = mlp.SUBJECT.build(case, CPU, True)
    x, parameters, dy = work.operands[0]
    matmuls = work.others[mlp.MATMULS]
    with torch.profiler.profile(acc_events=True) as profile:  # without it torch 2.11 warns
        torch.autograd.grad(matmuls[0](x, *parameters), [x, *parameters], dy, allow_unused=True)
    called = [event.name for event in profile.events() if event.name in ("aten::mm", "aten::addmm", "aten::addmm_")]
    assert len(called) == (9 if gated else 6)
    # And they are those of the block: what it multiplies by, and what comes out.
    w1, w2 = parameters[0], parameters[2]
    torch.testing.assert_close(matmuls[0](x, *parameters), x @ w1.t() @ w2.t())
    dx, dw1 = torch.autograd.grad(matmuls[0](x, *parameters), [x, w1], dy)
    torch.testing.assert_close(dw1, (dy @ w2).t() @ x)
    torch.testing.assert_close(dx, dy @ w2 @ w1 + (x @ parameters[1].t() @ parameters[1] if gated else 0.0))


def test_mlp_results_have_everything_a_reader_needs(tmp_path: Path) -> None:
    case = next(case for case in shapes.block_cases("cpu") if case.shape.name == "ViT-B")
    result = mlp.run([case], CPU, variants=("eager", "fusedlayers", "recompute", "matmuls"), quick=True, out=tmp_path)
    assert json.loads((tmp_path / "mlp.json").read_text())["cases"] == result["cases"]
    assert mlp.acceptance(result) == []
    variants = result["cases"][0]["variants"]
    assert "ratio" in variants["matmuls"]["forward"]
    assert "the block" in result["definitions"]["saved_bytes"]
    table = tables.mlp_table(result)
    assert "ViT-B, gelu, float32 (49 x 768 to 3072) | 1.1 | **0.6** | 0.0 |" in table


def test_mlp_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--only", "model/vit-b/gelu/float32", "--variants", "recompute,matmuls", "--quick"]
    assert bench_main(["mlp", "--device", "cpu", *arguments, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.json", "mlp.png"]
    assert (tmp_path / "mlp.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path / 'mlp.png'}" in capsys.readouterr().out


def test_mlp_targets_are_checked() -> None:
    times = {"forward_backward": {"ratio": 1.2, "median_us": 120.0}, "saved_bytes": 200}
    row = {
        "id": "model/a", "shape": "BERT-base", "dtype": "bfloat16", "gated": False, "hidden_bytes": 100,
        "variants": {"fusedlayers": times},
    }  # fmt: skip
    assert mlp.acceptance({"device": {"kind": "cuda"}, "quick": False, "cases": [row]}) == [
        "model/a: fusedlayers keeps 2.00 hidden buffers: MISSED",
        "model/a: fusedlayers 1.20x eager, target 1.0: MISSED",
    ]


# --- pointwise --------------------------------------------------------------------------------------------------------


def test_pointwise_compares_bandwidths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interleave = measure.interleave
    monkeypatch.setattr(
        measure, "interleave", lambda functions, device, seconds: interleave(functions, device, seconds=0.05)
    )
    result = pointwise.run(CPU, ("float32",), sizes=((16, 32),), out=tmp_path)
    assert json.loads((tmp_path / "pointwise.json").read_text()) == result
    assert [row["activation"] for row in result["cases"]] == list(shapes.ACTIVATIONS)
    row = result["cases"][0]
    assert row["copy"]["of_copy"] == 1
    assert row["copy"]["gb_per_s"] == pytest.approx(2 * 16 * 32 * 4 / row["copy"]["median_us"] * 1e-3, abs=0.1)
    assert row["forward"]["of_copy"] > 0 and row["backward"]["of_copy"] > 0
    assert pointwise.acceptance(result) == []  # a CPU promises nothing here
    on_gpu = {
        **result,
        "device": {"kind": "cuda"},
        "cases": [{"id": "a", "forward": {"of_copy": 0.9}, "backward": {"of_copy": 0.89}}],
    }
    assert pointwise.acceptance(on_gpu) == [
        "a forward: 0.90 of a copy's bandwidth, target 0.9: met",
        "a backward: 0.89 of a copy's bandwidth, target 0.9: MISSED",
    ]


# --- custom -----------------------------------------------------------------------------------------------------------


def custom_run(*ids: str, **options: Any) -> dict[str, Any]:
    return custom.run([case for case in custom.cases() if case.id in ids], CPU, **{"quick": True, **options})


def test_custom_results_have_everything_a_reader_needs(tmp_path: Path) -> None:
    result = custom_run("resnet18/prelu", "resnet18/snake", out=tmp_path)
    assert json.loads((tmp_path / "custom.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["custom.json"]  # no leftover of the atomic write
    assert result["versions"]["torch"] == torch.__version__ and result["threads"] == torch.get_num_threads()
    assert result["device"]["name"] and result["device"]["slug"] and result["date"] and result["not_run"] == []
    assert [row["id"] for row in result["cases"]] == ["resnet18/prelu", "resnet18/snake"]
    for row in result["cases"]:
        eager, ours = row["variants"]["eager"], row["variants"]["fusedlayers"]
        for variant in (eager, ours):
            times = variant["forward_backward"]
            assert 0 < times["q1_us"] <= times["median_us"] <= times["q3_us"]
            assert variant["peak_bytes"] > variant["saved_bytes"] > 0
            assert 0 <= variant["output_error"] < 1e-4
        assert eager["forward_backward"]["ratio"] == 1
        assert ours["saved_bytes"] <= eager["saved_bytes"]
    assert len(custom.acceptance(result)) == 2


def test_custom_records_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(custom._Fused):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of luck\nwith a second line")

    class Wrong(custom._Fused):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return super().forward(z).square()

    monkeypatch.setattr(custom, "_Fused", Broken)
    result = custom_run("resnet18/snake")
    (row,) = result["cases"]
    assert row["variants"]["fusedlayers"] == {"error": "RuntimeError: out of luck"}
    assert row["variants"]["eager"]["forward_backward"]["ratio"] == 1
    assert custom.acceptance(result) == ["resnet18/snake: MISSED: RuntimeError: out of luck"]

    monkeypatch.setattr(custom, "_Fused", Wrong)
    (row,) = custom_run("resnet18/snake")["cases"]
    assert row["variants"]["fusedlayers"]["error"].startswith("ArithmeticError: differs from float64 by ")


def test_custom_acceptance() -> None:
    def row(activation: str, saved: int, q1: float) -> dict[str, Any]:
        ours = {"saved_bytes": saved, "forward_backward": {"ratio": 1.0, "ratio_q1": q1}}
        return {
            "id": f"resnet18/{activation}",
            "activation": activation,
            "variants": {"eager": {"saved_bytes": 100}, "fusedlayers": ours},
        }

    cases = [row("relu", 100, 1.0), row("a", 111, 1.0), row("a", 50, 1.01)]
    assert custom.acceptance({"cases": cases}) == [
        "resnet18/relu: 1.00x eager's bytes: met, 1.00x its time: met, 1.00x ReLU's bytes: met",
        "resnet18/a: 1.11x eager's bytes: MISSED, 1.00x its time: met, 1.11x ReLU's bytes: MISSED",
        "resnet18/a: 0.50x eager's bytes: met, 1.00x its time: MISSED, 0.50x ReLU's bytes: met",
    ]


def test_custom_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(custom, "RESULTS", tmp_path / "results")
    assert bench_main(["custom", "--device", "cpu", "--only", "no such case"]) == 2
    assert "no case matches --only 'no such case'; there are ['resnet18/relu'" in capsys.readouterr().out
    arguments = ["custom", "--device", "cpu", "--only", "resnet18/relu", "--quick"]
    assert bench_main(arguments) == 0 and list(tmp_path.iterdir()) == []  # a part replaces no committed result
    assert bench_main([*arguments, "--budget", "0", "--out", str(tmp_path)]) == 0 and list(tmp_path.iterdir()) == []
    assert bench_main([*arguments, "--out", str(tmp_path)]) == 0
    assert "resnet18/relu: 1.00x eager's bytes: met" in capsys.readouterr().out
    assert json.loads((tmp_path / "custom.json").read_text())["quick"] is True


def test_resnet18_is_the_usual_one() -> None:
    made: list[int] = []

    def make(channels: int) -> torch.nn.Module:
        made.append(channels)
        return torch.nn.ReLU()

    with torch.device("meta"):
        parts = resnet(18, lambda channels: BatchNormAct(channels, make(channels)), classes=10, is_small=True)
        network = torch.nn.Sequential(*parts)
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 10)
        assert network[:-1](torch.empty(2, 3, 32, 32)).shape == (2, 512, 4, 4)
    assert made == [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (152, 60_192_808)])
def test_deep_resnets_have_as_many_parameters_as_published_ones(depth: int, count: int) -> None:
    with torch.device("meta"):
        network = torch.nn.Sequential(*resnet(depth))
        assert network(torch.empty(2, 3, 64, 64)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_both_variants_of_the_network_begin_alike() -> None:
    state = torch.get_rng_state()
    eager, ours = (custom._subject(custom.Case("snake"), name, CPU, quick=True) for name in custom.VARIANTS)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(eager.module.parameters(), ours.module.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs) and torch.equal(eager.x, ours.x)
    torch.testing.assert_close(eager.forward(), ours.forward())


ORDERS = (0.15, 0.5, 0.9, 1.0, 1.3, 1.8)
FRACTIONAL = ("fractional-splitting", "fractional")


def fractional(name: str, order: float) -> torch.nn.Module:
    module: torch.nn.Module = CUSTOM_ACTIVATIONS[name](1).double()
    share = torch.tensor((order - 0.1) / 1.8, dtype=torch.float64)
    return module.requires_grad_(False).apply(lambda module: module.p.copy_(share.logit())).requires_grad_()


def fractional_by_definition(x: float, a: float) -> float:
    if x > 0:
        return 1.0507 * x ** (1 - a) / math.gamma(2 - a)
    terms = [(-1) ** n * (1 - math.exp(x - n)) * math.gamma(1 + a) / math.factorial(n) for n in range(3)]
    # Gamma has a pole at 0: where a is 1 the last term is nothing.
    return 1.6732 * 1.0507 * sum(t / math.gamma(1 - n + a) for n, t in enumerate(terms) if abs(1 - n + a) > 1e-9)


@pytest.mark.parametrize("name", FRACTIONAL)
@pytest.mark.parametrize("order", ORDERS)
def test_fractional_activations_are_what_their_definition_says(name: str, order: float) -> None:
    module = fractional(name, order)
    x = torch.tensor([-30.0, -3.0, -1.0, -1e-9, 0.0, 1e-9, 0.1, 1.0, 3.0, 30.0], dtype=torch.float64)
    expected = torch.tensor([fractional_by_definition(value, order) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert CUSTOM_ACTIVATIONS[name](1).order().item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", FRACTIONAL)
@pytest.mark.parametrize("order", ORDERS)
def test_fractional_gradients(name: str, order: float) -> None:
    module = fractional(name, order)

    def function(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"p": p}, (x,))

    x = torch.tensor([-3.0, -1.0, -0.1, 0.1, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, module.p))
    # x^(1 - a) has no derivative at zero, and must not make NaN of the one that counts there.
    x = torch.tensor([-1.0, 0.0, -0.0, 1.0], requires_grad=True)
    p = module.p.detach().float().requires_grad_()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(function(x, p).sum(), (x, p)))


# --- overhead ---------------------------------------------------------------------------------------------------------


def overhead_run(*ids: str, **options: Any) -> dict[str, Any]:
    return overhead.run([case for case in overhead.cases() if case.id in ids], CPU, **{"quick": True, **options})


def test_overhead_results_have_everything_a_reader_needs(tmp_path: Path) -> None:
    # A case of each operation.
    ids = list({case.operation: case.id for case in overhead.cases()}.values())
    result = overhead_run(*ids, out=tmp_path)
    assert json.loads((tmp_path / "overhead.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["overhead.json"]
    assert result["versions"]["torch"] == torch.__version__ and result["threads"] == torch.get_num_threads()
    assert result["device"]["name"] and result["device"]["slug"] and result["date"] and result["not_run"] == []
    assert sorted(row["id"] for row in result["cases"]) == sorted(ids)
    for row in result["cases"]:
        for mode in ("forward_backward", "no_grad"):
            eager, ours = (row["variants"][name][mode] for name in overhead.VARIANTS)
            assert 0 < ours["q1_us"] <= ours["median_us"] <= ours["q3_us"] and ours["rounds"] >= 5
            assert eager["ratio"] == 1 and eager["over_eager_us"] == 0


def test_overhead_covers_what_it_says() -> None:
    cases = [*overhead.cases(), *overhead.cases(on_fake_gpu=True)]
    assert len({case.id for case in cases}) == len(cases)
    assert {case.group for case in cases} == set(overhead.GROUPS) >= set(overhead.TARGETS)
    for case in cases:
        eager, ours = overhead._build(case, CPU)
        y = eager.call()
        assert (
            len(eager.wanted)
            == len(ours.wanted)
            == {"bias_act": 2, "module": 1}.get(
                case.operation, {"mlp": 5, "gated_mlp": 7, "fuse": 5}.get(case.operation, 3)
            )
        )
        hidden = {"mlp": 4, "gated_mlp": 4}.get(case.operation, 1)  # the hidden layer is as many times wider
        assert y.numel() * hidden == case.elements and y.dtype is torch.float32


def test_overhead_records_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("out of luck\nwith a second line")

    monkeypatch.setattr(overhead.fl, "bias_act", broken)
    result = overhead_run("small/bias_act/relu/512")
    (row,) = result["cases"]
    assert row["variants"]["fusedlayers"] == {"error": "RuntimeError: out of luck"}
    assert row["variants"]["eager"]["no_grad"]["ratio"] == 1
    assert overhead.acceptance(result) == ["small/bias_act/relu/512: MISSED: RuntimeError: out of luck"]

    monkeypatch.setattr(overhead.fl, "bias_act", lambda z, b, activation: torch.relu(z + b) * 1.1)
    (row,) = overhead_run("small/bias_act/relu/512")["cases"]
    assert row["variants"]["fusedlayers"]["error"].startswith("ArithmeticError: differs from eager by 1.0e-01")


def test_overhead_acceptance() -> None:
    def row(group: str, ratio: float, over: float) -> dict[str, Any]:
        ours = {"forward_backward": {"ratio": ratio, "over_eager_us": over}}
        return {"id": group, "group": group, "variants": {"fusedlayers": ours}}

    cases = [
        *(row("small", 1.1, 5.1), row("small", 1.11, 5.0), row("small", 1.11, 5.1)),
        *(row("fused", 1.15, 20.1), row("fused", 1.16, 20.0), row("fused", 1.16, 20.1)),
        row("folded", 9.0, 900.0),  # of which nothing is promised
    ]
    assert overhead.acceptance({"cases": cases}) == [
        "small: 1.10x eager, +5.1 us, target at most 1.10x or 5 us: met",
        "small: 1.11x eager, +5.0 us, target at most 1.10x or 5 us: met",
        "small: 1.11x eager, +5.1 us, target at most 1.10x or 5 us: MISSED",
        "fused: 1.15x eager, +20.1 us, target at most 1.15x or 20 us: met",
        "fused: 1.16x eager, +20.0 us, target at most 1.15x or 20 us: met",
        "fused: 1.16x eager, +20.1 us, target at most 1.15x or 20 us: MISSED",
    ]


def test_overhead_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(overhead, "RESULTS", tmp_path / "results")
    threads = torch.get_num_threads()
    try:
        assert bench_main(["overhead", "--only", "no such case"]) == 2
        assert "no case matches --only 'no such case'; there are ['small/dense/relu/512'" in capsys.readouterr().out
        arguments = ["overhead", "--only", "small/bias_act", "--quick"]
        assert bench_main(arguments) == 0 and list(tmp_path.iterdir()) == []  # a part replaces no committed result
        assert bench_main([*arguments, "--budget", "0", "--out", str(tmp_path)]) == 0 and list(tmp_path.iterdir()) == []
        assert bench_main([*arguments, "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "small/bias_act/relu/512: " in out and "no_grad eager" in out and "target at most 1.10x or 5 us" in out
    written = json.loads((tmp_path / "overhead.json").read_text())
    assert written["quick"] is True and written["threads"] == 1


# --- models -----------------------------------------------------------------------------------------------------------


def of_transformers(test: Callable[..., None]) -> Callable[..., None]:
    quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:transformers")
    is_missing = importlib.util.find_spec("transformers") is None
    return pytest.mark.skipif(is_missing, reason="transformers is not installed")(quiet(test))


def a_small_model(hf: Any) -> torch.nn.Module:
    return hf.BertModel(hf.BertConfig(**models_sizes, vocab_size=100))  # type: ignore[no-any-return]


models_sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@of_transformers
def test_whole_models_are_measured_in_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = models.Case("Small", a_small_model, (2, 16), (1.03, 1.06))
    result = models.run([case], CPU, timed=False, out=tmp_path)
    (row,) = result["cases"]
    eager, exact, ours = (row["variants"][name] for name in ("eager", "exact", "fusedlayers"))
    assert exact["saved_bytes"] <= eager["saved_bytes"] and ours["saved_bytes"] <= eager["saved_bytes"]
    assert row["at_most"] == {"fusedlayers": 1.03, "exact": 1.06} and "small/float32" in capsys.readouterr().out
    assert json.loads((tmp_path / "models.json").read_text())["cases"] == [row]
    result = models.run([case], CPU, timed=False, budget_seconds=0)
    assert result["cases"] == [] and result["not_run"] == [case.id]


@of_transformers
def test_whole_models_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_CASE_SECONDS", {"cpu": 0.0})
    row = models.measure_case(models.Case("Small", a_small_model, (2, 16), (1.03, 1.06)), CPU, timed=True)
    assert row["variants"]["fusedlayers"]["forward_backward"]["rounds"] == models._FEWEST_ROUNDS
    assert row["variants"]["eager"]["forward_backward"]["ratio"] == 1 and "(at most 1.06)" in models.line(row)


def test_variants_of_a_model_share_their_parameters() -> None:
    case = models.Case("Small", lambda hf: torch.nn.Linear(2, 2), (1, 2), (1, 1))
    eager = models.Subject(case, torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.randn(1, 2))
    subject = eager.variant("fusedlayers", case)
    pairs = zip(eager.model.parameters(), subject.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs) and subject.model is not eager.model


def test_models_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[Path | None, bool]] = []

    def run(todo: Any, device: Any, *, out: Path | None, timed: bool, **options: Any) -> Any:
        written.append((out, timed))
        return {"cases": []}

    monkeypatch.setattr(models, "run", run)
    monkeypatch.setattr(models, "RESULTS", tmp_path)
    assert bench_main(["models", "--device", "cpu", "--only", "no such case"]) == 2
    assert "bench models: no case matches --only 'no such case': ['bert-base/" in capsys.readouterr().out
    for arguments in ([], ["--bytes-only"], ["--only", "bert"], ["--bytes-only", "--out", str(tmp_path)]):
        assert bench_main(["models", "--device", "cpu", *arguments]) == 0
    (whole, is_timed), *parts = written
    assert whole is not None and whole.parent == tmp_path and is_timed
    assert parts == [(None, False), (None, True), (tmp_path, False)]


def test_a_gpu_gets_larger_batches() -> None:
    of_cpus, of_gpus = ({case.id: case for case in models.cases(kind)} for kind in ("cpu", "cuda"))
    assert len(of_cpus) == 18 and len(of_gpus) == 8
    assert all(case.input[0] == 32 * of_cpus[name].input[0] for name, case in of_gpus.items())


def test_what_saved_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "_INPUTS", {"planes": lambda: torch.randn(2, 32, 16, 16)})
    row = saved.measure_case(saved._case("Blocks", lambda hf: saved.Blocks(), "planes", (0.5, 0.5, 0.5)), None)
    for mode in saved.MODES:
        assert row[mode]["own"] == pytest.approx(row[mode]["hooks"], rel=0.01)
        assert row[mode]["hooks"] == pytest.approx(row[mode]["living"], rel=0.01)
        assert row["share"][mode] < row["at_most"][mode] and f"{mode} own" in saved.line(row)
