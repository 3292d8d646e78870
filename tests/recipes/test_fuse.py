"""``fuse``: a model computes and trains as it did, to the last bit where that is asked, and every value is saved once.

Training loops and engines are in ``test_fuse_training.py``, random programs in ``test_programs.py``.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from copies import COPIES
from entering import entered
from programs import QuickGELU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers._torch import saved_tensors_hooks_on_top
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.recipes.fuse_report import count
from fusedlayers.recipes.patch import patch_of

ROWS, IN, HIDDEN = 64, 32, 128
HIDDEN_BYTES = 4 * ROWS * HIDDEN


pytestmark = pytest.mark.usefixtures("small_values_are_replayed")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


class MLP(nn.Module):
    """Behind a norm; of any activation."""

    def __init__(self, act: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(IN), nn.Linear(IN, HIDDEN), act or nn.GELU()
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A gate of two layers, or of one that makes both halves."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        if packed:
            self.packed = nn.Linear(IN, 2 * HIDDEN)
        else:
            self.gate, self.up = nn.Linear(IN, HIDDEN), nn.Linear(IN, HIDDEN)
        self.act, self.down = nn.SiLU(), nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        z, up = self.packed(x).chunk(2, -1) if "packed" in self._modules else (self.gate(x), self.up(x))
        return self.down(self.act(z) * up)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """A module, all of whose parts run in a checkpoint."""

    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def of_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), Gated(), nn.Linear(IN, 2))


def step(model: Any, x: Tensor, **context: Any) -> list[Tensor]:
    """The result of a training step, and all gradients."""
    torch.manual_seed(2)
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in context):
        y = model(x * 1)
    (y.float() if y.dtype is torch.bfloat16 else y).square().mean().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    for parameter in model.parameters():
        parameter.grad = None
    return [tensor for tensor in found if tensor is not None]


def are_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def kept(model: nn.Module, x: Any) -> int:
    return saved_bytes(model, x, exclude=[model, x])


def made_by(model: nn.Module, x: Tensor) -> set[str]:
    """The nodes whose results are spared."""
    return {spared.made_by for spared in count(model(x)).spared}


# --- what it does to a model ------------------------------------------------------------------------------------------


def test_without_inputs_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = of_layers(), []
    monkeypatch.setattr(nn.Module, "__call__", lambda *args: called.append(args))
    names = entered(lambda: fl.fuse(model))
    assert called == [] and 0 < len(names) <= 25 * len([*model.modules()]), len(names)


def test_nothing_of_the_model_changes_but_forward(x: Tensor) -> None:
    model = nn.Sequential(of_layers(), nn.BatchNorm1d(2), nn.Dropout(0.5))
    contents = {name: {**vars(module)} for name, module in model.named_modules()}
    classes, forwards = [type(m) for m in model.modules()], [type(m).forward for m in model.modules()]
    signature = inspect.signature(model.forward)
    values, state, text = copy.deepcopy(model.state_dict()), torch.get_rng_state(), str(model)
    for inputs in (None, x):
        fl.fuse(model, inputs)
        patched = {type(module) for module in model.modules() if patch_of(module) is not None}
        assert patched >= {nn.Sequential, nn.BatchNorm1d} and patched.isdisjoint({nn.Linear, nn.Dropout})
        assert str(model) == text and inspect.signature(model.forward) == signature
        assert [type(m) for m in model.modules()] == classes
        assert [type(m).forward for m in model.modules()] == forwards
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert [*model.state_dict()] == [*values] and all(
            map(torch.equal, model.state_dict().values(), values.values())
        )
        assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), state)
    fl.unfuse(model)
    fl.unfuse(model)  # which is not fused
    assert {name: {**vars(module)} for name, module in model.named_modules()} == contents


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_their_own(how: str, x: Tensor) -> None:
    model = of_layers()
    fl.fuse(model)
    other = COPIES[how](model)
    patches = {module: patch for module in other.modules() if (patch := patch_of(module)) is not None}
    assert len(patches) > 3 and all(patch.module is module for module, patch in patches.items())
    assert are_same(step(other, x), step(of_layers(), x)) and kept(other, x) == kept(model, x)
    fl.unfuse(other)
    assert patch_of(model) is not None
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(x).any() and model(x).any()


def test_shallow_copies_run_their_own_modules(x: Tensor) -> None:
    """``copy.copy`` and ``nn.DataParallel`` let copies share the attributes of a module."""
    model = MLP()
    fl.fuse(model)
    other = copy.copy(model)
    other.__dict__["_modules"] = {**model._modules, "up": nn.Linear(IN, HIDDEN)}
    expected = MLP.forward(other, x)
    assert torch.allclose(other(x), expected) and not torch.allclose(model(x), expected)
    replica: Any = model._replicate_for_data_parallel()
    replica._modules["up"] = other.up
    assert torch.allclose(replica(x), expected)


#: What changes behind ``fuse``.
CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "class of PyTorch": lambda m, patch: patch.setattr(nn.GELU, "forward", lambda self, x: 3 * x),
    "class of the user": lambda m, patch: patch.setattr(MLP, "forward", lambda self, x: 3 * self.down(self.up(x))),
    "spelled activation": lambda m, patch: patch.setattr(QuickGELU, "forward", lambda self, x: x.sin()),
    "class attribute": lambda m, patch: patch.setattr(QuickGELU, "scale", 0.5),
    "attribute": lambda m, patch: setattr(m[0].act, "approximate", "tanh"),
    "module": lambda m, patch: setattr(m[0], "act", nn.SiLU()),
    "forward of the instance": lambda m, patch: setattr(m[0].act, "forward", lambda z: 3 * z),
    "eps": lambda m, patch: setattr(m[0].norm, "eps", 0.5),
    "parametrization": lambda m, patch: nn.utils.parametrizations.weight_norm(m[0].up),
    "frozen": lambda m, patch: m[0].up.requires_grad_(False),
    "bias": lambda m, patch: setattr(m[0].up, "bias", None),
    "hook": lambda m, patch: m[0].act.register_forward_hook(lambda module, args, y: 0.9 * y),
    "hook before": lambda m, patch: m[0].norm.register_forward_pre_hook(lambda module, args: (1.1 * args[0],)),
    "evaluation of a part": lambda m, patch: m[1].eval(),
    "dropout": lambda m, patch: setattr(m[1].drop, "p", 0.5),
    "dtype": lambda m, patch: m.to(torch.float64),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_behind_fuse_counts(name: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(MLP(), MLP(QuickGELU()))
    eager = copy.deepcopy(model)
    fl.fuse(model)
    step(model, x)  # by which it has recognised what it has
    for each in (model, eager):
        CHANGES[name](each, monkeypatch)
    x = x.to(next(model.parameters()).dtype)
    assert are_same(step(model, x), step(eager, x))


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin() * x


def test_a_static_forward_is_left_alone(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), Static(), nn.Linear(HIDDEN, IN))
    eager = copy.deepcopy(model)
    fl.fuse(model)
    assert are_same(step(model, x), step(eager, x))


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_hooks_that_return_what_they_get_hold_no_more_of_a_gate() -> None:
    """Such a hook would hold an output with the node that made it, which holds what the hook returned."""
    model, x = Gated(), torch.randn(512, IN)
    fl.fuse(model)
    step(model, x)
    made = weakref.WeakSet[Tensor]()
    model.act.register_forward_hook(lambda module, args, y: made.add(y))
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = model(x)
        assert y.requires_grad and not made
    finally:
        gc.enable()


def test_bytes_within_autocast_are_those_of_a_step() -> None:
    """An earlier call would leave 16-bit copies of the weights, of which a later one saves what a step makes anew."""
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]), torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        report = fl.fuse(model, x)
    own = [*model.parameters(), x]

    def in_a_step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(x)
        return y

    assert report.saved_bytes is not None and report.saved_bytes[1] == saved_bytes(in_a_step, exclude=own)
    fl.unfuse(model)
    assert report.saved_bytes[0] == saved_bytes(in_a_step, exclude=own)


class Block(Gated):
    """A gate in a checkpoint inside of its module."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A norm and a negation read the argument, and two calls of a convolution its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(IN), nn.Conv1d(IN, IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.conv(F.gelu(self.conv((-x).mT))).mT  # type: ignore[no-any-return]


class Viewed(nn.Module):
    """A checkpoint whose argument is a view at first, and none in its second run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(IN, IN), Checkpointed(Twice())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x.view(4, -1, IN)).float())  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """In a checkpoint an activation reads a product with a tensor of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(IN), nn.LogSigmoid()

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            h = self.norm(x)
            return self.act(h * (1 + 0.1 * h.mean()))  # type: ignore[no-any-return]

        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


class Repeated(nn.Module):
    """A block twice: the second time autocast has copied its weights already."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = Checkpointed(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [{}, {"autocast": True}], ids=["", "autocast"])
@pytest.mark.parametrize(
    "make",
    [
        *(Block, lambda: Block(packed=True), Viewed, Scaled, lambda: Checkpointed(MLP())),
        *(lambda: Repeated(Gated()), lambda: Repeated(Twice())),
    ],
)
def test_checkpoints_inside(make: Callable[[], nn.Module], autocast: dict[str, bool], x: Tensor) -> None:
    for reentrant in (False, True):
        model = make()
        for module in model.modules():
            if hasattr(module, "reentrant"):
                module.reentrant = reentrant  # type: ignore[assignment]
        x.requires_grad_()
        eager, expected = copy.deepcopy(model), kept(model, x)
        fl.fuse(model)
        assert kept(model, x) <= expected
        assert are_same(step(model, x, **autocast), step(eager, x, **autocast))


# --- what runs around models ------------------------------------------------------------------------------------------


def test_the_inference_path_of_transformer_layers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = nn.TransformerEncoderLayer(IN, 4, HIDDEN, batch_first=True).eval(), [0]
    fl.fuse(model)
    fast = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return fast(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    with torch.no_grad():
        model(torch.randn(2, 16, IN))
    model.requires_grad_(False)(torch.randn(2, 16, IN))
    assert calls == [2]


def test_hooks_see_what_they_saw(x: Tensor) -> None:
    seen: list[list[Tensor]] = []
    for is_fused in (False, True):
        model = of_layers()
        values: list[Tensor] = []
        if is_fused:
            fl.fuse(model)
        for module in model.modules():
            module.register_forward_pre_hook(lambda m, args, values=values: values.append(args[0].detach()))
            module.register_forward_hook(lambda m, args, y, values=values: values.append(y.detach()))
            module.register_full_backward_hook(lambda m, dx, dy, values=values: values.append(dy[0]))  # type: ignore[misc]
        step(model, x)
        seen.append(values)
    assert len(seen[0]) == 3 * len([*of_layers().modules()])
    assert all(map(torch.equal, *seen))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_what_reads_code_sees_pytorchs_own(x: Tensor) -> None:
    """``torch.compile``, ``torch.export``, and tracing."""
    model, eager = of_layers(), of_layers()
    fl.fuse(model)
    programs = [torch.export.export(each, (x,), strict=strict) for each in (model, eager) for strict in (False, True)]
    targets = [[str(node.target) for node in program.graph.nodes] for program in programs]
    assert targets[0] == targets[2] and targets[1] == targets[3]
    expected = step(eager, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert are_same(step(compiled, x), expected)
    assert are_same(step(torch.fx.symbolic_trace(model), x), expected)
    assert torch.allclose(torch.jit.trace(model, (x,))(x), expected[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo reads it
def test_parts_that_are_compiled_or_scripted_are_left(x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Linear(IN, IN), nn.GELU()))
    inner = MLP()
    inner.compile(backend="eager")
    model = nn.Sequential(scripted, inner, torch.fx.symbolic_trace(MLP()))
    expected = step(model, x)[:2]  # a scripted module's parameters are others at each look
    fl.fuse(model, x)
    assert patch_of(scripted) is None and are_same(step(model, x)[:2], expected)


def test_a_model_is_freed(x: Tensor) -> None:
    model = of_layers()
    fl.fuse(model, x)
    step(model, x)
    ref = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert ref() is None
    finally:
        gc.enable()


# --- norms ------------------------------------------------------------------------------------------------------------


def test_parameters_of_inference_mode_are_left(x: Tensor) -> None:
    with torch.inference_mode():
        frozen = nn.Linear(IN, IN)
    model = MLP()
    model.frozen = frozen
    fl.fuse(model)
    model(x).sum().backward()
    with fl.save_once():
        model(x).sum().backward()
    assert saved_tensors_hooks_on_top(True) is None


def test_what_hooks_have_seen_stays_in_the_graph() -> None:
    model, x, seen = Gated(), torch.randn(512, IN, requires_grad=True), []
    fl.fuse(model)
    model.act.register_forward_hook(lambda module, args, y: seen.append(y))
    y = model(x)
    assert torch.autograd.grad(y.sum(), seen[0])[0].any()


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_says_what_is_measured_by_hand(x: Tensor) -> None:
    model = of_layers()
    step(model, x)
    before = kept(model, x), _peak(model, x)
    report = fl.fuse(model, x)
    assert report.saved_bytes == (before[0], kept(model, x)) and report.saved_bytes[1] < 0.6 * before[0]
    assert report.peak_bytes == (before[1], _peak(model, x)) and report.peak_bytes[1] < before[1]
    rows = {(row.made_by, row.read_by, row.modules): (row.nbytes, row.how) for row in report.spared}
    assert rows["NativeLayerNormBackward0", ("AddmmBackward0",), ("0.up",)] == (x.nbytes, "replayed")
    assert rows["GeluBackward0", ("AddmmBackward0",), ("0.down",)] == (HIDDEN_BYTES, "replayed")
    assert rows["SiluBackward0", ("MulBackward0",), ("1",)] == (HIDDEN_BYTES, "replayed")
    assert rows["MulBackward0", ("AddmmBackward0",), ("1.down",)] == (HIDDEN_BYTES, "replayed")
    assert sum(row.nbytes for row in report.kept) >= 0.9 * report.saved_bytes[1]
    assert "no operation by element made it" in {row.how for row in report.kept}
    text = str(report)
    assert text.startswith("Sequential: fused") and "the same gradients to the last bit" in text
    assert re.search(r"saved for backward, .* \d+ KiB before, \d+ KiB now \(-\d+\.\d %\)\n\npeak of a step", text)
    assert json.loads(json.dumps(report.to_dict()))["saved_bytes"] == [*report.saved_bytes]
    assert report._repr_html_().startswith("<pre>Sequential: fused") and "AddmmBackward0" in report._repr_html_()


def _peak(model: nn.Module, x: Tensor) -> int:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peak = peak_bytes(lambda: model(x).mean().backward())
    model.zero_grad()
    return peak


def test_reports_of_repeated_blocks_and_of_time(x: Tensor) -> None:
    model = nn.Sequential(*(MLP() for _ in range(3)))
    report = fl.fuse(model, x, time=True)
    (row,) = (row for row in report.spared if row.made_by == "NativeLayerNormBackward0")
    assert row.values == 3 and row.nbytes == 3 * x.nbytes and "0-2.up" in str(report)
    assert report.step_ms is not None and all(ms > 0 for ms in report.step_ms)
    assert re.search(r"forward and backward: .* ms before, .* ms now \(\d+\.\d\dx\)", str(report))
    for inputs in (x, (x,), [x], {"input": x}):
        assert fl.fuse(model, inputs).step_ms is None


def test_notes(x: Tensor) -> None:
    model = MLP(dropout=0.1)
    assert fl.fuse(model).notes == () and "with inputs this report has bytes" in str(fl.fuse(model))
    stages: list[str] = []
    fl.unfuse(model)
    report = fl.fuse(model.eval(), x, progress=lambda stage, part: stages.append(stage))
    assert any("model.train()" in note for note in report.notes)
    assert stages[0] == "measuring the model" and stages[-1] == "done"
    fl.unfuse(model.requires_grad_(False))
    report = fl.fuse(model, x)
    assert "Nothing is saved for a backward pass: all of its 6 parameters are frozen" in str(report)
    assert report.saved_bytes == (0, 0) and patch_of(model) is not None
    with torch.no_grad():  # which is where it is called, and not how the model is trained
        assert fl.fuse(MLP(), x).spared
    with torch.inference_mode():
        assert "call it outside torch.no_grad() and torch.inference_mode()" in str(fl.fuse(MLP(), x))


# --- what is refused --------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return ids * mask


X = torch.ones(ROWS, IN)


#: A model, its inputs, and what is said of them.
MISFITS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "missing": (Two, X, r"\(pass all that it needs: a tuple .*\): TypeError: .* missing .*: 'mask'"),
    "pair": (MLP, (X, X), r"of a pair from a loader pass batch\[0\].*takes 2 positional arguments but 3 were given"),
    "no such name": (MLP, {"images": X}, r"\(a dict holds keyword arguments.*unexpected keyword argument 'images'"),
    "sizes": (MLP, X[:, 1:], "RuntimeError: .*31"),
    "loader": (MLP, torch.utils.data.DataLoader([X]), "a data loader or a dataset is among the inputs; pass a batch"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_inputs_that_do_not_fit_change_nothing(name: str) -> None:
    make, inputs, text = MISFITS[name]
    for was_fused in (False, True):
        model = make()
        if was_fused:
            fl.fuse(model)
        before = {path: {**vars(module)} for path, module in model.named_modules()}
        with pytest.raises(ValueError, match=f"^fuse: the model does not run on these inputs.*{text}"):
            fl.fuse(model, inputs)
        assert {path: {**vars(module)} for path, module in model.named_modules()} == before


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError, KeyboardInterrupt])
def test_what_raises_changes_nothing(error: type[BaseException], call: int, x: Tensor) -> None:
    """In any of the runs."""
    model, calls = MLP(), []
    before = {path: {**vars(module)} for path, module in model.named_modules()}

    def fails(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise error("no more")

    hook = model.register_forward_pre_hook(fails)
    with pytest.raises((error, ValueError)) as caught:
        fl.fuse(model, x)
    hook.remove()
    assert {path: {**vars(module)} for path, module in model.named_modules()} == before
    if error is torch.OutOfMemoryError:
        assert str(caught.value).startswith("fuse: the model does not fit into memory with these inputs; fuse(model) ")
