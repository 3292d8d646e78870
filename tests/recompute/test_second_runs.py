"""A second run finds what the first one found, and leaves what there is: buffers, modes, frozen parameters; and where
it cannot, it says so. Invertible modules inside of it hold nothing; PyTorch's engines may be around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import inverting
import processes
import pytest
import torch
from recomputing import same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.utils import step

Container = Callable[..., nn.Module]
CONTAINERS: dict[str, Container] = {
    "all": lambda *modules: fl.SublinearSequential(*modules, segments=[len(modules) - 1, 1]),
    "cheap": lambda *modules: fl.SublinearSequential(*modules, segments=[len(modules) - 1, 1], recompute="cheap"),
}


@pytest.fixture(params=CONTAINERS)
def container(request: pytest.FixtureRequest) -> Container:
    return CONTAINERS[request.param]


def grads(loss: Tensor, *wanted: Any) -> list[Tensor]:
    return list(
        torch.autograd.grad(loss, [t for w in wanted for t in (w.parameters() if hasattr(w, "parameters") else [w])])
    )


def twice(make: Callable[[Container], list[Tensor]], container: Container) -> None:
    """The container does what ``nn.Sequential`` does."""
    results = []
    for kind in (nn.Sequential, container):
        torch.manual_seed(0)
        results.append(make(kind))
    same(results[1], results[0])


def test_parameters_that_are_frozen_or_thawed_meanwhile(container: Container) -> None:
    # A discriminator is frozen while a generator is trained; the shapes are such that torch would not notice.
    def step(kind: Container, before: bool) -> list[Tensor]:
        judge = kind(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        made, z = nn.Linear(16, 16), torch.randn(16, 16)
        judge(made(z))
        judge.requires_grad_(before)
        loss = judge(made(z)).square().mean()
        judge.requires_grad_(not before)
        found = grads(loss, made)
        assert all(p.requires_grad is not before for p in judge.parameters())
        return found

    for before in (False, True):
        twice(lambda kind, before=before: step(kind, before), container)


def test_modes_that_change_meanwhile(container: Container) -> None:
    def step(kind: Container) -> list[Tensor]:
        net = kind(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))
        x = torch.randn(4, 8)
        y = net(x)
        net.eval()
        found = grads(y.square().sum(), net)
        assert not any(module.training for module in net.modules())
        return found

    twice(step, container)


class Rotating(nn.Module):
    """Reads a buffer that it does not write to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angle", torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.angle.sum()).sin()


def test_buffers_that_are_edited_meanwhile(container: Container) -> None:
    """Those that are exchanged do not matter."""
    rotating, x = Rotating(), torch.randn(4, 8, requires_grad=True)
    net = container(rotating, nn.Tanh(), nn.Linear(8, 8))
    (expected,) = grads(net(x).sum(), x)
    y = net(x).sum()
    rotating.angle = torch.zeros(2, 2)
    assert torch.equal(*grads(y, x), expected) and rotating.angle.sum() == 0
    y = net(x).sum()
    rotating.angle.add_(1)
    with pytest.raises(RuntimeError, match="Rotating: the buffer angle was modified by an in-place operation"):
        y.backward()


def test_tensors_that_a_function_closes_over_must_not_be_edited() -> None:
    w, x = nn.Parameter(torch.rand(4)), torch.randn(4, requires_grad=True)
    for y in (
        fl.sublinear(lambda x: (x * w).tanh() * w, x),
        fl.invertible_checkpoint(lambda x: x * w.exp(), x, inverse=lambda y: y / w.exp()),
    ):
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="closes over, was modified by an in-place operation"):
            y.sum().backward()


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def test_cached_parametrizations_run_plainly(container: Container) -> None:
    def step(kind: Container) -> list[Tensor]:
        linear = nn.Linear(8, 8)
        parametrize.register_parametrization(linear, "weight", Low())
        net, x = kind(linear, nn.Tanh(), linear, nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
        with parametrize.cached():
            y = net(x)
        return grads(y.square().sum(), net)

    twice(step, container)


def test_cached_parametrizations_of_invertible_modules() -> None:
    linear = fl.orthogonal(fl.InvertibleLinear(4, 4))
    net, x = fl.InvertibleSequential(linear, fl.InvertibleActivation("elu"), linear), torch.randn(3, 4)
    with parametrize.cached():
        y = net(x)
    found = grads(y.square().sum(), net)
    net.checkpoint = False
    torch.testing.assert_close(found, grads(net(x).square().sum(), net))


def test_weights_that_a_hook_computes() -> None:
    layer = torch.nn.utils.spectral_norm(fl.InvertibleLinear(4, 4).double())
    xs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    results = []
    for invertible in (False, True):
        layer.load_state_dict(state)
        layer.checkpoint = layer.invertible = invertible
        first, _ = layer(xs[0]), layer(xs[1])
        results.append(grads(first.square().sum(), xs[0], layer))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [2, 8])
def test_invertible_children_of_what_runs_again_hold_nothing(count: int) -> None:
    parts = [module for _ in range(count) for module in (fl.InvertibleLinear(64, 64), nn.Tanh())]
    net, x = fl.SublinearSequential(*parts, nn.Identity(), segments=[2 * count, 1]), torch.randn(32, 64)
    found = grads(net(x).square().sum(), net)
    assert saved_bytes(net, x, exclude=[net, x]) == 0
    assert saved_bytes(lambda x: fl.sublinear(nn.Sequential(*parts), x), x, exclude=[net, x]) == 0
    torch.testing.assert_close(found, grads(nn.Sequential(*parts)(x).square().sum(), net), rtol=1e-4, atol=1e-5)


def test_invertible_parts_of_couplings_hold_nothing() -> None:
    networks = (nn.Sequential(fl.InvertibleLinear(32, 32), nn.Tanh()) for _ in range(8))
    chain = fl.InvertibleSequential(*(fl.AdditiveCoupling(next(networks), next(networks)) for _ in range(4)))
    x = torch.randn(16, 64).requires_grad_()
    assert saved_bytes(lambda x: chain(1 * x), x, exclude=[chain]) == x.nbytes


def test_a_chain_in_what_runs_again_holds_its_output_alone() -> None:
    for depth in (2, 8):
        chain = fl.InvertibleSequential(
            *(fl.AdditiveCoupling(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(depth))
        )
        x = torch.randn(16, 64)
        net = fl.SublinearSequential(nn.Linear(64, 64), nn.Tanh(), chain, nn.Tanh(), nn.Linear(64, 64), segments=[4, 1])
        expected = grads(nn.Sequential(*net)(x).square().sum(), net)
        torch.testing.assert_close(grads(net(x).square().sum(), net), expected)
        # The segment's output, and the chain's.
        assert saved_bytes(net, x, exclude=[net, x]) == 2 * x.nbytes
        net(x)
        assert net.plan is not None and net.plan.peak_bytes <= 5 * x.nbytes


@pytest.mark.parametrize("segments", [None, 4, [1, 3, 8, 3, 1]])
def test_children_that_write_over_a_view_of_the_segments_input(segments: Any) -> None:
    def make(kind: Container) -> list[Tensor]:
        parts = [
            [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU(inplace=True)] for _ in range(4)
        ]
        net = kind(*(module for part in parts for module in part))
        return grads(net(torch.randn(2, 4, 8, 8)).square().sum(), net)

    twice(make, lambda *modules: fl.SublinearSequential(*modules, segments=segments))


# --- several processes ------------------------------------------------------------------------------------------------


def _each(net: Any) -> nn.Module:
    for child in net:
        fully_shard(child)
    return fully_shard(net)


def _networks(net: Any) -> nn.Module:
    for coupling in net:
        fully_shard(coupling.f), fully_shard(coupling.g)
    return fully_shard(net)


def _blocks() -> list[nn.Module]:
    torch.manual_seed(0)  # they are the same in all processes
    return [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(6)]


def _fitted() -> nn.Module:
    step.ROUNDS = 1
    model = nn.Sequential(*_blocks()).double()
    report = fl.fit(model, inverting.randn(256, 8), fraction=0.5)
    assert report.recomputed and report.measured.bytes <= report.budget_bytes
    return model


ENGINES: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DDP,
    "ddp, static graph": lambda net: DDP(net, static_graph=True),
    "fsdp": fully_shard,
    "fsdp, each child": _each,
    "fsdp, by network": _networks,
}
SUBJECTS: dict[str, Container] = {
    "all": lambda: fl.SublinearSequential(*_blocks(), segments=3),
    "cheap": lambda: fl.SublinearSequential(*_blocks(), segments=3, recompute="cheap"),
    "fit": _fitted,
    "invertible": lambda: inverting.net(),
}


def _trained(net: nn.Module, shares: Sequence[Tensor]) -> list[Tensor]:
    """Parameters after some steps with the mean of the shares' losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.no_grad():  # in which modules run as well, and an engine's hooks on them
        assert all(net(share).isfinite().all() for share in shares)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([net(share).sin().square().mean() for share in shares]).mean().backward()
        optimizer.step()
    values = [parameter.detach() for parameter in net.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def _in_processes(rank: int, count: int) -> dict[tuple[str, str], list[Tensor]]:
    share = inverting.randn(8, 8).chunk(count)[rank]
    pairs = [(subject, engine) for subject in SUBJECTS for engine in ENGINES]
    pairs = [pair for pair in pairs if pair[0] == "invertible" or pair[1] != "fsdp, by network"]
    return {pair: _trained(ENGINES[pair[1]](SUBJECTS[pair[0]]().double()), [share]) for pair in pairs}


def test_engines(tmp_path: Path) -> None:
    shares = inverting.randn(8, 8).chunk(2)
    invertible = _trained(inverting.plain(inverting.net()).double(), shares)
    blocks = _trained(nn.Sequential(*_blocks()).double(), shares)
    for found in processes.results(_in_processes, 2, tmp_path):
        assert len(found) == 4 * len(ENGINES) - 3
        for (subject, _), values in found.items():
            expected = invertible if subject == "invertible" else blocks
            torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)
