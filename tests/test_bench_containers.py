"""``python -m bench containers``: what it measures, says, and what the README makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import containers, tables
from bench.__main__ import main as bench_main

CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "TORCH_SEGMENTS", (4,))


def test_a_run_measures_every_variant(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["containers", "--quick", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "containers.json").read_text())
    assert [row["id"] for row in result["cases"]] == ["revnet/2", "revnet/4", "resnet152"] and result["not_run"] == []
    *revnets, resnet = (row["variants"] for row in result["cases"])
    names = [
        "eager",
        "checkpoint_sequential-4",
        "same-memory-4",
        "sublinear",
        "cheap",
    ]
    assert list(resnet) == names
    for row in result["cases"]:
        assert all("error" not in variant for variant in row["variants"].values()), row
        assert row["variants"]["eager"]["forward_backward"]["ratio"] == 1
    # What is planned is what is kept, and less than what eager keeps.
    for name in ("same-memory-4", "sublinear", "cheap"):
        assert resnet[name]["saved_bytes"] <= resnet[name]["planned_bytes"] < resnet["eager"]["saved_bytes"]
    assert resnet["sublinear"]["saved_bytes"] < resnet["cheap"]["saved_bytes"]
    assert revnets[0]["invertible"]["saved_bytes"] == revnets[1]["invertible"]["saved_bytes"]
    out = capsys.readouterr().out
    assert "revnet: saved bytes grow by 0.0% over depths: met" in out and "resnet152, cheap: " in out


def test_what_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["containers", "--only", "no such case"]) == 2
    assert "there are ['revnet/8', 'revnet/32'" in capsys.readouterr().out


def test_a_variant_that_fails_is_a_finding() -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of luck")

    subject = containers.cases(quick=True)[0].build(CPU, True)
    subject.variants["invertible"] = broken
    row = containers.measure_case(containers.Case("revnet/2", 1.0, lambda *_: subject), CPU, seconds=0.0, quick=True)
    assert row["variants"]["invertible"] == {"error": "RuntimeError: out of luck"}


def test_a_variant_that_computes_something_else_is_not_timed() -> None:
    subject = containers.cases(quick=True)[0].build(CPU, True)
    make = subject.variants["invertible"]

    def other() -> containers.Variant:
        variant = make()
        return containers.Variant(variant.module, lambda x: 2 * variant.call(x))

    subject.variants["invertible"] = other
    row = containers.measure_case(containers.Case("revnet/2", 1.0, lambda *_: subject), CPU, seconds=0.0, quick=True)
    assert "differs from eager" in row["variants"]["invertible"]["error"]


def measured(peak: float, ratio: float, saved: float = 1.0) -> dict[str, Any]:
    to_torch = {"median": 0.9, "q1": 0.8, "q3": 1.1}
    times = {"median_us": 1e6 * ratio, "ratio": ratio, "ratio_q1": ratio, "ratio_q3": ratio, "to_torch": to_torch}
    return {"peak_bytes": peak * 2**20, "saved_bytes": saved * 2**20, "forward_backward": times}


def a_result() -> dict[str, Any]:
    resnet = {
        "eager": measured(100, 1.0, 90),
        "checkpoint_sequential-4": measured(40, 1.30),
        "same-memory-4": measured(40, 1.20),
        "checkpoint_sequential-8": measured(30, 1.30),
        "same-memory-8": measured(31, 1.20),
        "sublinear": measured(20, 1.25),
        "cheap": measured(60, 1.20),
    }
    deep = {"eager": measured(9, 1.0, 80), "invertible": measured(9, 1.5, 2.0)}
    rows = [
        {"id": "resnet152", "input": [16, 3, 9, 9], "layers": 152, "variants": resnet},
        {"id": "revnet/8", "input": [4, 6], "layers": 8, "variants": {**deep, "invertible": measured(9, 1.5, 2.1)}},
        {"id": "revnet/32", "input": [4, 6], "layers": 32, "variants": deep},
    ]
    device = {"name": "A device", "kind": "cpu", "slug": "a-device"}
    head = {"quick": False, "threads": 2, "versions": {"torch": "2.0"}, "date": "2000-01-01", "device": device}
    return {**head, "cases": rows}


def test_acceptance_says_what_is_met() -> None:
    assert containers.acceptance(a_result()) == [
        "resnet152, sublinear: 0.20x eager's memory at 0.80x its speed (asked: 0.40x at 0.72x): met",
        "resnet152, cheap: 0.60x eager's memory at 0.83x its speed (asked: 0.62x at 0.90x): MISSED",
        "resnet152, 4 segments: in 0.40x eager's memory, where checkpoint_sequential takes 0.40x, 0.90x its time: met",
        "resnet152, 8 segments: in 0.31x eager's memory, where checkpoint_sequential takes 0.30x, 0.90x its time: "
        "MISSED",
        "revnet: saved bytes grow by 5.0% over depths: MISSED",
    ]
    result = a_result()
    result["cases"][0]["variants"]["cheap"] = {"error": "RuntimeError: no"}
    assert "resnet152, cheap: MISSED: RuntimeError: no" in containers.acceptance(result)


def test_the_readmes_tables() -> None:
    lines = tables.containers_table(a_result()).splitlines()
    assert "| ResNet-152, float32 (16 x 3 x 9 x 9) | saved MiB | peak MiB | of eager's | speed |" in lines
    assert "| `nn.Sequential` | 90.0 | 100.0 | 1.00x | 1.00x |" in lines
    assert "| **here**, as little as can be | 1.0 | 20.0 | 0.20x | 0.80x |" in lines
    assert "| RevNet, float32 | saved MiB: eager | **here** | speed |" in lines
    assert "| 32 blocks (4 x 6) | 80.0 | 2.0 | 0.67x |" in lines
