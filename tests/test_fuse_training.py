"""Fused models in training loops, with adapters, in several processes, and on a GPU that is not there: losses and
gradients are those of the plain model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fuse import HIDDEN, IN, MLP, ROWS
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.recipes import region


@pytest.fixture(autouse=True)
def small_values_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


# --- training loops ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """As trainers want it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.head = MLP(dropout=0.1), nn.Linear(IN, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.head(self.mlp(x))
        return {"logits": y} if labels is None else {"loss": F.cross_entropy(y, labels), "logits": y}


def _by_hand(model: Net, x: Tensor, labels: Tensor, folder: Path) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(4):
        loss = model(x, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _by_transformers(model: Net, x: Tensor, labels: Tensor, folder: Path) -> list[float]:
    hf = pytest.importorskip("transformers")
    arguments = hf.TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=32, logging_steps=1, use_cpu=True, bf16=True, report_to=[],
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=3,
    )  # fmt: skip
    data = [{"x": row, "labels": int(label)} for row, label in zip(x, labels, strict=True)]
    trainer = hf.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [trainer.evaluate()["eval_loss"]]


def _by_accelerate(model: Net, x: Tensor, labels: Tensor, folder: Path) -> list[float]:
    accelerate = pytest.importorskip("accelerate")
    accelerator, losses = accelerate.Accelerator(cpu=True, mixed_precision="bf16"), []
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        loss = prepared(x, labels)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)  # which makes a method of its forward
    accelerate.state.AcceleratorState._reset_state(True)
    return [*losses, plain(x, labels)["loss"].item()]


def _by_lightning(model: Net, x: Tensor, labels: Tensor, folder: Path) -> list[float]:
    lightning = pytest.importorskip("lightning.pytorch")
    losses = []

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(*batch)["loss"]
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", precision="bf16-mixed", default_root_dir=folder, **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=32))
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [_by_hand, _by_transformers, _by_accelerate, _by_lightning])
def test_training_loops(train: Callable[..., list[float]], tmp_path: Path, x: Tensor) -> None:
    labels, found = (x.sum(1) > 0).long(), []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = Net()
        if is_fused:
            fl.fuse(model)
        losses = train(model, x, labels, tmp_path)
        fl.unfuse(model)
        found.append([*losses, *(parameter.sum().item() for parameter in model.parameters())])
    assert found[0] == found[1] and len(losses) >= 4


def _llama() -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


def _tokens() -> Tensor:
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


def test_generate() -> None:
    model = _llama().eval()
    expected = model.generate(_tokens()[:, :4], max_new_tokens=8, do_sample=False)
    fl.fuse(model)
    assert torch.equal(model.generate(_tokens()[:, :4], max_new_tokens=8, do_sample=False), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when: str) -> None:
    peft = pytest.importorskip("peft")
    inputs = {"input_ids": _tokens(), "use_cache": False}
    found, bytes_kept = [], []
    for is_fused in (False, True):
        model = _llama()
        if is_fused and when == "before":
            fl.fuse(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which is 0 at first
                nn.init.constant_(parameter, 0.02)
        if is_fused and when == "after":
            fl.fuse(model)
        bytes_kept.append(saved_bytes(lambda m=model: m(**inputs)[0], exclude=[model, inputs]))
        torch.manual_seed(2)
        y = model(**inputs)[0]
        y.square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.eval().merge_and_unload()(**inputs)
    assert all(map(torch.equal, *found)) and bytes_kept[1] < 0.8 * bytes_kept[0]


ON_A_GPU = """
import json, torch
from torch import nn
from bench.gpu import fake as fake_gpu
from bench.overhead import Own
from bench.zoo import TransformerBlock
import fusedlayers as fl

fake = fake_gpu.install()
model = nn.Sequential(TransformerBlock(256, 512, True), nn.Linear(256, 512), Own(), nn.Linear(512, 8)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fl.fuse(model)
x = torch.randn(4, 256, 256).bfloat16()
for number in range(3):
    fake.launches.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
names = [event.name for event in profile.events()]
looks = ("item", "_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_to_cpu")
print(json.dumps([[n for n in names if n in {f"aten::{look}" for look in looks}], [l.kernel for l in fake.launches]]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a driver of its own")
def test_a_training_step_looks_at_no_value_on_the_device() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    looks, launches = json.loads(done.stdout)
    assert looks == launches == []
