"""Modules that spell an RMS norm out: which are recognised, what their one node computes, and what it saves."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import DEVICE
from reference import check_orders, leaves, relative
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.kernels import reference
from fusedlayers.kernels.interface import RmsNormOptions
from fusedlayers.memory import saved_bytes
from fusedlayers.recipes.counting import count
from fusedlayers.recipes.leaves import is_leaf
from fusedlayers.recipes.spelled_norms import spelled_norm

ROWS, WIDTH = 64, 96
SIXTEEN = (torch.bfloat16, torch.float16)
EPS = 1e-5


class Llama(nn.Module):
    """As transformers spells it out; Qwen3's is the same."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 1.5, width)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Gemma(Llama):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class T5(Llama):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + 1e-8).sqrt()).to(x.dtype)


class Numbers(Llama):
    """With a number of the program's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


OPTIONS: dict[type[nn.Module], RmsNormOptions] = {
    Llama: RmsNormOptions(1e-6, 0.0, True),
    Gemma: RmsNormOptions(1e-6, 1.0, False),
    T5: RmsNormOptions(1e-6, 0.0, True),
    Bare: RmsNormOptions(1e-8, 0.0, True),
    Numbers: RmsNormOptions(1e-5, 0.0, True),
}
every_kind = pytest.mark.parametrize("kind", OPTIONS)


def run(module: nn.Module, x: Tensor) -> Tensor:
    norm = spelled_norm(module, x)
    assert norm is not None
    return norm(x)


def replaced(module: nn.Module) -> nn.Module:
    """Runs as ``fuse`` will have it."""
    own = type(module).forward

    def forward(x: Tensor) -> Any:
        norm = spelled_norm(module, x)
        return own(module, x) if norm is None else norm(x)

    module.forward = forward
    return module


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


# --- values and gradients ---------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_which_norm_it_is(kind: type[nn.Module], dtype: torch.dtype, x: Tensor) -> None:
    module = kind().to(dtype)
    assert is_leaf(module)
    norm = spelled_norm(module, x.to(dtype))
    assert norm is not None and norm.weight is getattr(module, "weight", None)
    # In float32 nothing is rounded before the weight multiplies it, and without a weight nothing is rounded twice.
    assert norm.options == OPTIONS[kind]._replace(rounds_first=norm.options.rounds_first)
    assert kind is Bare or dtype is torch.float32 or norm.options.rounds_first is (kind is not Gemma)


@every_kind
@pytest.mark.parametrize("block", [96 * 7, 1 << 18])
def test_derivatives_of_both_orders(kind: type[nn.Module], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fusedlayers.kernels.reference.rms_norm"], "BLOCK", block)
    options = OPTIONS[kind]._replace(rounds_first=False)
    module = kind()

    def ours(x: Tensor, *w: Tensor) -> Tensor:
        for parameter, value in zip(module.parameters(), w, strict=True):
            parameter.data = value
        norm = spelled_norm(module, x)
        assert norm is not None
        return norm._replace(weight=w[0] if w else None)(x)

    x, w = leaves((ROWS, WIDTH), (WIDTH,))
    check_orders(ours, lambda x, w=None: options(x, w), [x] if kind is Bare else [x, w])


@every_kind
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_16_bits(kind: type[nn.Module], dtype: torch.dtype, x: Tensor) -> None:
    module, x = kind().to(dtype), x.to(dtype).requires_grad_()
    sources, dy = [x, *module.parameters()], torch.randn(ROWS, WIDTH).to(dtype)
    assert kind is Bare or torch.equal(run(module, x), module(x))
    exact = [t.detach().double().requires_grad_() for t in sources]
    truth = torch.autograd.grad(OPTIONS[kind](*exact, *[None] * (2 - len(exact))), exact, dy.double())
    ours, theirs = (torch.autograd.grad(y, sources, dy) for y in (run(module, x), module(x)))
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert a.dtype is dtype and relative(a, t) <= 2 * relative(b, t)


def test_gradients_that_are_not_asked_for_and_batches_of_them(x: Tensor) -> None:
    module = Llama()
    y = run(module, x)
    (dw,) = torch.autograd.grad(y.sum(), module.weight)
    module.weight.requires_grad_(False)
    (dx,) = torch.autograd.grad(run(module, x.requires_grad_()), x, torch.ones_like(y))
    module.weight.requires_grad_(True)
    y, sources, dys = run(module, x), [x, module.weight], torch.stack([torch.ones_like(y), y.detach()])
    found = torch.autograd.grad(y, sources, dys, is_grads_batched=True)
    torch.testing.assert_close([t[0] for t in found], [dx, dw])
    second = torch.autograd.grad(module(x), sources, y.detach())
    torch.testing.assert_close([t[1] for t in found], [*second])


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda x: x.view(4, 16, WIDTH).transpose(0, 1),
        lambda x: torch.cat([x, x], 1)[:, :WIDTH],
        lambda x: x[:1].expand(ROWS, WIDTH),
        lambda x: x.t().contiguous().t(),
    ],
    ids=["transposed", "part", "expanded", "columns"],
)
def test_other_layouts_are_left(laid_out: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert spelled_norm(Llama(), laid_out(x)) is None


# --- what is saved ----------------------------------------------------------------------------------------------------


@every_kind
def test_the_input_is_saved_and_a_number_for_each_row(kind: type[nn.Module], x: Tensor) -> None:
    module = kind()
    h = x.requires_grad_() * 1.0
    assert saved_bytes(lambda: run(module, h), exclude=[*module.parameters()]) == x.nbytes + 4 * ROWS


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_the_layer_behind_it_saves_nothing_more(kind: type[nn.Module], dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), replaced(kind()), nn.Linear(WIDTH, WIDTH)).to(dtype)
    x = torch.randn(256, WIDTH).to(dtype)
    plain = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    with fl.save_once(model):
        y = model(x)
    found = count(y, [x, *model.parameters()])
    assert found.kept_bytes == x.nbytes + 4 * len(x) and [s.made_by for s in found.spared] == ["RmsNormBackward"]
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), [*model.parameters()]), plain))


@pytest.mark.parametrize("behind", [False, True])
def test_an_edited_weight_is_an_error_also_where_a_replay_reads_it(behind: bool) -> None:
    model, x = nn.Sequential(replaced(Llama()), nn.Linear(WIDTH, WIDTH)), torch.randn(256, WIDTH)
    with fl.save_once(model):
        y = model(x)
    if not behind:
        y = model(x.requires_grad_())
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|written to"):
        y.sum().backward()


# --- modules that are left --------------------------------------------------------------------------------------------


def _norm(x: Tensor, of: Tensor | None = None, dim: int = -1) -> Tensor:
    return x * torch.rsqrt((x if of is None else of).pow(2).mean(dim, keepdim=True) + 1e-5)


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count = getattr(self, "count", 0) + 1
    return self.weight * _norm(x)


def _hooked(self: Any, x: Tensor) -> Tensor:
    y = self.weight * _norm(x)
    y.register_hook(lambda g: 0.5 * g)
    return y


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def _without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return self.weight * x * scale


LOOK_ALIKES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "centred": lambda self, x: self.weight * _norm(x - x.mean(-1, keepdim=True)),
    "layer norm": lambda self, x: nn.functional.layer_norm(x, x.shape[-1:], self.weight),
    "columns": lambda self, x: self.weight * _norm(x, dim=0),
    "detached": lambda self, x: self.weight * _norm(x, of=x.detach()),
    "weight detached": lambda self, x: self.weight.detach() * _norm(x),
    "clamped": lambda self, x: self.weight * _norm(x.clamp(-1e3, 1e3)),
    "by shape": lambda self, x: self.weight * _norm(x) * (2.0 if x.shape[0] > 16 else 1.0),
    "writes over its input": lambda self, x: self.weight * x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "reversed": lambda self, x: _Reversed.apply(self.weight * _norm(x)),
    "another dtype": lambda self, x: (self.weight * _norm(x)).double(),
    "counted": _counted, "hooked": _hooked, "without gradients": _without_gradients,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_modules_that_only_look_like_norms_are_left(name: str, x: Tensor) -> None:
    module, before = type("Other", (Llama,), {"forward": LOOK_ALIKES[name]})(), x.clone()
    assert spelled_norm(module, x) is None and spelled_norm(module, x) is None
    assert torch.equal(x, before) and "count" not in vars(module)


def test_modules_that_are_no_candidates() -> None:
    replaced_one = replaced(Llama())
    matrix = Llama()
    matrix.weight = nn.Parameter(torch.ones(2, WIDTH))
    for module in (nn.RMSNorm(WIDTH), nn.Sequential(), nn.Sequential(Llama()), fl.GELU(), replaced_one, matrix):
        assert not is_leaf(module)


def test_calls_that_are_left(x: Tensor) -> None:
    module = Llama()
    run(module, x)
    left = [x.double(), x.half(), x[:1, :0], x[0, 0], x[:, :1], x[:2], x.to_sparse(), nn.Buffer(x)[:, :8], 3]
    assert [spelled_norm(module, t) for t in left] == [None] * len(left)  # type: ignore[arg-type]
    assert torch.func.vmap(lambda t: torch.tensor(spelled_norm(module, t) is None))(x.expand(2, *x.shape)).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert spelled_norm(copy.deepcopy(module).bfloat16(), x.bfloat16()) is None
        norm = spelled_norm(module, x)  # as in a residual stream
        assert norm is not None and torch.equal(norm(x), module(x))
    graph = torch.compile(lambda t: torch.ones(3) if spelled_norm(module, t) is None else t, backend="eager")
    assert torch.equal(graph(x), torch.ones(3))


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "eps": lambda m, patch: setattr(m, "variance_epsilon", 0.5),
    "code": lambda m, patch: patch.setattr(type(m), "forward", lambda self, x: self.weight * x),
    "code in place": lambda m, patch: patch.setattr(type(m).forward, "__code__", Gemma.forward.__code__),
    "weight": lambda m, patch: setattr(m, "weight", nn.Parameter(torch.linspace(1.0, 2.0, WIDTH))),
    "dtype": lambda m, patch: m.half(),
    "a method": lambda m, patch: patch.setattr(Gemma, "_norm", lambda self, x: x),
    "shadowed method": lambda m, patch: setattr(m, "_norm", lambda x: x),
    "a number": lambda m, patch: patch.setitem(globals(), "EPS", 0.5),
    "class": lambda m, patch: setattr(m, "__class__", Numbers),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_reads_may_change(name: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = (Gemma if "method" in name else Numbers if name == "a number" else Llama)()
    run(module, x)
    CHANGES[name](module, monkeypatch)
    norm = spelled_norm(module, x)
    if norm is not None:
        torch.testing.assert_close(norm(x), module(x))
    assert (norm is None) is (name in ("code", "code in place", "a method", "shadowed method", "a number"))


# --- Triton -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
@pytest.mark.parametrize(("rows", "columns", "widest"), [(1, 1, 64), (5, 48, 64), (7, 64, 64), (4, 65, 64)])
@pytest.mark.parametrize("options", [RmsNormOptions(1e-6, 0.0, True), RmsNormOptions(1e-6, 1.0), None], ids=str)
def test_triton(
    options: RmsNormOptions | None, rows: int, columns: int, widest: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    triton = pytest.importorskip("fusedlayers.kernels.triton")
    kernels = sys.modules["fusedlayers.kernels.triton.triton_rms_norm"]
    monkeypatch.setattr(kernels, "PROGRAMS", 3)  # several rows each, and the last program has fewer
    monkeypatch.setattr(kernels, "WIDEST", widest)
    x, dy, w = (t.detach().to(DEVICE) for t in leaves((rows, columns), (rows, columns), (columns,), dtype=dtype))
    if options is None:
        options, w = RmsNormOptions(1e-6), None
    unit = torch.finfo(dtype).eps
    y, inverse_std = triton.rms_norm(options, x, w)
    truth, of_torch = reference.rms_norm(options, x, w)
    torch.testing.assert_close(y, truth, rtol=4 * unit, atol=4 * unit)
    torch.testing.assert_close(inverse_std, of_torch)
    found = triton.rms_norm_gradient(options, dy, x, w, of_torch, needs_x=True)
    expected = reference.rms_norm_gradient(options, dy, x, w, of_torch, needs_x=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            unit = torch.finfo(dtype).eps * float(b.abs().max() + of_torch.max())
            torch.testing.assert_close(a.float(), b.float(), rtol=0.0, atol=16 * unit)
    assert triton.rms_norm_gradient(options, dy, x, w, of_torch, needs_x=False)[0] is None
