"""``python -m bench peers``: what is measured of others, and what is said where they cannot be."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import peers
from bench.__main__ import main as bench_main

CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes minutes."""
    for name in ("compile", "compile, budget"):
        monkeypatch.delitem(peers.VARIANTS, name)


def test_blocks_are_measured_and_who_is_missing_is_named(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_module = importlib.import_module

    def without_peers(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("optiacts", "liger_kernel", "inplace_abn"):
            raise ImportError(name=name)
        return import_module(name, *args, **more)

    monkeypatch.setattr(importlib, "import_module", without_peers)
    assert peers.main(options(out=tmp_path)) == 0
    result = json.loads((tmp_path / "peers.json").read_text())
    rows = {row["id"]: row["variants"] for row in result["cases"]}
    assert list(rows) == [block.id for block in peers.BLOCKS] and result["not_run"] == []
    for variants in rows.values():
        assert variants["checkpoint"]["saved_bytes"] == 0
        assert all(found["gradient_error"] < 1e-2 for found in variants.values() if "skipped" not in found)
        assert all(found["forward_backward"]["rounds"] == 2 for found in variants.values() if "skipped" not in found)
    assert rows["gated MLP, SiLU"]["Liger"] == {"skipped": "liger_kernel.ops.swiglu is not installed"}
    assert rows["MLP, GELU"]["recompute"]["saved_bytes"] == 0
    printed = capsys.readouterr().out
    assert "liger_kernel.ops.swiglu is not installed" in printed and "wrote" in printed


def options(**more: Any) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args(["--device", "cpu", "--quick"])), **more})


def test_a_block_that_no_pattern_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["peers", "--device", "cpu", "--only", "nothing"]) == 2
    assert "no block matches --only 'nothing'; there are ['MLP, GELU'," in capsys.readouterr().out


def test_a_variant_that_errs_or_raises_is_a_row(uncompiled: None) -> None:
    def wrong(module: torch.nn.Module, x: torch.Tensor) -> peers.Forward:
        return lambda x: module(2 * x)

    def raises(module: torch.nn.Module, x: torch.Tensor) -> peers.Forward:
        raise RuntimeError("no GPU\nat all")

    block = peers.Block("small", partial(peers.MLP, 8, 16), (4, 8), {"wrong": wrong, "raises": raises})
    variants = peers.measure_block(block, CPU, quick=True)["variants"]
    assert variants["wrong"]["error"].startswith("ArithmeticError: the gradient errs by ")
    assert variants["raises"] == {"error": "RuntimeError: no GPU"}
