"""The memory report: rows against arithmetic and ``saved_bytes``, the peak against ``peak_bytes``; and that a model is
left as it was."""

import contextlib
import functools
import gc
import json
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from settings import compiles
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.reports.memory_report import Row
from fusedlayers.utils.step import Step

ROWS, IN, OUT = 256, 32, 128
INPUT_BYTES, HIDDEN_BYTES, WEIGHT_BYTES = ROWS * IN * 4, ROWS * OUT * 4, IN * OUT * 4


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))


def places(report: Any) -> set[tuple[str, str]]:
    return {(row.module, row.operation) for row in report.rows}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_of_an_mlp(x: Tensor) -> None:
    """Not the input, nor the second weight, which were there before."""
    report = fl.memory_report(mlp(), x)
    assert report.rows == (
        Row("1", "GeluBackward0", (ROWS, OUT), "float32", HIDDEN_BYTES, ()),
        Row("2", "AddmmBackward0", (ROWS, OUT), "float32", HIDDEN_BYTES, ()),
    )
    assert report.saved_bytes == 2 * HIDDEN_BYTES
    assert report.name == "Sequential" and report.device == "cpu"


def test_a_storage_is_one_row_in_full_that_says_who_shares_it(x: Tensor) -> None:
    model = nn.ModuleDict({"relu": nn.ReLU(), "one": nn.Linear(IN, OUT), "two": nn.Linear(IN, OUT)})
    (row,) = fl.memory_report(lambda x: model["one"](y := model["relu"](2 * x)) + model["two"](y), x).rows
    assert row.bytes == INPUT_BYTES and (row.module, row.operation) == ("model.one", "AddmmBackward0")
    assert row.shared_with == (("model.two", "AddmmBackward0"),)
    report = fl.memory_report(lambda x: (2 * x)[:1] ** 2, x.requires_grad_())
    (row,) = report.rows
    assert row.shape == (1, IN) and row.bytes == INPUT_BYTES
    assert f" 1 x {IN} float32, a view\n" in str(report)


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
    report = fl.memory_report(Blocks(), {"x": x, "scale": 2.0})
    inner = {(f"blocks.{i}.{j}", op) for i in range(3) for j, op in ((0, "Addmm"), (1, "Gelu"), (2, "Addmm"))}
    outer = {("norm", "NativeLayerNorm"), ("", "Tanh")}
    # The first norm saves the model's input, but statistics of its own.
    assert places(report) == {(module, f"{op}Backward0") for module, op in inner | outer}
    norm = [row for row in report.rows if row.module == "norm"]
    assert sorted(row.shape for row in norm) == [(ROWS, 1)] * 8 + [(ROWS, IN)] * 3


MODEL = mlp()
HIDDEN = [MODEL]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: MODEL(x), {"MODEL.1": "Gelu", "MODEL.2": "Addmm"}),
        (functools.partial(MODEL.forward), {"1": "Gelu", "2": "Addmm"}),
        (functools.partial(lambda f, x: f(x), MODEL), {"Sequential.1": "Gelu", "Sequential.2": "Addmm"}),
        (lambda x: torch.exp(HIDDEN[0](x)), {"Sequential.1": "Gelu", "Sequential.2": "Addmm", "": "Exp"}),
    ],
    ids=["named", "method", "partial", "not named"],
)
def test_paths_of_modules(function: Any, expected: dict[str, str], x: Tensor) -> None:
    report = fl.memory_report(function, x)
    assert places(report) == {(module, f"{operation}Backward0") for module, operation in expected.items()}


@dataclass
class Output:
    logits: Tensor
    others: tuple[Tensor, ...]


def test_outputs_of_any_nesting(x: Tensor) -> None:
    model = mlp()
    wraps: list[Callable[[Tensor], Any]] = [
        lambda y: (y, None, 3),
        lambda y: {"a": {"b": [y, y.detach(), torch.arange(3)]}},
        lambda y: Output(y.detach(), (y,)),
    ]
    for wrap in wraps:
        assert fl.memory_report(lambda x, wrap=wrap: wrap(model(x)), x).saved_bytes == 2 * HIDDEN_BYTES


def test_the_loss_is_the_sum_of_means_or_what_is_asked_for(x: Tensor) -> None:
    seen: list[Tensor] = []
    model = mlp()
    model[2].register_full_backward_hook(lambda module, gx, gy: seen.append(gy[0].clone()))
    fl.memory_report(lambda x: (model(x), torch.ones(2, requires_grad=True)), x)
    assert len(seen) == 2
    assert all(torch.equal(grad, torch.full((ROWS, IN), 1 / (ROWS * IN))) for grad in seen)
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
    row, *states = report.rows
    assert (row.module, row.operation, row.bytes) == (module, operation, INPUT_BYTES)
    assert all(row.dtype == "uint8" for row in states)  # of the random number generator, in a reentrant one
    assert report.peak_bytes >= report.saved_bytes + 2 * HIDDEN_BYTES


def test_a_checkpoint_around_checkpoints_alone_keeps_its_input(x: Tensor) -> None:
    inner = nn.Sequential(nn.Linear(IN, IN), nn.Tanh())
    twice = nn.Sequential(*(nn.Sequential(nn.Linear(IN, IN), nn.Tanh()) for _ in range(2)))

    def both(x: Tensor) -> Any:
        return checkpoint(twice[1], checkpoint(twice[0], x, use_reentrant=False), use_reentrant=False)

    (row,) = fl.memory_report(lambda x: checkpoint(both, inner[0](x), use_reentrant=False), x).rows
    assert (row.operation, row.bytes) == ("checkpoint", x.nbytes)


def test_what_users_hooks_made_of_tensors_is_listed(x: Tensor) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (t.half(), "note"), lambda pair: pair[0].float())
    with hooks:
        report = fl.memory_report(mlp(), x)
    assert {row.dtype for row in report.rows} == {"float16"}
    assert report.saved_bytes == (2 * HIDDEN_BYTES + INPUT_BYTES + WEIGHT_BYTES) // 2


def test_operations_of_this_library_have_readable_names(x: Tensor) -> None:
    pair = nn.Sequential(fl.FusedDenseAct(IN, OUT, "gelu"), nn.Linear(OUT, IN))
    (row,) = fl.memory_report(pair, x).rows
    assert (row.module, row.operation) == ("0", "fusedlayers.BiasAct(gelu)")
    assert row.shared_with == (("1", "AddmmBackward0"),)
    block = fl.FusedMLP(IN, OUT, activation=nn.ELU(0.5))
    assert places(fl.memory_report(block, x)) == {("", "fusedlayers.MLP(elu(alpha=0.5))")}


def test_what_was_there_before_is_not_listed(x: Tensor) -> None:
    """Constants that only code names, what a first call caches; but autocast's copies, which each step makes."""
    layer, norm, constant, cache = nn.Linear(IN, IN), nn.BatchNorm1d(IN).eval(), torch.randn(ROWS, IN), []

    def model(x: Tensor) -> Tensor:
        cache.append(x.exp()) if not cache else None
        return norm(layer(x) * constant * cache[0])  # type: ignore[no-any-return]

    (row,) = fl.memory_report(model, x).rows
    assert row.operation == "NativeBatchNormBackward0" and row.shape == (ROWS, IN)
    with torch.autocast("cpu", torch.bfloat16):
        report, saved = fl.memory_report(mlp(), x), (2 * HIDDEN_BYTES + INPUT_BYTES + WEIGHT_BYTES) // 2
    assert report.saved_bytes == saved  # z, y, x and the second weight


def test_what_a_module_replaces_is_made_anew(x: Tensor) -> None:
    """Where the old tensor lay the new one may lie."""

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x).exp()
            return self.last.exp()

    assert len(fl.memory_report(Keeps(IN, IN), x).rows) == 2


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "blocks": lambda: (Blocks(), torch.randn(ROWS, IN)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 1)),
        torch.randn(4, 8, 16, 16),
    ),
    "attention": lambda: (nn.TransformerEncoderLayer(IN, 4, OUT, batch_first=True), torch.randn(4, 64, IN)),
    "fused dense": lambda: (nn.Sequential(fl.FusedDenseAct(IN, OUT), nn.Linear(OUT, IN)), torch.randn(ROWS, IN)),
    "fused gated": lambda: (fl.FusedGatedMLP(IN, OUT), torch.randn(ROWS, IN)),
    "recomputed": lambda: (fl.FusedMLP(IN, OUT, save="recompute"), torch.randn(ROWS, IN)),
    "checkpoints": lambda: (Twice(False), torch.randn(ROWS, IN)),
}


ON_GPUS = [(name, "cuda") for name in ("convolutions", "fused dense", "checkpoints") if torch.cuda.is_available()]


@pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in MODELS), *ON_GPUS])
def test_rows_and_peaks_of_models(name: str, device: str) -> None:
    """Rows sum to what saved-tensor hooks count, the parts to the peak of a step without a report."""
    model, x = (each.to(device) for each in MODELS[name]())
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    report = fl.memory_report(model, x)
    assert torch.equal(torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state(), state)
    assert report.device.startswith(device) and report.moment.startswith("backward pass, ")
    assert report.saved_bytes == saved_bytes(model, x, exclude=[model, x])
    peak = peak_bytes(Step(model, (x,), {}).run, device=device)
    assert report.peak_bytes == pytest.approx(peak, rel=0.02 if device == "cpu" else 0.05)
    assert report.peak_bytes >= report.saved_bytes


def test_of_a_fused_model_all_that_is_saved_is_listed(x: Tensor) -> None:
    model = Blocks()
    before = fl.memory_report(model, x)
    fl.fuse(model)
    report = fl.memory_report(model, x)
    assert 0 < report.saved_bytes < before.saved_bytes
    assert report.saved_bytes == saved_bytes(model, x, exclude=[x, *model.parameters()])


@compiles
def test_of_a_fused_model_what_only_recipes_and_checkpoints_hold_is_listed(x: Tensor) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(IN, IN) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            z = self.a(x)
            dropped = z.sin()  # which saves z
            y = self.b(-z)
            del dropped
            return checkpoint(self.c, y, use_reentrant=False)  # type: ignore[no-any-return]

    model = Dropping()
    fl.fuse(model)
    assert fl.memory_report(model, x).saved_bytes == saved_bytes(model, x, exclude=x) == 2 * x.nbytes


def test_compiled_code_is_one_operation_of_the_module_around_it(x: Tensor) -> None:
    torch._dynamo.reset()
    inner, plain = torch.compile(mlp(), backend="aot_eager"), nn.Sequential(mlp())
    model = nn.Sequential(inner, plain)
    report = fl.memory_report(model, x)
    assert {row.module for row in report.rows if row.operation == "CompiledFunctionBackward"} == {"0"}
    assert report.saved_bytes == saved_bytes(model, x, exclude=[model, x])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert fl.memory_report(model, x) == report


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_wrapped_and_sparse_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x, weight = (TwoTensor(torch.zeros(ROWS), torch.zeros(ROWS)) for _ in range(2))
    report = fl.memory_report(lambda x, weight: (x.add_(1) * weight).exp(), (x, weight.requires_grad_()))
    assert not x.a.any() and not x.b.any()
    assert [(row.operation, row.bytes) for row in report.rows] == [("ExpBackward0", ROWS * 4)] * 2
    embedding, layer = nn.Embedding(64, IN, sparse=True), nn.Linear(IN, OUT)
    for adjacency in (torch.eye(64).to_sparse(), torch.eye(64).to_sparse_csr()):
        for factor, found in ((1, set()), (2, {("", "SparseAddmmBackward0")})):  # of what is given none is listed
            report = fl.memory_report(
                lambda a, ids, n=factor: torch.sparse.mm(a if n == 1 else n * a, layer(embedding(ids))),
                (adjacency, torch.arange(64)),
            )
            assert places(report) == {("layer", "AddmmBackward0"), *found} and embedding.weight.grad is None


# --- the peak ---------------------------------------------------------------------------------------------------------


def test_the_peak_of_an_mlp(x: Tensor) -> None:
    """While the second layer's node runs, which holds y: z as well, dy, and that layer's gradients."""
    report = fl.memory_report(mlp(), x)
    assert report.peak_bytes == 3 * HIDDEN_BYTES + INPUT_BYTES + WEIGHT_BYTES + IN * 4 + 2 * 4
    assert report.moment == "backward pass, aten::sum in AddmmBackward0 of 2"


# --- the model is left as it was --------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> list[Any]:
    hooks = [
        (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks) for m in model.modules()
    ]
    glob = nn.modules.module
    return [
        [(name, id(t), t.tolist()) for name, t in model.state_dict(keep_vars=True).items()],
        [id(p.grad) for p in model.parameters()],
        [[len(own) for own in each] for each in hooks],
        (len(glob._global_forward_hooks), len(glob._global_forward_pre_hooks)),
        (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    ]


class Restless(nn.Module):
    """Changes all that a forward pass can change, and draws random numbers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(IN)
        self.linear = nn.Linear(IN, IN)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.drawn: list[tuple[float, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.drawn.append((random.random(), float(np.random.rand())))
        x += self.drawn[-1][0] * self.drawn[-1][1]
        return F.dropout(self.linear(self.norm(x)))


@pytest.mark.parametrize("fails", ["never", "forward 0", "forward 1", "backward 0", "backward 1"])
def test_nothing_is_left_behind(fails: str, x: Tensor) -> None:
    model = Restless()
    model.norm.weight.grad = torch.ones(IN)
    runs: dict[str, int] = {"forward": 0, "backward": 0}

    def count(phase: str, *_: Any) -> None:
        runs[phase] += 1
        if fails == f"{phase} {runs[phase] - 1}":
            raise RuntimeError("no such luck")

    model.linear.register_forward_hook(lambda *_: count("forward"))
    model.linear.register_full_backward_hook(lambda *_: count("backward"))

    def step(parameter: Tensor) -> None:  # of an optimizer, in the backward pass
        parameter.data.add_(parameter.grad)

    for parameter in model.linear.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before, state = x.clone(), state_of(model)
    with contextlib.nullcontext() if fails == "never" else pytest.raises((RuntimeError, ValueError), match="luck"):
        fl.memory_report(model, x)
    assert state_of(model) == state
    assert torch.equal(x, before) and torch.equal(model.norm.weight.grad, torch.ones(IN))
    assert len(set(model.drawn)) == 1 and len(model.drawn) == (1 if fails.endswith("0") else 2)


@pytest.mark.parametrize("measure", [fl.memory_report, functools.partial(fl.fit, fraction=1.0)], ids=["report", "fit"])
def test_gradients_stay(measure: Any, x: Tensor) -> None:
    """Where a reentrant checkpoint hides them: of parameters, an argument, attributes, and what code alone names."""
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
    scale.grad = torch.zeros(IN)
    measure(model, (x.requires_grad_(), scale))
    assert not scale.grad.any()
    assert all(t.grad is None for t in (x, named, model.own, *model.held, *model.parameters()))


def test_no_graph_is_kept(x: Tensor) -> None:
    kept: list[weakref.ref[Any]] = []
    model = mlp()
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output.untyped_storage())))
    fl.memory_report(model, x)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 2


# --- errors -----------------------------------------------------------------------------------------------------------


report_of: Any = fl.memory_report
X = torch.randn(ROWS, IN)
FROZEN = mlp().requires_grad_(False)
META = mlp().to("meta")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: report_of(3, X), TypeError, "^memory_report: model must be a module or a function, got int; pass the"),
        (
            lambda: report_of(META, X),
            ValueError,
            "got tensors on meta, but can measure only on cpu and cuda; move .* there, with a small",
        ),
        (lambda: torch.no_grad()(report_of)(MODEL, X), ValueError, "gradients are switched off here; call it outside"),
        (lambda: report_of(FROZEN, X), ValueError, r"of shape \(256, 32\) that does not .* 4 parameters are frozen"),
        (lambda: report_of(MODEL, X, loss=lambda y: y), ValueError, r"returned a float32 .* \(256, 32\) that requires"),
        (
            lambda: report_of(MODEL, X[:, 1:]),
            ValueError,
            "^memory_report: the model does not run .*: RuntimeError: .*mat",
        ),
        (lambda: report_of(MODEL, np.ones((2, IN))), ValueError, r"\(a NumPy array is among .* makes a tensor of it\)"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


# --- text, pictures, JSON ---------------------------------------------------------------------------------------------


def test_the_table(x: Tensor) -> None:
    report = fl.memory_report(Blocks(), x)
    text = str(report)
    lines = text.splitlines()
    gelu = "     0.38    36.1  blocks.0-2.1        GeluBackward0             3 of 256 x 128 float32"
    assert lines[0] == "Blocks on cpu" and gelu in lines and max(map(len, lines)) <= 100, text
    assert {line.index("blocks.") for line in lines if "  blocks." in line} == {lines[2].index("module")}, text
    assert any(line.endswith("saved for backward") and line.split()[1] == "100.0" for line in lines)
    assert lines[-2].startswith("Peak: ") and lines[-2].endswith(" %") and lines[-1] == f"in the {report.moment}"
    assert not any(line != line.rstrip() for line in lines)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["saved_bytes"] == report.saved_bytes == sum(row["bytes"] for row in plain["rows"])
    assert plain["peak_bytes"] == report.peak_bytes and plain["rows"][0]["shape"] == [ROWS, OUT]


def test_pictures(x: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = fl.memory_report(Blocks(), x)
    report.plot(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_bytes().startswith(b"<?xml")
    (axes,) = report.figure().axes
    assert [text.get_text() for text in axes.get_yticklabels()][:1] == ["blocks.0-2.1: GeluBackward0"]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths[0] == 3 * HIDDEN_BYTES and sum(widths) == report.saved_bytes
    nothing = fl.memory_report(lambda x: x + nn.Parameter(torch.ones(ROWS, IN)), x)
    assert nothing.saved_bytes == 0 and "  saved for backward" in str(nothing)
    with pytest.raises(ValueError, match="<lambda> saves nothing for backward, so that there is nothing to draw"):
        nothing.figure()


def test_writes_that_save_nothing_leave_nothing_unlisted() -> None:
    layer = nn.Linear(8, 16)
    report = fl.memory_report(lambda x: layer(x).sin(), torch.randn(32, 8))
    assert report.unlisted == () and "not listed" not in str(report)
    report = fl.memory_report(lambda x: F.silu(layer(x).view(-1, 4), inplace=True).exp(), torch.randn(32, 8))
    assert report.unlisted == ("",) and "not listed (fusedlayers.memory.saved_bytes counts it)" in str(report)
