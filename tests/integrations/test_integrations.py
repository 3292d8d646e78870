"""The callbacks and plugins of trainers, and loops that need none: each training has the losses and parameters of the
same training without ``fuse``, to the last bit, and the model is what it was at the end."""

from __future__ import annotations

import gc
import importlib
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import covering
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.integrations.fused_training import FusedTraining
from fusedlayers.recipes import region
from fusedlayers.recipes.patch import patches_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
STEPS, ROWS, LENGTH = 20, 4, 24


@pytest.fixture(autouse=True)
def small_values_are_replayed_and_each_trainer_has_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(32, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head(self.blocks(x))
        return {"loss": F.cross_entropy(y, labels), "logits": y}


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def assert_same_bits(model: nn.Module, plain: nn.Module) -> None:
    """The parameters are those of the plain model, and no forward pass is another one."""
    ours, theirs = model.state_dict(), plain.state_dict()
    local = [{name: getattr(value, "_local_tensor", value) for name, value in each.items()} for each in (ours, theirs)]
    assert ours.keys() == theirs.keys() and all(torch.equal(local[0][name], local[1][name]) for name in ours)
    changed = [[("forward" in vars(m), len(m._forward_pre_hooks)) for m in each.modules()] for each in (model, plain)]
    assert changed[0] == changed[1] and patches_of(model) == []


def assert_alike(run: Callable[[Any, list[Any]], Any], make: Callable[[], Any], given: Any) -> None:
    """What runs a training notes the losses, and how many modules are fused, at each step."""
    plain, model = seeded(make), seeded(make)
    expected, ours = run(plain, []), run(model, [given])
    assert ours.losses == expected.losses and len(set(ours.losses)) > 10
    assert set(expected.fused) == {0} and min(ours.fused) > 5
    assert_same_bits(model, plain)


# --- transformers, TRL ------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Any:
    hf = pytest.importorskip("transformers")
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SIZES))


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        **{"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": ROWS, "use_cpu": True},
        **{"report_to": [], "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 3},
        **{"logging_strategy": "no", "learning_rate": 1e-2, **more},
    }


def recording(base: type[Any]) -> type[Any]:
    class Recording(base):  # type: ignore[misc]
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(model, *args, **kwargs)
            self.losses = [*getattr(self, "losses", []), loss.item()]
            self.fused = [*getattr(self, "fused", []), len(patches_of(model))]
            return loss

    return Recording


def numbers(*shape: int) -> Tensor:
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(1))


def trained(model: Any, folder: Path, callbacks: list[Any], resume: str | None = None, **more: Any) -> Any:
    hf = pytest.importorskip("transformers")
    options, data = hf.TrainingArguments(**arguments(folder, **more)), list(numbers(16, LENGTH))
    trainer = recording(hf.Trainer)(
        model, options, lambda rows: dict.fromkeys(("input_ids", "labels"), torch.stack(rows)), train_dataset=data,
        eval_dataset=data, callbacks=callbacks,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def callback(**options: Any) -> Any:
    pytest.importorskip("transformers")
    return importlib.import_module("fusedlayers.integrations.transformers").FuseCallback(**options)


OPTIONS: list[dict[str, Any]] = [{}, {"report": True}, {"fit_budget": 0.6}]
TRAININGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "checkpoint": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 7, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize(("way", "make", "options"), covering(TRAININGS, [llama, with_adapters], OPTIONS))
def test_trainer(way: str, make: Any, options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = TRAININGS[way]
    if "fit_budget" in options and "gradient_checkpointing" in more:
        options = {"fit_budget": "1GiB"}  # all blocks are recomputed, so that fit finds nothing more
    assert_alike(lambda model, callbacks: trained(model, tmp_path, callbacks, **more), make, callback(**options))
    assert (f"{type(make()).__name__}: " in capsys.readouterr().out) is ("report" in options)


def test_a_checkpoint_loads_with_and_without_it(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 10}
    plain, model, resumed = seeded(llama), seeded(llama), seeded(llama)
    expected = trained(plain, tmp_path / "plain", [], **saving)
    trained(model, tmp_path / "ours", [type(callback())], **saving)
    assert_same_bits(model, plain)
    ours = trained(resumed, tmp_path / "resumed", [callback()], str(tmp_path / "plain" / "checkpoint-10"))
    assert ours.losses == expected.losses[10:] and len(ours.losses) == 10
    assert_same_bits(resumed, plain)
    assert_same_bits(type(plain).from_pretrained(tmp_path / "ours" / "checkpoint-20"), plain)


def test_trainers_one_after_another(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")

    class Interrupts(hf.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model, plain, given = seeded(llama), seeded(llama), callback(fit_budget=0.6)
    for each, callbacks in ((model, [given, Interrupts]), (plain, [Interrupts])):
        with pytest.raises(KeyboardInterrupt):
            trained(each, tmp_path, callbacks)
    for _ in range(2):
        found = [trained(model, tmp_path, [given], max_steps=3), trained(plain, tmp_path, [], max_steps=3)]
        assert found[0].losses == found[1].losses and min(found[0].fused) > 5
        assert_same_bits(model, plain)


def tokenizer() -> Any:
    hf, parts = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(3, 96))])}
    made = parts.Tokenizer(parts.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = parts.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def by_trl(model: Any, folder: Path, callbacks: list[Any], data: Any, more: dict[str, Any]) -> Any:
    trl = pytest.importorskip("trl")
    options = trl.SFTConfig(**arguments(folder), max_length=LENGTH, bf16=False, **more)
    return recording(trl.SFTTrainer)(model, options, None, data, processing_class=tokenizer(), callbacks=callbacks)


@pytest.mark.filterwarnings("ignore")  # of datasets and TRL
@pytest.mark.parametrize("options", [{"report": True}, {"fit_budget": 0.8}], ids=str)
def test_trl(options: Any, tmp_path: Path) -> None:
    texts = [{"text": " ".join(f"w{n}" for n in text)} for text in numbers(16, 8).tolist()]
    data = pytest.importorskip("datasets").Dataset.from_list(texts)

    def run(model: Any, callbacks: list[Any]) -> Any:
        torch.manual_seed(1)
        trainer = by_trl(model, tmp_path, callbacks, data, {"gradient_checkpointing": "fit_budget" not in options})
        trainer.train()
        return trainer

    assert_alike(run, llama, callback(**options))


# --- Lightning --------------------------------------------------------------------------------------------------------

LIGHTNING = "lightning.pytorch"


def lit(name: str = LIGHTNING) -> Any:
    """A module of ``lightning.pytorch`` or ``pytorch_lightning`` around a net."""
    module = pytest.importorskip(name)

    class Lit(module.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.fused = Net(), list[float](), list[int]()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(batch[0], labels=batch[1])["loss"]
            self.losses.append(loss.item())
            self.fused.append(len(patches_of(self)))
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.net(*batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return seeded(Lit)


def fitted(module: Any, callbacks: list[Any], name: str = LIGHTNING, precision: Any = "32") -> Any:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    logging.getLogger(name).setLevel(logging.ERROR)
    trainer = pytest.importorskip(name).Trainer(
        max_epochs=4, accelerator="cpu", callbacks=callbacks, num_sanity_val_steps=1, precision=precision, **quiet
    )
    torch.manual_seed(1)
    trainer.fit(module, data, data)
    return module


def lightning_callback(**options: Any) -> Any:
    if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
        pytest.skip("Lightning is not installed")
    return importlib.import_module("fusedlayers.integrations.lightning").FuseCallback(**options)


@pytest.mark.filterwarnings("ignore")  # of Lightning
@pytest.mark.parametrize(
    ("name", "precision", "options"),
    covering([LIGHTNING, "pytorch_lightning"], ["32", "bf16-mixed", "bf16-true"], OPTIONS),
)
def test_lightning(name: str, precision: str, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run(module: Any, callbacks: list[Any]) -> Any:
        for _ in range(2):  # trainers one after another
            fitted(module, callbacks, name, precision)
        return module

    assert_alike(run, lambda: lit(name), lightning_callback(**options))
    assert ("Net: " in capsys.readouterr().out) is ("report" in options)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_an_error_in_lightning_undoes_it() -> None:
    def interrupted(*_: Any) -> None:
        raise RuntimeError("interrupted")

    module = lit()
    hook = module.net.register_forward_hook(interrupted)
    with pytest.raises(RuntimeError, match="interrupted"):
        fitted(module, [lightning_callback()])
    hook.remove()
    assert_same_bits(module, lit())


# --- axolotl, ms-swift ------------------------------------------------------------------------------------------------


def trainers_module(monkeypatch: pytest.MonkeyPatch, name: str, **stand_in: Any) -> Any:
    """The module where it can be imported; or one with what ours uses, for these trainers pin versions of others."""
    try:
        return importlib.import_module(name)
    except ImportError:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        vars(sys.modules[name]).update(stand_in)
        for ours in ("axolotl", "ms_swift"):
            monkeypatch.delitem(sys.modules, f"fusedlayers.integrations.{ours}", raising=False)
        return sys.modules[name]


def test_axolotl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic")
    methods = {"get_input_args": lambda self: None, "add_callbacks_post_trainer": lambda self, cfg, trainer: []}
    base = trainers_module(monkeypatch, "axolotl.integrations.base", BasePlugin=type("BasePlugin", (), methods))
    plugin = pkgutil.resolve_name("fusedlayers.integrations.axolotl.FusePlugin")()
    assert isinstance(plugin, base.BasePlugin)
    schema = pkgutil.resolve_name(plugin.get_input_args())
    for keys in ({"fuse_report": True, "fuse_fit_budget": "1GiB"}, {"fuse_fit_budget": 0.5}):
        (given,) = plugin.add_callbacks_post_trainer(schema(**keys).model_dump(exclude_none=True), None)
        assert_alike(lambda model, callbacks: trained(model, tmp_path, callbacks), llama, given)
        assert ("at most 1.00 GiB" in capsys.readouterr().out) is ("fuse_report" in keys)
    with pytest.raises(TypeError, match="FuseCallback: report must be True or False, got 'no'"):
        plugin.add_callbacks_post_trainer({"fuse_report": "no"}, None)


@pytest.mark.filterwarnings("ignore")  # of ms-swift
def test_ms_swift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    callbacks_map = trainers_module(monkeypatch, "swift.callbacks", callbacks_map={}).callbacks_map
    importlib.import_module("fusedlayers.integrations.ms_swift").register(fit_budget=0.5)
    given = callbacks_map.pop("fuse")({"callbacks": ["fuse"]}, object())
    assert_alike(lambda model, callbacks: trained(model, tmp_path, callbacks), llama, given)


# --- loops that need no callback: accelerate, torchtitan --------------------------------------------------------------


def losses_of(model: nn.Module, loss_of: Callable[[Any], Tensor], backward: Any = Tensor.backward) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2), []
    for _ in range(STEPS):
        loss = loss_of(model)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) > 10
    return losses


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accelerate(when: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    found, models = [], []
    for fused in (None, when):
        model = seeded(with_adapters).train()
        model.gradient_checkpointing_enable()
        if fused == "before prepare":
            fl.fuse(model)
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        if fused == "after prepare":
            fl.fuse(prepared)
        loss_of = lambda model: model(input_ids=numbers(ROWS, LENGTH), labels=numbers(ROWS, LENGTH))["loss"]
        losses = losses_of(prepared, loss_of, accelerator.backward)
        fl.unfuse(prepared)
        models.append(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
        found.append([*losses, loss_of(models[-1]).item()])
    assert found[0] == found[1]
    assert_same_bits(models[1], models[0])


def parallelized(order: str) -> nn.Module:
    """As torchtitan's ``parallelize``: checkpoints, then the compiler block by block, then shards."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = seeded(Net)
    for word in order.split():
        if word == "fuse":
            fl.fuse(model)
        elif word == "checkpoint":
            for name, block in model.blocks.named_children():
                model.blocks.register_module(name, checkpoint_wrapper(block, preserve_rng_state=True))
        for part in (*model.blocks, model):
            if word == "shard":
                fully_shard(part)
            elif word == "compile" and part is not model:
                part.compile(backend="aot_eager", fullgraph=True)
    return model


ORDERS = ["shard fuse", "compile fuse shard", "fuse checkpoint compile shard", "checkpoint compile shard fuse"]


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of one process. Behind it nothing of what shards is left, by which ``fuse`` tells that parameters may be
    freed."""
    from torch.distributed.fsdp import FSDPModule

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    torch._dynamo.reset()
    importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard").cls_to_fsdp_cls.clear()
    gc.collect()
    assert FSDPModule.__subclasses__() == []


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("order", ORDERS)
def test_torchtitans_order(order: str) -> None:
    plain, model = parallelized(order.replace("fuse", "")), parallelized(order)
    loss_of = lambda model: model(torch.randn(8, 32), torch.arange(8) % 2)["loss"]
    assert losses_of(model, loss_of) == losses_of(plain, loss_of)
    fl.unfuse(model)
    assert_same_bits(model, plain)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'exakt'"):
        callback(exakt=True)
    with pytest.raises(TypeError, match="FuseCallback: report must be True or False, got 1"):
        callback(report=1)
    for budget in ("a lot", "0.3", -1, True, 30, 1.5):
        with pytest.raises(ValueError, match=r"FuseCallback: fit_budget must be bytes, .*\(30 % are 0\.3\), got "):
            callback(fit_budget=budget)


COMPILES = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize(
    ("budgets", "more", "message"),
    [
        ([None, 0.5], {}, "FuseCallback: got two of them in one trainer; pass one, with the options"),
        ([None], COMPILES, r"FuseCallback: got torch_compile=True, and torch\.compile decides"),
        ([5000], {}, r"fit: memory_budget_bytes=5000 .* cannot be met: .* ask for that, pass a"),
    ],
)
def test_trainings_that_cannot_begin(budgets: list[Any], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = seeded(llama)
    with pytest.raises(ValueError, match=message):
        trained(model, tmp_path, [callback(fit_budget=budget) for budget in budgets], **more)
    assert_same_bits(model, seeded(llama))


def test_a_model_that_no_step_calls() -> None:
    training, net = FusedTraining(report=True), seeded(Net)
    training.begin(net, types.SimpleNamespace())
    with torch.no_grad():
        net(torch.randn(2, 32), torch.tensor([0, 1]))  # no training step
    with pytest.warns(UserWarning, match="FuseCallback: no training step has called the model, other than"):
        training.end(net)
    assert_same_bits(net, seeded(Net))


def test_a_step_that_calls_parts_is_not_fitted() -> None:
    net = seeded(Net)
    FusedTraining(fit_budget=0.5).begin(net, types.SimpleNamespace())
    with pytest.raises(ValueError, match=r"FuseCallback: report and fit_budget need .* calls Sequential first, which"):
        net.blocks(torch.randn(8, 32))
    assert_same_bits(net, seeded(Net))


@pytest.mark.parametrize("report", [False, True])
def test_what_the_user_has_done_stays(report: bool) -> None:
    net, given = seeded(Net), (torch.randn(8, 32), torch.tensor([0, 1] * 4))
    fl.fit(net, given, fraction=0.5)
    before = [(patch, patch.recompute) for patch in patches_of(net)]
    assert any(recompute for _, recompute in before)
    training = FusedTraining(report=report)
    training.begin(net, types.SimpleNamespace())
    for use in (partial(net, *given), partial(training.end, net)):
        use()
        assert [(patch, patch.recompute) for patch in patches_of(net)] == before


def test_a_report_is_no_hindrance() -> None:
    net = seeded(Net)
    FusedTraining(report=True).begin(net, types.SimpleNamespace())
    with pytest.warns(UserWarning, match=r"there is no report\. FuseCallback: .* calls Sequential first, which"):
        net.blocks(torch.randn(8, 32)).sum().backward()
    assert patches_of(net)


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    FusedTraining().begin(Net(), types.SimpleNamespace())
    with pytest.raises(ValueError, match=r"FuseCallback: report and fit_budget run a model that is not split, got 2"):
        FusedTraining(fit_budget=0.5).begin(Net(), types.SimpleNamespace())
