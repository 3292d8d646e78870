"""What is saved and what the peak is, where simple arithmetic knows the answer."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settings import compiles
from torch import Tensor, nn

from fusedlayers.memory import peak_bytes, saved_bytes

ROWS, IN, OUT = 64, 32, 96
INPUT_BYTES = ROWS * IN * 4
HIDDEN_BYTES = ROWS * OUT * 4


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


@pytest.fixture
def w() -> Tensor:
    return torch.randn(OUT, IN, requires_grad=True)


# --- saved_bytes ------------------------------------------------------------------------------------------------------


def test_relu_saves_its_output_and_gelu_the_input_too(x: Tensor, w: Tensor) -> None:
    assert saved_bytes(lambda x: F.linear(x, w), x) == INPUT_BYTES
    assert saved_bytes(lambda x: F.relu(F.linear(x, w)), x, exclude=x) == HIDDEN_BYTES
    # gelu alone keeps z; with a layer behind it that keeps y there are two hidden-sized buffers.
    w2 = torch.randn(IN, OUT, requires_grad=True)
    assert saved_bytes(lambda x: F.gelu(F.linear(x, w)), x, exclude=x) == HIDDEN_BYTES
    assert saved_bytes(lambda x: F.linear(F.gelu(F.linear(x, w)), w2), x, exclude=x) == 2 * HIDDEN_BYTES
    assert saved_bytes(lambda x: F.linear(F.relu(F.linear(x, w)), w2), x, exclude=x) == HIDDEN_BYTES


def test_nothing_is_saved_without_gradients(x: Tensor, w: Tensor) -> None:
    with torch.no_grad():
        assert saved_bytes(lambda: F.gelu(F.linear(x, w))) == 0
    assert saved_bytes(lambda: x.tanh()) == 0


def test_a_storage_counts_once_and_in_full(w: Tensor) -> None:
    def three_views(w: Tensor) -> Tensor:
        q, k, v = (2 * w).chunk(3)
        return q * k * v  # saves q, k, q * k and v

    assert saved_bytes(three_views, w) == w.nbytes + w.nbytes // 3
    assert saved_bytes(lambda w: (2 * w)[:1].tanh(), w) == w[:1].nbytes  # its own output, in a storage of its own
    assert saved_bytes(lambda w: (2 * w)[:1] ** 2, w) == w.nbytes  # a view, which keeps all of the storage alive


def test_views_count_what_they_keep_alive(w: Tensor) -> None:
    """An expanded tensor its storage; a slice of a data set not the data set, which is the user's."""
    row, factor = torch.randn(1, IN), torch.randn(ROWS, IN, requires_grad=True)
    assert saved_bytes(lambda: factor * row.expand(ROWS, IN)) == row.nbytes
    data = torch.randn(100, ROWS, IN)
    assert saved_bytes(lambda batch: F.linear(batch, w), data[7]) == INPUT_BYTES


def test_parameters_and_their_views_are_left_out(x: Tensor) -> None:
    layer = nn.Linear(IN, OUT)
    assert saved_bytes(layer, x) == INPUT_BYTES
    x.requires_grad_()
    assert saved_bytes(layer, x) == 0  # x is a leaf that requires grad now, and the weight is saved as a view
    layer.requires_grad_(False)
    assert saved_bytes(layer, x) == 0
    assert saved_bytes(lambda x: layer(x), x) == 0
    constant = torch.randn(OUT, IN)
    assert saved_bytes(lambda x: F.linear(x, constant), x) == constant.nbytes
    assert saved_bytes(lambda x: F.linear(x, constant), x, exclude=[constant]) == 0


def test_exclude_takes_what_users_have_at_hand(x: Tensor) -> None:
    norm = nn.BatchNorm1d(IN).eval()
    calls = saved_bytes(lambda x: norm(x), x)
    for state in (norm, norm.buffers(), set(norm.buffers()), dict(norm.named_buffers())):
        assert calls - saved_bytes(lambda x: norm(x), x, exclude=state) == 2 * IN * 4  # running mean and variance


def test_a_graph_that_is_dropped_does_not_count_twice() -> None:
    x = torch.randn(ROWS, IN, requires_grad=True)
    assert saved_bytes(lambda: [(2 * x).tanh().sum().backward() for _ in range(5)]) == INPUT_BYTES
    assert saved_bytes(lambda: [(2 * x).tanh() for _ in range(5)]) == 5 * INPUT_BYTES
    x.grad = None


def test_results_and_lifetimes_stay_as_they_were() -> None:
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []
    assert saved_bytes(lambda: kept.append(x.tanh().exp())) == 2 * x.nbytes
    (y,) = kept
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, (1 - x.tanh() ** 2) * y, rtol=0, atol=1e-15)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)
    y = x.tanh()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="output 0 of Tanh"):  # autograd's own check, not the hooks'
        y.sum().backward()


def test_a_graph_does_not_keep_itself_alive_through_its_own_output() -> None:
    x = torch.randn(ROWS, requires_grad=True)
    kept: list[Tensor] = []
    saved_bytes(lambda: kept.append(x.tanh()))
    storage = weakref.ref(kept[0].untyped_storage())
    kept.clear()  # without a backward pass, which would free what was saved
    gc.collect()
    assert storage() is None


def test_an_in_place_change_of_a_saved_tensor_is_still_an_error() -> None:
    x = torch.randn(ROWS, requires_grad=True)
    kept: list[Tensor] = []
    saved_bytes(lambda: kept.append(x.tanh()))
    kept[0].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*saved at version 0 and is at version 1"):
        kept[0].sum().backward()


class _KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.product, ctx.shape = x @ x, x.shape  # a matmul, because torch.compile would recompute anything cheaper
        return ctx.product * ctx.product

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return dy * ctx.product  # not the derivative, and never run


class _SavesAView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(-1, x.shape[-1]))  # which says that it is a leaf and needs a gradient
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x.exp().view_as(grads[0])


def test_views_that_a_function_makes_count(x: Tensor, w: Tensor) -> None:
    assert saved_bytes(lambda x: _SavesAView.apply(F.linear(x, w)), x) == INPUT_BYTES + HIDDEN_BYTES
    assert saved_bytes(lambda: _SavesAView.apply(w)) == 0  # a parameter's view


@compiles
def test_tensors_on_a_context_count_although_no_hook_sees_them() -> None:
    x = torch.randn(ROWS, ROWS, requires_grad=True)
    assert saved_bytes(_KeepsOnContext.apply, x) == x.nbytes
    compiled = torch.compile(lambda x: _KeepsOnContext.apply(x), backend="aot_eager")
    compiled(x)
    assert saved_bytes(compiled, x) == x.nbytes


@compiles
def test_compiled_functions_can_be_measured(x: Tensor, w: Tensor) -> None:
    w2 = torch.randn(IN, OUT, requires_grad=True)
    for function, buffers in ((F.relu, 1), (F.gelu, 2)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, f=function: F.linear(f(F.linear(x, w)), w2), backend="aot_eager")
        for _ in range(2):  # the first call compiles
            assert saved_bytes(compiled, x, exclude=x) == buffers * HIDDEN_BYTES


def test_autocast_copies_count(x: Tensor, w: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.relu(F.linear(x.requires_grad_(), w))

    assert saved_bytes(forward, x.clone()) == (ROWS * IN + OUT * IN + ROWS * OUT) * 2


def test_subclasses_count_what_they_wrap() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(ROWS, IN), torch.randn(ROWS, IN)).requires_grad_()
    assert saved_bytes(lambda x: (2 * x).tanh(), x) == 2 * INPUT_BYTES


# --- peak_bytes -------------------------------------------------------------------------------------------------------


def test_peak_counts_what_the_call_allocates(x: Tensor) -> None:
    assert peak_bytes(lambda: x.exp(), device="cpu") == INPUT_BYTES
    assert peak_bytes(lambda x: x.neg_().view(-1), x) == 0
    assert peak_bytes(lambda x: x.exp().neg(), x) == 2 * INPUT_BYTES
    assert peak_bytes(lambda x: x.exp().neg().exp(), x) == 2 * INPUT_BYTES  # one of three is gone by then
    assert peak_bytes(lambda: torch.empty(0), device="cpu") == 0


def test_peak_sees_inside_operators(x: Tensor) -> None:
    assert peak_bytes(x.median, device="cpu") >= INPUT_BYTES  # a scalar comes out, but the operator sorts within a copy


def test_peak_of_in_place_work_in_a_graph() -> None:
    z, dy = torch.randn(ROWS, IN, requires_grad=True), torch.randn(ROWS, IN)
    assert peak_bytes(lambda: z.neg().relu_(), device="cpu") == INPUT_BYTES
    # The root y stays until backward is over; beside it d(-z), and dz made from that.
    assert peak_bytes(lambda: z.neg().relu_().backward(dy), device="cpu") == 3 * INPUT_BYTES


@compiles
def test_the_hooks_are_not_compiled_where_a_graph_breaks() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 8, 32)
    eager_bytes = saved_bytes(model, x)
    model.compile(backend="eager")
    model(x)
    assert saved_bytes(model, x) == eager_bytes


@compiles
def test_peak_of_a_compiled_function_is_that_of_the_compiled_code() -> None:
    x = torch.randn(1024, 1024)

    def chain(x: Tensor) -> Tensor:
        return x.exp().sin().neg().tanh()

    compiled = torch.compile(chain)
    compiled(x)
    assert peak_bytes(chain, x) == 2 * x.nbytes
    assert peak_bytes(compiled, x) == x.nbytes


def test_garbage_from_before_is_not_subtracted(x: Tensor) -> None:
    before: list[Tensor] = []
    # Of what was allocated here the profiler tells the release.
    peak_bytes(lambda: before.append(torch.empty_like(x)), device="cpu")

    def garbage_then_exp() -> Tensor:
        circle: list[object] = [before.pop()]  # young, so that the collector meets it first
        circle.append(circle)
        del circle
        containers = [[] for _ in range(10_000)]
        assert len(containers) == 10_000
        return x.exp()

    assert peak_bytes(garbage_then_exp, device="cpu") == INPUT_BYTES
    assert gc.isenabled()


def test_peak_refuses_a_device_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="peak_bytes: got device 'meta', but can measure only 'cpu' and 'cuda'"):
        peak_bytes(lambda: None, device="meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_and_saved_bytes_on_a_gpu() -> None:
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    assert saved_bytes(lambda x: (2 * x).tanh(), x) == x.nbytes
    assert peak_bytes(lambda x: (x.detach() * 2) * 2, x) == 2 * x.nbytes
    assert peak_bytes(lambda: (x.detach() * 2) * 2) == 2 * x.nbytes
    assert peak_bytes(lambda: torch.empty(1024), device="cpu") == 4096
