"""The callbacks that fuse a model when training begins, and adapters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.fusion.region import region_of
from fusedlayers.integrations import fuse_on_first_batch
from fusedlayers.memory import saved_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.down(self.drop(self.act(self.up(x))))
        return {"logits": y} if labels is None else {"loss": nn.functional.cross_entropy(y, labels), "logits": y}


def test_the_first_batch_decides_and_changes_no_random_number() -> None:
    torch.manual_seed(0)
    model, state = Net(), torch.get_rng_state()

    def batches() -> Any:
        yield {"x": torch.randn(64, 8)}
        raise AssertionError("one is enough")

    report = fuse_on_first_batch(model, batches())
    assert {place.activation or place.pattern for place in report.replaced} == {"gelu", "dropout"}
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="there is no batch"):
        fuse_on_first_batch(model, [])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_transformers_trainer(tmp_path: Any) -> None:
    """Losses are those of the plain model."""
    transformers = pytest.importorskip("transformers")
    from fusedlayers.integrations.transformers import FuseCallback

    torch.manual_seed(0)
    data = [{"x": x, "labels": int(x.sum() > 0)} for x in torch.randn(256, 8)]
    plain, losses = Net(), []
    for is_fused in (True, False):
        model, callback = copy.deepcopy(plain), FuseCallback()
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=8, per_device_train_batch_size=64, logging_steps=1, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=3,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback] if is_fused else [])
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert (callback.report is not None and bool(callback.report.replaced)) == is_fused
        assert (region_of(model.act) is not None) == is_fused
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and len(losses[0]) == 8


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from fusedlayers.integrations.lightning import FuseCallback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)["logits"]

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, labels = batch
            return nn.functional.cross_entropy(self(x), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.randn(128, 8)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64)
    callback, module = FuseCallback(), Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    assert callback.report is not None and region_of(module.net.act) is not None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_accelerate(tmp_path: Any) -> None:
    """Fuse first, then prepare."""
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    fl.fuse(model, torch.randn(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    loss = prepared(torch.randn(64, 8), torch.randint(2, (64,)))["loss"]
    accelerator.backward(loss)
    optimizer.step()
    assert accelerator.unwrap_model(prepared) is model and region_of(model.act) is not None


@pytest.mark.parametrize("is_fused_first", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_before_and_after_fuse(is_fused_first: bool) -> None:
    peft, hf = pytest.importorskip("peft"), pytest.importorskip("transformers")
    options = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj", "gate_proj", "down_proj"])
    torch.manual_seed(0)
    plain = hf.LlamaModel(
        hf.LlamaConfig(
            vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 100, (2, 32)), "use_cache": False}
    model = copy.deepcopy(plain)
    if is_fused_first:
        fl.fuse(model, inputs)
    eager, model = (peft.get_peft_model(m, options) for m in (plain, model))
    model.load_state_dict(eager.state_dict())
    if not is_fused_first:
        fl.fuse(model, inputs)
    results, kept = [], []
    for m in (model, eager):
        for name, p in m.named_parameters():
            if "lora_B" in name:  # which are 0 at first
                torch.nn.init.constant_(p, 0.02)
        kept.append(saved_bytes(lambda m=m: m(**inputs)[0], exclude=[m, inputs]))
        torch.manual_seed(1)
        y = m(**inputs)[0]
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for p in m.parameters() if p.grad is not None)])
    assert kept[0] < 0.95 * kept[1]
    torch.testing.assert_close(*results, rtol=2e-3, atol=1e-5)
    merged = [m.eval().merge_and_unload()(**inputs)[0] for m in (model, eager)]
    torch.testing.assert_close(*merged)
