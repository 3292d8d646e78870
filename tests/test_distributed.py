"""PyTorch's own engines for several processes, around fused layers: losses and gradients are those of one process with
the whole batch, and no process keeps more for its backward pass than without fused layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.recipes import region

# --- the model -------------------------------------------------------------------------------------------------------

ROWS, WIDTH, HIDDEN = 32, 32, 64


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner[0] if len(inner) == 1 else nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def of_layers() -> nn.Module:
    torch.manual_seed(0)
    dense = [(nn.Linear(WIDTH, WIDTH), activation) for activation in (nn.Mish(), nn.Tanh())]
    return nn.Sequential(Residual(*dense[0]), Residual(MLP()), Residual(GatedMLP()), Residual(*dense[1]))


def of_fused_modules() -> nn.Module:
    dense = [(fl.FusedDenseAct(WIDTH, WIDTH, activation), nn.Identity()) for activation in ("mish", "tanh")]
    mlp, gated = fl.FusedMLP(WIDTH, HIDDEN), fl.FusedGatedMLP(WIDTH, HIDDEN)
    model = nn.Sequential(Residual(*dense[0]), Residual(mlp), Residual(gated), Residual(*dense[1]))
    model.load_state_dict(of_layers().state_dict())
    return model


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


# --- the engines ------------------------------------------------------------------------------------------------------


class Engine(NamedTuple):
    """How a model is spread over the processes of a mesh of data parallel and of tensor parallel dimensions.

    Attributes:
        wrap: gives the spread model.
        tensor: how many processes share a layer: 1, or "all", or 2.
        spares: whether a fused model keeps less than a plain one: checkpoints keep as little of either, and activations
            of DTensors are torch's.
        autocast: whether it runs under autocast to bfloat16.
    """

    wrap: Callable[[Any, DeviceMesh], nn.Module]
    tensor: Any = 1
    spares: bool = True
    autocast: bool = False

    def mesh(self, count: int) -> DeviceMesh:
        tensor = count if self.tensor == "all" else self.tensor
        return init_device_mesh("cpu", (count // tensor, tensor), mesh_dim_names=("data", "tensor"))


def ddp(model: Any, mesh: DeviceMesh) -> nn.Module:
    return DDP(model)


def ddp_of_static_graph(model: Any, mesh: DeviceMesh) -> nn.Module:
    return DDP(model, gradient_as_bucket_view=True, static_graph=True)


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for part in model:
        fully_shard(part, mesh=mesh["data"], **options)
    return fully_shard(model, mesh=mesh["data"], **options)


def sharded_in_bfloat16(model: Any, mesh: DeviceMesh) -> nn.Module:
    return sharded(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def by_tensor(model: Any, mesh: DeviceMesh, use_local_output: bool = True) -> nn.Module:
    """``use_local_output``: whether activations get this process's part of the hidden layer, or a DTensor."""
    columns, rows = ColwiseParallel(use_local_output=use_local_output), RowwiseParallel()
    whole = fl.FusedColwiseParallel(output_layouts=Replicate())
    is_fused = isinstance(model[3].inner[0], fl.FusedDenseAct)  # whose activation needs the sum over all processes
    plan = {
        "0.inner.0": whole,
        **{"1.inner.fc1": columns, "1.inner.fc2": rows},
        **{"2.inner.gate_proj": columns, "2.inner.up_proj": columns, "2.inner.down_proj": rows},
        "3.inner.0": whole if is_fused else RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tensor"], plan)


def by_dtensor(model: Any, mesh: DeviceMesh) -> nn.Module:
    return by_tensor(model, mesh, use_local_output=False)


def sharded_by_tensor(model: Any, mesh: DeviceMesh) -> nn.Module:
    return sharded(by_tensor(model, mesh), mesh)


def checkpointed(wrap: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda model, mesh: wrap(nn.Sequential(*map(checkpoint_wrapper, model)), mesh)


ENGINES = {
    "ddp": Engine(ddp),
    "ddp, static graph": Engine(ddp_of_static_graph),
    "ddp, autocast": Engine(ddp, autocast=True),
    "ddp, checkpointed": Engine(checkpointed(ddp), spares=False),
    "fsdp": Engine(sharded),
    "fsdp, bfloat16": Engine(sharded_in_bfloat16),
    "fsdp, checkpointed": Engine(checkpointed(sharded), spares=False),
    "tensor parallel": Engine(by_tensor, tensor="all"),
    "tensor parallel, DTensors": Engine(by_dtensor, tensor="all", spares=False),
    "fsdp, tensor parallel": Engine(sharded_by_tensor, tensor=2),
}


def _fuse_then_wrap(engine: Engine, mesh: DeviceMesh, x: Tensor) -> nn.Module:
    model = of_layers()
    fl.fuse(model)
    return engine.wrap(model, mesh)


def _wrap_then_fuse(engine: Engine, mesh: DeviceMesh, x: Tensor) -> nn.Module:
    model = engine.wrap(of_layers(), mesh)
    fl.fuse(model)
    return model


#: Without fused layers, and the ways to have them.
PLAIN = "plain"
MODELS: dict[str, Callable[[Engine, DeviceMesh, Tensor], nn.Module]] = {
    PLAIN: lambda engine, mesh, x: engine.wrap(of_layers(), mesh),
    "fused modules": lambda engine, mesh, x: engine.wrap(of_fused_modules(), mesh),
    "fuse, then wrap": _fuse_then_wrap,
    "wrap, then fuse": _wrap_then_fuse,
}
FUSED = [name for name in MODELS if name != PLAIN]


# --- in the processes -------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Of a step: the loss over all processes, the gradients, and what this process keeps for its backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor]
    saved_bytes: int


def _second_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients after a step of an optimizer, which has changed what the processes have a part of."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of().backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.detach().double(), {_own_name(name): _whole(p.grad) for name, p in model.named_parameters()}


def _own_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def _whole(gradient: Any) -> Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).double()


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _in_processes(model: nn.Module, x: Tensor, autocast: bool = False) -> Found:
    def loss_of() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return _loss(model, x)

    kept = saved_bytes(loss_of, exclude=[x, *model.buffers()])
    loss, gradients = _second_step(model, loss_of)
    dist.all_reduce(loss)
    return Found(loss / dist.get_world_size(), gradients, kept)


def _everything(rank: int, count: int) -> dict[tuple[str, str], Found]:
    region.LEAST_BYTES = 1 << 6
    found = {}
    for name, engine in ENGINES.items():
        mesh = engine.mesh(count)
        x = batch().chunk(mesh["data"].size())[mesh.get_local_rank("data")]
        for kind, make in MODELS.items():
            found[name, kind] = _in_processes(make(engine, mesh, x), x, engine.autocast)
    _check_that_whole_state_dicts_are_plain(ENGINES["fsdp"])
    _check_that_dense_layers_are_sharded_by_rows(init_device_mesh("cpu", (count,)))
    return found


def _check_that_whole_state_dicts_are_plain(engine: Engine) -> None:
    whole = StateDictOptions(full_state_dict=True)
    mesh = engine.mesh(dist.get_world_size())
    before, model = of_layers().state_dict(), MODELS["fuse, then wrap"](engine, mesh, batch())
    state = get_model_state_dict(model, options=whole)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)
    set_model_state_dict(model, {name: 2 * tensor for name, tensor in before.items()}, options=whole)
    assert all(torch.equal(p.full_tensor(), 2 * before[name]) for name, p in model.named_parameters())  # type: ignore[attr-defined]


def _check_that_dense_layers_are_sharded_by_rows(mesh: DeviceMesh) -> None:
    x, count = torch.randn(6, WIDTH), mesh.size()
    for bias, activation in product((True, False), ("gelu", nn.PReLU(1))):
        layer = fl.FusedDenseAct(WIDTH, 64, activation, bias)
        with torch.no_grad():
            expected = layer(x).chunk(count, -1)[mesh.get_local_rank()]
        model = parallelize_module(nn.Sequential(copy.deepcopy(layer)), mesh, {"0": fl.FusedColwiseParallel()})
        sharded: Any = model[0]
        parameters: dict[str, Any] = dict(sharded.named_parameters())
        assert parameters.keys() == dict(layer.named_parameters()).keys()
        for name, parameter in parameters.items():
            assert parameter.placements == (Replicate() if name == "activation.weight" else Shard(0),)
        torch.testing.assert_close(model(x), expected)
    with pytest.raises(NotImplementedError, match=r"nn\.Linear"):
        parallelize_module(nn.Sequential(nn.Conv1d(1, 1, 1)), mesh, {"0": fl.FusedColwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"nn\.Linear"):
        parallelize_module(nn.Sequential(fl.FusedDenseAct(4, 4)), mesh, {"0": ColwiseParallel()})


# --- in this process --------------------------------------------------------------------------------------------------


# One test, for the processes take long to start, and each of pytest's would start them for a share of several tests.
def test_losses_gradients_and_saved_bytes_of_each_process(tmp_path: Path) -> None:
    count = 4  # two groups of two where a mesh has two dimensions
    found = processes.results(_everything, count, tmp_path)
    wrong = [f"process {rank}: {what}" for rank, of_process in enumerate(found) for what in _wrong(of_process, count)]
    assert not wrong, "\n".join(wrong)


def _wrong(found: dict[tuple[str, str], Found], count: int) -> Iterator[str]:
    exact = _second_step_in_one_process(of_layers(), batch())
    for name, kind in product(ENGINES, FUSED):
        ours, torchs = found[name, kind], found[name, PLAIN]
        # The loss is a mean of numbers that autocast rounds, each in another way.
        loss = torch.finfo(torch.bfloat16).eps / 2 / math.sqrt(batch().numel()) if ENGINES[name].autocast else 0.0
        if not _are_as_exact(_errors(ours, exact), _errors(torchs, exact), loss):
            yield f"{name}, {kind}: errors {_errors(ours, exact)}, torch's {_errors(torchs, exact)}"
        is_less, is_as_much = ours.saved_bytes < torchs.saved_bytes, ours.saved_bytes == torchs.saved_bytes
        if not is_less and (ENGINES[name].spares or not is_as_much):
            yield f"{name}, {kind}: {ours.saved_bytes} bytes saved, by torch {torchs.saved_bytes}"


Step = tuple[Tensor, dict[str, Tensor]]


def _second_step_in_one_process(model: nn.Module, x: Tensor) -> Step:
    """In float64."""
    return _second_step(model.double(), lambda: _loss(model, x.double()))


def _errors(found: Found, exact: Step) -> tuple[float, float]:
    """Of the loss and of the gradients, relative."""
    loss, gradients = exact
    assert found.gradients.keys() == gradients.keys()
    ours, wanted = (torch.cat([g.flatten() for g in of.values()]) for of in (found.gradients, gradients))
    return float((found.loss - loss).abs() / loss), float((ours - wanted).norm() / wanted.norm())


def _are_as_exact(errors: tuple[float, float], torchs: tuple[float, float], of_loss: float = 0.0) -> bool:
    rounding, allowed = torch.finfo(torch.float32).eps, (of_loss, 0.0)
    return all(
        ours <= 2 * theirs + 4 * rounding + more for ours, theirs, more in zip(errors, torchs, allowed, strict=True)
    )
