"""What reports share: how files and notebooks get their tables and pictures."""

import base64
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.reports.memory_report import MemoryReport
from fusedlayers.utils.report import Report


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def reports() -> Iterator[Any]:
    x = torch.randn(64, 32)
    yield fl.memory_report(model(), x)
    yield fl.explain("relu")
    yield fl.explain(model())
    yield fl.fuse(model(), x)
    yield fl.fit(nn.Sequential(model(), model()), x, fraction=0.9)
    yield fl.InvertibleSequential(fl.InvertibleActivation("leaky_relu")).check(x)


def test_notebooks_show_tables_and_pictures() -> None:
    pytest.importorskip("matplotlib")
    for report in reports():
        assert isinstance(report, Report) and report.to_dict()
        with pytest.raises(TypeError, match="cannot be called: it is a report, and no model"):
            report(torch.ones(2))
        shown = report._repr_html_()
        table, image = re.fullmatch(r"<pre>(.*?)</pre>(<img .*>)?", shown, re.DOTALL).groups()  # type: ignore[union-attr]
        assert table.splitlines()[0] == str(report).splitlines()[0]
        assert (image is not None) == isinstance(report, MemoryReport), type(report)
        if image is not None:
            assert base64.b64decode(re.search(r"base64,([^\"]*)", image)[1]).startswith(b"\x89PNG")  # type: ignore[index]


def test_what_has_no_picture_is_shown_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = fl.memory_report(lambda x: x.sum(), torch.ones(3, requires_grad=True))
    assert "<img" not in nothing._repr_html_() and "&lt;lambda&gt;" in nothing._repr_html_()
    report = fl.memory_report(model(), torch.randn(64, 32))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<img" not in report._repr_html_()
    with pytest.raises(
        ImportError, match=r"memory_report: a plot needs matplotlib, .* pip install 'fusedlayers\[demo\]'"
    ):
        report.plot(tmp_path / "picture.png")
