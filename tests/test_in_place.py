"""Results of medium size: the activation is torch's own in-place operation, which saves its result and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pairs import covering
from plans import plans_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.activations import KEPT_BY_TORCH, definitions, resolve
from fusedlayers.memory import saved_bytes


@pytest.fixture(autouse=True)
def all_is_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SMALL_BYTES", 1 << 10)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 1 << 30)


IN_PLACE = [row.name for row in definitions() if resolve(row.name).in_place is not None]


@pytest.mark.parametrize("row", definitions(), ids=lambda row: row.name)
def test_the_table_says_what_saves_its_result(row: Any) -> None:
    activate = row.native.activate_
    if activate is None:
        assert resolve(row.name).in_place is None
        return
    z = torch.randn(100, requires_grad=True)

    def in_place(t: Tensor) -> Tensor:
        return activate(t * 1, **row.parameters)

    y, kept = in_place(z), saved_bytes(in_place, z, exclude=[z])
    result = getattr(y.grad_fn, "_saved_result", None)
    saves_result = kept == 400 and result is not None and result.data_ptr() == y.data_ptr()
    # celu_ saves its result, but rounds 1 / alpha to float32.
    assert (saves_result and row.name != "celu") == row.native.saves_result == (resolve(row.name).in_place is not None)


class Subject(NamedTuple):
    """An operation with an activation, the shapes of its tensors, and the operation alone by PyTorch."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    operation: Callable[..., Tensor]
    takes_residual: bool = True


SUBJECTS = {
    "dense": Subject(fl.dense_bias_act, ((30, 12), (40, 12), (40,)), F.linear),
    "dense, one dimension": Subject(fl.dense_bias_act, ((12,), (1024, 12), (1024,)), F.linear),
    "dense, three dimensions": Subject(fl.dense_bias_act, ((5, 6, 12), (40, 12), (40,)), F.linear),
    "conv": Subject(fl.conv_bias_act, ((4, 3, 9, 9), (8, 3, 3, 3), (8,)), F.conv2d),
    "conv, no batch": Subject(fl.conv_bias_act, ((3, 99), (8, 3, 3), (8,)), F.conv1d),
    "bias": Subject(
        lambda x, _w, b, activation, residual: fl.bias_act(x, b, activation),
        ((30, 40), (1,), (40,)),
        lambda x, w, b: x + b,
        takes_residual=False,
    ),
}
DTYPES = (torch.float32, torch.bfloat16)
GRID = covering(list(SUBJECTS), IN_PLACE, DTYPES, (False, True))


@pytest.mark.parametrize(("subject", "name", "dtype", "adds"), GRID)
def test_it_is_what_the_function_computes(
    subject: str, name: str, dtype: torch.dtype, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients to the bit, second derivatives as PyTorch's; one buffer beside what the operation saves."""
    call, shapes, operation, takes_residual = SUBJECTS[subject]
    x, w, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    z = operation(x, w, b)
    residual = torch.randn_like(z).requires_grad_() if adds and takes_residual else None
    sources = [t for t in (x, b, residual) if t is not None]
    dy = torch.randn_like(z)

    def results(y: Tensor, *, twice: bool) -> list[Tensor]:
        first = torch.autograd.grad(y, sources, dy, create_graph=twice)
        second = torch.autograd.grad([d.square().sum() for d in first], sources) if twice else ()
        return [y, *first, *second]

    own = partial(call, activation=name, residual=residual)
    (found,) = plans_of(own, x, w, b)
    assert (found.path, found.saved) == ("in_place", "output")
    got = results(own(x, w, b), twice=False)
    kept = saved_bytes(own, x, w, b, exclude=[x, w, b])
    assert kept == saved_bytes(operation, x, w, b, exclude=[x, w, b]) + z.numel() * z.itemsize
    if dtype is torch.float32:
        summed = z if residual is None else z + residual
        expected = results(resolve(name).plain(summed), twice=True)
        torch.testing.assert_close(results(own(x, w, b), twice=True), expected, rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 0)
    assert plans_of(own, x, w, b)[0].path == "fused"
    assert all(map(torch.equal, got, results(own(x, w, b), twice=False)))


@pytest.mark.parametrize("name", IN_PLACE)
def test_contexts(name: str) -> None:
    module, x = fl.FusedDenseAct(12, 40, name), torch.randn(30, 12, requires_grad=True)
    plain, dy = resolve(name).plain, torch.randn(30, 40)

    def eager(x: Tensor) -> Tensor:
        return plain(F.linear(x, module.weight, module.bias))

    def gradients(y: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, [x, *module.parameters()], dy, **options)

    expected = gradients(eager(x))
    torch.testing.assert_close(gradients(checkpoint(module, x, use_reentrant=False)), expected)
    y = module(x)
    torch.testing.assert_close(gradients(y, retain_graph=True), expected)
    torch.testing.assert_close(gradients(y), expected)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    with saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    torch.testing.assert_close(gradients(y), expected)
    assert sum(t.shape == y.shape for t in packed) == 1
    y = module(x)
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(y)
    # Autograd looks at no version under hooks; PyTorch's own layer has saved z, if it is none of these.
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        y = module(x)
    y.detach().zero_()
    if name not in KEPT_BY_TORCH:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(y)


@pytest.mark.parametrize("subject", ["dense", "dense, three dimensions", "conv"])
def test_under_autocast(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, shapes, operation, _ = SUBJECTS[subject]
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    own = partial(call, activation="elu")
    with torch.autocast("cpu", torch.bfloat16):
        assert plans_of(own, x, w, b)[0].path == "in_place"
        y = own(x, w, b)
        kept = saved_bytes(own, x, w, b, exclude=[x, w, b])
        assert kept == saved_bytes(operation, x, w, b, exclude=[x, w, b]) + y.numel() * y.itemsize
        monkeypatch.setattr(sizes, "MEDIUM_BYTES", 0)
        assert plans_of(own, x, w, b)[0].path == "fused"
        expected = own(x, w, b)
    dy = torch.randn_like(y)
    assert y.dtype is torch.bfloat16 and torch.equal(y, expected)
    gradients = [torch.autograd.grad(t, (x, w, b), dy) for t in (y, expected)]
    assert all(map(torch.equal, *gradients))


def test_bias_act() -> None:
    x, b = torch.randn(30, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    (found,) = plans_of(fl.bias_act, x, b, "elu")
    assert found.path == "in_place"
    before = x.detach().clone()
    y = fl.bias_act(x, b, "elu")
    assert torch.equal(y, F.elu(x + b)) and torch.equal(x, before)
    # Without a bias the argument would be overwritten, and with inplace=True it is to be.
    for call in (lambda: plans_of(fl.bias_act, x, None, "elu"), lambda: plans_of(fl.elu, x)):
        assert call()[0].path == "fused"
    assert torch.equal(fl.elu(x), F.elu(x)) and torch.equal(x, before)
    assert plans_of(fl.bias_act, x * 1, b, "elu", inplace=True)[0].path == "fused"


def test_large_and_other_results() -> None:
    x = torch.randn(30, 12, requires_grad=True)
    for name in ("gelu", "softplus", "celu", "relu6", "hardtanh"):  # relu6_ saves a copy
        assert plans_of(fl.FusedDenseAct(12, 40, name), x)[0].path == "fused"
    for save in ("input", "recompute"):
        assert plans_of(fl.FusedDenseAct(12, 40, "relu", save=save), x)[0].path == "fused"
    assert plans_of(fl.FusedDenseAct(12, 40, nn.LeakyReLU(-0.5)), x)[0].path == "fused"


def test_the_sizes_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SMALL_BYTES", 512 << 10)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 2 << 20)
    paths = [plans_of(fl.FusedDenseAct(8, 1024, "elu"), torch.randn(n, 8))[0].path for n in (127, 128, 511, 512)]
    assert paths == ["composite", "in_place", "in_place", "fused"]
    small = torch.randn(127, 8)
    assert plans_of(fl.FusedDenseAct(8, 1024, "elu", save="output"), small)[0].path == "in_place"
