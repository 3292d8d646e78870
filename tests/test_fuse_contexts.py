"""Fused models in what training puts around models: checkpoints of activations, automatic mixed precision, and what
reads a model's classes and signatures."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import hf
from residuals import batch, images, of_fused_modules, of_layers, of_norms
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

EPS = torch.finfo(torch.float32).eps


def _fused(model: Callable[[], nn.Module]) -> nn.Module:
    made = model()
    assert fl.fuse(made, batch()).replaced
    return made


#: Each with the gradients and the ``state_dict`` of ``of_layers()``.
FUSED: dict[str, Callable[[], nn.Module]] = {
    "fused modules": of_fused_modules,
    "fuse": lambda: _fused(of_layers),
}
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors if t is not None])


def _gradients(model: nn.Module, x: Tensor) -> Tensor:
    """Of the parameters and of the input, in one."""
    x = x.clone().requires_grad_()
    model(x).square().mean().backward()
    return _flat([x.grad, *(p.grad for p in model.parameters())])


def _error(found: Tensor, exact: Tensor) -> Tensor:
    return (found - exact).norm() / exact.norm()


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """The parts of a model, or what is in them, one by one in checkpoints."""

    def __init__(self, model: Iterable[nn.Module], call: Callable[[nn.Module, Tensor], Tensor], is_inner: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model)
        self.call, self.is_inner = call, is_inner

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + self.call(part.inner, part.norm(x)) if self.is_inner else self.call(part, x)
        return x


def _wrapper(implementation: CheckpointImpl) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda part, x: checkpoint_wrapper(part, checkpoint_impl=implementation)(x)


def _selective(policy: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda part, x: checkpoint(part, x, use_reentrant=False, context_fn=contexts)


def _by_chance(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if len(str(operation)) % 2 else CheckpointPolicy.PREFER_RECOMPUTE


aten = torch.ops.aten
CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant": lambda part, x: checkpoint(part, x, use_reentrant=True),
    "not reentrant": lambda part, x: checkpoint(part, x, use_reentrant=False),
    "to the end": lambda part, x: checkpoint(part, x, use_reentrant=False, early_stop=False),
    "wrapper": _wrapper(CheckpointImpl.NO_REENTRANT),
    "reentrant wrapper": _wrapper(CheckpointImpl.REENTRANT),
    "matmuls": _selective([aten.mm.default, aten.addmm.default]),
    "activations": _selective([aten.gelu.default, aten.silu.default, aten.mish.default, aten.tanh.default]),
    "everything": _selective(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE),
    "half of it": _selective(_by_chance),
}


@pytest.mark.parametrize("is_inner", [False, True], ids=["parts", "inner"])
@pytest.mark.parametrize("name", CHECKPOINTS)
@every_fused
def test_checkpoints(make: Callable[[], nn.Module], name: str, is_inner: bool) -> None:
    x = batch()
    ours, torchs = (Checkpointed(model, CHECKPOINTS[name], is_inner) for model in (make(), of_layers()))
    kept = [saved_bytes(lambda m=m: m(x.clone().requires_grad_())) for m in (ours, torchs)]  # type: ignore[misc]
    assert kept[0] == kept[1]
    exact = _gradients(of_layers().double(), x.double())
    assert _error(_gradients(ours, x), exact) <= 2 * _error(_gradients(torchs, x), exact) + 4 * EPS


class _Edited(nn.Module):
    """Writes over the output of its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x)).mul_(2.0))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_outputs_that_a_checkpoint_writes_over(use_reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(48, 48), _Edited()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, self.outer(x), use_reentrant=use_reentrant)
            return y

    torch.manual_seed(0)
    model, x = Outer(), torch.randn(64, 48)
    (expected,) = (
        torch.autograd.grad(model(x).square().sum(), model.inner.first.weight) if not use_reentrant else [None]
    )
    report = fl.fuse(model, x)
    assert "written over in place" in str(report)
    model(x).square().sum().backward()
    assert expected is None or torch.equal(model.inner.first.weight.grad, expected)


# Which count batches in place: a checkpoint that keeps that too is refused by torch.
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "everything"])
def test_checkpoints_of_batch_norms(name: str) -> None:
    x = images()
    found = []
    for is_fused, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        model = of_norms()
        if is_fused:
            fl.fuse(model, x)
        calls = Checkpointed([model.to(dtype)], CHECKPOINTS[name], is_inner=False)
        found.append(_gradients(calls, x.to(dtype)))
    ours, torchs, exact = found
    assert _error(ours, exact) <= 2 * _error(torchs, exact) + 4 * EPS


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("order", ["fuse, then enable", "enable, then fuse"])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning",
    "ignore:None of the inputs have requires_grad:UserWarning",  # fuse looks at the model without gradients
)
def test_gradient_checkpointing_enable(name: str, order: str, use_reentrant: bool) -> None:
    case = next(case for case in models.CASES if case.name == name)
    torch.manual_seed(0)
    made: Any = case.make().train()
    inputs = {**case.inputs(), "use_cache": False}
    found, kept = [], []
    for is_fused, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        model = copy.deepcopy(made).to(dtype)
        steps = [lambda m=model: m.gradient_checkpointing_enable({"use_reentrant": use_reentrant})]  # type: ignore[misc]
        if is_fused:
            steps.insert(order == "enable, then fuse", lambda m=model: fl.fuse(m, inputs))  # type: ignore[misc]
        for step in steps:
            step()
        kept.append(saved_bytes(lambda m=model: m(**inputs), exclude=[inputs, model]))  # type: ignore[misc]
        model(**inputs)[0].pow(2).mean().backward()
        found.append(_flat(p.grad for p in model.parameters()))
    ours, torchs, exact = found
    assert _error(ours, exact) <= 2 * _error(torchs, exact) + 4 * EPS
    assert kept[0] <= kept[1]  # what is outside the checkpoints may be less


# --- automatic mixed precision ----------------------------------------------------------------------------------------


def _trained(model: nn.Module, dtype: torch.dtype | None) -> tuple[list[Tensor], list[float]]:
    """The gradients of three steps, the second with an infinite loss, and the scales after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, scales = [], []
    for factor in (1.0, torch.inf, 1.0):
        if dtype is None and factor == torch.inf:
            continue  # as the scaler does
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(batch().to(next(model.parameters()).dtype)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * factor).backward()
        before = _flat(model.parameters())
        scaler.unscale_(optimizer)
        gradients.append(_flat(p.grad for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, _flat(model.parameters())) == (factor == torch.inf)
    return gradients, scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_fused
def test_scaled_gradients(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    (first, infinite, last), scales = _trained(make(), dtype)
    (torchs_first, _, torchs_last), torchs_scales = _trained(of_layers(), dtype)
    (exact_first, exact_last), _ = _trained(of_layers().double(), None)
    assert scales == torchs_scales == [2.0**10, 2.0**9, 2.0**9] and not infinite.isfinite().all()
    assert _error(first, exact_first) <= 2 * _error(torchs_first, exact_first) + 4 * EPS
    assert _error(last, exact_last) <= 2 * _error(torchs_last, exact_last) + 4 * EPS


# --- where the layers of a block must be called -----------------------------------------------------------------------


def test_activations_of_blocks_keep_their_output_where_layers_have_hooks() -> None:
    kept = []
    for model in (_fused(of_layers), of_layers()):
        for name in ("1.inner.fc1", "2.inner.up_proj"):
            model.get_submodule(name).register_forward_hook(lambda *args: None)
        kept.append(saved_bytes(model, batch()))
    assert kept[1] - kept[0] >= 3 * 32 * 64 * 4  # a hidden buffer of the one, two of the gated one


# --- what reads a model -----------------------------------------------------------------------------------------------


def _sequence_classifier() -> Any:
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        )
    )  # fmt: skip


def test_signatures_and_names_of_classes_stay() -> None:
    model = _sequence_classifier()
    before = {
        name: (type(module).__name__, type(module).__qualname__, type(module).__module__)
        for name, module in model.named_modules()
    }
    signatures = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    assert fl.fuse(model, models.tokens()).replaced
    for name, module in model.named_modules():
        kind = type(module)
        assert (kind.__name__, kind.__qualname__, kind.__module__) == before[name]
        assert inspect.signature(module.forward) == signatures[name]


def test_saved_models_are_loaded_into_plain_ones(tmp_path: Path) -> None:
    model = _sequence_classifier()
    fl.fuse(model, models.tokens())
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is hf.BertForSequenceClassification
    inputs = models.tokens()
    fl.unfuse(model)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits)
