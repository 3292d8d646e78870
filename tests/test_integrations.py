"""The callbacks and plugins of trainers: each training has the losses and parameters of the same training without it,
to the last bit, and the model is what it was at the end."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.integrations.fused_training import FusedTraining
from fusedlayers.recipes import region
from fusedlayers.recipes.patch import patches_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
STEPS, ROWS, LENGTH = 20, 4, 24


@pytest.fixture(autouse=True)
def small_values_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)


@pytest.fixture(autouse=True)
def each_trainer_has_an_accelerator_of_its_own() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(self.act(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(32, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.head(self.blocks(x))
        return {"logits": y} if labels is None else {"loss": F.cross_entropy(y, labels), "logits": y}


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def assert_same_bits(model: nn.Module, plain: nn.Module) -> None:
    """The parameters are those of the plain model, and no forward pass is another one."""
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    replaced = [["forward" in vars(module) for module in each.modules()] for each in (model, plain)]
    assert replaced[0] == replaced[1] and patches_of(model) == []


# --- transformers -----------------------------------------------------------------------------------------------------


def tokens(count: int = 16) -> list[dict[str, Any]]:
    rows = torch.randint(3, 96, (count, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def llama() -> Any:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))


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
    """A trainer that notes the losses, and how many modules are fused, at each step."""

    class Recording(base):  # type: ignore[misc]
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(model, *args, **kwargs)
            self.losses = [*getattr(self, "losses", []), loss.item()]
            self.fused = [*getattr(self, "fused", []), len(patches_of(model))]
            return loss

    return Recording


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def trained(model: nn.Module, folder: Path, callbacks: list[Any], resume: str | None = None, **more: Any) -> Any:
    hf = pytest.importorskip("transformers")
    options = hf.TrainingArguments(**arguments(folder, **more))
    data = tokens()
    trainer = recording(hf.Trainer)(
        model, options, collate, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def callback(**options: Any) -> Any:
    pytest.importorskip("transformers")
    return importlib.import_module("fusedlayers.integrations.transformers").FuseCallback(**options)


CHECKPOINTS = {"gradient_checkpointing": True}
TRAININGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "checkpoint": {**CHECKPOINTS, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {**CHECKPOINTS, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 7, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("options", [{}, {"report": True}, {"fit_budget": 0.6}], ids=str)
@pytest.mark.parametrize("make", [llama, with_adapters])
@pytest.mark.parametrize("way", TRAININGS)
def test_trainer(way: str, make: Any, options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = TRAININGS[way]
    if "fit_budget" in options and "gradient_checkpointing" in more:
        options = {"fit_budget": "1GiB"}  # all blocks are recomputed, so that fit finds nothing more
    plain, model = seeded(make), seeded(make)
    expected, ours = trained(plain, tmp_path, [], **more), trained(model, tmp_path, [callback(**options)], **more)
    assert ours.losses == expected.losses and len(set(ours.losses)) > 10
    assert set(expected.fused) == {0} and min(ours.fused) > 5
    assert_same_bits(model, plain)
    assert (f"{type(model).__name__}: " in capsys.readouterr().out) is ("report" in options)


def test_a_fitted_model_keeps_to_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = seeded(llama)
    trained(model, tmp_path, [callback(report=True, fit_budget=100_000)], max_steps=2)
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM: at most 97.7 KiB saved for backward" in shown and "recomputed" in shown
    assert patches_of(model) == [] and not any(module._forward_pre_hooks for module in model.modules())


def test_a_checkpoint_loads_with_and_without_it(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 10}
    plain, model, resumed = seeded(llama), seeded(llama), seeded(llama)
    expected = trained(plain, tmp_path / "plain", [], **saving)
    trained(model, tmp_path / "ours", [callback()], **saving)
    assert_same_bits(model, plain)
    ours = trained(resumed, tmp_path / "resumed", [callback()], str(tmp_path / "plain" / "checkpoint-10"))
    assert ours.losses == expected.losses[10:] and len(ours.losses) == 10
    assert_same_bits(resumed, plain)
    assert_same_bits(type(plain).from_pretrained(tmp_path / "ours" / "checkpoint-20"), plain)


@pytest.mark.parametrize("is_class", [True, False])
@pytest.mark.parametrize("way", ["float32", "bfloat16"])
def test_trainers_one_after_another(way: str, is_class: bool, tmp_path: Path) -> None:
    plain, model = seeded(llama), seeded(llama)
    given = type(callback()) if is_class else callback()
    for _ in range(2):
        expected = trained(plain, tmp_path, [], max_steps=5, **TRAININGS[way])
        ours = trained(model, tmp_path, [given], max_steps=5, **TRAININGS[way])
        assert ours.losses == expected.losses and min(ours.fused) > 5
    assert_same_bits(model, plain)


def test_after_an_interrupted_training(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")

    class Interrupts(hf.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model, plain, given = seeded(llama), seeded(llama), callback(fit_budget=0.6)
    for each, callbacks in ((model, [given, Interrupts]), (plain, [Interrupts])):
        with pytest.raises(KeyboardInterrupt):
            trained(each, tmp_path, callbacks)
    assert trained(model, tmp_path, [given], max_steps=3).losses == trained(plain, tmp_path, [], max_steps=3).losses
    assert_same_bits(model, plain)


# --- TRL, sentence-transformers ---------------------------------------------------------------------------------------


def tokenizer() -> Any:
    hf, parts = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(3, 96))])}
    made = parts.Tokenizer(parts.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = parts.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts(*columns: str, count: int = 16) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = torch.randint(3, 96, (count, len(columns), 8), generator=torch.Generator().manual_seed(1)).tolist()
    named = [dict(zip(columns, (" ".join(f"w{n}" for n in text) for text in row), strict=True)) for row in rows]
    return datasets.Dataset.from_list(named)


def by_sft(model: nn.Module, folder: Path, callbacks: list[Any], has_checkpoints: bool) -> Any:
    trl = pytest.importorskip("trl")
    options = trl.SFTConfig(**arguments(folder), max_length=LENGTH, bf16=False, gradient_checkpointing=has_checkpoints)
    return recording(trl.SFTTrainer)(
        model, options, train_dataset=texts("text"), processing_class=tokenizer(), callbacks=callbacks
    )


def by_dpo(model: nn.Module, folder: Path, callbacks: list[Any], has_checkpoints: bool) -> Any:
    trl = pytest.importorskip("trl")
    options = trl.DPOConfig(**arguments(folder), max_length=LENGTH, bf16=False, gradient_checkpointing=has_checkpoints)
    data = texts("prompt", "chosen", "rejected")
    return recording(trl.DPOTrainer)(
        model, seeded(llama), options, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    )


def sentences(folder: Path) -> Any:
    parts, hf = pytest.importorskip("sentence_transformers"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    hf.BertModel(hf.BertConfig(vocab_size=96, pad_token_id=0, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    modules = importlib.import_module("sentence_transformers.models")
    words = modules.Transformer(str(folder), max_seq_length=LENGTH)
    return parts.SentenceTransformer(modules=[words, modules.Pooling(32)], device="cpu")


def by_sentences(model: nn.Module, folder: Path, callbacks: list[Any], has_checkpoints: bool) -> Any:
    parts = pytest.importorskip("sentence_transformers")
    loss = importlib.import_module("sentence_transformers.losses").MultipleNegativesRankingLoss(model)
    options = parts.SentenceTransformerTrainingArguments(**arguments(folder))
    return recording(parts.SentenceTransformerTrainer)(
        model, options, texts("anchor", "positive"), loss=loss, callbacks=callbacks
    )


@pytest.mark.filterwarnings("ignore")  # of datasets, TRL and sentence-transformers
@pytest.mark.parametrize("options", [{}, {"report": True}, {"fit_budget": 0.8}], ids=str)
@pytest.mark.parametrize("by", [by_sft, by_dpo, by_sentences])
def test_trainers_of_others(by: Any, options: Any, tmp_path: Path) -> None:
    make = (lambda: sentences(tmp_path / "bert")) if by is by_sentences else llama
    plain, model = seeded(make), seeded(make)
    found = []
    for each, callbacks in ((plain, []), (model, [callback(**options)])):
        torch.manual_seed(1)
        found.append(by(each, tmp_path, callbacks, "fit_budget" not in options))
        found[-1].train()
    expected, ours = found
    assert ours.losses == expected.losses and len(set(ours.losses)) > 10
    assert set(expected.fused) == {0} and min(ours.fused) > 5
    assert_same_bits(model, plain)


# --- Lightning --------------------------------------------------------------------------------------------------------


def lit(name: str, make: Callable[[], nn.Module] = Net, step: Callable[..., Tensor] | None = None) -> Any:
    """A module of ``lightning.pytorch`` or ``pytorch_lightning`` around a net."""
    module = pytest.importorskip(name)

    class Lit(module.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.losses: list[float] = []
            self.fused: list[int] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = step(self, *batch) if step else self.net(*batch)["loss"]
            self.log("loss", loss)
            self.losses.append(loss.item())
            self.fused.append(len(patches_of(self)))
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.net(*batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return seeded(Lit)


def fitted(module: Any, name: str, callbacks: list[Any], **more: Any) -> Any:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    for logger in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    trainer = pytest.importorskip(name).Trainer(
        max_epochs=4, accelerator="cpu", callbacks=callbacks, **quiet, **{"num_sanity_val_steps": 1, **more}
    )
    torch.manual_seed(1)
    trainer.fit(module, data, data)
    return module


def lightning_callback(**options: Any) -> Any:
    if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
        pytest.skip("Lightning is not installed")
    return importlib.import_module("fusedlayers.integrations.lightning").FuseCallback(**options)


def uncached(name: str) -> dict[str, Any]:
    """The autocast of Lightning 2.6.0 and later; others keep the 16-bit copies of weights."""
    plugins = pytest.importorskip(f"{name}.plugins")

    class Uncached(plugins.MixedPrecision):  # type: ignore[misc,name-defined]
        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    return {"plugins": Uncached("bf16-mixed", "cpu")}


def cached(name: str) -> dict[str, Any]:
    plugins = pytest.importorskip(f"{name}.plugins")

    class Cached(plugins.MixedPrecision):  # type: ignore[misc,name-defined]
        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", torch.bfloat16)

    return {"plugins": Cached("bf16-mixed", "cpu")}


PRECISIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "float32": lambda name: {},
    "bf16-mixed": lambda name: {"precision": "bf16-mixed"},
    "bf16-true": lambda name: {"precision": "bf16-true"},
    "cached": cached,
    "uncached": uncached,
}


@pytest.mark.filterwarnings("ignore")  # of Lightning
@pytest.mark.parametrize("options", [{}, {"report": True}, {"fit_budget": 0.6}], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(name: str, precision: str, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    more, given = PRECISIONS[precision](name), lightning_callback(**options)
    plain, module = lit(name), lit(name)
    for _ in range(2):  # trainers one after another
        plain, module = fitted(plain, name, [], **more), fitted(module, name, [given], **more)
    assert module.losses == plain.losses and len(set(module.losses)) > 10
    assert set(plain.fused) == {0} and min(module.fused) > 5
    assert_same_bits(module, plain)
    assert ("Net: " in capsys.readouterr().out) is ("report" in options)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_an_error_in_lightning_undoes_it() -> None:
    name = "lightning.pytorch"

    def interrupted(module: Any, *batch: Tensor) -> Tensor:
        raise RuntimeError("interrupted")

    module, given = lit(name, step=interrupted), lightning_callback(report=True)
    with pytest.raises(RuntimeError, match="interrupted"):
        fitted(module, name, [given])
    assert patches_of(module) == [] and not any(part._forward_pre_hooks for part in module.modules())


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_a_step_that_calls_parts_is_fused_and_not_fitted() -> None:
    name = "lightning.pytorch"

    def step(module: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(module.net.head(module.net.blocks(x)), labels)

    plain, module = lit(name, step=step), lit(name, step=step)
    fitted(plain, name, [])
    fitted(module, name, [lightning_callback()])
    assert module.losses == plain.losses
    assert_same_bits(module, plain)
    with pytest.raises(ValueError, match=r"FuseCallback: report and fit_budget need .* calls Sequential first, which"):
        fitted(lit(name, step=step), name, [lightning_callback(fit_budget=0.5)])


# --- axolotl, ms-swift: they pin other versions of what is installed here, so that stand-ins have their interface -----


@pytest.fixture
def axolotl_base(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """``axolotl.integrations.base`` where it is installed, or the class as axolotl 0.19.0 has it."""
    pytest.importorskip("pydantic")
    if importlib.util.find_spec("axolotl") is not None:
        return importlib.import_module("axolotl.integrations.base")

    class BasePlugin:
        def get_input_args(self) -> str | None:
            return None

        def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
            return []

    base = types.ModuleType("axolotl.integrations.base")
    vars(base).update(BasePlugin=BasePlugin, load_plugin=load_plugin)
    for module in (types.ModuleType("axolotl"), types.ModuleType("axolotl.integrations"), base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "fusedlayers.integrations.axolotl", raising=False)
    return base


def load_plugin(name: str) -> Any:
    """As axolotl does."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)()


def test_axolotl(axolotl_base: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = axolotl_base.load_plugin("fusedlayers.integrations.axolotl.FusePlugin")
    assert isinstance(plugin, axolotl_base.BasePlugin)
    module, _, kind = plugin.get_input_args().rpartition(".")
    schema = getattr(importlib.import_module(module), kind)
    plain, model = seeded(llama), seeded(llama)
    expected = trained(plain, tmp_path, [])
    for keys in ({}, {"fuse_report": True, "fuse_fit_budget": "1GiB"}, {"fuse_fit_budget": 0.5}):
        cfg = schema(**keys).model_dump(exclude_none=True)
        (given,) = plugin.add_callbacks_post_trainer(cfg, None)
        model = seeded(llama)
        ours = trained(model, tmp_path, [given])
        assert ours.losses == expected.losses and min(ours.fused) > 5
        assert_same_bits(model, plain)
        assert ("at most 1.00 GiB" in capsys.readouterr().out) is ("fuse_report" in keys)
    with pytest.raises(TypeError, match="FuseCallback: exact must be True or False, got 'no'"):
        plugin.add_callbacks_post_trainer({"fuse_exact": "no"}, None)


@pytest.fixture
def callbacks_map(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """That of ms-swift where it can be imported, or an empty one."""
    try:
        found: dict[str, Any] = importlib.import_module("swift.callbacks").callbacks_map
    except ImportError:
        found, callbacks = {}, types.ModuleType("swift.callbacks")
        vars(callbacks).update(callbacks_map=found)
        for module in (types.ModuleType("swift"), callbacks):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.delitem(sys.modules, "fusedlayers.integrations.ms_swift", raising=False)
    monkeypatch.setattr(importlib.import_module("fusedlayers.integrations.ms_swift"), "callbacks_map", found)
    return found


@pytest.mark.filterwarnings("ignore")  # of ms-swift
def test_ms_swift(callbacks_map: dict[str, Any], tmp_path: Path) -> None:
    importlib.import_module("fusedlayers.integrations.ms_swift").register(fit_budget=0.5)
    plain, model = seeded(llama), seeded(llama)
    trainer = object()
    expected = trained(plain, tmp_path, [])
    ours = trained(model, tmp_path, [callbacks_map.pop("fuse")({"callbacks": ["fuse"]}, trainer)])
    assert ours.losses == expected.losses and min(ours.fused) > 5
    assert_same_bits(model, plain)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'exakt'"):
        callback(exakt=True)
    with pytest.raises(TypeError, match="FuseCallback: report must be True or False, got 1"):
        callback(report=1)
    for budget in ("a lot", -1, True):
        with pytest.raises(ValueError, match="FuseCallback: fit_budget: memory_budget_bytes"):
            callback(fit_budget=budget)
    with pytest.raises(ValueError, match=r"FuseCallback: fit_budget must be bytes, .* at most 1.0, got 1.5"):
        callback(fit_budget=1.5)


class Run:
    """What a trainer has for one training."""


def test_a_trainer_without_a_model() -> None:
    with pytest.raises(ValueError, match=r"FuseCallback: the trainer has no model \(got None\); pass a model to"):
        FusedTraining().begin(None, Run())
    with pytest.raises(TypeError, match=r"fuse: model must be an nn\.Module, got"):
        FusedTraining().begin(print, Run())


def test_two_callbacks(tmp_path: Path) -> None:
    model, given = seeded(llama), callback()
    for callbacks in ([given, callback(exact=False)], [given, given]):
        with pytest.raises(
            ValueError, match="FuseCallback: got two of them in one trainer; pass one, with the options"
        ):
            trained(model, tmp_path, callbacks)
        assert patches_of(model) == []


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_two_callbacks_in_lightning() -> None:
    module = lit("lightning.pytorch")
    with pytest.raises(ValueError, match="FuseCallback: got two of them in one trainer; pass one"):
        fitted(module, "lightning.pytorch", [lightning_callback(), lightning_callback(exact=False)])
    assert patches_of(module) == []


def test_a_compiled_or_scripted_model() -> None:
    with pytest.raises(TypeError, match=r"fuse: the model is compiled, .* or call fuse before torch.compile"):
        FusedTraining().begin(torch.compile(Net()), Run())
    with pytest.raises(TypeError, match="fuse: the model is of TorchScript; fuse it before you trace or script it"):
        FusedTraining().begin(torch.jit.script(nn.Linear(2, 2)), Run())


def test_a_trainer_that_compiles(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FuseCallback: got torch_compile=True, and torch\.compile decides"):
        trained(seeded(llama), tmp_path, [callback()], torch_compile=True, torch_compile_backend="eager")


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_a_compiled_module_of_lightning() -> None:
    module = torch.compile(lit("lightning.pytorch"), backend="eager")
    with pytest.raises(TypeError, match=r"FuseCallback: fit got a compiled module, and torch\.compile decides"):
        fitted(module, "lightning.pytorch", [lightning_callback()])


def test_a_budget_that_no_plan_meets(tmp_path: Path) -> None:
    model = seeded(llama)
    with pytest.raises(ValueError, match=r"fit: memory_budget_bytes=1000 .* cannot be met: .* ask for that, or pass a"):
        trained(model, tmp_path, [callback(fit_budget=1000)])
    assert patches_of(model) == [] and not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_no_step_calls() -> None:
    run, training, net = Run(), FusedTraining(report=True), Net()
    training.begin(net, run)
    with torch.no_grad():
        net(torch.randn(2, 32))  # no training step
    with pytest.warns(UserWarning, match="FuseCallback: no training step has called the model, other than"):
        training.end(net)
    assert patches_of(net) == [] and not any(module._forward_pre_hooks for module in net.modules())


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    FusedTraining().begin(Net(), Run())
    with pytest.raises(ValueError, match=r"FuseCallback: report and fit_budget run a model that is not split, got 2"):
        FusedTraining(fit_budget=0.5).begin(Net(), Run())


def test_positional_and_keyword_arguments_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    training, net = FusedTraining(report=True), Net()
    training.begin(net, Run())
    assert net(torch.randn(8, 32), labels=torch.zeros(8, dtype=torch.long))["loss"].requires_grad
    assert "Net: " in capsys.readouterr().out
    training.end(net)


def test_importing_the_package_imports_no_trainer() -> None:
    code = (
        "import sys, fusedlayers\n"
        "assert not {n for n in sys.modules if n.split('.')[0] in ('transformers', 'lightning', 'axolotl', 'swift')}\n"
        "assert not {n for n in sys.modules if n.startswith('fusedlayers.integrations')}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
