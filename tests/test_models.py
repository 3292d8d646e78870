"""Whole models of the transformers package: what ``fuse`` finds in them, that losses, gradients and training stay what
they were, and that ``unfuse`` undoes it."""

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, Case, hf
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fusedlayers as fl
from fusedlayers.fusion.report import FuseReport

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:transformers")

STEPS = 20
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    result = model(**inputs)
    return result.loss if getattr(result, "loss", None) is not None else result[0].pow(2).mean()


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of all parameters in one."""
    loss = loss_of(model, inputs)
    loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach().double(), torch.cat(gradients)


def curve(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses, dtype=torch.float64)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def largest(a: Tensor, b: Tensor) -> float:
    return float(((a - b) / b).abs().max())


def test_what_is_found(case: Case) -> None:
    model, inputs = case.make().train(), case.inputs()
    names, parameters = list(model.state_dict()), list(model.parameters())
    before = copy.deepcopy(model.state_dict())
    report = fl.fuse(model, inputs)
    assert _counted(report) == case.patterns
    assert list(model.state_dict()) == names and all(
        a is b for a, b in zip(model.parameters(), parameters, strict=True)
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert report.saved_bytes is not None and report.saved_bytes[1] <= report.saved_bytes[0]
    found = _counted(fl.fuse(model))
    assert found.total() - found["dropout"] == case.without


def _counted(report: FuseReport) -> Counter[str]:
    """The places by what is computed there."""
    counted: Counter[str] = Counter()
    for place in (*report.replaced, *report.too_small):
        counted[place.activation or place.pattern] += len(place.modules)
    return counted


def test_losses_and_gradients(case: Case) -> None:
    model, inputs = case.make().train(), case.inputs()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fl.fuse(model, inputs)
    found, torchs, wanted = step(model, inputs), step(eager, inputs), step(exact, double(inputs))
    rounding = torch.finfo(torch.float32).eps
    for ours, theirs, reference in zip(found, torchs, wanted, strict=True):
        assert relative(ours, reference) <= 2 * relative(theirs, reference) + 4 * rounding


def test_training_goes_the_same_way(case: Case) -> None:
    model, inputs = case.make().train(), case.inputs()
    eager, exact, other = copy.deepcopy(model), copy.deepcopy(model).double(), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():  # by half a unit in the last place
            parameter.mul_(1 + torch.finfo(torch.float32).eps * (torch.rand_like(parameter) - 0.5))
    fl.fuse(model, inputs)
    found, torchs = curve(model, inputs), curve(eager, inputs)
    noise = max(largest(curve(other, inputs), torchs), largest(torchs, curve(exact, double(inputs))))
    assert largest(found, torchs) <= 4 * noise
    assert found[-1] < 0.95 * found[0]


def test_unfuse_restores_the_model(case: Case) -> None:
    model, inputs = case.make().eval(), case.inputs()
    classes = {name: type(module) for name, module in model.named_modules()}
    contents = {name: set(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        before = model(**inputs)[0]
        fl.fuse(model, inputs)
        fl.unfuse(model)
        assert {name: type(module) for name, module in model.named_modules()} == classes
        assert {name: set(vars(module)) for name, module in model.named_modules()} == contents
        assert torch.equal(model(**inputs)[0], before)


# --- saved bytes, by full-size layers ---------------------------------------------------------------------------------


def test_a_small_dac_keeps_what_the_readme_says() -> None:
    sizes = {"encoder_hidden_size": 16, "decoder_hidden_size": 64, "n_codebooks": 2, "codebook_size": 64}
    model = hf.DacModel(hf.DacConfig(**sizes, downsampling_ratios=[2, 4], upsampling_ratios=[4, 2])).train()
    report = fl.fuse(model, torch.randn(4, 1, 8192))
    assert report.saved_bytes is not None
    before, now = report.saved_bytes
    (said,) = re.findall(r"a small DAC: (\d+) % less", README.read_text(encoding="utf-8"))
    assert round(100 - 100 * now / before) == int(said)


def saved(model: nn.Module, inputs: dict[str, Any], **options: Any) -> float:
    """What is saved after ``fuse``, in relation to before."""
    report = fl.fuse(model.train(), inputs, **options)
    assert report.saved_bytes is not None
    before, after = report.saved_bytes
    return after / before


def _mistral(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.MistralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000,
    )  # fmt: skip
    return hf.MistralModel(config).to(dtype), {"input_ids": torch.randint(3, 1000, (1, 256)), "use_cache": False}


def test_saved_bytes_of_bert() -> None:
    # A layer is a layer: bench/models.py measures all twelve, and 512 tokens.
    config = hf.BertConfig(num_hidden_layers=2, vocab_size=1000, attention_probs_dropout_prob=0.0)
    assert saved(hf.BertModel(config), {"input_ids": torch.randint(3, 1000, (4, 128))}) <= 0.80


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 0.71), (torch.bfloat16, 0.74)])
def test_saved_bytes_of_mistral(dtype: torch.dtype, limit: float) -> None:
    model, inputs = _mistral(dtype)
    assert saved(model, inputs) <= limit


def test_saved_bytes_of_mistral_recomputed() -> None:
    model, inputs = _mistral(torch.float32)
    assert saved(model, inputs, save="recompute") <= 0.45


def test_saved_bytes_of_vit() -> None:
    model = hf.ViTModel(hf.ViTConfig(num_hidden_layers=2), add_pooling_layer=False)
    assert saved(model, {"pixel_values": torch.randn(1, 3, 224, 224)}) <= 0.78
