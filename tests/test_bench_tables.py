"""``python -m bench readme``: what the documents' tables and their picture make of result files.

The documents hold the tables of all committed results; here is what those results do not have."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench import overview, report, setups, shapes, tables
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
        "dtype": shapes.DTYPES[kind][0],
        "tokens": 512,
        "in_features": 768,
        "hidden_features": 3072,
        "variants": {"eager": measured(12345.6, 1.0, 12), "fusedlayers": measured(9000.0, 0.7289, 6)},
    }
    commit(a_run([row, {**row, "activation": "tanh"}], kind), "dense", results)


README = "# Title\n\n<!-- bench:dense -->\nold\n<!-- /bench:dense -->\n\nend\n"
TABLE_ROW = "| BERT-base, gelu, float32 (512 x 768 to 3072) | 12.0 | **6.0** | 12.3 ms | **0.73x** |"


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
    def row(dtype: str, **variants: Any) -> dict[str, Any]:
        eager = {"saved_bytes": 200 * 2**20, "peak_bytes": 400 * 2**20}
        return {"model": "BERT", "dtype": dtype, "input": [4, 512], "variants": {"eager": eager, **variants}}

    time_of = {"forward_backward": {"median_us": 5432100.0, "ratio": 0.987}}
    ours = {"saved_bytes": 150 * 2**20, "peak_bytes": 300 * 2**20}
    run = a_run([row("float32", fusedlayers=ours), row("autocast")])
    run["cases"][1]["variants"]["eager"] |= time_of
    run["cases"][1]["variants"] |= {"fusedlayers": time_of, "compile": {"error": "no compiler"}}
    lines = table_of("models", run, tmp_path)
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4:-1] == [
        "| BERT, float32 (4 x 512) | 200.0 | **-25.0 %** | 400.0 | **-25.0 %** | - | **-** | - |",
        "| BERT, autocast (4 x 512) | 200.0 | **-** | 400.0 | **-** | 5.43 s | **0.99x** | - |",
    ]


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
    row = {"model": "BERT-base", "dtype": "float32", "input": [4, 512]}
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


def test_the_peers_table(tmp_path: Path) -> None:
    also = {"peak_bytes": 20 << 20}
    variants = {
        "eager": {**measured(12345.6, 1.0, 12), **also, "gradient_error": 1e-7},
        "optiacts": {**measured(1.0, 1.1, 6), **also, "gradient_error": 5e-3},
        "Liger": {"skipped": "liger_kernel is not installed"},
        "FusedMLP": {**measured(1.0, 0.9, 6), **also, "gradient_error": 9e-7},
    }
    gated = {name: variants[name] for name in ("eager", "FusedMLP")}
    cases = [{"id": "MLP", "input": [4, 8], "variants": variants}, {"id": "gated", "input": [2], "variants": gated}]
    lines = table_of("peers", a_run(cases), tmp_path)
    assert lines[2].endswith("| MLP (4 x 8) | gated (2) |")
    assert lines[4:-1] == [
        "| PyTorch | inputs and outputs of operations | 12.0, 20, 12.3 ms | 12.0, 20, 12.3 ms |",
        "| optiacts | outputs and a bit for each element | 6.0, 20, 1.10x, dx errs by 5e-03 |  |",
        "| **`FusedMLP`, `FusedGatedMLP`** | the same | 6.0, 20, 0.90x | 6.0, 20, 0.90x |",
    ]


def test_the_table_of_setups_in_short(tmp_path: Path) -> None:
    """Reasons once, peaks where PyTorch saves nothing, and which cells have no figure."""

    def row(setup: str, saved: int, peak: int, eager: int = 100) -> dict[str, Any]:
        bytes_of = {"eager": (eager, 200), "fusedlayers": (saved, peak)}
        keys = "saved_bytes", "peak_bytes"
        variants = {name: dict(zip(keys, found, strict=True)) for name, found in bytes_of.items()}
        return {"setup": setup, "model": "BERT", "variants": variants}

    cases = [row("float32", 63, 150), row("bfloat16", 50, 150), row("save_on_cpu", 0, 140, eager=0)]
    cases.append(row("checkpoints of all blocks", 75, 150))
    for setup in ("checkpoints of every second block", "selective checkpoints"):
        cases.append({"setup": setup, "model": "BERT", "variants": {}, "unsuited": "no such switch"})
    commit(a_run(cases), "setups", tmp_path)
    lines = tables.TABLES["works_with"](tmp_path).splitlines()
    assert lines[2] == "| Saved bytes, as a share of PyTorch's | BERT |"
    cells = dict(line.strip("| ").split(" | ") for line in lines[4:])
    assert {re.sub(r"\[(.*?)\]\(.*?\)", r"\1", label): cell for label, cell in cells.items()} == {
        "float32; bfloat16": ".63; .50",
        "autocast; with bfloat16 weights": "not measured",
        "under autocast LoRA on q and v; on all projections; only the last block trained": "not measured",
        "checkpoints of all blocks; of every second; selective ones": ".75; no such switch",
        "DDP, autocast; FSDP2; EMA copy": "not measured",
        "`save_on_cpu` (peak)": ".70",
    }


def test_every_setup_but_one_is_in_the_short_table() -> None:
    shown = {setup for row in tables.WORKS_WITH for setup in row}
    assert {*setups.SETUPS} - shown == {"checkpoints of all blocks, autocast"}
    assert shown <= {*setups.SETUPS}


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
    assert "`python -m bench fit-compiled` makes one" in tables.TABLES["fit_compiled"](tmp_path)
