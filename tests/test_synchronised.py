"""Batch norm over a process group: in several processes it computes what it computes in one with all of the data."""

import copy
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import batch_norm

CHANNELS = 5
#: How many images each process has.
SHARES = (2, 5)


def _layer(activation: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(CHANNELS, **options)
    if norm.affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        with torch.no_grad():
            norm.weight[0] = 0.0
    return fl.FusedBatchNormAct2d.from_modules(norm, activation)


def _data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = sum(SHARES), CHANNELS, 6, 7
    x, residual, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return (x * 3 + 20).float(), residual.float(), dy.float()


ACTIVATIONS: dict[str, Any] = {"relu": "relu", "elu": "elu", "silu": "silu", "none": None, "snake": torch.sin}
CASES = [(name, with_residual, save) for name in ACTIVATIONS for with_residual in (False, True) for save in ("auto",)]
CASES += [("elu", False, "recompute"), ("elu", False, "input"), ("relu", False, "output")]


def _run(layer: Any, x: Tensor, residual: Tensor | None, dy: Tensor) -> list[Tensor]:
    """Two steps: the output, the gradients and the buffers."""
    found: list[Tensor] = []
    for step in range(2):
        leaves = [t if t is None else (t + step).requires_grad_() for t in (x, residual)]
        layer.zero_grad()
        y = layer(*leaves)
        y.backward(dy)
        found += [y.detach(), *(t.grad for t in (*leaves, *layer.parameters()) if t is not None)]
    return [*found, *(buffer.clone() for buffer in layer.buffers())]


def _in_process(rank: int, count: int) -> dict[Any, Any]:
    batch_norm.WORTH_IT = 1
    found: dict[Any, Any] = {}
    x, residual, dy = (t.split(SHARES)[rank] for t in _data())
    for name, with_residual, save in CASES:
        layer = _layer(ACTIVATIONS[name])
        layer.process_group, layer.save = dist.group.WORLD, save
        found[name, with_residual, save] = _run(layer, x, residual if with_residual else None, dy)
    for options in ({"momentum": None}, {"track_running_stats": False}, {"affine": False}):
        layer = _layer("elu", **options)
        layer.process_group = dist.group.WORLD
        found[str(options)] = _run(layer, x, None, dy)

    layer = _layer("silu")
    layer.process_group = dist.group.WORLD
    single = layer.float()(x[:1, :, :1, :1].float())
    found["one value each"] = [single.isfinite().all().detach()]
    wide = torch.randn(8, CHANNELS, 32, 32)
    fresh = fl.FusedBatchNormAct2d(CHANNELS, "silu", process_group=dist.group.WORLD)
    found["saved"] = [torch.tensor(saved_bytes(lambda t: fresh(t + 0), wide.requires_grad_()) / wide.nbytes)]
    for dtype in (torch.float32, torch.bfloat16):
        layer = _layer("gelu").to(dtype)
        layer.process_group = dist.group.WORLD
        found[dtype] = _run(layer, *(t.to(dtype) for t in (x, residual, dy)))
    layer = _layer("silu")
    layer.process_group = dist.group.WORLD
    try:
        x = x.clone().requires_grad_()
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    except RuntimeError as error:
        found["second"] = [str(error)]
    layer.eval()
    found["eval"] = [layer(x).detach(), *(layer.get_buffer(name).clone() for name in ("running_mean", "running_var"))]
    with torch.no_grad():
        found["no gradients"] = [layer.train()(x)]
    empty = _layer("elu").train()
    empty.process_group = dist.group.WORLD
    part = (x[:0] if rank == 0 else x).detach().requires_grad_()
    y = empty(part)
    y.sum().backward()
    found["empty"] = [y.detach(), part.grad, empty.weight.grad]
    alone = [dist.new_group([other]) for other in range(len(SHARES))][rank]
    single = fl.FusedBatchNormAct2d(CHANNELS, "relu", process_group=alone)
    try:
        single(torch.ones(1, CHANNELS, 1, 1))
    except ValueError as error:
        found["one value in all"] = [str(error)]
    single(torch.ones(0, CHANNELS, 3, 3))
    found["alone"] = [single.running_mean, single.running_var]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return processes.results(_in_process, len(SHARES), tmp_path_factory.mktemp("synchronised"))


def _assert_like_one_process(found: list[list[Tensor]], layer: Any, with_residual: bool) -> None:
    """Tensors with a batch are parts of it; gradients of parameters add up; buffers agree. As far from float64 as
    PyTorch is in one process, or twice: the order of sums is another."""
    exact, eager = (_run(*_in_one(layer, dtype, with_residual)) for dtype in (torch.float64, torch.float32))
    count = len(list(layer.buffers()))
    for i, (truth, alone) in enumerate(zip(exact, eager, strict=True)):
        parts = [part[i] for part in found]
        if truth.dim() == 4:
            wholes = [torch.cat(parts)]
        elif i >= len(exact) - count:
            wholes = parts
        else:
            wholes = [sum(parts[1:], parts[0])]
        for whole in wholes:
            assert whole.dtype is alone.dtype
            error, torchs = (float((found.double() - truth.double()).norm()) for found in (whole, alone))
            assert error <= 2 * torchs + 2e-6 * float(truth.double().norm()), i


def _in_one(layer: Any, dtype: torch.dtype, with_residual: bool) -> tuple[Any, Tensor, Tensor | None, Tensor]:
    x, residual, dy = (t.to(dtype) for t in _data())
    return copy.deepcopy(layer).to(dtype), x, residual if with_residual else None, dy


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_compute_what_one_does(found: list[dict[Any, Any]], case: Any) -> None:
    name, with_residual, save = case
    layer = _layer(ACTIVATIONS[name])
    layer.save = "recompute" if save == "recompute" else layer.save
    _assert_like_one_process([part[case] for part in found], layer, with_residual)


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str)
def test_hyperparameters_mean_what_they_do_in_one(found: list[dict[Any, Any]], options: dict[str, Any]) -> None:
    _assert_like_one_process([part[str(options)] for part in found], _layer("elu", **options), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(found: list[dict[Any, Any]], dtype: torch.dtype) -> None:
    """As far from float64 as one process is, or half as much again: the order of sums is another."""
    layer = _layer("gelu")
    data = [t.to(dtype) for t in _data()]
    exact = _run(copy.deepcopy(layer).double(), *(t.double() for t in data))
    single = _run(layer.to(dtype), *data)
    parts = [part[dtype] for part in found]
    for i, (truth, alone) in enumerate(zip(exact, single, strict=True)):
        if truth.dim() != 4 or not truth.is_floating_point():
            continue
        ours = torch.cat([part[i] for part in parts])
        assert ours.dtype is dtype
        assert (ours - truth).norm() <= 1.5 * (alone - truth).norm() + torch.finfo(dtype).eps * truth.norm()


def test_each_process_may_have_one_value(found: list[dict[Any, Any]]) -> None:
    assert all(bool(part["one value each"][0]) for part in found)


def test_a_process_alone_has_plain_batch_norm(found: list[dict[Any, Any]]) -> None:
    for part in found:
        assert "FusedBatchNormAct2d: one value per channel has no variance" in part["one value in all"][0]
        assert all(statistic.isfinite().all() for statistic in part["alone"])


def test_one_tensor_is_kept(found: list[dict[Any, Any]]) -> None:
    assert all(1 < float(part["saved"][0]) < 1.01 for part in found)


def test_second_derivatives_are_refused(found: list[dict[Any, Any]]) -> None:
    assert all("FusedBatchNormAct2d: statistics of a process group have no second" in p["second"][0] for p in found)


def test_in_eval_mode_and_without_gradients(found: list[dict[Any, Any]]) -> None:
    layer = _layer("silu")
    x, *_ = _data()
    expected = copy.deepcopy(layer).train()(x)
    torch.testing.assert_close(torch.cat([part["no gradients"][0] for part in found]), expected)
    for part, share in zip(found, x.split(SHARES), strict=True):
        y, mean, var = part["eval"]
        torch.testing.assert_close(y, F.silu(F.batch_norm(share, mean, var, layer.weight, layer.bias)))
    torch.testing.assert_close(found[0]["eval"][1:], found[1]["eval"][1:])


def test_a_batch_may_be_empty(found: list[dict[Any, Any]]) -> None:
    x = _data()[0].split(SHARES)[1].requires_grad_()
    layer = _layer("elu")
    y = layer(x)
    y.sum().backward()
    none, all_of_it = (part["empty"] for part in found)
    assert none[0].shape[0] == 0 and none[1].shape[0] == 0 and not none[2].any()
    for ours, truth in zip(all_of_it, (y.detach(), x.grad, layer.weight.grad), strict=True):
        torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("group", ["world", 3])
def test_what_is_no_process_group_is_refused(group: Any) -> None:
    with pytest.raises(TypeError, match="FusedBatchNormAct1d: process_group must be a group of"):
        fl.FusedBatchNormAct1d(CHANNELS, process_group=group)
