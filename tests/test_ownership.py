"""The saved output is overwritten in backward where nobody can read it again, and nowhere else."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.ops import buffer_reuse

#: Folded, ATen's kernels, plain operations: three ways to write dz.
NAMES = ["gelu", "tanh", "softsign"]

every_name = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 5e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2.0},
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Case:
    """A dense layer with a Linear behind it, and what eager PyTorch makes of the same."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.name, self.dtype = name, dtype
        shapes = {"x": (40, 12), "w": (50, 12), "b": (50,), "w2": (6, 50)}
        tensors = {k: torch.randn(s).to(dtype).requires_grad_() for k, s in shapes.items()}
        self.x, self.w, self.b, self.w2 = tensors.values()
        self.leaves = list(tensors.values())

    def hidden(self) -> Tensor:
        return fl.dense_bias_act(self.x, self.w, self.b, self.name)

    def eager(self, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = resolve(self.name).plain(F.linear(self.x, self.w, self.b))
        return list(torch.autograd.grad(loss(y), self.leaves, allow_unused=True, materialize_grads=True))

    def check(self, loss: Callable[[Tensor], Tensor]) -> None:
        """The gradients now in the leaves are those of ``loss(y)``."""
        got = [torch.zeros_like(t) if t.grad is None else t.grad for t in self.leaves]
        torch.testing.assert_close(got, self.eager(loss), **CLOSE[self.dtype])
        for leaf in self.leaves:
            leaf.grad = None

    def loss(self, y: Tensor) -> Tensor:
        return F.linear(y, self.w2).square().sum()


def _overwritten(make: Callable[[Tensor], Tensor], finish: Callable[[Tensor], None]) -> bool:
    """Whether the gradient of a leaf z came to lie in the memory of the saved output."""
    z = torch.randn(30, 40, requires_grad=True)
    y = make(z)
    address = y.data_ptr()
    loss = y.sum()
    del y
    finish(loss)
    assert z.grad is not None
    return z.grad.data_ptr() == address


# --- where it is overwritten ------------------------------------------------------------------------------------------


@every_name
def test_a_plain_backward_overwrites(name: str) -> None:
    assert _overwritten(lambda z: fl.bias_act(z, None, name), lambda loss: loss.backward())


@every_name
def test_a_kept_graph_does_not(name: str) -> None:
    assert not _overwritten(lambda z: fl.bias_act(z, None, name), lambda loss: loss.backward(retain_graph=True))


@pytest.mark.parametrize("save", ["input", "recompute"])
def test_an_input_is_never_overwritten(save: str) -> None:
    z = torch.randn(30, 40, requires_grad=True)
    before = z.detach().clone()
    fl.bias_act(z, None, "gelu", save=save).sum().backward()
    fl.bias_act(z, torch.zeros(40, requires_grad=True), "gelu", save=save).sum().backward()
    assert torch.equal(z, before)
    x, w, b = torch.randn(30, 12), torch.randn(40, 12, requires_grad=True), torch.randn(40, requires_grad=True)
    copies = [t.detach().clone() for t in (x, w, b)]
    fl.dense_bias_act(x, w, b, "gelu", save=save).sum().backward()
    assert all(torch.equal(t, c) for t, c in zip((x, w, b), copies, strict=True))


def test_this_torch_can_be_asked() -> None:
    assert buffer_reuse._users_when_alone() is not None


@every_name
def test_where_torch_cannot_be_asked_nothing_is_overwritten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_reuse, "_users_when_alone", lambda: None)
    assert not _overwritten(lambda z: fl.bias_act(z, None, name), lambda loss: loss.backward())
    case = Case(name)
    case.loss(case.hidden()).backward()
    case.check(case.loss)


@pytest.mark.parametrize("missing", ["storage_use_count", "graph_is_kept"])
def test_a_torch_without_the_questions_is_recognised(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise AttributeError(missing)

    monkeypatch.setattr(buffer_reuse, missing, gone)
    assert buffer_reuse._users_when_alone.__wrapped__() is None


# --- where it must not be: y is unchanged, and the gradients are right ------------------------------------------------


@every_name
@every_dtype
@pytest.mark.parametrize(
    "alias",
    [
        *["itself", "detach", "view", "slice", "t", "numpy", "storage", "dlpack", "data", "set_", "list of lists"],
        *["grad_fn only", "weakly", "closure"],
    ],
)
def test_the_user_still_has_it(name: str, dtype: torch.dtype, alias: str) -> None:
    if alias == "numpy" and dtype is torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    case = Case(name, dtype)
    y = case.hidden()
    loss = case.loss(y)
    before = y.detach().clone()
    made: dict[str, Callable[[], Any]] = {
        "itself": lambda: y,
        "detach": lambda: y.detach(),
        "view": lambda: y.view(-1),
        "slice": lambda: y[3:5],
        "t": lambda: y.t(),
        "numpy": lambda: y.detach().numpy(),
        "storage": lambda: y.untyped_storage(),
        "dlpack": lambda: torch.from_dlpack(y.detach()),
        "data": lambda: y.data,
        "set_": lambda: torch.empty(0, dtype=dtype).set_(y.detach()),
        "list of lists": lambda: [[y]],
        "grad_fn only": lambda: y.grad_fn,
        "weakly": lambda: None,
        "closure": lambda: lambda: y.detach(),
    }
    held = made[alias]()
    if alias != "closure":
        del y
    loss.backward()
    case.check(case.loss)
    if alias in ("grad_fn only", "weakly"):
        return
    if callable(held) and alias == "closure":
        held = held()
    if alias == "list of lists":
        held = held[0][0]
    if alias == "storage":
        held = torch.empty(0, dtype=dtype).set_(held, 0, before.shape)  # type: ignore[call-overload]
    now = torch.as_tensor(held).detach().reshape(-1)
    expected = {"slice": before[3:5], "t": before.t()}.get(alias, before).reshape(-1)
    assert torch.equal(now, expected)


@every_name
@every_dtype
def test_another_consumer_has_it(name: str, dtype: torch.dtype) -> None:
    def loss(y: Tensor) -> Tensor:
        # exp saves its own output, square and the product save y; they run before and after the layer's other consumer.
        return case.loss(y) + (y * y.detach()).sum() + y.square().sum() + y.tanh().sum()

    case = Case(name, dtype)
    loss(case.hidden()).backward()
    case.check(loss)


@every_name
def test_another_graph_has_it(name: str) -> None:
    case = Case(name)
    y = case.hidden()
    other = torch.randn(40, 50, requires_grad=True)
    product = other * y.detach()  # saves y, and outlives the layer's backward pass
    loss = case.loss(y)
    expected = y.detach().clone()
    del y
    loss.backward()
    case.check(case.loss)
    assert torch.equal(torch.autograd.grad(product.sum(), other)[0], expected)


@every_name
def test_backward_for_some_inputs_leaves_the_rest_for_later(name: str) -> None:
    case = Case(name)
    y = case.hidden()
    loss = case.loss(y)
    loss.backward(inputs=[case.w2], retain_graph=True)
    expected = case.eager(case.loss)
    torch.testing.assert_close(case.w2.grad, expected[3], **CLOSE[torch.float32])
    case.w2.grad = None
    before = y.detach().clone()
    loss.backward(inputs=[case.w, case.b], retain_graph=True)
    torch.testing.assert_close([case.w.grad, case.b.grad], expected[1:3], **CLOSE[torch.float32])
    assert torch.equal(y, before)
    del y
    loss.backward(inputs=[case.x])
    torch.testing.assert_close(case.x.grad, expected[0], **CLOSE[torch.float32])


@every_name
def test_backward_for_the_next_layer_only(name: str) -> None:
    # The layer's own node does not run; its saved output must survive for the call that follows.
    case = Case(name)
    y = case.hidden()
    head, tail = F.linear(y, case.w2).square().sum(), y.sum()
    del y
    head.backward(inputs=[case.w2])
    case.w2.grad = None
    tail.backward()
    case.check(lambda y: y.sum())


@every_name
@pytest.mark.parametrize("pack", ["identity", "clone", "collect"])
@pytest.mark.parametrize("around", ["layer", "next", "both"])
def test_saved_tensor_hooks_have_it(name: str, pack: str, around: str) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor.clone() if pack == "clone" else tensor

    case = Case(name)

    def run(hooked: bool, function: Callable[[], Tensor]) -> Tensor:
        if not hooked:
            return function()
        with saved_tensors_hooks(keep if pack != "identity" else lambda t: t, lambda t: t):
            return function()

    outputs = [run(around != "next", case.hidden)]
    loss = run(around != "layer", lambda: case.loss(outputs.pop()))
    copies = [t.clone() for t in kept]
    loss.backward()
    case.check(case.loss)
    assert all(torch.equal(t, c) for t, c in zip(kept, copies, strict=True))


@every_name
def test_a_hook_on_the_output_sees_it_unchanged(name: str) -> None:
    case = Case(name)
    seen: list[Tensor] = []
    y = case.hidden()
    before = y.detach().clone()
    alias = y.detach()
    y.register_hook(lambda _: seen.append(alias))
    loss = case.loss(y)
    del y
    loss.backward()
    case.check(case.loss)
    assert torch.equal(seen[0], before)


@every_name
def test_create_graph_keeps_it(name: str) -> None:
    case = Case(name)
    y = case.hidden()
    before = y.detach().clone()
    grads = torch.autograd.grad(case.loss(y), case.leaves, create_graph=True)
    torch.testing.assert_close(list(grads), case.eager(case.loss), **CLOSE[torch.float32])
    assert torch.equal(y, before)
    again = torch.autograd.grad(grads[0].square().sum(), case.leaves)
    assert all(bool(g.isfinite().all()) for g in again)
    assert torch.equal(y, before)


@every_name
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_may_keep_it(name: str, use_reentrant: bool) -> None:
    case = Case(name)
    held: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        y = fl.dense_bias_act(x, case.w, case.b, name)
        held.append(y.detach())
        return F.linear(y, case.w2).square().sum()

    checkpoint(block, case.x, use_reentrant=use_reentrant).backward()
    case.check(case.loss)
    assert len(held) == 2
    torch.testing.assert_close(held[0], held[1])


@every_name
def test_the_incoming_gradient_is_never_written(name: str) -> None:
    case = Case(name)
    dy = torch.randn(40, 50)
    before = dy.clone()
    # A residual add hands one tensor to both of its consumers.
    y = case.hidden()
    other = torch.randn(40, 50, requires_grad=True)
    (y + other).backward(dy)
    assert torch.equal(dy, before)
    assert torch.equal(other.grad, before)  # type: ignore[arg-type]


@every_name
def test_in_place_outputs_are_somebody_elses_too(name: str) -> None:
    base = torch.randn(30, 40, requires_grad=True) * 1
    y = fl.bias_act(base, None, name, inplace=True)
    before = y.detach().clone()
    y.sum().backward()
    assert torch.equal(base, before)


@every_name
def test_threads_backward_at_once(name: str) -> None:
    cases = [Case(name) for _ in range(4)]
    errors: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            for _ in range(5):
                case.loss(case.hidden()).backward()
                case.check(case.loss)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_first_question_may_come_in_any_mode() -> None:
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta"), saved_tensors_hooks(id, id)):
        buffer_reuse._users_when_alone.cache_clear()
        with mode:
            alone = buffer_reuse._users_when_alone()
        assert alone is not None
        buffer_reuse._users_when_alone.cache_clear()
        assert buffer_reuse._users_when_alone() == alone


@every_name
def test_three_dimensions(name: str) -> None:
    # The layer works on two and returns a view.
    torch.manual_seed(0)
    x, w = torch.randn(4, 10, 12, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    expected = torch.autograd.grad(resolve(name).plain(F.linear(x, w)).sum(), (x, w))
    for hold in (True, False):
        y = fl.dense_bias_act(x, w, None, name)
        before = y.detach().clone()
        loss = y.sum()
        if not hold:
            del y
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), expected, **CLOSE[torch.float32])
        assert not hold or torch.equal(y, before)


def test_nothing_leaks() -> None:
    gc.collect()
    case = Case("gelu")
    y = case.hidden()
    storage = y.untyped_storage()._weak_ref()
    loss = case.loss(y)
    loss.backward()
    del y, loss
    assert torch.UntypedStorage._expired(storage)  # type: ignore[attr-defined]
    torch.UntypedStorage._free_weak_ref(storage)  # type: ignore[attr-defined]


# --- memory that torch does not own -----------------------------------------------------------------------------------


def test_arrays_of_numpy_are_not_overwritten() -> None:
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    b = torch.zeros(64, requires_grad=True)
    y = fl.bias_act(torch.from_numpy(array), b, "gelu", inplace=True)
    before = array.copy()
    loss = (y * 3).sum()
    del y
    loss.backward()
    assert np.array_equal(array, before)


def test_files_in_memory_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    torch.randn(64 * 64).numpy().tofile(path)
    b = torch.zeros(64, requires_grad=True)
    y = fl.bias_act(
        torch.from_file(str(path), shared=True, size=64 * 64).view(64, 64).detach(), b, "gelu", inplace=True
    )
    loss = (y * 3).sum()
    del y
    before = np.fromfile(path)
    loss.backward()
    assert np.array_equal(np.fromfile(path), before)
