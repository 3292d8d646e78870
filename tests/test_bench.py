"""The benchmarks' own machinery, on shapes too small to measure anything."""

import importlib.util
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bench import containers, grid, layers, machine, measure, models, overhead, peers, saved, shapes, zoo
from bench.__main__ import main as bench_main
from bench.measure import Setting, Variant
from bench.reference import resnet
from fusedlayers.memory import saved_bytes

CPU = torch.device("cpu")
QUICK = Setting(CPU)


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

    up, down = nn.Linear(8, 32), nn.Linear(32, 8)
    x = torch.randn(16, 8)
    kept = {}
    variants = {
        part: measure.compiled(nn.Sequential(up, nn.GELU(), down), backend="aot_eager_decomp_partition")
        for part in (1.0, 0.1)
    }
    for _ in range(2):
        for part, run in variants.items():
            with config.patch(activation_memory_budget=part):
                run(x)
                kept[part] = saved_bytes(run, x, exclude=x)
    assert kept[0.1] < kept[1.0]


def test_a_drift_of_the_machine_leaves_the_ratio_alone() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = measure.summary([3 * factor for factor in drift], [2 * factor for factor in drift])
    assert (found["ratio"], found["ratio_q1"], found["ratio_q3"]) == (1.5, 1.5, 1.5)
    assert measure.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3, "q1": 2, "q3": 4}


def test_variants_that_fail_or_compute_something_else_are_rows() -> None:
    x = torch.ones(64, requires_grad=True)

    def variant(factor: float) -> Variant:
        def forward() -> torch.Tensor:
            return (factor * x).exp()

        return Variant({"forward": forward}, lambda: [forward().detach()], forward=forward, own=x, step=forward)

    def raises(error: Exception) -> Variant:
        raise error

    makers = {
        "eager": partial(variant, 1.0),
        "same": partial(variant, 1.0),
        "other": partial(variant, 1.1),
        "broken": partial(raises, RuntimeError("out of luck\nwith a second line")),
        "silent": partial(raises, AssertionError()),
        "missing": partial(raises, ModuleNotFoundError(name="liger_kernel")),
        "yardstick": lambda: Variant({"forward": lambda: None}),
    }
    rows = measure.compare(makers, QUICK, allowed=1e-2)
    assert rows["other"]["error"].startswith("ArithmeticError: differs from eager by ")
    assert rows["broken"] == {"error": "RuntimeError: out of luck"}
    assert rows["silent"] == {"error": "AssertionError: no message"}
    assert rows["missing"] == {"skipped": "liger_kernel is not installed"}
    assert rows["yardstick"].keys() == {"forward"}
    assert rows["eager"]["forward"]["ratio"] == 1 and rows["same"]["forward"]["rounds"] == 2
    assert rows["same"]["saved_bytes"] == 64 * 4 <= rows["same"]["peak_bytes"]
    with pytest.raises(RuntimeError, match="out of luck"):  # without a baseline there is nothing to compare with
        measure.compare({"eager": makers["broken"]}, QUICK)


def test_a_busy_machine_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    description = {**machine.describe(CPU), "load_average": 2.5}
    machine.warn_if_busy(description)
    assert "warning: the load average is 2.5" in capsys.readouterr().out
    machine.warn_if_busy({**description, "load_average": 0.1})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100"),
        ("AMD EPYC", "amd-epyc-avx2-4-threads"),
        ("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "intel-xeon-platinum-8488c-avx2-4-threads"),
    ],
)
def test_slugs_name_the_device(name: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_instructions", lambda: "avx2")
    monkeypatch.setattr(machine, "device_name", lambda device: name)
    assert machine.slug(torch.device("cuda" if "NVIDIA" in name else "cpu"), 4) == slug


# --- grid -------------------------------------------------------------------------------------------------------------


class Letter(NamedTuple):
    id: str


def letters(seconds: list[float] | None = None) -> grid.Benchmark:
    """Measures nothing, but notes the seconds of a case."""

    def measured(case: Letter, setting: Setting) -> dict[str, Any]:
        if seconds is not None:
            seconds.append(setting.seconds)
        return {"id": case.id, "variants": {"eager": {"error": "none"}}}

    return grid.Benchmark(
        "letters", {}, lambda kind: [Letter(c) for c in "abc"], measured,
        missed=lambda result: [f"{len(result['cases'])} cases"], case_seconds=9.0, packages=("pytest", "no-such"),
        facts={"count": 3}, threads=1,
    )  # fmt: skip


def test_a_result_grows_by_a_case_at_a_time(tmp_path: Path) -> None:
    result = grid.begin("letters", CPU, {}, not_run=["a", "b", "c"])
    seen = []
    for case, left in grid.until(time.monotonic() + 60, "abc"):
        assert 59 < left <= 60
        seen.append(case)
        grid.add(result, {"id": case}, tmp_path)
        written = json.loads((tmp_path / "letters.json").read_text())
        assert written == result and [row["id"] for row in written["cases"]] + written["not_run"] == ["a", "b", "c"]
        assert f'  {{"id": "{case}"}}' in (tmp_path / "letters.json").read_text().splitlines()  # a case a line
    assert seen == ["a", "b", "c"] and result["not_run"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["letters.json"]


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


def test_a_run_says_where_and_of_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds: list[float] = []
    benchmark = letters(seconds)
    result = grid.run(benchmark, benchmark.cases("cpu"), CPU, budget_seconds=30.0, out=tmp_path)
    assert json.loads((tmp_path / "letters.json").read_text()) == result
    assert [row["id"] for row in result["cases"]] == ["a", "b", "c"] and result["not_run"] == []
    assert result["versions"]["pytest"] == pytest.__version__ and "no-such" not in result["versions"]
    assert result["threads"] == torch.get_num_threads() and result["count"] == 3
    assert result["device"]["name"] and result["device"]["slug"] and result["date"]
    # Half of what is left for each case, and no more than a case may have.
    assert seconds == [pytest.approx(5.0, abs=0.5), pytest.approx(7.5, abs=0.5), 9.0]
    out = capsys.readouterr().out
    assert "eager: none" in out and out.endswith("MISSED: 3 cases\n")
    assert grid.run(benchmark, benchmark.cases("cpu"), CPU, budget_seconds=0.0)["not_run"] == ["a", "b", "c"]


def test_a_part_replaces_no_committed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid, "RESULTS", tmp_path / "results")
    benchmark, threads = letters(), torch.get_num_threads()

    def run(*arguments: str) -> int:
        import argparse

        parser = argparse.ArgumentParser()
        grid.add_arguments(parser, benchmark)
        return grid.main(benchmark, parser.parse_args(["--device", "cpu", *arguments]))

    try:
        assert run("--only", "no such case") == 2
        assert "no case matches --only 'no such case'; there are ['a', 'b', 'c']" in capsys.readouterr().out
        assert run("--quick") == run("--only", "a|b") == 0 and list(tmp_path.iterdir()) == []
        assert run("--quick", "--only", "b", "--out", str(tmp_path / "out")) == 0
        written = json.loads((tmp_path / "out" / "letters.json").read_text())
        assert written["quick"] is True and [row["id"] for row in written["cases"]] == ["b"]
        assert run() == 0 and torch.get_num_threads() == 1
        assert [path.parent.name for path in tmp_path.glob("results/*/letters.json")] == [machine.slug(CPU, 1)]
    finally:
        torch.set_num_threads(threads)


# --- each benchmark ---------------------------------------------------------------------------------------------------

#: Commands and a case of each; ``fit``'s is in test_fit.py.
COMMANDS = {
    "dense": "vit-b/gelu/float32",
    "mlp": "vit-b/gelu/float32",
    "conv": "wavenet/contiguous/tanh/float32",
    "overhead": "small/bias_act",
    "containers": "revnet/8|resnet152",
    "saved": "diffusion-blocks/float32",
    "accuracy": "^gelu/bfloat16",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_benchmark_measures_its_cases(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        arguments = ["--device", "cpu", "--only", COMMANDS[name], "--quick", "--out", str(tmp_path)]
        assert bench_main([name, *arguments]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["not_run"] == [] and all(row["id"] in capsys.readouterr().out for row in result["cases"][:1])
    for row in result["cases"]:
        for variant in row.get("variants", {}).values():
            times = variant["forward_backward"]
            assert 0 < times["q1_us"] <= times["median_us"] <= times["q3_us"] and times["rounds"] == 2
    check: Callable[[dict[str, Any]], None] | None = globals().get(f"_check_{name}")
    if check is not None:
        check({row["id"]: row for row in result["cases"]})


def _check_dense(rows: dict[str, Any]) -> None:
    (row,) = rows.values()
    assert (row["tokens"], row["in_features"], row["hidden_features"]) == (12, 768, 3072)
    assert row["hidden_bytes"] == 12 * 3072 * 4
    assert row["variants"]["fusedlayers"]["peak_bytes"] > row["hidden_bytes"]


def _check_mlp(rows: dict[str, Any]) -> None:
    (row,) = rows.values()
    assert row["variants"].keys() == {"eager", "fusedlayers", "recompute"}


def _check_containers(rows: dict[str, Any]) -> None:
    revnet, resnet152 = (row["variants"] for row in rows.values())
    assert revnet["invertible"]["saved_bytes"] < revnet["eager"]["saved_bytes"]
    kept = {name: variant["saved_bytes"] for name, variant in resnet152.items()}
    assert kept["sublinear"] < kept["cheap"] <= containers.CHEAP * kept["eager"]
    assert {*kept} == {"eager", "sublinear", "cheap"} | {
        f"{who}-{segments}" for who in ("checkpoint_sequential", "same-memory") for segments in (4, 8, 16)
    }


def _check_saved(rows: dict[str, Any]) -> None:
    (row,) = rows.values()
    ours = row[saved.OURS]
    assert ours["own"] == pytest.approx(ours["hooks"], rel=0.01)
    assert ours["hooks"] == pytest.approx(ours["living"], rel=0.01)
    assert ours["hooks"] < 0.4 * row["eager"]["hooks"]


# --- layers -----------------------------------------------------------------------------------------------------------


def work_of(case: shapes.Case, build: Any) -> layers.Work:
    def randn(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes) * scale).to(getattr(torch, case.dtype)).requires_grad_()

    work: layers.Work = build(case.shape, case.format, "cpu", randn, True)
    return work


BUILT = [
    *((case, layers.build_dense) for case in shapes.cases(shapes.LAYERS, "cpu") if case.shape.hidden_features < 8000),
    *((case, layers.build_mlp) for case in shapes.cases(shapes.BLOCKS, "cpu") if case.shape.hidden_features < 8000),
    *((case, layers.build_conv) for case in shapes.cases(shapes.CONVOLUTIONS, "cpu")),
]


@pytest.mark.parametrize(("case", "build"), BUILT, ids=[case.id for case, _ in BUILT])
def test_layers_and_blocks_save_what_is_promised(case: shapes.Case, build: Any) -> None:
    work = work_of(case, build)
    kept = {}
    for name in work.calls:
        variant = work.variant(name)
        assert variant.forward is not None
        kept[name] = saved_bytes(variant.forward, exclude=variant.own) / work.hidden_bytes
    is_gated = getattr(case.shape, "is_gated", False)
    eager = 4 if is_gated else 1 if case.shape.activation in ("relu", "tanh") else 2
    assert math.floor(kept["eager"]) == eager and kept["fusedlayers"] == 1 + is_gated
    assert kept.get("recompute", 0) == 0


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_convolutions_are_measured_in_the_format_of_the_device(kind: str) -> None:
    for case in shapes.cases(shapes.CONVOLUTIONS, kind)[: len(shapes.CONVOLUTIONS)]:
        work = work_of(case, layers.build_conv)
        x, (w, _), dy = work.layer.x, work.layer.parameters, work.layer.dy
        last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
        format = last if case.format == "channels_last" else torch.contiguous_format
        assert x.is_contiguous(memory_format=format)
        assert w.is_contiguous(memory_format=format)
        assert {call(x, *work.layer.parameters).stride() for call, _ in work.calls.values()} == {dy.stride()}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("of", [shapes.LAYERS, shapes.BLOCKS, shapes.CONVOLUTIONS])
def test_the_main_dtype_comes_first(of: Any, kind: str) -> None:
    cases = shapes.cases(of, kind)
    assert len({case.id for case in cases}) == len(cases)
    assert len(cases) == len(shapes.DTYPES[kind]) * len(of)
    assert [case.shape for case in cases[: len(of)]] == list(of)
    assert {case.dtype for case in cases[: len(of)]} == {shapes.DTYPES[kind][0]}


def test_calls_that_cost_too_much_are_named() -> None:
    broken = {"id": "d", "variants": {"eager": {}, "fusedlayers": {"error": "RuntimeError: no"}}}

    def call(group: str, ratio: float, over: float) -> dict[str, Any]:
        ours = {"forward_backward": {"ratio": ratio, "over_eager_us": over}}
        return {"id": group, "group": group, "variants": {"fusedlayers": ours}}

    calls = [call("small", 1.1, 5.1), call("small", 1.11, 5.0), call("small", 1.11, 5.1), call("folded", 9.0, 900.0)]
    assert list(overhead.missed({"cases": [*calls, broken]})) == [
        "small: 1.11x eager, +5.1 us, target at most 1.10x or 5 us",
        "d: RuntimeError: no",
    ]


# --- calls, models, peers ---------------------------------------------------------------------------------------------


def test_overhead_compares_what_computes_the_same() -> None:
    cases = [*overhead.cases()]
    assert len({case.id for case in cases}) == len(cases)
    assert {case.group for case in cases} == {*overhead.TARGETS, "folded"}
    for case in {case.operation: case for case in cases}.values():
        eager, ours, tensors = overhead.build(case, CPU)
        counts = {"bias_act": 2, "module": 1, "mlp": 5, "gated_mlp": 7, "fuse": 5, "layer": 10}
        assert len(tensors) == counts.get(case.operation, 3)
        y = eager()
        hidden = 4 if "mlp" in case.operation else 1  # the hidden layer is as many times wider
        assert y.numel() * hidden == case.elements and y.dtype is torch.float32
        torch.testing.assert_close(ours(), y, rtol=1e-4, atol=1e-5)


def test_variants_of_a_model_share_their_parameters() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    own, _ = models.variant("fusedlayers", model, x, is_autocast=False).own
    pairs = zip(model.parameters(), own.parameters(), strict=True)
    assert all(a is b for a, b in pairs) and own is not model


def test_a_gpu_gets_larger_batches() -> None:
    of_cpus, of_gpus = ({case.id: case for case in models.cases(kind)} for kind in ("cpu", "cuda"))
    assert len(of_cpus) == 24 and of_cpus.keys() == of_gpus.keys()
    assert all(case.input[0] == 32 * of_cpus[name].input[0] for name, case in of_gpus.items())
    assert sum(case.is_compiled for case in of_cpus.values()) == 3
    assert not any(case.is_compiled for case in of_gpus.values())


def test_models_are_measured_in_both_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [models.Case("Small", zoo.convolutions, (4, 32, 24, 24), is_compiled=True)]
    if importlib.util.find_spec("transformers") is not None:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        cases.append(models.Case("Text", models.hf("Bert", **sizes, vocab_size=100), (2, 16)))
    monkeypatch.setattr(models, "CASES", cases)
    assert bench_main(["models", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "models.json").read_text())["cases"]
    assert [row["id"] for row in rows] == [case.id for case in models.cases("cpu")]
    for row in rows:
        eager, ours = (row["variants"][name] for name in ("eager", "fusedlayers"))
        assert ours["saved_bytes"] <= eager["saved_bytes"] * (1.0 if row["model"] == "Text" else 0.7)


def test_blocks_are_measured_by_others_and_who_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compile", "compile, budget"):  # which take minutes
        monkeypatch.delitem(peers.VARIANTS, name)

    def wrong(module: nn.Module) -> peers.Forward:
        return lambda x: 2 * module(x)

    for block in peers.BLOCKS:
        variants = peers.measure_block(
            peers.Block(block.id, block.build, block.shape, {**block.peers, "wrong": wrong}), QUICK
        )["variants"]
        assert variants["checkpoint"]["saved_bytes"] == 0
        assert variants["wrong"]["error"].startswith("ArithmeticError: the gradient errs by ")
        for name in ("eager", "FusedMLP", "recompute"):
            assert variants[name]["gradient_error"] < 1e-2 and variants[name]["peak_bytes"] > 0
        for name in {"optiacts", "Liger"} & block.peers.keys():
            if importlib.util.find_spec({"Liger": "liger_kernel"}.get(name, name)) is None:
                assert "is not installed" in variants[name]["skipped"]


# --- examples that are measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (152, 60_192_808)])
def test_resnets_have_as_many_parameters_as_published_ones(depth: int, count: int) -> None:
    with torch.device("meta"):
        network = nn.Sequential(*resnet(depth))
        assert network(torch.empty(2, 3, 64, 64)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
