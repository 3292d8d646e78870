"""``python -m bench readme``: what the documents' tables and their picture make of result files.

The documents hold the tables of all committed results; here is what those results do not have."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench import overview, report, shapes
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


def test_readme_without_results(tmp_path: Path) -> None:
    assert "No result is committed yet" in report.fill(README, tmp_path)


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
    assert overview.shown({**run, "cases": [of_another_dtype, untimed, timed]}) == [timed]
