"""``dropout=`` of layers: the numbers that F.dropout drops, a bit for each, and where PyTorch's own mask is saved."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.calls.plan import LEAST_DROPPED
from fusedlayers.memory import saved_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS, WIDTH = 256, 300
HIDDEN = ROWS * WIDTH
assert HIDDEN >= LEAST_DROPPED


def _tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((ROWS, 32), (WIDTH, 32), (WIDTH,), (8, WIDTH))]


@each_dtype
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_values_and_gradients_are_those_of_torchs_dropout(dtype: torch.dtype, p: float) -> None:
    x, w, b, _ = _tensors(dtype)
    found = []
    for dropped in (
        lambda: fl.dense_bias_act(x, w, b, "relu", dropout=p),
        lambda: F.dropout(F.relu(F.linear(x, w, b)), p),
    ):
        torch.manual_seed(7)
        y = dropped()
        state = torch.get_rng_state()
        again = torch.autograd.grad(y.float().square().mean(), (x, w, b), create_graph=True)
        second = torch.autograd.grad(sum(d.float().square().mean() for d in again), x)
        found.append([state, (y == 0).detach(), y, *again, *second])
    assert all(map(torch.equal, found[0][:2], found[1][:2]))
    unit = torch.finfo(dtype).eps
    for ours, its in zip(found[0][2:], found[1][2:], strict=True):
        # On CPUs F.dropout rounds 1 / (1 - p) to 16 bits.
        torch.testing.assert_close(ours, its, rtol=0, atol=8 * unit * float(its.detach().abs().max()) + 1e-30)


@each_dtype
@pytest.mark.parametrize("name", ["gelu", "relu", "silu"])
def test_the_activations_output_and_a_bit_for_each_number_are_saved(name: str, dtype: torch.dtype) -> None:
    x, w, b, last = _tensors(dtype)
    function: Callable[[Tensor], Tensor] = getattr(F, name)
    for own, eager, buffers in (
        (lambda: fl.dense_bias_act(x, w, b, name, dropout=0.1), lambda: F.dropout(function(F.linear(x, w, b)), 0.1), 1),
        (
            lambda: F.linear(fl.dense_bias_act(x, w, b, name, dropout=0.1), last),
            lambda: F.linear(F.dropout(function(F.linear(x, w, b)), 0.1), last),
            2,
        ),
        (lambda: fl.mlp(x, w, b, last, None, name, dropout=0.1), None, 2 if dtype is torch.float64 else 1),
    ):
        ours = saved_bytes(own)
        assert ours == buffers * HIDDEN * dtype.itemsize + HIDDEN // 8
        assert eager is None or ours < saved_bytes(eager) - HIDDEN // 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_masks_of_any_layout(order: tuple[int, ...]) -> None:
    """Of a number of elements that is no multiple of eight, too."""
    z = torch.randn(3, 81, 81, 5).permute(order).requires_grad_()
    found = []
    for dropped in (lambda: fl.bias_act(z, None, "relu", dropout=0.4), lambda: F.dropout(F.relu(z), 0.4)):
        torch.manual_seed(7)
        y = dropped()
        found.append([y.detach(), *torch.autograd.grad(y, z, torch.ones_like(y))])
        assert y.stride() == z.stride()
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


def test_checkpoints_hooks_and_autocast() -> None:
    layer, (x, *_) = fl.FusedDenseAct(32, WIDTH, "gelu", dropout=0.3), _tensors()

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        return [*torch.autograd.grad(call(x).float().square().sum(), [x, *layer.parameters()])]

    expected = step(layer)
    torch.testing.assert_close(step(lambda x: checkpoint(layer, x, use_reentrant=False)), expected)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(step(layer), expected)
    with fl.save_once():
        torch.testing.assert_close(step(layer), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        for ours, wide in zip(step(layer), expected, strict=True):
            assert float((ours - wide).norm() / wide.norm()) < 0.02


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
def test_compiled_layers_are_the_compilers() -> None:
    layer, (x, *_) = fl.FusedDenseAct(32, WIDTH, "gelu", dropout=0.3), _tensors()
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert 0.2 < float((y == 0).float().mean()) < 0.4
    y.sum().backward()
