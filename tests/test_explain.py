"""``explain`` and its command: what is said is what the layers do."""

import json

import pytest
import torch
from literature import PUBLISHED, Published
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.cli import main

KINDS = {"input": "needs input"}


@pytest.mark.parametrize("published", [p for p in PUBLISHED if not p.trainable][::4], ids=str)
def test_kinds_are_the_expected_ones(published: Published) -> None:
    found = fl.explain(published.function)
    assert found.kind == KINDS.get(published.kind, published.kind) and found.reason
    said = repr(fl.FusedDenseAct(8, 16, published.function))
    assert ("saves the output" in said) == (found.kind in ("monotone", "folded"))


@pytest.mark.parametrize(
    ("activation", "kind", "eager_bytes", "bytes_here"),
    [("gelu", "folded", 8, 4), ("tanh", "monotone", 4, 4), (torch.sin, "needs input", 8, 8), (nn.PReLU(8), None, 8, 8)],
    ids=["gelu", "tanh", "sin", "prelu"],
)
def test_bytes_and_errors(activation: object, kind: str | None, eager_bytes: float, bytes_here: float) -> None:
    found = fl.explain(activation)
    assert found.kind == (kind or "needs input")
    assert found.saved_bytes["float32"] == pytest.approx((eager_bytes, bytes_here), rel=0.01)
    assert found.saved_bytes["bfloat16"] == pytest.approx((eager_bytes / 2, bytes_here / 2), rel=0.01)
    for dtype, errors in found.accuracy.items():
        unit = torch.finfo(getattr(torch, dtype)).eps
        assert errors.floor_rms <= unit and errors.rms <= max(2 * errors.eager_rms, 40 * unit)
    assert json.loads(json.dumps(found.to_dict()))["kind"] == found.kind
    assert found.reason in str(found) and "saved bytes per element" in str(found)


def test_fallbacks_say_why() -> None:
    def softmax(z: Tensor) -> Tensor:
        return z.softmax(-1)

    found = fl.explain(softmax)
    assert found.kind == "fallback" and "not pointwise" in found.reason and found.source == ""
    with pytest.raises(ValueError, match="unknown activation 'gleu'"):
        fl.explain("gleu")


def test_the_generated_code_is_shown() -> None:
    pytest.importorskip("triton")
    assert "def silu_forward(z" in fl.explain("silu").source and "def silu_gradient(dy, y" in fl.explain("silu").source


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\ndef wave(z):\n    return torch.sin(z) * z\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["explain", "gelu"]) == 0 and capsys.readouterr().out.startswith("gelu: folded")
    assert main(["explain", "mine:wave", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "needs input"
    pytest.importorskip("matplotlib")
    assert main(["explain", "mine:wave", "--plot", "wave.png"]) == 0 and (tmp_path / "wave.png").stat().st_size > 1000
    assert main(["explain", "gleu"]) == 2 and "unknown activation" in capsys.readouterr().err
    assert main(["explain", "mine:tide"]) == 2 and "has no 'tide'" in capsys.readouterr().err
