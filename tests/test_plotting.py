"""What pictures share: colours that everybody tells apart, and how files and notebooks get them."""

import base64
import io
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.utils import plotting
from fusedlayers.utils.reports import DrawnReport, Report

COLORS = ("BLUE", "ORANGE", "GREEN", "SKY", "WINE", "LEMON", "GREY")
#: What linear RGB looks like without one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1).
VISIONS = {
    "all": torch.eye(3),
    "no red": torch.tensor([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "no green": torch.tensor([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no blue": torch.tensor([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def linear(color: str) -> Tensor:
    value = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return torch.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def cielab(rgb: Tensor) -> Tensor:
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clamp(0, 1) / torch.tensor([0.9505, 1.0, 1.0888])
    x, y, z = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_colors_are_told_apart(vision: str) -> None:
    seen = {name: cielab(VISIONS[vision] @ linear(getattr(plotting, name))) for name in COLORS}
    for one, other in itertools.combinations(seen, 2):
        assert (seen[one] - seen[other]).norm() > 12, f"{one} and {other}"


@pytest.mark.parametrize("name", COLORS)
def test_text_on_colors_is_read(name: str) -> None:
    color = getattr(plotting, name)
    text = "#ffffff" if color in plotting.DARK else plotting.INK
    luminance = sorted(float(linear(c) @ torch.tensor([0.2126, 0.7152, 0.0722])) for c in (color, text))
    assert (luminance[1] + 0.05) / (luminance[0] + 0.05) > 4.5  # as WCAG 2 asks of small text


DrawnTexts = dict[int, tuple[str, Any]]


@pytest.fixture
def drawn_texts(monkeypatch: pytest.MonkeyPatch) -> DrawnTexts:
    """The texts of figures that are drawn, with their boxes."""
    text_class = pytest.importorskip("matplotlib.text").Text
    drawn: DrawnTexts = {}
    draw = text_class.draw

    def recording(self: Any, renderer: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn[id(self)] = self.get_text(), self.get_window_extent(renderer)  # the last time it is drawn
        draw(self, renderer)

    monkeypatch.setattr(text_class, "draw", recording)
    return drawn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def reports() -> Iterator[Report]:
    x = torch.randn(64, 32)
    before = fl.memory_report(model(), x)
    yield before
    yield before.compare(before)
    yield fl.explain("relu")
    yield fl.explain(model())  # type: ignore[misc]
    yield fl.fuse(model(), x)
    yield fl.fit(nn.Sequential(model(), model()), x, fraction=0.9)
    yield fl.InvertibleSequential(fl.InvertibleActivation("leaky_relu")).check(x)


def test_notebooks_show_tables_and_pictures() -> None:
    pytest.importorskip("matplotlib")
    for report in reports():
        shown = report._repr_html_()
        table, image = re.fullmatch(r"<pre>(.*?)</pre>(<img .*>)?", shown, re.DOTALL).groups()  # type: ignore[union-attr]
        assert table.splitlines()[0] == str(report).splitlines()[0]
        assert (image is not None) == isinstance(report, DrawnReport), type(report)
        if image is not None:
            assert base64.b64decode(re.search(r"base64,([^\"]*)", image)[1]).startswith(b"\x89PNG")  # type: ignore[index]


def test_what_has_no_picture_is_shown_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for report in (
        fl.explain(lambda z: z.no_such_method()),
        fl.memory_report(lambda x: x.sum(), torch.ones(3, requires_grad=True)),
    ):
        assert isinstance(report, DrawnReport) and "<img" not in report._repr_html_()
        assert "&lt;lambda&gt;" in report._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<img" not in fl.explain("relu")._repr_html_()  # type: ignore[union-attr]


def test_drawing_leaves_matplotlibs_state_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib.figure

    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before = dict(dict.items(matplotlib.rcParams))
    fl.explain("gelu").plot(tmp_path / "picture.png")  # type: ignore[union-attr]
    assert "matplotlib.pyplot" not in sys.modules
    assert dict(dict.items(matplotlib.rcParams)) == before  # a look-up of the backend would import pyplot
    from matplotlib.image import imread

    assert imread(tmp_path / "picture.png").shape[1] == plotting.WIDTH * plotting.DPI


ACTIVATIONS = [
    *fl.activations()[::6],
    torch.cos,
    torch.abs,
    nn.PReLU(),
    nn.LeakyReLU(-0.3),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_text_lies_on_another_or_outside(activation: object, drawn_texts: DrawnTexts) -> None:
    check_texts(fl.explain(activation), drawn_texts)  # type: ignore[arg-type]


def test_nor_in_pictures_of_models(drawn_texts: DrawnTexts) -> None:
    for report in reports():
        if isinstance(report, DrawnReport):
            check_texts(report, drawn_texts)


def check_texts(report: DrawnReport, drawn: DrawnTexts) -> None:
    figure = report.figure()
    drawn.clear()
    figure.savefig(io.BytesIO())
    assert len(drawn) > 3
    for text, box in drawn.values():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for (text, box), (other, its_box) in itertools.combinations(drawn.values(), 2):
        assert not box.overlaps(its_box), f"{text!r} and {other!r}"
