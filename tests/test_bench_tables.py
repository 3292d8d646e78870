"""``python -m bench readme``: what the documents' tables and their picture make of result files."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench import overview, report, tables
from bench.__main__ import main as bench_main


def measured(microseconds: float, ratio: float, saved_mib: float) -> dict[str, Any]:
    return {"forward_backward": {"median_us": microseconds, "ratio": ratio}, "saved_bytes": int(saved_mib * 2**20)}


def a_run(cases: list[dict[str, Any]], kind: str = "cpu") -> dict[str, Any]:
    return {
        "device": {"kind": kind, "name": f"Some {kind}", "slug": kind},
        "threads": 4,
        "versions": {"torch": "2.13.0+cpu"},
        "date": "2030-01-02",
        "quick": False,
        "cases": cases,
    }


def commit(run: dict[str, Any], name: str, results: Path) -> None:
    folder = results / run["device"]["slug"]
    folder.mkdir(parents=True)
    (folder / f"{name}.json").write_text(json.dumps(run))


def a_committed_run(results: Path, kind: str = "cpu") -> None:
    row = {
        "group": "model",
        "shape": "BERT-base",
        "activation": "gelu",
        "dtype": tables.MAIN_DTYPE[kind],
        "tokens": 512,
        "in_features": 768,
        "hidden_features": 3072,
        "variants": {
            "eager": measured(12345.6, 1.0, 12),
            "compile": {"error": "no compiler"},
            "fusedlayers": measured(9000.0, 0.7289, 6),
        },
    }
    cases = [row, {**row, "activation": "tanh"}, {**row, "group": "acceptance"}]
    commit(a_run(cases, kind), "dense", results)


README = "# Title\n\n<!-- bench:dense -->\nold\n<!-- /bench:dense -->\n\nend\n"
TABLE_ROW = "| BERT-base, gelu, float32 (512 x 768 to 3072) | 12.0 | - | **6.0** | 12.3 ms | - | **0.73x** |"


def readme(path: Path, results: Path, *flags: str) -> int:
    return bench_main(["readme", "--documents", str(path), "--results", str(results), *flags])


def test_readme_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = tmp_path / "README.md", tmp_path / "results"
    path.write_text(README)
    a_committed_run(results)
    assert readme(path, results, "--check") == 1
    assert "-old" in capsys.readouterr().out and path.read_text() == README
    assert readme(path, results) == 0
    text = path.read_text()
    assert TABLE_ROW in text.splitlines() and text.count("BERT-base") == 1 and "old" not in text
    assert "Some cpu, 4 threads, torch 2.13.0, 2030-01-02:" in text
    assert text.startswith("# Title\n\n<!-- bench:dense -->\n") and text.endswith("\n<!-- /bench:dense -->\n\nend\n")
    assert readme(path, results, "--check") == 0
    assert readme(path, results) == 0 and path.read_text() == text

    a_committed_run(results, kind="cuda")
    assert readme(path, results, "--check") == 1
    assert readme(path, results) == 0
    assert path.read_text().index("Some cuda, torch") < path.read_text().index("Some cpu")


def table_of(name: str, run: dict[str, Any], results: Path) -> list[str]:
    """The lines of the README's table when the folder of results, which was empty before, has this run on a CPU."""
    text = f"{README}<!-- bench:{name} -->\n<!-- /bench:{name} -->\n"
    assert f"`python -m bench {name}` makes one" in report.fill(text, results)
    commit(run, name, results)
    lines = report.fill(text, results).split(f"<!-- bench:{name} -->")[1].strip().splitlines()
    assert lines[0] == "Some cpu, 4 threads, torch 2.13.0, 2030-01-02:"
    return lines


def test_the_models_table(tmp_path: Path) -> None:
    def row(layers: int | None, **variants: Any) -> dict[str, Any]:
        eager = {"saved_bytes": 200 * 2**20, "peak_bytes": 400 * 2**20}
        return {
            "model": "BERT-base",
            "layers": layers,
            "dtype": "float32",
            "input": [4, 512],
            "variants": {"eager": eager, **variants},
        }

    time_of = {"forward_backward": {"median_us": 5432100.0, "ratio": 0.987}}
    ours = {"saved_bytes": 150 * 2**20, "peak_bytes": 300 * 2**20}
    run = a_run([row(None, fusedlayers=ours), row(4)])
    run["cases"][1]["variants"]["eager"] |= time_of
    run["cases"][1]["variants"] |= {"exact": {**ours, **time_of}, "compile": {**ours, **time_of}}
    lines = table_of("models", run, tmp_path)
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4:-1] == [
        "| BERT-base, float32 (4 x 512) | 200.0 | - | **-25.0 %** | 400.0 | - | **-25.0 %** | - | - | **-** | - |",
        "| BERT-base, 4 layers, float32 (4 x 512) | 200.0 | -25.0 % | **-** | 400.0 | -25.0 % | **-** "
        "| 5.43 s | 0.99x | **-** | 0.99x |",
    ]


def test_the_conv_table(tmp_path: Path) -> None:
    def row(shape: str, activation: str, format: str, sizes: list[int], **more: Any) -> dict[str, Any]:
        variants = {
            "eager": measured(12345.6, 1, 12),
            "compile": measured(1, 1.1, 12),
            "fusedlayers": measured(1, 0.9, 6),
        }
        row = {"group": "model", "shape": shape, "activation": activation, "format": format, "dtype": "float32"}
        return {**row, "input": sizes, "output": [sizes[0], 7, *sizes[2:]], "variants": variants, **more}

    cases = [
        row("WaveNet", "tanh", "contiguous", [2, 3, 99]),
        row("ResNet-50 3x3", "relu", "channels_last", [1, 1, 1, 1]),
        row("ResNet-50 3x3", "relu", "contiguous", [4, 64, 56, 56]),
        row("ResNet-50 3x3", "relu", "contiguous", [1, 1, 1, 1], group="other"),
    ]
    lines = table_of("conv", a_run(cases), tmp_path)
    assert "(contiguous)" in lines[2]
    cells = "12.0 | 12.0 | **6.0** | 12.3 ms | 1.10x | **0.90x** |"
    assert lines[4:-1] == [
        f"| ResNet-50 3x3, relu, float32 (4 x 64 x 56 x 56 to 7) | {cells}",
        f"| WaveNet, tanh, float32 (2 x 3 x 99 to 7) | {cells}",
    ]
    # On GPUs the other format is the main one; a sequence has none.
    table = tables.conv_table(a_run([{**row, "dtype": "bfloat16"} for row in cases], "cuda"))
    assert "(1 x 1 x 1 x 1 to 7)" in table and "64 x 56" not in table and "WaveNet" in table


def test_the_custom_table(tmp_path: Path) -> None:
    def row(activation: str, eager: float, ours: dict[str, Any], group: str = "resnet18") -> dict[str, Any]:
        variants = {"eager": measured(123456.7, 1.0, eager), "fusedlayers": ours}
        return {"group": group, "activation": activation, "input": [16, 3, 32, 32], "variants": variants}

    fused = measured(1.0, 0.789, 50)
    cases = [row("relu", 40, fused), row("snake", 120, fused), row("prelu", 60, {"error": "no"})]
    cases.append(row("alone", 1, fused, group="alone"))
    lines = table_of("custom", a_run(cases), tmp_path)
    assert "ResNet-18, float32, 16 images of 32 x 32" in lines[2]
    assert lines[4:-1] == [
        "| relu | 40.0 | **50.0** | 1.00x | **1.25x** | 123 ms | **0.79x** |",
        "| snake | 120.0 | **50.0** | 3.00x | **1.25x** | 123 ms | **0.79x** |",
        "| prelu | 60.0 | **-** | 1.50x | **-** | 123 ms | **-** |",
    ]
    # Without ReLU there is nothing to compare with.
    table = tables.custom_table(a_run(cases[1:]))
    assert "| snake | 120.0 | **50.0** | - | **-** | 123 ms | **0.79x** |" in table


def test_readme_without_results(tmp_path: Path) -> None:
    assert "No result is committed yet" in report.fill(README, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no marker", "there must be `<!-- bench:NAME -->`, each with its `<!-- /bench:NAME -->` behind it, once"),
        ("<!-- bench:dense -->", "there must be"),
        ("<!-- /bench:dense --><!-- bench:dense -->", "there must be"),
        (README + "<!-- bench:other --><!-- /bench:other -->", r"no table is called 'other'; there are \['accuracy', "),
    ],
)
def test_readme_markers_must_be_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        report.fill(text, tmp_path)
    path = tmp_path / "README.md"
    path.write_text(text)
    assert readme(path, tmp_path) == 1 and path.read_text() == text


def test_the_documents_show_the_committed_results() -> None:
    assert bench_main(["readme", "--check"]) == 0, "run `python -m bench readme` and commit the documents"


def a_models_run(**more: Any) -> dict[str, Any]:
    eager, ours = {"saved_bytes": 200 * 2**20}, measured(1.0, 0.987, 150)
    row = {"model": "BERT-base", "layers": None, "dtype": "float32", "input": [4, 512]}
    return {**a_run([{**row, "variants": {"eager": eager, "fusedlayers": ours}}]), **more}


def test_the_picture_has_a_row_for_each_model(tmp_path: Path) -> None:
    assert overview.picture(tmp_path) is None
    commit(a_models_run(quick=True), "models", tmp_path / "quick")
    assert overview.picture(tmp_path) is None
    commit(a_models_run(), "models", tmp_path)
    drawn = overview.picture(tmp_path)
    assert drawn is not None
    words = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text and element.text.strip()]
    assert {"BERT-base", "float32, 4 x 512", "200 MiB", "150 MiB  (-25 %)", "time of a step", "0.99x"} < {*words}
    eager, here = (element for element in ElementTree.fromstring(drawn).iter() if element.get("height") == "14")
    assert float(here.get("width", 0)) == pytest.approx(0.75 * float(eager.get("width", 0)), abs=0.1)
    run = a_models_run()
    (timed,) = run["cases"]
    untimed, of_another_dtype = copy.deepcopy(timed), {**copy.deepcopy(timed), "dtype": "float16"}
    del untimed["variants"]["fusedlayers"]["forward_backward"]
    assert overview.shown({**run, "cases": [untimed, timed, of_another_dtype]}) == [timed]


def test_the_picture_is_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = tmp_path / "README.md", tmp_path / "results"
    path.write_text(README)
    a_committed_run(results)
    (results / "cpu" / "models.json").write_text(json.dumps(a_models_run()))
    assert readme(path, results) == 0 and (results / "overview.svg").read_text() == overview.picture(results)
    assert readme(path, results, "--check") == 0
    (results / "overview.svg").write_text("another")
    assert readme(path, results, "--check") == 1 and "overview.svg differs" in capsys.readouterr().out


def test_the_overview_has_the_parts_of_the_devices_with_most(tmp_path: Path) -> None:
    text = f"{README}<!-- bench:overview --><!-- /bench:overview -->"
    assert "`python -m bench dense` makes one" in report.fill(text, tmp_path).split("bench:overview")[1]
    a_committed_run(tmp_path)
    a_committed_run(tmp_path, kind="cuda")
    row = {"group": "model", "shape": "LLaMA-7B", "activation": "silu", "dtype": "float32"}
    row["variants"] = {"eager": measured(2000.0, 1.0, 16), "fusedlayers": measured(1.0, 0.5, 8)}
    (tmp_path / "cpu" / "mlp.json").write_text(json.dumps(a_run([row])))
    device = {"kind": "cpu", "name": "Other", "slug": "other"}
    commit({**a_run([row]), "date": "2040-01-01", "device": device}, "mlp", tmp_path)
    filled = report.fill(text, tmp_path).split("<!-- bench:overview -->")[1]
    assert "Other" not in filled
    lines = filled.strip().splitlines()
    assert lines[0].startswith("GPU: Some cuda, torch") and ", bfloat16. CPU: Some cpu, " in lines[0]
    assert " Some cpu, 4 threads, torch 2.13.0, 2030-01-02, float32. Bytes are" in lines[0]
    assert lines[2].endswith("| GPU: PyTorch | GPU: **here** | CPU: PyTorch | CPU: **here** |")
    assert lines[4].startswith("| Linear + GELU: BERT-base |")
    assert lines[4].endswith("| 12.0, 12.3 ms | **6.0**, **0.73x** |")
    assert lines[5] == "| gated MLP, SiLU: LLaMA-7B | - | - | 16.0, 2 ms | **8.0**, **0.50x** |"


def test_the_peers_table(tmp_path: Path) -> None:
    also = {"peak_bytes": 20 << 20}
    variants = {
        "eager": {**measured(12345.6, 1.0, 12), **also, "gradient_error": 1e-7},
        "optiacts": {**measured(1.0, 1.1, 6), **also, "gradient_error": 5e-3},
        "Liger": {"skipped": "liger_kernel is not installed"},
        "fusedlayers": {**measured(1.0, 0.9, 6), **also, "gradient_error": 9e-7},
    }
    gated = {name: variants[name] for name in ("eager", "fusedlayers")}
    cases = [{"id": "MLP", "input": [4, 8], "variants": variants}, {"id": "gated", "input": [2], "variants": gated}]
    lines = table_of("peers", a_run(cases), tmp_path)
    assert lines[2].endswith("| MLP (4 x 8) | gated (2) |")
    assert lines[4:-1] == [
        "| PyTorch | inputs and outputs of operations | 12.0, 20, 12.3 ms | 12.0, 20, 12.3 ms |",
        "| optiacts | outputs and a bit for each element | 6.0, 20, 1.10x, dx errs by 5e-03 |  |",
        "| **`fl.fuse`** | outputs; the factors of products | 6.0, 20, 0.90x | 6.0, 20, 0.90x |",
    ]


def test_the_table_of_small_calls(tmp_path: Path) -> None:
    def row(group: str, elements: int) -> dict[str, Any]:
        variants = {"eager": {"forward_backward": {"median_us": 123.4, "ratio": 1.0}}, "fusedlayers": {}}
        variants["fusedlayers"] = {mode: {"median_us": 1.0, "ratio": 1.25} for mode in ("forward_backward", "no_grad")}
        return {"group": group, "operation": "dense", "activation": "relu", "elements": elements, "variants": variants}

    run = a_run([row("small", 512), row("fused", 16384), row("fused", 131072)])
    assert table_of("overhead", run, tmp_path)[4:-1] == [
        "| dense, relu (512) | 123 us | **1.25x** | - | **1.25x** |",
        "| dense, relu (131072) | 123 us | **1.25x** | - | **1.25x** |",
    ]
    assert "`python -m bench overhead --fake-gpu` makes one" in tables.TABLES["host"](tmp_path)


def test_the_saved_table(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"bert/{dtype}", "model": "BERT", "dtype": dtype, "eager": {"hooks": 20 << 20},
            "exact": {"hooks": 12 << 20}, "fusedlayers": {"hooks": (10 + i) << 20},
        }
        for i, dtype in enumerate(("float32", "bfloat16", "autocast"))
    ]  # fmt: skip
    peak = {
        "id": "BERT/float32", "peak_bytes": {"eager": 40 << 20, "fusedlayers": 30 << 20, "exact": 36 << 20},
        "share": {"fusedlayers": 0.75, "exact": 0.9},
    }  # fmt: skip
    lines = table_of("saved", {**a_run(rows), "peaks": [peak], "linear_over_eager_us": 14.0}, tmp_path)
    assert "| BERT | 20.0, **10.0** (-50 %), 12.0 | 20.0, **11.0** (-45 %), 12.0 | 20.0, **12.0** (-40 %) |" in lines
    assert "| BERT, float32 | 40 | **30** (0.75x) | 36 (0.90x) |" in lines


def test_the_fit_table(tmp_path: Path) -> None:
    def entry(budget: float, **variants: Any) -> dict[str, Any]:
        return {"budget": budget, "variants": {"eager": measured(2e5, 1.0, 100), **variants}}

    fit = {**measured(1.0, 1.05, 60), "predicted_bytes": 61 * 2**20, "predicted_ratio": 1.1, "planning_s": 16.4}
    budgets = [entry(0.7, fit=fit, checkpoint=measured(1.0, 1.3, 65)), entry(0.3, fit={"error": "too small"})]
    run = a_run([{"id": "bert/float32", "saved_bytes": 100 * 2**20, "budgets": budgets}])
    lines = table_of("fit", run, tmp_path)
    assert lines[2].endswith(
        "| budget | checkpoints of blocks | **`fl.fit`** | predicted by `fit` | duration of `fit` |"
    )
    assert lines[4:-1] == [
        "| bert, float32, 100.0 | 70.0% | 65.0%, 1.30x | 60.0%, 1.05x | 61.0%, 1.10x | 16 s, as 82 steps |",
        "| bert, float32, 100.0 | 30.0% | - | - | - | - |",
    ]
