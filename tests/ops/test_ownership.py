"""The saved output is overwritten in backward where nobody can read it again, and nowhere else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import assert_near
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.ops import saved_buffers

#: Folded, ATen's kernels, plain operations: three ways to write dz.
every_name = pytest.mark.parametrize("name", ["gelu", "tanh", "softsign"])


class Case:
    """A dense layer with a Linear behind it, and what eager PyTorch makes of the same."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.dtype = name, dtype
        shapes = {"x": (40, 12), "w": (50, 12), "b": (50,), "w2": (6, 50)}
        self.leaves = [torch.randn(s).to(dtype).requires_grad_() for s in shapes.values()]
        self.x, self.w, self.b, self.w2 = self.leaves

    def hidden(self) -> Tensor:
        return fl.dense_bias_act(self.x, self.w, self.b, self.name)

    def loss(self, y: Tensor) -> Tensor:
        return F.linear(y, self.w2).square().sum()

    def check(self, loss: Callable[[Tensor], Tensor] | None = None) -> None:
        """The gradients now in the leaves are those of ``loss(y)`` in eager PyTorch."""
        y = resolve(self.name).plain(F.linear(self.x, self.w, self.b))
        expected = torch.autograd.grad((loss or self.loss)(y), self.leaves, allow_unused=True, materialize_grads=True)
        got = [torch.zeros_like(t) if t.grad is None else t.grad for t in self.leaves]
        assert_near(got, expected, 4)
        for leaf in self.leaves:
            leaf.grad = None


def _overwrites(name: str, **options: Any) -> bool:
    """Whether the gradient of a leaf z came to lie in the memory of the saved output."""
    z = torch.randn(30, 40, requires_grad=True)
    y = fl.bias_act(z, None, name)
    address, loss = y.data_ptr(), y.sum()
    del y
    loss.backward(**options)
    assert z.grad is not None
    return z.grad.data_ptr() == address


@every_name
def test_the_last_backward_pass_overwrites(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _overwrites(name) and not _overwrites(name, retain_graph=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t):  # which hold nothing any more
        assert _overwrites(name)
    monkeypatch.setattr(saved_buffers, "_users_of_new", lambda: None)
    assert not _overwrites(name)
    case = Case(name)
    case.loss(case.hidden()).backward()
    case.check()


def test_torch_is_asked_once_and_in_any_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta"), saved_tensors_hooks(id, id)):
        saved_buffers._users_of_new.cache_clear()
        with mode:
            alone = saved_buffers._users_of_new()
        saved_buffers._users_of_new.cache_clear()
        assert alone is not None and saved_buffers._users_of_new() == alone
    for missing in ("storage_use_count", "graph_is_kept"):
        with monkeypatch.context() as patch:
            patch.delattr(f"fusedlayers.ops.saved_buffers.{missing}")
            patch.setattr(saved_buffers, missing, _gone, raising=False)
            assert saved_buffers._users_of_new.__wrapped__() is None


def _gone(*_: object) -> None:
    raise AttributeError


@pytest.mark.parametrize("save", ["input", "recompute"])
def test_an_input_is_never_overwritten(save: str) -> None:
    x, w, b = torch.randn(30, 40, requires_grad=True), torch.randn(40, 40, requires_grad=True), torch.zeros(40)
    copies = [t.detach().clone() for t in (x, w, b)]
    for call in (fl.bias_act(x, None, "gelu", save=save), fl.dense_bias_act(x, w, b, "gelu", save=save)):
        call.sum().backward()
    fl.bias_act(x, b.requires_grad_(), "gelu", save=save).sum().backward()
    assert all(map(torch.equal, (x, w, b), copies))


#: How a user may still have y, and what that says of its numbers.
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "itself": (lambda y: y, lambda y: y),
    "detached": (Tensor.detach, lambda y: y),
    "view": (lambda y: y.view(-1), lambda y: y),
    "slice": (lambda y: y[3:5], lambda y: y),
    "numpy": (lambda y: y.detach().float().numpy() if y.dtype is torch.bfloat16 else y.detach().numpy(), np.array),
    "storage": (lambda y: (y.untyped_storage(), y.dtype), lambda held: torch.empty(0, dtype=held[1]).set_(held[0])),
    "dlpack": (lambda y: torch.from_dlpack(y.detach()), lambda y: y),
    "data": (lambda y: y.data, lambda y: y),
    "list of lists": (lambda y: [[y]], lambda held: held[0][0]),
    "closure": (lambda y: lambda: y.detach(), lambda held: held()),
    "node": (lambda y: y.grad_fn, lambda node: ()),
    "nobody": (lambda y: None, lambda nothing: ()),
}


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("holder", HOLDERS)
def test_the_user_still_has_it(name: str, dtype: torch.dtype, holder: str) -> None:
    hold, read = HOLDERS[holder]
    case = Case(name, dtype)
    y = case.hidden()
    loss, held = case.loss(y), hold(y)
    before = torch.as_tensor(read(held)).detach().clone()
    del y
    loss.backward()
    case.check()
    assert torch.equal(torch.as_tensor(read(held)).detach(), before)


@every_name
def test_another_operation_has_it(name: str) -> None:
    case = Case(name)

    def loss(y: Tensor) -> Tensor:
        # exp saves its own output, square and the product save y; they run before and after the layer's other reader.
        return case.loss(y) + (y * y.detach()).sum() + y.square().sum() + y.tanh().sum()

    loss(case.hidden()).backward()
    case.check(loss)
    other = torch.randn(40, 50, requires_grad=True)
    y = case.hidden()
    product, tail, expected = other * y.detach(), case.loss(y), y.detach().clone()
    del y
    tail.backward()
    case.check()
    assert torch.equal(torch.autograd.grad(product.sum(), other)[0], expected)


@every_name
def test_backward_for_some_inputs_leaves_the_rest_for_later(name: str) -> None:
    case = Case(name)
    y = case.hidden()
    loss, tail, before = case.loss(y), y.sum(), y.detach().clone()
    loss.backward(inputs=[case.w2], retain_graph=True)
    loss.backward(inputs=[case.w, case.b], retain_graph=True)
    assert torch.equal(y, before)
    del y
    loss.backward(inputs=[case.x], retain_graph=True)
    case.check()
    # The layer's own node does not run; its saved output must survive for the call that follows.
    loss.backward(inputs=[case.w2])
    case.w2.grad = None
    tail.backward()
    case.check(lambda y: y.sum())


@every_name
def test_create_graph_and_hooks_on_the_output_keep_it(name: str) -> None:
    case, seen = Case(name), list[Tensor]()
    y = case.hidden()
    before, alias = y.detach().clone(), y.detach()
    y.register_hook(lambda _: seen.append(alias))
    loss = case.loss(y)
    del y
    grads = torch.autograd.grad(loss, case.leaves, create_graph=True)
    assert torch.equal(alias, before)
    again = torch.autograd.grad(grads[0].square().sum(), case.leaves)
    assert all(bool(g.isfinite().all()) for g in again) and torch.equal(seen[0], before)
    case.loss(case.hidden()).backward()
    case.check()


@every_name
def test_neither_incoming_gradients_nor_what_is_somebody_elses(name: str) -> None:
    case, dy = Case(name), torch.randn(40, 50)
    before, other = dy.clone(), torch.randn(40, 50, requires_grad=True)
    (case.hidden() + other).backward(dy)  # a residual add hands one tensor to both of its consumers
    assert torch.equal(dy, before) and torch.equal(other.grad, before)  # type: ignore[arg-type]
    base = torch.randn(30, 40, requires_grad=True) * 1
    y = fl.bias_act(base, None, name, inplace=True)
    before = y.detach().clone()
    y.sum().backward()
    assert torch.equal(base, before)


@pytest.mark.parametrize("kind", ["array", "file"])
def test_memory_that_torch_does_not_own(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    array = np.random.standard_normal((64, 64)).astype(np.float32)
    array.tofile(path)
    mapped = torch.from_file(str(path), shared=True, size=64 * 64).view(64, 64).detach()
    y = fl.bias_act(torch.from_numpy(array) if kind == "array" else mapped, torch.zeros(64, requires_grad=True), "gelu",
                    inplace=True)  # fmt: skip
    before = y.detach().numpy().copy()
    loss = (y * 3).sum()
    del y
    loss.backward()
    now = array if kind == "array" else np.fromfile(path, dtype=np.float32).reshape(64, 64)
    assert np.array_equal(now, before)
