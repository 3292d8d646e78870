"""The benchmarks' own machinery, on shapes too small to measure anything."""

import importlib.util
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bench import containers, grid, machine, measure, models, peers, saved, zoo
from bench.__main__ import main as bench_main
from bench.measure import Setting, Variant
from bench.reference import resnet
from fusedlayers.memory import saved_bytes

CPU = torch.device("cpu")
QUICK = Setting(CPU)


# --- measure ----------------------------------------------------------------------------------------------------------


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
    "architectures": "^(bert|t5|uvdoc)$",
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


def _check_architectures(rows: dict[str, Any]) -> None:
    assert "skipped" in rows.pop("uvdoc")  # it needs images of another size
    for row in rows.values():
        assert row["same"] == {"float32": True, "autocast": True}
        assert all(2 * now < 1.2 * before for before, now in row["saved_bytes"].values())


# --- calls, models, peers ---------------------------------------------------------------------------------------------


def test_variants_of_a_model_share_their_parameters() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    own, _ = models.variant("fusedlayers", model, x, is_autocast=False).own
    pairs = zip(model.parameters(), own.parameters(), strict=True)
    assert all(a is b for a, b in pairs) and own is not model


def test_models_are_measured_in_both_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CASES", [models.Case("Small", zoo.convolutions, (4, 32, 24, 24))])
    assert bench_main(["models", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "models.json").read_text())["cases"]
    assert [row["id"] for row in rows] == [case.id for case in models.cases("cpu")]
    for row in rows:
        eager, ours = (row["variants"][name] for name in ("eager", "fusedlayers"))
        assert ours["saved_bytes"] <= 0.7 * eager["saved_bytes"]


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


@pytest.mark.parametrize(("depth", "count"), [(50, 25_557_032), (152, 60_192_808)])
def test_resnets_have_as_many_parameters_as_published_ones(depth: int, count: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in nn.Sequential(*resnet(depth)).parameters()) == count
