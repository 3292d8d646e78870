"""The memory report: rows against arithmetic and ``saved_bytes``, the peak against two other witnesses; and that a
model is left as it was."""

import contextlib
import functools
import json
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.profiling.row_groups import groups_of
from fusedlayers.profiling.saved_rows import Row

ROWS, IN, OUT = 256, 32, 128
INPUT_BYTES, HIDDEN_BYTES, WEIGHT_BYTES = ROWS * IN * 4, ROWS * OUT * 4, IN * OUT * 4

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))


def activations(report: Any) -> list[Row]:
    return [row for row in report.rows if row.kind == "activation"]


def places(report: Any) -> set[tuple[str, str]]:
    return {(row.module, row.operation) for row in activations(report)}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_of_an_mlp(x: Tensor) -> None:
    report = fl.memory_report(mlp(), x)
    z, y = activations(report)
    assert z == Row("1", "GELU", "GeluBackward0", (ROWS, OUT), "float32", HIDDEN_BYTES, "activation", ())
    assert y == Row("2", "Linear", "AddmmBackward0", (ROWS, OUT), "float32", HIDDEN_BYTES, "activation", ())
    assert report.saved_bytes == 2 * HIDDEN_BYTES
    others = {(row.kind, row.operation, row.bytes) for row in report.rows if row.kind != "activation"}
    # The first layer saves its input and, as the model's input needs no gradient, no weight.
    assert others == {("input", "AddmmBackward0", INPUT_BYTES), ("parameter", "AddmmBackward0", WEIGHT_BYTES)}
    assert report.name == "Sequential" and report.device == "cpu"


def test_a_storage_is_one_row_that_says_who_shares_it(x: Tensor) -> None:
    model = nn.ModuleDict({"relu": nn.ReLU(), "one": nn.Linear(IN, OUT), "two": nn.Linear(IN, OUT)})
    (row,) = activations(fl.memory_report(lambda x: model["one"](y := model["relu"](2 * x)) + model["two"](y), x))
    assert row.bytes == INPUT_BYTES and (row.module, row.operation) == ("model.one", "AddmmBackward0")
    assert row.shared_with == (("model.two", "AddmmBackward0"),)
    x.requires_grad_()
    (row,) = activations(fl.memory_report(lambda x: model["one"](y := model["relu"](2 * x)) + model["two"](y), x))
    assert (row.module, row.operation) == ("model.relu", "ReluBackward0")
    assert row.shared_with == (("model.one", "AddmmBackward0"), ("model.two", "AddmmBackward0"))


def test_a_view_counts_its_storage_in_full(x: Tensor) -> None:
    x.requires_grad_()
    (row,) = activations(fl.memory_report(lambda x: (2 * x)[:1] ** 2, x))
    assert row.shape == (1, IN) and row.bytes == INPUT_BYTES
    assert f" 1 x {IN} float32, of a larger buffer\n" in str(fl.memory_report(lambda x: (2 * x)[:1] ** 2, x))


class Blocks(nn.Module):
    """Functional calls in a parent's forward, a list of modules, a module that is called twice and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.norm = nn.LayerNorm(IN)
        self.same = self.norm

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(self.same(x)))
        return {"out": scale * self.norm(x)}


def test_the_innermost_module_that_runs_has_it(x: Tensor) -> None:
    report = fl.memory_report(Blocks(), x, scale=2.0)
    inner = {(f"blocks.{i}.{j}", op) for i in range(3) for j, op in ((0, "Addmm"), (1, "Gelu"), (2, "Addmm"))}
    outer = {("norm", "NativeLayerNorm"), ("", "Tanh")}
    # The first norm saves the model's input, but statistics of its own.
    assert places(report) == {(module, f"{op}Backward0") for module, op in inner | outer}
    tanh = [row for row in report.rows if row.operation == "TanhBackward0"]
    assert len(tanh) == 3 and {row.module_class for row in tanh} == {"Blocks"}
    norm = [row for row in activations(report) if row.module == "norm"]
    assert sorted(row.shape for row in norm) == [(ROWS, 1)] * 8 + [(ROWS, IN)] * 3


def test_functions_are_asked_for_the_modules_that_they_name(x: Tensor) -> None:
    model = mlp()
    assert places(fl.memory_report(lambda x: model(x), x)) == {
        ("model.1", "GeluBackward0"),
        ("model.2", "AddmmBackward0"),
    }
    assert places(fl.memory_report(functools.partial(model.forward), x)) == {
        ("1", "GeluBackward0"),
        ("2", "AddmmBackward0"),
    }
    assert places(fl.memory_report(functools.partial(lambda f, x: f(x), model), x)) == {
        ("Sequential.1", "GeluBackward0"),
        ("Sequential.2", "AddmmBackward0"),
    }
    hidden = [model]
    report = fl.memory_report(lambda x: torch.exp(hidden[0](x)), x)
    assert report.name == "<lambda>"
    assert places(report) == {
        ("Sequential.1", "GeluBackward0"),
        ("Sequential.2", "AddmmBackward0"),
        ("", "ExpBackward0"),
    }


class Fallible(nn.Module):
    """Goes on when a module of its own has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong, self.right = nn.Linear(IN + 1, IN), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            return self.wrong(x)
        return torch.exp(self.right(x))


def test_a_module_that_fails_is_over(x: Tensor) -> None:
    report = fl.memory_report(Fallible(), x.requires_grad_())
    assert places(report) == {("right", "SigmoidBackward0"), ("", "ExpBackward0")}


def test_resized_storages_count_as_they_are(x: Tensor) -> None:
    weight = nn.Parameter(torch.ones(()))

    def resizes(x: Tensor) -> Tensor:
        y = torch.empty(0)
        torch.cat([x, x], out=y)
        return weight * y

    report = fl.memory_report(resizes, x)
    assert report.saved_bytes == 2 * INPUT_BYTES and report.rest_bytes == 0


@dataclass
class Output:
    logits: Tensor
    others: tuple[Tensor, ...]
    note: str = ""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: (y, None, 3),
        lambda y: [y, y.detach(), torch.arange(3)],
        lambda y: {"a": {"b": (y,)}},
        lambda y: Output(y, ()),
        lambda y: Output(y.detach(), (y,)),
    ],
    ids=["tensor", "tuple", "list", "dicts", "dataclass", "nested"],
)
def test_outputs_of_any_nesting(wrap: Callable[[Tensor], Any], x: Tensor) -> None:
    model = mlp()
    assert fl.memory_report(lambda x: wrap(model(x)), x).saved_bytes == 2 * HIDDEN_BYTES


def test_the_loss_is_the_sum_of_means_or_what_is_asked_for(x: Tensor) -> None:
    seen: list[Tensor] = []
    model = mlp()
    model[2].register_full_backward_hook(lambda module, gx, gy: seen.append(gy[0].clone()))
    fl.memory_report(lambda x: (model(x), torch.ones(2, requires_grad=True)), x)
    assert len(seen) == 3
    assert all(torch.equal(grad, torch.full((ROWS, IN), 1 / (ROWS * IN))) for grad in seen)
    seen.clear()
    report = fl.memory_report(model, x, loss=lambda y: 3 * y.sum())
    assert all(torch.equal(grad, torch.full((ROWS, IN), 3.0)) for grad in seen)
    assert report.saved_bytes == 2 * HIDDEN_BYTES
    targets = torch.zeros(ROWS, dtype=torch.long)
    report = fl.memory_report(model, x, loss=lambda y: F.cross_entropy(y, targets))
    assert ("", "LogSoftmaxBackward0") in places(report)
    assert report.saved_bytes == 2 * HIDDEN_BYTES + INPUT_BYTES + 4  # log-probabilities, and the total weight


class Twice(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize(
    ("use_reentrant", "module", "operation"),
    [(False, "second", "checkpoint"), (True, "", "CheckpointFunctionBackward")],
)
def test_checkpoints_keep_their_inputs(use_reentrant: bool, module: str, operation: str, x: Tensor) -> None:
    report = fl.memory_report(Twice(use_reentrant), x.requires_grad_())
    (row,) = activations(report)
    assert (row.module, row.operation, row.bytes) == (module, operation, INPUT_BYTES)
    assert report.parts["computed again by checkpoints"] >= 2 * HIDDEN_BYTES
    # A checkpoint keeps the state of the random number generator, which no operator returns.
    assert 0 <= report.rest_bytes <= 4 * torch.get_rng_state().nbytes


def test_what_users_hooks_made_of_tensors_is_listed(x: Tensor) -> None:
    model = mlp()

    def halved(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.half(), "note"), lambda pair: pair[0].float()):
            return model(x)

    report = fl.memory_report(halved, x)
    assert {row.dtype for row in activations(report)} == {"float16"}
    assert report.saved_bytes == (2 * HIDDEN_BYTES + INPUT_BYTES + WEIGHT_BYTES) // 2


def test_operations_of_this_library_have_readable_names(x: Tensor) -> None:
    pair = nn.Sequential(fl.FusedDenseAct(IN, OUT, "gelu"), nn.Linear(OUT, IN))
    (row,) = activations(fl.memory_report(pair, x))
    assert (row.module, row.operation) == ("0", "fusedlayers.BiasAct(gelu)")
    assert row.shared_with == (("1", "AddmmBackward0"),)
    block = fl.FusedMLP(IN, OUT, activation=nn.ELU(0.5))
    assert places(fl.memory_report(block, x)) == {("", "fusedlayers.MLP(elu(alpha=0.5))")}


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(), torch.randn(ROWS, IN)),
    "blocks": lambda: (Blocks(), torch.randn(ROWS, IN)),
    "dropout": lambda: (nn.Sequential(mlp(), nn.Dropout(0.5), mlp()), torch.randn(ROWS, IN)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 1)),
        torch.randn(4, 8, 16, 16),
    ),
    "attention": lambda: (nn.TransformerEncoderLayer(IN, 4, OUT, batch_first=True), torch.randn(4, 64, IN)),
    "lstm": lambda: (nn.LSTM(IN, IN, 2), torch.randn(16, 16, IN)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(100, IN), mlp()), torch.randint(100, (4, 64))),
    "fused dense": lambda: (nn.Sequential(fl.FusedDenseAct(IN, OUT), nn.Linear(OUT, IN)), torch.randn(ROWS, IN)),
    "fused mlp": lambda: (fl.FusedMLP(IN, OUT), torch.randn(ROWS, IN)),
    "fused gated": lambda: (fl.FusedGatedMLP(IN, OUT), torch.randn(ROWS, IN)),
    "recomputed": lambda: (fl.FusedMLP(IN, OUT, save="recompute"), torch.randn(ROWS, IN)),
    "checkpoints": lambda: (Twice(False), torch.randn(ROWS, IN)),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_peaks_of_models(name: str) -> None:
    """Rows sum to what saved-tensor hooks count; the tensors that were followed are the allocator's peak."""
    model, x = MODELS[name]()
    report = fl.memory_report(model, x)
    assert report.saved_bytes == saved_bytes(model, x, exclude=[model, x])
    assert report.estimated_peak_bytes == pytest.approx(report.peak_bytes, rel=0.02)
    assert sum(report.parts.values()) == report.estimated_peak_bytes


def test_autocast_copies_of_weights_count(x: Tensor) -> None:
    model = mlp()
    report = fl.memory_report(torch.autocast("cpu", torch.bfloat16)(model), x)
    # In bfloat16: z, y, x and the second weight.
    assert report.saved_bytes == (2 * HIDDEN_BYTES + INPUT_BYTES + WEIGHT_BYTES) // 2


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("measure", [fl.memory_report, functools.partial(fl.fit, fraction=1.0)])
def test_gradients_stay_where_a_reentrant_checkpoint_hides_parameters(measure: Any, x: Tensor) -> None:
    model = nn.Sequential(Twice(True), Twice(True))
    (first, *others) = model.parameters()
    first.grad = torch.zeros_like(first)
    measure(model, x.requires_grad_())
    assert not first.grad.any() and all(p.grad is None for p in others)


@pytest.mark.parametrize("measure", [fl.memory_report, functools.partial(fl.fit, fraction=1.0)])
def test_gradients_stay_of_what_is_no_parameter(measure: Any, x: Tensor) -> None:
    """Of an argument, and of tensors that are attributes, or no more than named by code."""
    named = torch.ones(IN, requires_grad=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(mlp(), nn.Linear(IN, IN))
            self.own, self.held = torch.ones(IN, requires_grad=True), [nn.Parameter(torch.ones(IN))]

        def forward(self, x: Tensor, scale: Tensor) -> Any:
            def run(x: Tensor) -> Tensor:
                return self.layers(x * scale * self.own * self.held[0])  # type: ignore[no-any-return]

            return checkpoint(run, x * named, use_reentrant=True)

    model, scale = Model(), torch.ones(IN, requires_grad=True)
    inputs = (x.requires_grad_(), scale)
    scale.grad = torch.zeros(IN)
    measure(model, *inputs) if measure is fl.memory_report else measure(model, inputs)
    assert not scale.grad.any()
    assert all(t.grad is None for t in (x, named, model.own, *model.held, *model.parameters()))


def test_a_checkpoint_around_checkpoints_alone_keeps_its_input(x: Tensor) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y

    blocks = [Checkpointed(nn.Sequential(nn.Linear(IN, IN), nn.Tanh())) for _ in range(2)]
    model = nn.Sequential(nn.Linear(IN, IN), Checkpointed(nn.Sequential(*blocks)))
    (row,) = (row for row in fl.memory_report(model, x).rows if row.kind == "activation")
    assert (row.module, row.operation, row.bytes) == ("1.inner", "checkpoint", x.nbytes)


def test_checkpoints_are_named_by_the_module_that_runs_throughout(x: Tensor) -> None:
    """Not by the path of a part that blocks share; and one in a block by the part that it is around."""
    shared, kinds = nn.GELU(), ("whole", "whole", "part")
    blocks = [nn.Sequential(nn.Linear(IN, 64), shared, nn.Sequential(nn.Linear(64, IN), nn.Tanh())) for _ in kinds]
    model = nn.ModuleList(blocks)

    def run(x: Tensor) -> Tensor:
        for kind, block in zip(kinds, model, strict=True):
            if kind == "whole":
                x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            else:
                up, act, down = block  # type: ignore[misc]
                x = checkpoint(down, act(up(x)), use_reentrant=False)  # type: ignore[assignment]
        return x

    rows = fl.memory_report(run, x.requires_grad_()).rows
    assert [row.module for row in sorted(rows, key=lambda row: row.module) if row.operation == "checkpoint"] == [
        "model.0",
        "model.1",
        "model.2.2",
    ]


@compiles
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler asks
def test_modules_that_were_compiled_in_place_have_their_paths(x: Tensor) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(Own(), Own())
    for block in model:
        block.compile(backend="aot_eager")
    calls = [block._compiled_call_impl for block in model]
    rows = activations(fl.memory_report(model, x))
    assert {(row.module, row.operation) for row in rows} == {(n, "CompiledFunctionBackward") for n in "01"}
    assert [block._compiled_call_impl for block in model] == calls


@compiles
def test_compiled_code_stays_whole(x: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Own(), fullgraph=True)
    report = fl.memory_report(compiled, x)
    assert {row.operation for row in activations(report)} == {"CompiledFunctionBackward"}
    assert report.saved_bytes == saved_bytes(compiled, x, exclude=[compiled, x])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert fl.memory_report(compiled, x) == report


@compiles
def test_compiled_code_is_one_operation_and_its_backward_pass_is_followed(x: Tensor) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(torch.compile(mlp()), mlp())
    report = fl.memory_report(model, x)
    assert {row.operation for row in activations(report) if row.module == "0"} == {"CompiledFunctionBackward"}
    assert report.saved_bytes == 4 * HIDDEN_BYTES + INPUT_BYTES
    assert report.estimated_peak_bytes == pytest.approx(report.peak_bytes, rel=0.02)
    assert "compiled code's temporaries" in str(report)
    model = mlp()
    report = fl.memory_report(torch.compile(lambda x: model(x).mean()), x)  # whose peak is within the compiled code
    assert "CompiledFunctionBackward" in report.moment
    assert report.estimated_peak_bytes == pytest.approx(report.peak_bytes, rel=0.02)
    fl.memory_report(torch.compile(mlp(), backend="eager"), x)


def test_sparse_inputs_and_gradients() -> None:
    adjacency = torch.eye(64).to_sparse()
    embedding, layer = nn.Embedding(64, IN, sparse=True), nn.Linear(IN, OUT)
    report = fl.memory_report(lambda a, ids: torch.sparse.mm(a, layer(embedding(ids))), adjacency, torch.arange(64))
    assert {row.bytes for row in report.rows if row.operation == "SparseAddmmBackward0"} == {64 * 2 * 8, 64 * 4}
    assert {row.kind for row in report.rows if row.operation == "SparseAddmmBackward0"} == {"input"}
    assert embedding.weight.grad is None and report.rest_bytes == 0


def test_inputs_that_wrap_tensors_are_put_back() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x, weight = (TwoTensor(torch.zeros(ROWS), torch.zeros(ROWS)) for _ in range(2))
    report = fl.memory_report(lambda x, weight: x.add_(1) * weight, x, weight.requires_grad_())
    assert not x.a.any() and not x.b.any()
    assert [(row.kind, row.bytes) for row in report.rows] == [("input", ROWS * 4)] * 2


# --- the peak ---------------------------------------------------------------------------------------------------------


def test_what_the_peak_of_an_mlp_consists_of(x: Tensor) -> None:
    """While the second layer's node runs, which holds y: z as well, dy, and that layer's gradients."""
    report = fl.memory_report(mlp(), x)
    assert report.parts == {
        "saved for backward, still held": 2 * HIDDEN_BYTES,
        "gradients of activations": HIDDEN_BYTES + INPUT_BYTES + 4,
        "gradients of parameters": WEIGHT_BYTES + IN * 4,
        "outputs of the forward pass, and temporaries": 4,
    }
    assert report.moment == "backward pass, aten.sum.dim_IntList for AddmmBackward0 of 2"
    assert report.peak_bytes == report.estimated_peak_bytes == sum(report.parts.values())
    assert report.rest_bytes == 0


def test_gradients_that_exist_are_not_counted_again(x: Tensor) -> None:
    model = nn.Linear(IN, IN, bias=False)
    weight = model.weight
    assert fl.memory_report(model, x[:1]).parts["gradients of parameters"] == weight.nbytes
    weight.grad = torch.ones_like(weight)
    report = fl.memory_report(model, x[:1])
    # It takes as much, but for a moment: made, and then added to what is there.
    assert "gradients of parameters" not in report.parts
    assert report.parts["gradients of activations"] >= weight.nbytes
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_gradients_of_inputs_are_told_apart(x: Tensor) -> None:
    report = fl.memory_report(mlp(), x.requires_grad_())
    assert x.grad is None
    report = fl.memory_report(lambda x: x.exp(), x)
    assert report.parts["gradients of inputs"] == INPUT_BYTES


def test_a_peak_in_the_forward_pass(x: Tensor) -> None:
    weight = nn.Parameter(torch.ones(1))

    def shrinks(x: Tensor) -> Tensor:
        return weight * (x.repeat(1, 8) + 1).sum()

    report = fl.memory_report(shrinks, x)
    assert report.moment.startswith("forward pass, aten.add.Tensor for shrinks")
    assert report.parts["outputs of the forward pass, and temporaries"] == 16 * INPUT_BYTES
    assert report.peak_bytes == report.estimated_peak_bytes == pytest.approx(16 * INPUT_BYTES, abs=16)


def test_scratch_memory_inside_an_operator_is_told_apart() -> None:
    w = nn.Parameter(torch.ones(1))
    z = torch.randn(64, 1024)
    report = fl.memory_report(lambda z: w * z.median(), z)
    assert report.parts["scratch memory inside the operator"] >= z.nbytes  # it sorts within a copy
    assert "aten.median" in report.moment
    assert report.rest_bytes == 0


BERT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
LLAMA = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(100, (4, 64))
    match name:
        case "bert":
            return transformers.BertModel(transformers.BertConfig(**BERT, vocab_size=100)), {"input_ids": ids}
        case "llama":
            config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, vocab_size=100)
            return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
        case "resnet":
            sizes = {"embedding_size": 16, "hidden_sizes": [32, 64, 64, 64], "depths": [2, 1, 1, 1]}
            config = transformers.ResNetConfig(**sizes, layer_type="basic")
            return transformers.ResNetModel(config), {"pixel_values": torch.randn(4, 3, 64, 64)}
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["bert", "llama", "resnet"])
def test_estimate_and_trackers_agree_on_real_models(name: str) -> None:
    """Within 5 %, with the allocator's peak and that of torch's own tracker, which follows tensors as well; and what is
    saved is what saved-tensor hooks count."""
    mem_tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    model, inputs = hugging_face(name)
    report = fl.memory_report(model, **inputs)
    assert report.estimated_peak_bytes == pytest.approx(report.peak_bytes, rel=0.05)
    assert report.saved_bytes == saved_bytes(lambda: model(**inputs), exclude=[model, inputs])

    tracker = mem_tracker.MemTracker()
    tracker.track_external(model, *inputs.values())
    (before,) = (row["Total"] for row in tracker.get_tracker_snapshot().values())
    with tracker:
        tensors = [t for t in model(**inputs).values() if isinstance(t, Tensor) and t.requires_grad]
        loss = functools.reduce(torch.add, [t.mean() for t in tensors])
        del tensors
        loss.backward()
    (peak,) = (row["Total"] for row in tracker.get_tracker_snapshot("peak").values())
    scratch = report.parts.get("scratch memory inside the operator", 0)  # of convolutions; it is not in any tensor
    assert report.estimated_peak_bytes - scratch == pytest.approx(peak - before, rel=0.05)


# --- the model is left as it was --------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: (t.clone(), id(t)) for name, t in model.state_dict(keep_vars=True).items()},
        "gradients": [p.grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ],
        "global hooks": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
            len(nn.modules.module._global_forward_hooks_always_called),
        ),
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = state_of(model)
    yield
    after = state_of(model)
    for name, (value, identity) in before.pop("tensors").items():
        assert torch.equal(after["tensors"][name][0], value), name
        assert after["tensors"][name][1] == identity, name
    del after["tensors"]
    assert all(a is b for a, b in zip(before.pop("gradients"), after.pop("gradients"), strict=True))
    assert before == after


class Restless(nn.Module):
    """Changes all that a forward pass can change."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(IN)
        self.linear = nn.Linear(IN, IN)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        x += random.random() * float(np.random.rand())
        if self.fails:
            raise RuntimeError("no such luck")
        return F.dropout(self.linear(self.norm(x)))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_left_behind(fails: bool, training: bool, x: Tensor) -> None:
    model = Restless().train(training)
    model.norm.weight.grad = torch.ones(IN)
    model.fails = fails
    model.linear.register_forward_hook(lambda *_: None)
    before = x.clone()
    with unchanged(model):
        if fails:
            with pytest.raises(RuntimeError, match=r"^no such luck$"):
                fl.memory_report(model, x)
        else:
            fl.memory_report(model, x)
    assert torch.equal(x, before)
    assert torch.equal(model.norm.weight.grad, torch.ones(IN))


@pytest.mark.parametrize("run", [0, 1, 2])
def test_nothing_is_left_behind_by_a_run_that_fails(run: int, x: Tensor) -> None:
    model = Restless()
    runs: list[int] = []

    def fails(module: nn.Module, *_: Any) -> None:
        runs.append(len(runs))
        if runs[-1] == run:
            raise RuntimeError("in the backward pass")

    model.linear.register_full_backward_hook(fails)
    with unchanged(model), pytest.raises(RuntimeError, match="in the backward pass"):
        fl.memory_report(model, x)
    assert runs[-1] == run
    assert fl.memory_report(mlp(), x).rest_bytes == 0  # a report after it is as ever


def test_optimizers_that_step_in_the_backward_pass_are_undone(x: Tensor) -> None:
    model = mlp()

    def step(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with unchanged(model):
        fl.memory_report(model, x)


def test_every_run_draws_the_same_random_numbers(x: Tensor) -> None:
    drawn = []
    weight = nn.Parameter(torch.ones(()))

    def draws(x: Tensor) -> Tensor:
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return weight * x

    fl.memory_report(draws, x)
    assert len(drawn) == 3 and len(set(drawn)) == 1


def test_no_graph_is_kept(x: Tensor) -> None:
    import gc
    import weakref

    kept: list[weakref.ref[Any]] = []
    model = mlp()
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output.untyped_storage())))
    report = fl.memory_report(model, x)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert report.rest_bytes == 0


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_called_is_refused(x: Tensor) -> None:
    with pytest.raises(
        TypeError, match=r"memory_report: model must be a module or a function, got str; pass the model"
    ):
        fl.memory_report("model", x)  # type: ignore[arg-type]


def test_devices_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(
        ValueError, match="memory_report: got tensors on meta, but can measure only on cpu and cuda; move"
    ):
        fl.memory_report(mlp().to("meta"), torch.randn(ROWS, IN, device="meta"))


def test_without_gradients_there_is_nothing_to_report(x: Tensor) -> None:
    model = mlp()
    with torch.no_grad(), pytest.raises(ValueError, match=r"gradients are switched off here; call it outside"):
        fl.memory_report(model, x)
    with pytest.raises(ValueError, match=r"returned a float32 tensor of shape \(256, 32\) that does not require grad"):
        fl.memory_report(model.requires_grad_(False), x)
    with pytest.raises(ValueError, match=r"all of its 4 parameters are frozen; unfreeze some, or let an input"):
        fl.memory_report(model, x)
    fl.memory_report(model, x.requires_grad_())
    with pytest.raises(
        ValueError, match=r"memory_report: the model returned dict with 1 tensor in it, expected a float"
    ):
        fl.memory_report(lambda x: {"indices": x.argmax(), "name": "x"}, x)
    with pytest.raises(ValueError, match=r"NoneType with 0 tensors in it.*let a parameter or an input require grad"):
        fl.memory_report(lambda x: None, x)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda y: y, r"a float32 tensor of shape \(256, 32\) that requires grad"),
        (lambda y: y.sum().item(), "float with 0 tensors in it"),
        (lambda y: y.sum().detach(), r"a float32 tensor of shape \(\) that does not require grad"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, got: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"memory_report: loss returned {got}, expected a tensor with one element"):
        fl.memory_report(mlp(), x, loss=loss)


@pytest.mark.parametrize("names", [(), ("input",)])
@pytest.mark.parametrize("model", [nn.Linear(8, 8), lambda input: input.sin()])
def test_one_container_stands_for_the_arguments_as_in_fuse(names: Sequence[str], model: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    given: Any = dict.fromkeys(names, x) or (x,)
    report = fl.memory_report(model, given)
    assert report == fl.memory_report(model, x) and report.bytes_of("input") == x.nbytes


def test_a_container_that_is_no_arguments_stays_one() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert fl.memory_report(lambda batch: batch["x"].sin(), {"x": x}).bytes_of("input") == x.nbytes
    assert fl.memory_report(lambda batch: batch["x"].sin(), {"batch": {"x": x}}).bytes_of("input") == x.nbytes
    assert fl.memory_report(lambda pair: pair[0] * pair[1].detach(), (x, x + 1)).bytes_of("input") == x.nbytes
    assert fl.memory_report(torch.sin, (x,)).bytes_of("input") == x.nbytes


def test_errors_of_the_model_and_the_loss_are_the_users(x: Tensor) -> None:
    def model(first: Tensor, second: Tensor) -> Tensor:
        raise KeyError("a bug of the model's")

    with pytest.raises(KeyError, match="a bug of the model's"):
        fl.memory_report(model, (x, x))
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        fl.memory_report(mlp(), (x,), loss=lambda y: y.nonsense)
    with pytest.raises(TypeError, match=r"^memory_report: no inputs were given; pass them behind the model: .*, x\)$"):
        fl.memory_report(mlp())
    with pytest.raises(TypeError, match=r"^memory_report: model must be a module or a function, got int"):
        fl.memory_report(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Linear\.forward\(\) missing"):  # which this model calls so
        fl.memory_report(lambda: nn.Linear(2, 2)())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (("x",), ""),
        ((torch.ones(3),), ""),
        ((np.ones((2, IN)),), "a NumPy array is among the inputs; torch.from_numpy makes a tensor of it"),
        ((2, IN), f"the inputs are numbers; if a tensor of this shape is meant, pass torch.randn(2, {IN})"),
    ],
    ids=["text", "shape", "NumPy", "numbers"],
)
def test_what_the_model_raises_comes_through_with_a_note(inputs: tuple[Any, ...], said: str) -> None:
    with pytest.raises((TypeError, RuntimeError)) as raised:
        mlp()(*inputs)
    with pytest.raises(raised.type, match=f"^{re.escape(str(raised.value))}") as passed_on:
        fl.memory_report(mlp(), *inputs)
    assert getattr(passed_on.value, "__notes__", []) == ([f"memory_report: {said}"] if said else [])


# --- text, pictures, JSON ---------------------------------------------------------------------------------------------


def test_repeated_blocks_are_one_line(x: Tensor) -> None:
    text = str(fl.memory_report(Blocks(), x))
    lines = text.splitlines()
    assert any(line.endswith("  blocks.0-2.1  GeluBackward0             3 of 256 x 128 float32") for line in lines), (
        text
    )
    assert lines[0] == "Blocks on cpu"
    assert {line.index("blocks.") for line in lines if "  blocks." in line} == {lines[2].index("module")}, text
    assert any(line.endswith("saved for backward") and line.split()[1] == "100.0" for line in lines)
    for word in ("at the peak: backward pass", "gradients of parameters", "estimated", "rest: ", "measured"):
        assert word in text
    assert "not counted, because it was there before: 32.0 KiB of inputs, " in text
    assert not any(line != line.rstrip() for line in lines)


def test_numbered_modules_of_other_shapes_are_other_lines(x: Tensor) -> None:
    x.requires_grad_()
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(IN, IN)) for _ in range(3)), nn.Tanh())
    deeper = nn.Sequential(
        nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN), nn.Tanh(), nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, 1)
    )
    assert "0-2.0  TanhBackward0 +1" in " ".join(str(fl.memory_report(model, x)).split("\n"))
    lines = str(fl.memory_report(deeper, x)).splitlines()
    assert [line.split()[2:4] for line in lines[3:5]] == [["1,5", "TanhBackward0"], ["3", "TanhBackward0"]]
    assert any("+n: n more operations save the same memory" in line for line in lines)


def test_modules_of_other_classes_are_other_groups(x: Tensor) -> None:
    layers = [
        nn.Sequential(OrderedDict(act=act, linear=nn.Linear(IN, IN))) for act in (nn.ReLU(), nn.Tanh(), nn.ReLU())
    ]
    report = fl.memory_report(nn.Sequential(*layers), x.requires_grad_())
    groups = {group.path: group.bytes for group in groups_of(report.rows, report.name)}
    assert groups == {"0,2.act": 2 * INPUT_BYTES, "1.act": INPUT_BYTES}


def test_small_lines_are_summed_up() -> None:
    layers: list[nn.Module] = []
    for width in range(4, 24):
        layers += [nn.Linear(width, width + 1), nn.Tanh()]
    report = fl.memory_report(nn.Sequential(*layers), torch.randn(ROWS, 4))
    lines = str(report).splitlines()
    (others,) = (line for line in lines if line.endswith(" more"))
    assert others.split()[-2:] == ["4", "more"]
    shares = [float(line.split()[1]) for line in lines[3 : lines.index(others) + 1]]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_a_model_that_saves_nothing(x: Tensor) -> None:
    weight = nn.Parameter(torch.ones(ROWS, IN))
    report = fl.memory_report(lambda x: x + weight, x)
    assert report.saved_bytes == 0 and report.rows == ()
    assert "0.0  saved for backward" in str(report)
    with pytest.raises(ValueError, match="<lambda> saves nothing for backward, so that there is nothing to draw"):
        report.plot("nothing.png")


def test_json(x: Tensor) -> None:
    report = fl.memory_report(Blocks(), x)
    plain = json.loads(json.dumps(report.to_dict()))
    assert (
        plain["saved_bytes"]
        == report.saved_bytes
        == sum(row["bytes"] for row in plain["rows"] if row["kind"] == "activation")
    )
    assert plain["peak_bytes"] - plain["estimated_peak_bytes"] == plain["rest_bytes"]
    assert plain["parts"] == report.parts and plain["moment"] == report.moment
    row = plain["rows"][0]
    assert row["shape"] == [ROWS, OUT] and row["module_class"] and isinstance(row["shared_with"], list)


def test_two_reports_side_by_side(x: Tensor) -> None:
    before = fl.memory_report(mlp(), x)
    after = fl.memory_report(nn.Sequential(fl.FusedDenseAct(IN, OUT), nn.Linear(OUT, IN)), x)
    with pytest.raises(TypeError, match="compare: expected another report of memory_report, got int: 3"):
        before.compare(3)  # type: ignore[arg-type]
    found = before.compare(after)
    assert found.groups == {
        "0": (0, HIDDEN_BYTES),
        "1": (HIDDEN_BYTES, 0),
        "2": (HIDDEN_BYTES, 0),
    }
    assert found.totals["saved for backward"] == (2 * HIDDEN_BYTES, HIDDEN_BYTES)
    assert found.totals["peak, measured"] == (before.peak_bytes, after.peak_bytes)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["totals"]["saved for backward"] == {"before": 2 * HIDDEN_BYTES, "after": HIDDEN_BYTES}
    lines = str(found).splitlines()
    assert lines[0] == "Sequential, in KiB"
    assert "    256.00    128.00    -50.0 %  saved for backward" in lines
    assert "      0.00    128.00        new  0" in lines
    assert "    128.00      0.00   -100.0 %  1" in lines
    assert any(line.endswith("peak, measured") for line in lines)


def test_a_module_may_have_the_name_of_the_models_class(x: Tensor) -> None:
    class net(nn.Module):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.sin()).exp().exp()  # type: ignore[no-any-return]

    report = fl.memory_report(net(), x.requires_grad_())
    assert report.compare(report).groups == {"net": (report.saved_bytes, report.saved_bytes)}


def test_modules_in_place_of_one_are_compared_with_it(x: Tensor) -> None:
    before = fl.memory_report(model := Blocks(), x)
    model.blocks = nn.ModuleList(fl.FusedMLP.from_modules(*block) for block in model.blocks)
    after = fl.memory_report(model, x)
    groups = before.compare(after).groups
    assert list(groups) == ["blocks.0-2", "norm", "Blocks"]
    assert groups["blocks.0-2"] == (6 * HIDDEN_BYTES + 3 * INPUT_BYTES, 3 * HIDDEN_BYTES + 3 * INPUT_BYTES)
    assert after.compare(before).groups["blocks.0-2"] == groups["blocks.0-2"][::-1]


def test_pictures(x: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = fl.memory_report(Blocks(), x)
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        report.plot(tmp_path / f"picture.{suffix}")
        assert (tmp_path / f"picture.{suffix}").read_bytes().startswith(start)


def test_boxes_of_a_picture_are_modules_in_modules(x: Tensor) -> None:
    from fusedlayers.profiling.memory_plot import tree

    report = fl.memory_report(nn.ModuleDict({"deep": nn.Sequential(Blocks())})["deep"], x)
    root = tree(report.rows, report.name)
    assert root.name == "Sequential" and root.bytes == report.saved_bytes
    (blocks,) = root.children.values()
    assert blocks.name == "0" and blocks.bytes == root.bytes
    assert set(blocks.children) > {"blocks.0-2.1", "blocks.0-2.2", "norm"}
    assert sum(child.bytes for child in blocks.children.values()) == blocks.bytes
    (gelu,) = blocks.children["blocks.0-2.1"].children.values()
    assert (gelu.name, gelu.note, gelu.bytes) == ("GeluBackward0", "3 of 256 x 128 float32", 3 * HIDDEN_BYTES)


def test_modules_with_one_module_in_them_are_one_box(x: Tensor) -> None:
    from fusedlayers.profiling.memory_plot import tree

    inner = nn.Sequential(OrderedDict(core=mlp()))
    model = nn.Sequential(OrderedDict(outer=nn.Sequential(OrderedDict(inner=inner))))
    report = fl.memory_report(model, x)
    root = tree(report.rows, report.name)
    (box,) = root.children.values()
    assert (root.name, box.name, root.depth) == ("Sequential", "outer.inner", 3)
    assert set(box.children) == {"core.1", "core.2"}


def test_a_picture_without_matplotlib(x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = fl.memory_report(mlp(), x)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib, .* pip install 'fusedlayers\[demo\]'"):
        report.plot(tmp_path / "picture.png")


def test_copies_of_weights_that_autocast_makes_count_as_they_do_for_fuse() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 32)), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        report = fl.memory_report(model, x)
        saved = saved_bytes(model, x, exclude=[model, x])
    assert report.saved_bytes == saved and report.bytes_of("constant") == 0


def test_writes_that_save_nothing_leave_nothing_unlisted() -> None:
    """Buffers and numbers are saved too, and were there before."""
    layer, norm, scale = nn.Linear(8, 16), nn.BatchNorm1d(16), torch.tensor(2.0)

    def zeroed(x: Tensor) -> Tensor:
        y = norm(layer(x)) * 0.5 * scale
        y[:, :4] = 0
        return y.sin()

    report = fl.memory_report(zeroed, torch.randn(32, 8))
    assert report.unlisted == () and report.unlisted_bytes == 0 and "not listed" not in str(report)
    report = fl.memory_report(lambda x: F.silu(zeroed(x).view(-1, 4), inplace=True).exp(), torch.randn(32, 8))
    assert report.unlisted_bytes == 32 * 16 * 4


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "name", ["mlp", "blocks", "dropout", "convolutions", "fused dense", "fused mlp", "checkpoints"]
)
def test_rows_and_peaks_on_a_gpu(name: str) -> None:
    model, x = MODELS[name]()
    model, x = model.cuda(), x.cuda()
    state = torch.cuda.get_rng_state()
    report = fl.memory_report(model, x)
    assert report.device.startswith("cuda") and torch.equal(torch.cuda.get_rng_state(), state)
    assert report.saved_bytes == saved_bytes(model, x, exclude=[model, x])
    assert report.estimated_peak_bytes == pytest.approx(report.peak_bytes, rel=0.05)


@pytest.mark.parametrize("exact", [True, False])
def test_of_a_fused_model_all_that_is_saved_is_listed(exact: bool) -> None:
    model, x = Blocks(), torch.randn(ROWS, IN)
    before = fl.memory_report(model, x)
    fl.fuse(model, exact=exact)
    report = fl.memory_report(model, x)
    assert 0 < report.saved_bytes < before.saved_bytes
    copies = 3 * IN * 4  # of norms' biases, which replays read
    assert report.saved_bytes == saved_bytes(model, x, exclude=[x, *model.parameters()]) + copies
