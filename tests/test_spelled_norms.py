"""Modules that spell an RMS norm out: which are recognised, what their one node computes, and what it saves."""

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
from fusedlayers.recipes import region
from fusedlayers.recipes.fuse_report import count

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


class Numbers(Llama):
    """With a number of the program's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


OPTIONS: dict[type[nn.Module], RmsNormOptions] = {
    Llama: RmsNormOptions(1e-6, 0.0, True),
    Gemma: RmsNormOptions(1e-6, 1.0, False),
    T5: RmsNormOptions(1e-6, 0.0, True),
    Numbers: RmsNormOptions(1e-5, 0.0, True),
}
every_kind = pytest.mark.parametrize("kind", OPTIONS)


def fused(module: nn.Module) -> nn.Sequential:
    model = nn.Sequential(module)
    fl.fuse(model, exact=False)
    return model


def options_of(y: Tensor) -> RmsNormOptions | None:
    """Those of the node that made it; None for other nodes."""
    node: Any = y.grad_fn
    return node.options if node.name() == "RmsNormBackward" else None


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH).requires_grad_()


# --- values and gradients ---------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_which_norm_it_is(kind: type[nn.Module], dtype: torch.dtype, x: Tensor) -> None:
    found = options_of(fused(kind().to(dtype))(x.to(dtype)))
    # In float32 nothing is rounded before the weight multiplies it.
    assert found is not None and found == OPTIONS[kind]._replace(rounds_first=found.rounds_first)
    assert dtype is torch.float32 or found.rounds_first is (kind is not Gemma)


@every_kind
@pytest.mark.parametrize("block", [96 * 7, 1 << 18])
def test_derivatives_of_both_orders(kind: type[nn.Module], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fusedlayers.kernels.reference.rms_norm"], "BLOCK", block)
    options, model = OPTIONS[kind]._replace(rounds_first=False), fused(kind())

    def ours(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, {"0.weight": w}, x)
        assert options_of(y) is not None
        return y

    check_orders(ours, options, [*leaves((ROWS, WIDTH), (WIDTH,))])


@every_kind
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_16_bits(kind: type[nn.Module], dtype: torch.dtype, x: Tensor) -> None:
    module, x = kind().to(dtype), x.to(dtype).requires_grad_()
    sources, dy = [x, *module.parameters()], torch.randn(ROWS, WIDTH).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in sources]
    truth = torch.autograd.grad(OPTIONS[kind](*exact), exact, dy.double())
    theirs, model = module(x), fused(module)
    y = model(x)
    assert options_of(y) is not None and torch.equal(y, theirs)
    pairs = zip(torch.autograd.grad(y, sources, dy), torch.autograd.grad(theirs, sources, dy), truth, strict=True)
    for a, b, t in pairs:
        assert a.dtype is dtype and relative(a, t) <= 2 * relative(b, t)


def test_gradients_that_are_not_asked_for_and_batches_of_them(x: Tensor) -> None:
    module = Llama()
    run = fused(module)
    y = run(x)
    (dw,) = torch.autograd.grad(y.sum(), module.weight)
    module.weight.requires_grad_(False)
    (dx,) = torch.autograd.grad(run(x.requires_grad_()), x, torch.ones_like(y))
    module.weight.requires_grad_(True)
    y, sources, dys = run(x), [x, module.weight], torch.stack([torch.ones_like(y), y.detach()])
    found = torch.autograd.grad(y, sources, dys, is_grads_batched=True)
    torch.testing.assert_close([t[0] for t in found], [dx, dw])
    second = torch.autograd.grad(Llama.forward(module, x), sources, y.detach())
    torch.testing.assert_close([t[1] for t in found], [*second])


# --- what is saved ----------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_the_input_is_saved_and_a_number_for_each_row(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """The layer behind it saves nothing more."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    x = torch.randn(256, WIDTH).to(dtype)
    fl.fuse(model, exact=False)
    found = count(model(x), [x, *model.parameters()])
    assert found.kept_bytes == x.nbytes + 4 * len(x) and [s.made_by for s in found.spared] == ["RmsNormBackward"]
    assert saved_bytes(model, x, exclude=[x, *model.parameters()]) == found.kept_bytes
    gradients = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    with pytest.MonkeyPatch.context() as patch:  # of all values
        patch.setattr(region, "LEAST_BYTES", 1 << 30)
        assert count(model(x)).spared == ()
        assert all(map(torch.equal, torch.autograd.grad(model(x).square().sum(), [*model.parameters()]), gradients))


@pytest.mark.parametrize("behind", [False, True])
def test_an_edited_weight_is_an_error_also_where_a_replay_reads_it(behind: bool) -> None:
    model, x = nn.Sequential(Llama(), nn.Linear(WIDTH, WIDTH)), torch.randn(256, WIDTH, requires_grad=not behind)
    fl.fuse(model, exact=False)
    y = model(x)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|written to"):
        y.sum().backward()


# --- modules that are left --------------------------------------------------------------------------------------------


def _norm(x: Tensor, of: Tensor | None = None, dim: int = -1) -> Tensor:
    return x * torch.rsqrt((x if of is None else of).pow(2).mean(dim, keepdim=True) + 1e-5)


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.weight * _norm(x)


def _listed(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.dim())
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
    "counted": _counted, "listed": _listed, "hooked": _hooked, "without gradients": _without_gradients,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_modules_that_only_look_like_norms_are_left(name: str, x: Tensor) -> None:
    module = type("Other", (Llama,), {"forward": LOOK_ALIKES[name], "seen": [], "count": 0})()
    model = fused(module)
    for calls in (1, 2):
        found = model(x.clone().requires_grad_() * 1)
        assert options_of(found) is None
        assert module.count in (0, calls) and len(module.seen) in (0, calls)


def test_modules_that_are_no_candidates(x: Tensor) -> None:
    matrix, replaced = Llama(), Llama()
    matrix.weight = nn.Parameter(torch.ones(2, WIDTH))
    replaced.forward = lambda x: Llama.forward(replaced, x)  # type: ignore[method-assign]
    for module in (nn.RMSNorm(WIDTH), replaced, matrix):
        assert options_of(fused(module)(x[:2])) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.double(),
        lambda x: x.half(),
        lambda x: x[:, :1].contiguous(),
        lambda x: x[:2],  # is small
        lambda x: x.view(4, 16, WIDTH).transpose(0, 1),
        lambda x: torch.cat([x, x], 1)[:, :WIDTH],
        lambda x: x[:1].expand(ROWS, WIDTH),
        lambda x: x.t().contiguous().t(),
        lambda x: x.detach(),  # of which PyTorch saves the normalized values alone
    ],
    ids=["float64", "16 bits", "one column", "few rows", "transposed", "part", "expanded", "columns", "no gradient"],
)
def test_calls_that_are_left(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert options_of(fused(Llama())(call(x))) is None


def test_autocast_and_transforms(x: Tensor) -> None:
    module, model = Llama().bfloat16(), fused(Llama())
    with torch.autocast("cpu", torch.bfloat16):
        assert options_of(fused(module)(x.bfloat16())) is None
        y = model(x)  # as in a residual stream
    assert options_of(y) is not None and torch.equal(y, Llama()(x))
    batched = torch.func.vmap(model)(x.expand(2, *x.shape))
    assert torch.allclose(batched[0], y) and options_of(batched) is None
    assert torch.allclose(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "eps": lambda m, patch: setattr(m, "variance_epsilon", 0.5),
    "code": lambda m, patch: patch.setattr(type(m), "forward", lambda self, x: self.weight * x),
    "code in place": lambda m, patch: patch.setattr(
        type(m).forward, "__code__", (lambda self, x: self.weight * x).__code__
    ),
    "weight": lambda m, patch: setattr(m, "weight", nn.Parameter(torch.linspace(1.0, 2.0, WIDTH))),
    "dtype": lambda m, patch: m.half(),
    "a method": lambda m, patch: patch.setattr(Gemma, "_norm", lambda self, x: x),
    "shadowed method": lambda m, patch: setattr(m, "_norm", lambda x: x),
    "a number": lambda m, patch: patch.setitem(globals(), "EPS", 0.25),
    "class": lambda m, patch: setattr(m, "__class__", Numbers),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_reads_may_change(name: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = (Gemma if "method" in name else Numbers if name == "a number" else Llama)()
    model = fused(module)
    assert options_of(model(x)) is not None
    CHANGES[name](module, monkeypatch)
    y = model(x)
    torch.testing.assert_close(y, type(module).forward(module, x))
    assert (options_of(y) is None) is (name in ("code", "code in place", "a method", "shadowed method", "a number"))


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
