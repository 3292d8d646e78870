"""Casts that are torch's own: kept once, whoever uses them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedlayers.calls.casts import shared_cast
from fusedlayers.memory import saved_bytes


def _saved_by_torch(x: Tensor, w: Tensor) -> Tensor:
    """The cast of w that ``F.linear`` saves."""
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        F.linear(x, w)
    return next(t for t in seen if t.untyped_storage().nbytes() == 2 * w.numel() and t.shape[-1] != x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_what_linear_uses(dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    with torch.autocast("cpu", dtype):
        first = shared_cast(w, dtype)
        assert first.dtype is dtype and torch.equal(first, w.to(dtype))
        assert shared_cast(w, dtype).data_ptr() == first.data_ptr() == _saved_by_torch(x, w).data_ptr()
    (dw,) = torch.autograd.grad((first * 2).sum(), w)
    assert dw.dtype is torch.float32 and torch.equal(dw, torch.full_like(w, 2.0))


def test_hooks_neither_see_nor_change_it() -> None:
    w = torch.randn(8, 4, requires_grad=True)
    seen: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        expected = shared_cast(w, torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t + 1):
            found = shared_cast(w, torch.bfloat16)
    assert not seen and found.data_ptr() == expected.data_ptr()


def test_in_a_checkpoint() -> None:
    w = torch.randn(8, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(lambda w: shared_cast(w, torch.bfloat16).square(), w, use_reentrant=False)
    (dw,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(dw, (2 * w.to(torch.bfloat16)).float())


def test_what_torch_casts_anew_is_cast_anew() -> None:
    leaf = torch.randn(8, 4, requires_grad=True)
    for w in (leaf * 1, leaf[:4], leaf.detach(), leaf.detach()[0].requires_grad_()):
        with torch.autocast("cpu", torch.bfloat16):
            a, b = shared_cast(w, torch.bfloat16), shared_cast(w, torch.bfloat16)
        assert a.dtype is torch.bfloat16 and a.data_ptr() != b.data_ptr()
        assert a.requires_grad == w.requires_grad
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert shared_cast(leaf, torch.bfloat16).data_ptr() != shared_cast(leaf, torch.bfloat16).data_ptr()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert not shared_cast(leaf, torch.bfloat16).requires_grad
    half = leaf.detach().to(torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert shared_cast(half, torch.bfloat16) is half


def test_nothing_is_saved_for_it() -> None:
    w = torch.randn(8, 4, requires_grad=True)

    def cast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return shared_cast(w, torch.bfloat16)

    assert saved_bytes(cast) == 0
