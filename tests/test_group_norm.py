"""Group norm that saves its output, alone and before an activation."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import check_orders, relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.backends import cpu
from fusedlayers.backends import torch as reference
from fusedlayers.backends.cpu import build
from fusedlayers.backends.norms import GroupNorm, Kept
from fusedlayers.memory import saved_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: What the rounding of a saved output may add to a gradient's error, by dtype, of its norm.
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = {
    "images": ((4, 16, 12, 12), torch.contiguous_format),
    "channels last": ((4, 16, 12, 12), torch.channels_last),
    "signals": ((3, 32, 51), torch.contiguous_format),
    "volumes": ((2, 8, 5, 6, 7), torch.contiguous_format),
    "volumes, channels last": ((2, 8, 5, 6, 7), torch.channels_last_3d),
    "vectors": ((40, 64), torch.contiguous_format),
    "long": ((1, 4, 9000), torch.contiguous_format),
}
every_shape = pytest.mark.parametrize("name", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def small_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sizes, "GROUP_NORM_BYTES", 1 << 10)


def _case(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, layout = SHAPES[name]
    x = (torch.randn(shape) * 2 + 0.5).to(dtype).contiguous(memory_format=layout).requires_grad_()
    w = torch.empty(shape[1]).uniform_(0.2, 2).mul_(torch.randn(shape[1]).sign()).to(dtype).requires_grad_()
    b = torch.empty(shape[1]).uniform_(-0.5, 0.5).to(dtype).requires_grad_()
    return x, w, b, torch.randn(shape).to(dtype)


def _is_ours(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_GroupNormBackward"


def _assert_good(x: Tensor, w: Tensor | None, b: Tensor | None, dy: Tensor, groups: int = 4) -> None:
    """Twice torch's error, and the rounding of the output."""
    sources = [t for t in (x, w, b) if t is not None]
    y = fl.group_norm(x, groups, w, b)
    eager = F.group_norm(x, groups, w, b)
    assert _is_ours(y) and torch.equal(y, eager) and y.stride() == eager.stride()
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.autograd.grad(
        F.group_norm(wide[0], groups, *wide[1:]), [t for t in wide if t is not None], dy.double()
    )
    ours, torchs = (torch.autograd.grad(r, sources, dy) for r in (y, eager))
    for a, t, truth, source in zip(ours, torchs, exact, sources, strict=True):
        assert a.dtype is source.dtype and a.shape == source.shape
        assert relative(a, truth) <= 2 * relative(t, truth) + FLOOR[x.dtype]


@every_shape
@every_dtype
def test_gradients_are_as_good_as_torchs(name: str, dtype: torch.dtype) -> None:
    _assert_good(*_case(name, dtype))


@every_shape
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_number_of_groups(name: str, groups: int) -> None:
    _assert_good(*_case(name), groups=groups)


@every_dtype
def test_without_weights(dtype: torch.dtype) -> None:
    x, w, _, dy = _case("images", dtype)
    _assert_good(x, None, None, dy)
    _assert_good(x, w, None, dy)


@every_shape
@every_dtype
def test_variances_far_below_epsilon(name: str, dtype: torch.dtype) -> None:
    x, w, b, dy = _case(name, dtype)
    with torch.no_grad():
        x *= 1e-4
        w.fill_(0.3)
        b.fill_(1.0)
    _assert_good(x, w, b, dy)


@every_dtype
@pytest.mark.parametrize("small", [2, 4, 8, 16])
def test_groups_whose_variances_are_far_below_epsilon(dtype: torch.dtype, small: int) -> None:
    """The others do not hide them; of few channels xhat is kept, of many the input alone."""
    x, w, b, dy = _case("images", dtype)
    with torch.no_grad():
        x[:, :small] *= 1e-5
        w.fill_(0.3)
        b.fill_(1.0)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    (exact,) = torch.autograd.grad(F.group_norm(x64, 8, w64, b.double()), w64, dy.double())
    ours, torchs = (torch.autograd.grad(f(x, 8, w, b), w, dy)[0][:small] for f in (fl.group_norm, F.group_norm))
    assert relative(ours, exact[:small]) <= 2 * relative(torchs, exact[:small]) + 4 * FLOOR[dtype]
    kept, by_torch = (saved_bytes(lambda f=f: f(x * 1, 8, w, b)) for f in (fl.group_norm, F.group_norm))
    assert kept <= by_torch * (1.3 if small <= 4 else 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler
def test_a_compiled_graph_is_whole() -> None:
    torch.compiler.reset()
    layer, x = fl.FusedGroupNormAct(4, 16, "relu"), _case("images")[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["images", "channels last", "vectors"])
@every_dtype
def test_channels_that_outputs_do_not_tell_are_saved_beside(name: str, dtype: torch.dtype) -> None:
    x, w, b, dy = _case(name, dtype)
    channels = len(w)
    for count in (1, channels // 4, channels // 4 + 1, channels):
        with torch.no_grad():
            w[:count], b[:count] = 0.0, 1.0
        y = fl.group_norm(x, 4, w, b)
        assert _is_ours(y) == (count <= channels // 4)
        if _is_ours(y):
            _assert_good(x, w, b, dy)
            expected = x.numel() * dtype.itemsize * (1 + count / channels)
            kept = saved_bytes(lambda: fl.group_norm(x * 1, 4, w, b))
            assert expected <= kept <= expected + len(x) * 4 * 4 + 8 * count
    with torch.no_grad():
        w.fill_(1e-3)
        b.zero_()
    _assert_good(x, w, b, dy)


@every_shape
@every_dtype
@pytest.mark.parametrize("keeps", [False, True])
def test_the_loops_compute_what_the_reference_does(name: str, dtype: torch.dtype, keeps: bool) -> None:
    x, w, b, dy = (t.detach() for t in _case(name, dtype))
    dy = torch.empty_like(x).copy_(dy)
    norm = GroupNorm(4, 1e-5)
    y, _, std = torch.native_group_norm(x, w, b, *norm.extents(x), 4, 1e-5)
    kept = Kept(torch.tensor([1, 3]), torch.randn_like(x[:, :2])) if keeps else None
    found = [
        backend.group_norm_gradient(norm, dy, y.clone(), w, b, std, kept, needs_x=True, overwrite=overwrite)
        for backend in (reference, cpu)
        for overwrite in (False, True)
    ]
    for other in found[1:]:
        for a, r in zip(other, found[0], strict=True):
            torch.testing.assert_close(
                a.float(), r.float(), rtol=64 * torch.finfo(dtype).eps, atol=0.05 if dtype.itemsize == 2 else 1e-4
            )
    without, *_ = cpu.group_norm_gradient(norm, dy, y, w, b, std, kept, needs_x=False, overwrite=False)
    assert without is None


@pytest.mark.skipif(build.shared_object() is None, reason="no compiler")
def test_the_same_bits_on_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    x, w, b, dy = _case("long")
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.autograd.grad(fl.group_norm(x, 2, w, b), (x, w, b), dy))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, c) for a, c in zip(other, found[0], strict=True))


def test_saved_bytes() -> None:
    x, *_ = _case("images")
    one = x.numel() * 4
    conv = nn.Conv2d(16, 8, 1)
    fused, plain = fl.FusedGroupNormAct(4, 16, "silu"), nn.GroupNorm(4, 16)
    assert saved_bytes(lambda: conv(fl.GroupNorm(4, 16)(x * 1))) <= one + 4 * 4 * 4
    assert saved_bytes(lambda: conv(plain(x * 1))) >= 2 * one
    assert saved_bytes(lambda: conv(fused(x * 1))) <= 2 * one + 4 * 4 * 4
    assert saved_bytes(lambda: conv(F.silu(plain(x * 1)))) >= 3 * one


def test_second_derivatives_and_batches() -> None:
    x, w, b = torch.randn(2, 4, 40), torch.rand(4) + 0.5, torch.rand(4)
    sources = [t.requires_grad_() for t in (x, w, b)]
    call = lambda x, w, b: fl.group_norm(x, 2, w, b, save="output")
    assert _is_ours(call(*sources))
    check_orders(call, lambda x, w, b: F.group_norm(x, 2, w, b), sources)
    y, eager = call(*sources), F.group_norm(sources[0], 2, *sources[1:])
    dys = torch.randn(3, *y.shape, dtype=y.dtype)
    for a, r in zip(*(torch.autograd.grad(t, sources, dys, is_grads_batched=True) for t in (y, eager)), strict=True):
        torch.testing.assert_close(a, r)


def test_contexts() -> None:
    x, w, b, dy = _case("images")
    expected = torch.autograd.grad(F.group_norm(x, 4, w, b).sin(), (x, w, b), dy)
    run = lambda x: fl.group_norm(x, 4, w, b).sin()
    torch.testing.assert_close(torch.autograd.grad(checkpoint(run, x, use_reentrant=False), (x, w, b), dy), expected)
    for pack in (lambda t: t, lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 3 else t):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = run(x)
        torch.testing.assert_close(torch.autograd.grad(y, (x, w, b), dy), expected)
    y = run(x)
    first = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    assert all(torch.equal(a, c) for a, c in zip(first, torch.autograd.grad(y, (x, w, b), dy), strict=True))
    torch.testing.assert_close(
        torch.func.grad(lambda x: run(x).sum())(x.detach()), torch.autograd.grad(run(x).sum(), x)[0]
    )
    for view in (x.transpose(2, 3), x[:, :, ::2], x[:, ::2].clone().expand(4, 8, 12, 12)):
        assert fl.group_norm(view, 4).shape == view.shape
    assert not _is_ours(fl.group_norm(x.transpose(0, 1), 4)) and not _is_ours(fl.group_norm(x, 4, w, b, save="input"))
    assert _is_ours(fl.group_norm(x, 4, w.detach(), b.detach())) and _is_ours(fl.group_norm(x.detach(), 4, w, b))
    neg = torch._neg_view(dy)
    for a, c in zip(
        *(torch.autograd.grad(f(x, 4, w, b), (x, w, b), neg) for f in (fl.group_norm, F.group_norm)), strict=True
    ):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


def test_outputs_that_others_hold_are_not_overwritten() -> None:
    x, w, b, dy = _case("images")
    y = fl.group_norm(x, 4, w, b)
    before = y.detach().clone()
    y.backward(dy)
    assert torch.equal(y, before)


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", nn.PReLU(16)])
def test_with_an_activation(activation: Any) -> None:
    layer = fl.FusedGroupNormAct(4, 16, activation)
    plain = nn.GroupNorm(4, 16)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
    assert plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k in ("weight", "bias")})
    x, _, _, dy = _case("images")
    eager = activation if isinstance(activation, nn.Module) else getattr(F, activation)
    results = [[y, *torch.autograd.grad(y, x, dy)] for y in (layer(x), eager(plain(x)))]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert fl.FusedGroupNormAct.from_modules(plain, activation)(x).shape == x.shape
    assert copy.deepcopy(layer.eval())(x).shape == x.shape


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("activation", ["relu", "tanh", "silu", "leaky_relu", "gelu"])
def test_with_an_activation_no_more_is_kept(activation: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between convolutions, whether PyTorch computes the norm or this package."""
    monkeypatch.setattr(sizes, "GROUP_NORM_BYTES", 0 if is_fused else 1 << 30)
    x, v = torch.randn(4, 16, 12, 12), torch.randn(16, 16, 1, 1, requires_grad=True)
    layer, norm = fl.FusedGroupNormAct(4, 16, activation), nn.GroupNorm(4, 16)
    eager = lambda z: getattr(torch if activation == "tanh" else F, activation)(norm(z))
    kept, by_torch = (
        saved_bytes(lambda h=hidden: F.conv2d(h(F.conv2d(x, v)), v), exclude=[x, layer, norm])
        for hidden in (layer, eager)
    )
    statistics = 2 * 4 * 4 * 4
    buffers = by_torch // (x.numel() * 4) if activation in ("relu", "tanh") else 2
    assert kept <= buffers * x.numel() * 4 + statistics, (kept, by_torch)


def test_modules_are_torchs() -> None:
    ours, torchs = fl.GroupNorm(4, 16), nn.GroupNorm(4, 16)
    assert isinstance(ours, nn.GroupNorm) and ours.state_dict().keys() == torchs.state_dict().keys()
    assert repr(ours).endswith(", save='auto')") and fl.GroupNorm(4, 16, affine=False).weight is None
    (plan,) = fl.plan_of(ours, torch.randn(4, 16, 12, 12, requires_grad=True))
    assert plan.path == "fused" and str(plan) == "saves the output, which determines the input"
    nn.init.zeros_(ours.weight)
    (plan,) = fl.plan_of(ours, torch.randn(4, 16, 12, 12, requires_grad=True))
    assert str(plan).startswith("not fused: its output does not determine its input for 16 of 16 weights, which are 0")
    assert fl.FusedGroupNormAct(4, 16).weight.shape == (16,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fl.group_norm(x, 3), ValueError, r"\(4, 16, 12, 12\), 16, must be a multiple of num_groups, 3"),
        (lambda x: fl.group_norm(x, 0), ValueError, "must be a multiple of num_groups, 0"),
        (lambda x: fl.group_norm(x, 2.0), TypeError, "num_groups must be an int, got float"),
        (lambda x: fl.group_norm(x[0, 0, 0], 2), ValueError, r"expected input \(batch, channels, ...\), got \(12,\)"),
        (lambda x: fl.group_norm(x, 2, torch.ones(4)), ValueError, r"expected weight \(16,\), one for each"),
        (lambda x: fl.group_norm(x.long(), 2), TypeError, "floating dtype"),
        (lambda x: fl.group_norm(x, 2, eps="a"), TypeError, "eps must be a number"),
        (lambda x: fl.group_norm(x, 2, save="recompute"), ValueError, "save must be 'auto', 'output' or 'input'"),
        (lambda x: fl.group_norm(x[:, :, 0, 0], 16), ValueError, "expected more than 1 value per group"),
        (lambda x: fl.FusedGroupNormAct(2, 4, save="recompute"), ValueError, "save must be"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(4, 16, 12, 12))
