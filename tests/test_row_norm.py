"""Layer norm and RMS norm that save their output: how good gradients from it are, what is saved, and where PyTorch
computes them."""

import copy
import io
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import check_orders
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.backends import cpu, norms
from fusedlayers.backends import torch as reference
from fusedlayers.backends.cpu import build
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import inexact_columns, row_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("layer", "rms", "llama", "gemma")
#: What the rounding of a saved output may add to a gradient's error, by dtype, of its norm.
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def small_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sizes, "LAYER_NORM_BYTES", 1 << 10)


def _llama(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """As transformers' ``LlamaRMSNorm``."""
    wide = x if x.dtype is torch.float64 else x.float()
    h = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return h if w is None else w * h


def _gemma(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """As transformers' ``GemmaRMSNorm``."""
    wide = x if x.dtype is torch.float64 else x.float()
    h = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (h if w is None else h * (1.0 + w.to(h.dtype))).to(x.dtype)


def _eager(kind: str, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float = 1e-6) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], w, b, eps)
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], w, eps)
    return (_llama if kind == "llama" else _gemma)(x, w, eps)


def _ours(kind: str, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float = 1e-6, **options: Any) -> Tensor:
    if kind == "layer":
        return fl.layer_norm(x, x.shape[-1:], w, b, eps, **options)
    options |= {"llama": {"rounds_first": True}, "gemma": {"weight_offset": 1.0}}.get(kind, {})
    return fl.rms_norm(x, x.shape[-1:], w, eps, **options)


def _parameters(kind: str, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    w = torch.rand(columns, dtype=torch.float64) * 1.8 + 0.2 - float(kind == "gemma")
    b = torch.rand(columns, dtype=torch.float64) * 2 - 1 if kind == "layer" else None
    return w.to(dtype), None if b is None else b.to(dtype)


def _node(y: Tensor) -> Any:
    return y.grad_fn if type(y.grad_fn).__name__ == "_RowNormBackward" else None


def _saved(y: Tensor) -> tuple[Any, ...]:
    """What that node saves. In torch 2.11 it cannot be read once ``y`` is gone."""
    saved: tuple[Any, ...] = _node(y).saved_tensors
    return saved


Found = list[Tensor]


def _run(call: Callable[..., Tensor], kind: str, dy: Tensor, *tensors: Tensor | None) -> Found:
    """The output, and the gradients of what is given."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = call(kind, *leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves if t is not None and t.grad is not None)]


def _assert_good(kind: str, dy: Tensor, *tensors: Tensor | None, floor: float | None = None) -> None:
    """No result errs more than twice as much as eager's, besides the floor."""
    x = tensors[0]
    assert x is not None
    ours, eager = (_run(call, kind, dy, *tensors) for call in (_ours, _eager))
    exact = _run(_eager, kind, dy.double(), *(None if t is None else t.double() for t in tensors))
    for place, (one, other, right) in enumerate(zip(ours, eager, exact, strict=True)):
        assert one.dtype is other.dtype and one.shape == other.shape and bool(one.isfinite().all())
        errors = [float((t.double() - right).norm()) for t in (one, other)]
        allowed = FLOOR[x.dtype] if floor is None else floor
        assert errors[0] <= 2 * errors[1] + allowed * float(right.norm()), (place, errors, float(right.norm()))


# --- gradients --------------------------------------------------------------------------------------------------------

SHAPES = [(3, 1), (40, 5), (7, 256), (33, 257), (2, 4, 31, 48), (600, 300), (5, 5000)]


@every_dtype
@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_as_good_as_torchs(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, dy = ((torch.randn(shape) * 2 + 0.5).to(dtype) for _ in range(2))
    _assert_good(kind, dy, x, *_parameters(kind, shape[-1], dtype))


@every_dtype
@every_kind
def test_without_weights(kind: str, dtype: torch.dtype) -> None:
    x, dy = (torch.randn(50, 40).to(dtype) for _ in range(2))
    assert _node(_ours(kind, x.clone().requires_grad_(), None, None)) is not None
    _assert_good(kind, dy, x, None, None)


@every_dtype
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shift", [0.0, 1e-2, 1.0, 30.0])
def test_weights_of_all_sizes(kind: str, dtype: torch.dtype, shift: float) -> None:
    # Those next to 0 are among them, and those much smaller than the bias.
    x, dy = (torch.randn(300, 400).to(dtype) for _ in range(2))
    w = torch.logspace(-3, 3, 400) * torch.tensor([1.0, -1.0]).repeat(200)
    w[::50] = 0.0
    b = shift * torch.randn(400) if kind == "layer" else None
    _assert_good(kind, dy, x, w.to(dtype), None if b is None else b.to(dtype))


@every_dtype
@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-5, 0.0])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_variances_far_below_epsilon(dtype: torch.dtype, scale: float, shift: float) -> None:
    """xhat is small then, and an output rounds it away beside the bias."""
    x, dy = ((torch.randn(300, 128) * size).to(dtype) for size in (scale, 1.0))
    w, b = torch.full((128,), 0.3).to(dtype), torch.full((128,), shift).to(dtype)
    ours, eager = (partial(call, eps=1e-5) for call in (_ours, _eager))
    exact = _run(eager, "layer", dy.double(), x.double(), w.double(), b.double())
    for one, other, right in zip(
        _run(ours, "layer", dy, x, w, b), _run(eager, "layer", dy, x, w, b), exact, strict=True
    ):
        errors = [float((t.double() - right).norm()) for t in (one, other)]
        # The smallest xhat that is read off an output is a quarter of the usual ones.
        assert errors[0] <= 2 * errors[1] + 4 * FLOOR[dtype] * float(right.norm()), errors
    # Where nobody keeps the output either.
    x, w = x.requires_grad_(), w.requires_grad_()
    kept, by_torch = (saved_bytes(lambda f=f: f("layer", x * 1, w, b)) for f in (ours, eager))
    assert kept <= by_torch
    if x.dtype is torch.float32 and shift:
        few = [t.detach().requires_grad_() for t in (x[:4], w, b)]
        check_orders(lambda x, w, b: fl.layer_norm(x, 128, w, b, 1e-5, save="output"), partial(eager, "layer"), few)


@every_dtype
@every_kind
def test_constant_rows_and_outliers(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(60, 128)
    x[3] = 2.0
    x[4] = 0.0
    x[5, 7] = 3e3
    x[6] *= 1e-3
    x[7] += 50.0
    _assert_good(kind, torch.randn(60, 128).to(dtype), x.to(dtype), *_parameters(kind, 128, dtype))


@every_kind
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    x = torch.randn(20, 64)
    x[3, 5], x[4, 6] = math.nan, math.inf
    w, b = _parameters(kind, 64, torch.float32)
    ours, eager = (_run(call, kind, torch.ones_like(x), x, w, b) for call in (_ours, _eager))
    assert torch.equal(ours[1].isnan().any(1), eager[1].isnan().any(1))
    rows = [i for i in range(20) if i not in (3, 4)]
    torch.testing.assert_close(ours[1][rows], eager[1][rows])
    torch.testing.assert_close(ours[0], eager[0], equal_nan=True)


@every_dtype
@every_kind
def test_outputs_are_those_of_the_originals(kind: str, dtype: torch.dtype) -> None:
    x = (torch.randn(200, 384) * 3).to(dtype).requires_grad_()
    w, b = _parameters(kind, 384, dtype)
    y, expected = _ours(kind, x, w, b), _eager(kind, x, w, b)
    assert y.dtype is dtype
    if kind == "layer":
        assert torch.equal(y, expected)
    else:  # sums in another order may move what is rounded, once or twice, by one step each
        rtol = 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(y, expected, rtol=rtol, atol=1e-7)
        assert dtype is torch.float32 or float((y == expected).float().mean()) > 0.99


def test_epsilon_is_torchs() -> None:
    for dtype in (*DTYPES, torch.float64):
        x = torch.full((40, 64), 1e-4, dtype=dtype, requires_grad=True)
        torch.testing.assert_close(fl.rms_norm(x, 64, save="output"), F.rms_norm(x, (64,)))


@every_kind
def test_second_derivatives(kind: str) -> None:
    x = torch.randn(6, 9, requires_grad=True)
    w, b = (None if t is None else t.requires_grad_() for t in _parameters(kind, 9, torch.float32))
    inputs = (x, w) if b is None else (x, w, b)

    def call(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = _ours(kind, x, w, b, save="output")
        assert _node(y) is not None
        return y

    def eager(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return _eager(kind, x, w, b)

    check_orders(call, eager, inputs)
    with torch.no_grad():
        w[2] = 0.0  # of this column xhat is saved
    check_orders(call, eager, inputs)
    with torch.no_grad():
        w.zero_()  # of these outputs tell nothing
        w.sub_(float(kind == "gemma"))
    assert _node(_ours(kind, x, w, b, save="output")) is None


@every_kind
def test_a_gradient_penalty(kind: str) -> None:
    x = torch.randn(40, 64)
    w, b = _parameters(kind, 64, torch.float32)
    results = []
    for call, dtype in ((_ours, torch.float32), (_eager, torch.float32), (_eager, torch.float64)):
        leaves = [t.to(dtype).clone().requires_grad_() for t in (x, w, b) if t is not None]
        h = leaves[0] * 2
        y = call(kind, h, *leaves[1:], *([None] * (3 - len(leaves))))
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        loss = torch.stack([d.square().sum() for d in first]).sum()
        results.append([*first, *torch.autograd.grad(loss, leaves)])
    for one, other, right in zip(*results, strict=True):
        errors = [float((t.double() - right).detach().norm()) for t in (one, other)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * float(right.detach().norm())


@pytest.mark.parametrize("frozen", list(itertools.product((True, False), repeat=3)), ids=str)
def test_frozen_parts(frozen: tuple[bool, ...]) -> None:
    tensors = torch.randn(40, 64), *_parameters("layer", 64, torch.float32)
    results = []
    for call in (_ours, _eager):
        leaves = [t.clone().requires_grad_(not f) for t, f in zip(tensors, frozen, strict=True)]
        y = call("layer", *leaves)
        if all(frozen):
            assert y.grad_fn is None
            continue
        results.append(torch.autograd.grad(y.square().sum(), [t for t in leaves if t.requires_grad]))
    for one, other in zip(*results, strict=True) if results else ():
        torch.testing.assert_close(one, other)


@every_dtype
@every_kind
@pytest.mark.parametrize("odd", [False, True])
def test_the_loops_compute_what_the_reference_does(kind: str, dtype: torch.dtype, odd: bool) -> None:
    if build.shared_object() is None:
        pytest.skip("no loops")
    w, b = _parameters(kind, 300, dtype)
    if odd:
        w[[1, 255, 256, 299]] = -1.0 if kind == "gemma" else 0.0
    x, dy = (torch.randn(70, 300).to(dtype) for _ in range(2))
    norm = norms.RowNorm("norm", (300,), 1e-6, kind == "layer", float(kind == "gemma"), kind == "llama")
    columns = inexact_columns.inexact_columns(cpu, w, b, norm.offset, dtype, norm.columns)
    found = inexact_columns.inexact_columns(reference, w, b, norm.offset, dtype, norm.columns)
    assert columns is found is None or torch.equal(columns, found)  # type: ignore[arg-type]
    y, inverse_std, mean = cpu.row_norm(norm, x, w, b)
    torch.testing.assert_close((y, inverse_std), tuple(reference.row_norm(norm, x, w, b))[:2])
    kept = None if columns is None else norms.Kept(columns, row_norm._xhat_of(x, inverse_std, mean, columns))
    results = []
    for backend, overwrite in itertools.product((cpu, reference), (True, False)):
        given = y.clone()
        dx, *others = backend.row_norm_gradient(
            norm, dy, given, w, b, inverse_std, kept, needs_x=True, overwrite=overwrite
        )
        assert dx is not None and (dx.data_ptr() == given.data_ptr()) is overwrite
        assert (given._version > 0) is overwrite
        results.append([dx, *others[: 1 + (kind == "layer")]])
    for others in results[1:]:
        torch.testing.assert_close(others, results[0], rtol=1e-4 if dtype is torch.float32 else 1e-2, atol=1e-3)


@pytest.mark.parametrize("shape", [(300, 700), (9, 5000), (4000, 3)], ids=str)
def test_the_same_bits_on_any_number_of_threads(shape: tuple[int, ...]) -> None:
    before = torch.get_num_threads()
    for kind in KINDS:
        x, dy = torch.randn(2, *shape)
        parameters = _parameters(kind, shape[-1], torch.float32)
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(_run(_ours, kind, dy, x, *parameters))
        finally:
            torch.set_num_threads(before)
        for others in results[1:]:
            assert all(map(torch.equal, others, results[0]))


# --- what is saved ----------------------------------------------------------------------------------------------------


def _kept(call: Callable[..., Tensor], kind: str, x: Tensor, *parameters: Tensor | None) -> int:
    return saved_bytes(lambda: call(kind, x * 1, *parameters), exclude=[t for t in parameters if t is not None])


@every_dtype
@every_kind
def test_saved_bytes(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 128).to(dtype).requires_grad_()
    w, b = _parameters(kind, 128, dtype)
    w.requires_grad_()
    hidden, numbers = x.numel() * dtype.itemsize, 64 * 4
    found = _kept(_ours, kind, x, w, b)
    assert found <= hidden + numbers
    y = _ours(kind, x * 1, w, b)
    assert _saved(y)[0].data_ptr() == y.data_ptr()
    # Where x is somebody else's and y is what the next layer saves anyway, eager keeps x besides.
    layer = nn.Linear(128, 4).to(dtype)
    ours, eager = (
        saved_bytes(lambda c=call: layer(c(kind, x * 1, w, b)), exclude=[w, *([] if b is None else [b])])
        for call in (_ours, _eager)
    )
    assert ours <= hidden + numbers and eager >= 2 * hidden
    with torch.no_grad():
        assert _kept(_ours, kind, x, w, b) == 0


def test_columns_that_outputs_do_not_tell_are_saved_beside() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    for count in (0, 1, 32, 33, 128):
        w, b = torch.ones(128), torch.zeros(128)
        w[:count] = 0.0
        y = fl.layer_norm(x * 1, 128, w, b)
        hidden = x.numel() * 4
        kept = _kept(lambda kind, *tensors: fl.layer_norm(tensors[0], 128, *tensors[1:]), "", x, w, b)
        if count > 32:  # x, as eager
            assert _node(y) is None and kept == hidden + 2 * 64 * 4
        else:
            assert kept == hidden + 64 * 4 + count * (64 * 4 + 8)
            saved = _saved(y)
            assert (saved[4] is None) == (count == 0)


@every_dtype
def test_which_columns_outputs_tell(dtype: torch.dtype) -> None:
    numbers = torch.finfo(dtype)
    small, large = numbers.smallest_normal / 2, numbers.max
    w = torch.tensor([1.0, -1.0, 0.0, -0.0, small, large, math.nan, math.inf, 1.0, 1.0, 0.5], dtype=torch.float64)
    b = torch.tensor([0.0, 4.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -4.5, math.nan, -2.5])
    w, b = (t.to(torch.promote_types(dtype, torch.float32)) for t in (w, b))
    for backend in (cpu, reference):
        columns = inexact_columns.inexact_columns(backend, w, b, 0.0, dtype, 11)
        assert columns is not None and columns.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_zero_initialised_weights_train() -> None:
    # Of a norm whose weights begin at 0 outputs tell nothing, and after a step they do.
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(32, 64), kind, nn.Linear(64, 8)) for kind in (fl.LayerNorm(64), nn.LayerNorm(64))]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        nn.init.zeros_(net[1].weight)  # type: ignore[arg-type]
    x, target, paths = torch.randn(50, 32), torch.randn(50, 8), set()
    optimizers = [torch.optim.SGD(net.parameters(), 0.5) for net in nets]
    for _ in range(5):
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            h = net[1](net[0](x))
            paths.add(_node(h) is not None)
            loss = (net[2](h) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert paths == {False, True}


def test_weights_that_change_past_the_version_counter_are_seen() -> None:
    x, w = torch.randn(40, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    assert _saved(fl.rms_norm(x, 64, w))[4] is None
    w.data[3] = 0.0
    y = fl.rms_norm(x, 64, w)
    assert _saved(y)[4].tolist() == [3]
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_weights_on_a_gpu_are_looked_at_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look_at_all = inexact_columns._look_at_all
    monkeypatch.setattr(inexact_columns, "_look_at_all", lambda *a: (looks.append(1), look_at_all(*a)))
    layers = [nn.LayerNorm(8), nn.LayerNorm(16)]

    def look() -> list[Any]:
        found = []
        for layer in layers:
            limits = inexact_columns.limits(torch.float32, len(layer.weight))
            columns = inexact_columns._remembered(reference, layer.weight, layer.bias, 0.0, limits)
            found.append(None if columns is None else columns.tolist())
        return found

    assert look() == [None, None] and len(looks) == 2  # each is new once
    assert look() == [None, None] and len(looks) == 2
    with torch.no_grad():
        for layer in layers:
            layer.weight[2] = 0.0
    assert look() == [[2], [2]] and len(looks) == 3  # one look for both
    with torch.no_grad():
        layers[1].bias[5] = 9.0
    assert look() == [[2], [2, 5]] and len(looks) == 4
    with torch.no_grad():
        layers[0].weight.fill_(1.0)
    assert look() == [None, [2, 5]] and len(looks) == 5
    count = len(inexact_columns._seen)
    del layers[0]
    assert len(inexact_columns._seen) == count - 1


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_the_output_is_overwritten_where_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[bool] = []
    gradient = cpu.row_norm_gradient

    def noting(*args: Any, needs_x: bool, overwrite: bool) -> Any:
        notes.append(overwrite)
        return gradient(*args, needs_x=needs_x, overwrite=overwrite)

    monkeypatch.setattr(cpu, "row_norm_gradient", noting)
    x, w = torch.randn(40, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    fl.rms_norm(x, 64, w).sum().backward()
    layer = nn.Linear(64, 8)
    layer(fl.rms_norm(x, 64, w)).sum().backward()
    assert notes == [True, True]
    notes.clear()
    y = fl.rms_norm(x, 64, w)
    before = y.detach().clone()
    y.sum().backward()
    assert notes == [False] and torch.equal(y, before)
    loss = fl.rms_norm(x, 64, w).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and notes[1:] == [False, False]


def test_weights_and_outputs_that_were_edited_are_noticed() -> None:
    for place in range(3):
        x, w, b = torch.randn(40, 64, requires_grad=True), torch.ones(64, requires_grad=True), torch.zeros(64)
        y = fl.layer_norm(x, 64, w, b)
        with torch.no_grad():
            (y, w, b)[place].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("save", ["output", "input"])
def test_gradients_that_are_negated_or_have_no_memory(save: str) -> None:
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 64)
    for call in (fl.layer_norm, fl.rms_norm):
        y = call(x, 64, save=save)
        expected, found = (torch.autograd.grad(y, x, t, retain_graph=True)[0] for t in (-dy, torch._neg_view(dy)))
        torch.testing.assert_close(found, expected)
        assert not bool(torch.autograd.grad(y, x, torch._efficientzerotensor(y.shape))[0].any())


def test_layouts_and_views() -> None:
    w, b = _parameters("layer", 64, torch.float32)
    base = torch.randn(64, 50)
    for x in (base.t(), base.t()[::2], torch.randn(1, 64).expand(30, 64), torch.randn(30, 80)[:, 8:72]):
        dy = torch.randn(x.shape[1], x.shape[0]).t()
        _assert_good("layer", dy, x, w, b)
    x = torch.randn(8, 16, 3, 8, requires_grad=True)
    two = torch.rand(3, 8) + 0.5
    got = torch.autograd.grad(fl.layer_norm(x, (3, 8), two, two).square().sum(), x)[0]
    torch.testing.assert_close(got, torch.autograd.grad(F.layer_norm(x, (3, 8), two, two).square().sum(), x)[0])


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w, b = _parameters("layer", 64, torch.float32)
    assert b is not None
    return torch.randn(40, 64), w, b, torch.randn(40, 64)


def test_checkpoints_and_hooks(case: tuple[Tensor, ...]) -> None:
    x, w, b, dy = case
    expected = _run(_ours, "layer", dy, x, w, b)
    for reentrant in (True, False):
        found = _run(partial(checkpoint, _ours, use_reentrant=reentrant), "layer", dy, x, w, b)
        assert all(map(torch.equal, found, expected))
    with torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, _run(_ours, "layer", dy, x, w, b), expected))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_outputs_that_hooks_have_laid_out_in_another_way(kind: str) -> None:
    x, dy = torch.randn(4, 16, 32, requires_grad=True), torch.randn(4, 16, 32)
    w, b = _parameters(kind, 32, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, lambda t: t):
        y = _ours(kind, x, w, b)
    assert _node(y) is not None
    expected = torch.autograd.grad(_eager(kind, x, w, b), x, dy)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy, retain_graph=True), expected)
    again = torch.autograd.grad(y, x, dy, create_graph=True)
    torch.testing.assert_close(again, expected)


# torch.func takes deprecated parts of torch itself.
@pytest.mark.filterwarnings(r"ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_are_pytorchs(case: tuple[Tensor, ...]) -> None:
    x, w, b, dy = case
    ours, eager = (lambda x, c=call: c("layer", x, w, b) for call in (_ours, _eager))
    torch.testing.assert_close(torch.func.vmap(ours)(x), eager(x))
    torch.testing.assert_close(torch.func.jvp(ours, (x,), (dy,)), torch.func.jvp(eager, (x,), (dy,)))
    torch.testing.assert_close(torch.func.vjp(ours, x)[1](dy), torch.func.vjp(eager, x)[1](dy))
    leaf = x.clone().requires_grad_()
    batch = torch.stack([dy, 2 * dy])
    found, expected = (torch.autograd.grad(f(leaf), leaf, batch, is_grads_batched=True)[0] for f in (ours, eager))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
def test_compiled_norms_are_pytorchs(case: tuple[Tensor, ...]) -> None:
    x, *_ = case
    layer = fl.LayerNorm(64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    assert fl.plan_of(layer, x, compiled=True)[0].path == "composite"


def test_under_autocast_the_dtype_is_torchs(case: tuple[Tensor, ...]) -> None:
    x, w, b, _ = case
    for dtype, kind in itertools.product((torch.float32, torch.bfloat16), ("layer", "rms")):
        with torch.autocast("cpu", torch.bfloat16):
            tensors = x.to(dtype).requires_grad_(), w.to(dtype), b.to(dtype) if kind == "layer" else None
            assert _ours(kind, *tensors).dtype is _eager(kind, *tensors).dtype


def test_float32_parameters_of_16_bit_inputs() -> None:
    for kind in ("layer", "rms"):
        w, b = (None if t is None else t.requires_grad_() for t in _parameters(kind, 64, torch.float32))
        x, dy = (torch.randn(100, 64).bfloat16() for _ in range(2))
        x.requires_grad_()
        y = _ours(kind, x, w, b)
        assert _node(y) is not None and y.dtype is torch.bfloat16
        found = torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], dy)
        doubles = [t.detach().double().requires_grad_() for t in (x, w, b) if t is not None]
        exact = torch.autograd.grad(_eager(kind, *doubles, *([None] * (3 - len(doubles)))), doubles, dy.double())
        for one, right in zip(found, exact, strict=True):
            assert float((one.double() - right).norm()) <= 6e-3 * float(right.norm())
        assert found[1].dtype is torch.float32


def test_plans_say_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 64, requires_grad=True)
    layer = fl.LayerNorm(64)

    def plan(x: Tensor = x, layer: Any = layer) -> tuple[str, str]:
        (found,) = fl.plan_of(layer, x)
        return found.path, str(found)

    assert plan() == ("fused", "saves the output, which determines the input")
    with torch.no_grad():
        assert plan()[0] == "composite"
    assert plan()[0] == "fused"
    assert plan(x.detach()) == plan()  # the weights train
    for count in (1, 64):
        weighted = fl.LayerNorm(64)
        with torch.no_grad():
            weighted.weight[:count], weighted.bias[:count] = 0.2, 1.0
        path, said = plan(layer=weighted)
        assert path == ("fused" if count == 1 else "composite") and f"input for {count} of 64 weights, which" in said
    assert "empty" in plan(x[:0])[1]
    assert "input is saved" in plan(layer=fl.LayerNorm(64, save="input"))[1]
    assert plan(x.double(), copy.deepcopy(layer).double()) == ("composite", "not fused: float64 is computed by PyTorch")
    monkeypatch.setattr(sizes, "LAYER_NORM_BYTES", 1 << 20)
    assert plan()[1] == "not fused: results of less than 1 MiB are left to PyTorch"
    assert plan(layer=fl.LayerNorm(64, save="output"))[0] == "fused"
    assert plan(layer=fl.RMSNorm(64))[0] == "fused"
    monkeypatch.setattr(build, "shared_object", lambda: None)
    monkeypatch.setattr(build, "missing_because", lambda **_: "there is no compiler")
    assert plan(layer=fl.RMSNorm(64, eps=0.5))[1] == "not fused: there is no compiler"
    layer = fl.RMSNorm(64, eps=0.25, save="output")
    assert plan(layer=layer)[0] == "fused"
    torch.testing.assert_close(
        torch.autograd.grad(layer(x).square().sum(), x)[0],
        torch.autograd.grad(F.rms_norm(x, (64,), layer.weight, 0.25).square().sum(), x)[0],
    )


# --- modules ----------------------------------------------------------------------------------------------------------


def test_modules_are_torchs() -> None:
    for ours, torchs in ((fl.LayerNorm((3, 8), 1e-3), nn.LayerNorm((3, 8), 1e-3)), (fl.RMSNorm(24), nn.RMSNorm(24))):
        assert isinstance(ours, type(torchs))
        ours.load_state_dict(torchs.state_dict())
        x = torch.randn(30, *torchs.normalized_shape)
        torch.testing.assert_close(ours(x), torchs(x))
        assert repr(ours).startswith(repr(torchs)[:-1])
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert torch.equal(again(x), ours(x)) and torch.equal(copy.deepcopy(ours)(x), ours(x))
    assert [*fl.LayerNorm(8, bias=False).state_dict()] == ["weight"]
    assert not fl.RMSNorm(8, elementwise_affine=False).state_dict()
    assert float(fl.RMSNorm(8, weight_offset=1.0).weight.detach().abs().max()) == 0.0
    with torch.device("meta"):
        assert fl.LayerNorm(8).weight.is_meta


def test_in_torchs_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(layer)
    for name in ("norm1", "norm2"):
        norm = fl.LayerNorm(32)
        norm.load_state_dict(getattr(layer, name).state_dict())
        setattr(ours, name, norm)
    x = torch.randn(8, 20, 32, requires_grad=True)
    results = [torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]) for net in (layer, ours)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert saved_bytes(ours, x) < saved_bytes(layer, x)
    ours.eval(), layer.eval()
    with torch.no_grad():  # torch's own path for inference
        torch.testing.assert_close(ours(x), layer(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fl.layer_norm(x, 7), ValueError, "last dimensions of input (40, 64) must be normalized_shape (7,)"),
        (lambda x: fl.layer_norm(x, ()), ValueError, "at least one dimension"),
        (lambda x: fl.layer_norm(x, (2, 40, 64)), ValueError, "must be normalized_shape (2, 40, 64)"),
        (lambda x: fl.layer_norm(x, 64.0), TypeError, "normalized_shape must be an int or a sequence"),
        (lambda x: fl.layer_norm(x, 64, torch.ones(7)), ValueError, "expected weight (64,), of normalized_shape"),
        (lambda x: fl.layer_norm(x, 64, None, torch.ones(1, 64)), ValueError, "expected bias (64,)"),
        (lambda x: fl.layer_norm(x.long(), 64), TypeError, "must have a floating dtype"),
        (lambda x: fl.layer_norm(x.cfloat(), 64), TypeError, "must have a floating dtype"),
        (lambda x: fl.layer_norm([1.0], 1), TypeError, "input must be a tensor"),
        (lambda x: fl.layer_norm(x, 64, torch.ones(64, device="meta")), ValueError, "weight is on meta"),
        (lambda x: fl.layer_norm(x, 64, save="recompute"), ValueError, "save must be 'auto', 'output' or 'input'"),
        (lambda x: fl.rms_norm(x, 64, weight_offset=torch.ones(())), TypeError, "weight_offset must be a number"),
        (lambda x: fl.rms_norm(x, 64, eps="a"), TypeError, "eps must be a number"),
        (lambda x: fl.rms_norm(x, 63), ValueError, "rms_norm: the last dimensions"),
        (lambda x: fl.RMSNorm(64, save="all"), ValueError, "RMSNorm: save must be"),
        (lambda x: fl.LayerNorm(64)(x[:, :3]), ValueError, "layer_norm: the last dimensions"),
    ],
)
def test_bad_input(call: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(torch.randn(40, 64))
