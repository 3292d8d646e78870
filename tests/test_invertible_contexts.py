"""Invertible modules in what surrounds them: autograd's other features, the library's own, PyTorch's engines; and what
might break the mechanism in ``invertible/call.py``."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from inverting import (
    EXACT,
    Log,
    Scale,
    assert_exact,
    dense,
    error,
    linears,
    loss_of,
    net,
    plain,
    randn,
    step,
    steps,
    worst,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl


def mixed() -> fl.InvertibleSequential:
    torch.manual_seed(0)
    return fl.InvertibleSequential(
        fl.InvertibleLinear(8, 8),
        fl.InvertibleBatchNorm1d(8),
        fl.AdditiveCoupling(dense(), dense()),
        fl.InvertibleActivation("leaky_relu"),
        fl.AffineCoupling(nn.Linear(4, 8), nn.Linear(4, 8)),
        Scale(),
    ).double()


def compared(use: Callable[[Any, Tensor], Any], module: Any = None, x: Tensor | None = None) -> None:
    """``use(module, x)``, and of its plain copy, have equal values and gradients."""
    module = mixed() if module is None else module
    x = randn(6, 8) if x is None else x
    other = plain(module)
    found, wanted = (step(lambda x, m=m: use(m, x), (x,), list(m.parameters())) for m in (module, other))
    assert worst(found, wanted) <= EXACT


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_second_derivatives() -> None:
    def penalty(module: Any, x: Tensor) -> Tensor:
        y = module(1 * x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return dx.square().sum() + y.sum()

    compared(penalty)
    compared(penalty, net().double())
    for name in ("tanh", "sigmoid", "softplus"):
        compared(penalty, fl.InvertibleSequential(Scale(), fl.InvertibleActivation(name)).double())


def test_gradcheck() -> None:
    x = randn(2, 8).requires_grad_()
    assert torch.autograd.gradcheck(net(2).double(), x)
    assert torch.autograd.gradgradcheck(net(1).double(), x)


def test_function_transforms_see_plain_operations() -> None:
    module, other = mixed().eval(), plain(mixed().eval())
    x = randn(6, 8)
    for transformed in (
        lambda m: torch.func.grad(lambda x: m(x).sin().sum())(x),
        lambda m: torch.func.vmap(m)(x[:, None]),
        lambda m: torch.func.jacrev(m)(x[:1]),
        lambda m: torch.func.vmap(torch.func.grad(lambda x: m(x[None]).sum()))(x),
    ):
        torch.testing.assert_close(transformed(module), transformed(other))

    def energy(parameters: Any) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    found = torch.func.grad(energy)({name: 2 * p.detach() for name, p in module.named_parameters()})
    assert all(g.abs().sum() > 0 for g in found.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # torch's decompositions use it
        tangents = [torch.func.jvp(m, (x,), (x,))[1] for m in (module, other)]
        torch.testing.assert_close(*tangents)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(module(dual)).tangent, tangents[0])


def test_functional_call_outside_of_transforms() -> None:
    """The second run finds the parameters that the first one found."""
    module = net().double()
    other = plain(module)
    x = randn(2, 8)
    found = []
    for inner in (module, other):
        parameters = {name: (1.5 * p.detach()).requires_grad_() for name, p in inner.named_parameters()}
        y = torch.func.functional_call(inner, parameters, (x,))
        found.append(torch.autograd.grad(loss_of(y), list(parameters.values())))
    assert worst(*found) <= EXACT


def test_parameters_that_change_between_the_passes_raise() -> None:
    """As of plain autograd: gradients would be those of other weights."""
    for module in (net().double(), fl.InvertibleSequential(Scale(), fl.InvertibleLinear(8, 8)).double()):
        loss = loss_of(module(randn(2, 8)))
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            loss.backward()


def test_saved_tensor_hooks() -> None:
    def on_cpu(module: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return module(x).sin()

    compared(on_cpu)

    def halved(module: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return module(x).sin()

    compared(halved)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        mixed()(randn(6, 8))


def test_in_a_checkpoint() -> None:
    compared(lambda module, x: checkpoint(module, 1 * x, use_reentrant=False), net().double())
    compared(lambda module, x: module(checkpoint(module, module(x), use_reentrant=False)), net().double())
    module, x = net().double(), randn(2, 8).requires_grad_()
    checkpoint(module, 1 * x, use_reentrant=True).sum().backward()  # which refuses grad
    assert x.grad is not None
    assert worst([x.grad], torch.autograd.grad(plain(module)(x).sum(), x)) <= EXACT


def test_in_sublinear_ones() -> None:
    compared(lambda module, x: fl.sublinear(module, x))
    module = fl.SublinearSequential(nn.Linear(8, 8), mixed(), nn.Tanh(), mixed(), segments=2).double()
    assert_exact(module, randn(6, 8))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = fl.SublinearSequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), segments=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    blocks = [fl.AdditiveCoupling(Inside(), Inside()) for _ in range(2)]
    assert_exact(fl.InvertibleSequential(*blocks).double(), randn(6, 8))


@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast(backward_too: bool) -> None:
    module = mixed().float()
    x = randn(6, 8, dtype=torch.float32)
    gradients = []
    for inner in (module, plain(module)):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(inner(leaf))
            if backward_too:
                loss.backward()
        if not backward_too:
            loss.backward()
        gradients.append([leaf.grad, *(p.grad for p in inner.parameters())])
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predicted = module.check(x).gradient_error
    assert error(*gradients) <= 4 * predicted + torch.finfo(torch.bfloat16).eps


# Dynamo looks for a gradient of what comes out of a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled() -> None:
    module = net().double()
    compiled = torch.compile(lambda x: module(x.sin()).cos(), backend="aot_eager")
    x = randn(2, 8)
    found = step(compiled, (x,), list(module.parameters()))
    assert worst(found, step(lambda x: module(x.sin()).cos(), (x,), list(module.parameters()))) <= EXACT
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: module(x), backend="aot_eager", fullgraph=True)(x.requires_grad_())
    torch._dynamo.reset()
    module.checkpoint = False
    torch.compile(lambda x: module(x), backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_tensor_and_module_hooks() -> None:
    """Hooks on intermediates see the gradients, and may change them."""

    def hooked(module: Any, x: Tensor) -> Tensor:
        y = module[0](x)
        y.register_hook(lambda dy: 2 * dy)
        y = module[1](y)
        y.register_hook(lambda dy: dy.sin())
        return module[2](y)

    compared(hooked, net().double())

    def of_modules(module: Any, x: Tensor) -> Tensor:
        (
            module[0].register_forward_hook(lambda module, inputs, y: 2 * y),
            module[1].register_forward_pre_hook(lambda module, inputs: tuple(3 * x for x in inputs)),
            module[1].register_full_backward_hook(lambda module, dx, dy: tuple(2 * d for d in dx)),
            module[2].f.register_forward_hook(lambda module, inputs, y: y.sin()),
        )
        return module(x)

    compared(of_modules, net().double())


# --- branches ---------------------------------------------------------------------------------------------------------


def _auxiliary_before(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    auxiliary = y.square().sum()
    return m[1](y), auxiliary


def _auxiliary_after(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    z = m[1](y)
    return z, y.square().sum()


def _auxiliary_alone(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    m[1](y)
    return y.square().sum()


def _two_users(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    return m[1](y), m[2](y)


def _two_users_of_which_one_is_used(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    first, second = m[1](y), m[2](y)
    return second + 0 * first.detach()


def _residual(m: Any, x: Tensor) -> Any:
    for inner in m:
        x = x + inner(x)
    return x


def _dense_connections(m: Any, x: Tensor) -> Any:
    seen = [x]
    for inner in m:
        seen.append(inner(sum(seen)))  # type: ignore[arg-type]
    return tuple(seen[1:])


def _chunks_between(m: Any, x: Tensor) -> Any:
    a, b = m[0](x).chunk(2, 0)
    return m[1](a), m[2](b)


def _detached_between(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    return m[1](y.detach()), m[2](y)


def _backward_in_parts(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    z = m[1](y)
    (dy,) = torch.autograd.grad(loss_of(z), y, retain_graph=True)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    return z + dx


def _part_of_two_streams(m: Any, x: Tensor) -> Any:
    a, b = x.chunk(2, 1)
    for inner in m:
        a, b = inner(a, b)
    return b


def _streams_swapped(m: Any, x: Tensor) -> Any:
    a, b = x.chunk(2, 1)
    for inner in m:
        b, a = inner(a, b)
    return a, b


def _streams_mixed(m: Any, x: Tensor) -> Any:
    a, b = m[0](*x.chunk(2, 1))
    c, d = m[1](b, b)
    e, f = m[2](a, c)
    return d, e, f


def _forwards_before_backwards(m: Any, x: Tensor) -> Any:
    first, second = m(x), m(2 * x)
    loss_of(first).backward(retain_graph=True)
    loss_of(second).backward(retain_graph=True)
    return first.sin() + second


def _backwards_before_forwards(m: Any, x: Tensor) -> Any:
    first = m(x)
    second = m(first)
    loss_of(second).backward(retain_graph=True)
    return first, m(x)


USES = [f for name, f in list(globals().items()) if name.startswith("_") and getattr(f, "__code__", None)]


@pytest.mark.parametrize("use", [f for f in USES if not f.__name__.startswith("__")], ids=lambda f: f.__name__)
def test_uses(use: Any) -> None:
    compared(use, net().double())


def test_inputs_and_outputs_edited_in_between() -> None:
    """What nobody needs any more may be edited, where plain autograd would need it and raise."""

    def use(m: Any, x: Tensor, edit: bool) -> Tensor:
        z = 1 * x
        y = m[0](z)
        out = m[1](y)
        if edit:
            with torch.no_grad():
                z.zero_(), y.zero_()
        return out

    module, x = linears(2, 8).double(), randn(6, 8)
    parameters = list(module.parameters())
    found, wanted = (step(lambda x, e=edit: use(module, x, e), (x,), parameters) for edit in (True, False))
    assert worst(found, wanted) <= EXACT
    other = plain(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(lambda x: use(other, x, True), (x,), list(other.parameters()))


def test_mixed_wishes_for_gradients() -> None:
    """Inputs, and parameters, of which only some require gradients."""
    for frozen in (["0."], ["1."], [".f."], [".g."], ["0.", "1.", "2.g"], ["2."]):
        module = net().double()
        for name, p in module.named_parameters():
            p.requires_grad_(not any(part in name for part in frozen))
        assert_exact(module, randn(2, 8))
        other = plain(module)
        a, b = randn(2, 4), randn(2, 4, seed=2)
        for wanted in ((True, False), (False, True), (False, False)):
            outputs = [
                m(*(x.clone().requires_grad_(w) for x, w in zip((a, b), wanted, strict=True))) for m in (module, other)
            ]
            assert [y.requires_grad for y in outputs[0]] == [y.requires_grad for y in outputs[1]]
            if not any(y.requires_grad for y in outputs[0]):
                continue
            gradients = [
                torch.autograd.grad(loss_of(y), [p for p in m.parameters() if p.requires_grad], allow_unused=True)
                for y, m in zip(outputs, (module, other), strict=True)
            ]
            assert worst(*gradients) <= EXACT


def test_empty_batches() -> None:
    for module in (
        net().double(),
        linears(3, 8).double(),
        fl.InvertibleSequential(fl.InvertibleActivation("elu")).double(),
    ):
        found, wanted = steps(module, randn(0, 8))
        assert all(a is None or a.shape == b.shape for a, b in zip(found, wanted, strict=True))  # type: ignore[union-attr]


def test_shared_parameters_and_modules() -> None:
    shared = dense()
    blocks = [fl.AdditiveCoupling(shared, dense()), fl.AdditiveCoupling(dense(), shared)]
    module = fl.InvertibleSequential(*blocks, blocks[0]).double()
    assert_exact(module, randn(2, 8))
    assert module.check(randn(2, 8)).is_within
    linear = fl.InvertibleLinear(8, 8).double()
    other = fl.InvertibleLinear(8, 8)
    other.weight = linear.weight
    assert_exact(fl.InvertibleSequential(linear, other.double(), linear), randn(2, 8))


def test_long_chains() -> None:
    """Longer than Python's stack is deep, also where the first output alone has a loss."""
    module, x = fl.InvertibleSequential(*(Scale(0.0) for _ in range(1200))).double(), randn(3).requires_grad_()
    y = first = module[0](x)
    for inner in module[1:]:
        y = inner(y)
    (dx,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(dx, 2 * x)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, 2 * x)


def test_lazy_networks_draw_their_dropout_again() -> None:
    """In the first call the numbers that initialize parameters come before the dropout's."""
    torch.manual_seed(0)
    module = fl.InvertibleSequential(
        fl.AdditiveCoupling(nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5))), fl.AdditiveCoupling(dense())
    ).double()
    x = randn(16, 8).requires_grad_()
    torch.manual_seed(1)
    y = module(x)
    found = torch.autograd.grad(loss_of(y), [x, *module.parameters()])
    torch.manual_seed(1)
    torch.empty(4, 4, dtype=torch.float64).uniform_(), torch.empty(4, dtype=torch.float64).uniform_()
    again = module(x)
    assert torch.equal(y, again)
    assert worst(found, torch.autograd.grad(loss_of(again), [x, *module.parameters()])) <= EXACT


# --- going on after errors, threads -----------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Raises in the run that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs_until_error = Log([-1])

    def forward(self, x: Tensor) -> Tensor:
        self.runs_until_error[0] -= 1
        if self.runs_until_error[0] == -1:
            raise KeyError("sometimes")
        return self.linear(x).sin() * (1 + torch.rand_like(x))


@pytest.mark.parametrize("run", [0, 1, 2, 3])
def test_going_on_after_an_error(run: int) -> None:
    """Two forward runs, then two for the backward pass."""
    network = Sometimes()
    module = fl.InvertibleSequential(*(fl.AdditiveCoupling(network) for _ in range(2))).double()
    assert_exact(module, randn(2, 8))
    state = torch.get_rng_state()
    network.runs_until_error[0] = run
    with pytest.raises(KeyError):
        module(randn(2, 8)).sum().backward()
    if run in (2, 3):
        torch.set_rng_state(state)
        network.runs_until_error[0] = -1
        y = module(randn(2, 8))
        after = torch.get_rng_state()
        network.runs_until_error[0] = run - 2
        with pytest.raises(KeyError):
            y.sum().backward(retain_graph=True)
        assert torch.equal(after, torch.get_rng_state())
        network.runs_until_error[0] = -1
        module.zero_grad()
        y.sum().backward()
        found = [p.grad for p in module.parameters()]
        torch.set_rng_state(state)
        other = plain(module)
        other.zero_grad()
        other(randn(2, 8)).sum().backward()
        assert worst(found, [p.grad for p in other.parameters()]) <= EXACT
    assert_exact(module, randn(2, 8))


def test_threads() -> None:
    """Forward passes in one, backward passes in another, and several at once."""
    module = net().double()
    x = randn(2, 8)
    wanted = step(plain(module), (x,))
    found: list[Any] = []

    def work() -> None:
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            (dx,) = torch.autograd.grad(loss_of(y), leaf)
            found.append([y.detach(), dx])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(worst(one, wanted) <= EXACT for one in found)

    leaf = x.clone().requires_grad_()
    loss = loss_of(module(leaf))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert worst([leaf.grad], wanted[1:]) <= EXACT


# --- the library's own ------------------------------------------------------------------------------------------------


def test_memory_report() -> None:
    module, x = net(4, 32), randn(64, 64, dtype=torch.float32)
    kept = fl.memory_report(module, x)
    whole = fl.memory_report(plain(module), x)
    assert kept.saved_bytes < whole.saved_bytes / 4


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies() -> None:
    module = fl.InvertibleSequential(
        *mixed(), fl.InvertibleFlatten(), fl.orthogonal(fl.InvertibleLinear(8, 8))
    ).double()
    module[0].invertible = False
    module[1].seed = False
    x = randn(6, 8)
    module(x)  # what a call leaves in a module must not be in the way
    wanted = step(module, (x,), list(module.parameters()))
    parametrized = module[:-1]  # torch does not pickle these
    copies: list[Any] = [copy.deepcopy(module)]
    for other in copies:
        assert worst(step(other, (x,), list(other.parameters())), wanted) <= EXACT
        assert not other[0].invertible and not other[1].seed
    loaded = pickle.loads(pickle.dumps(parametrized))
    assert worst(*(step(m, (x,), list(m.parameters())) for m in (parametrized, loaded))) <= EXACT
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = copy.deepcopy(module)
    for p in fresh.parameters():
        nn.init.ones_(p)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert worst(step(fresh, (x,), list(fresh.parameters())), wanted) <= EXACT


# --- engines ----------------------------------------------------------------------------------------------------------


def _batch() -> Tensor:
    return randn(8, 8)


def _trained(model: nn.Module, shares: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the second step, which sees parameters of which others have changed a part."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():  # in which modules run as well, and an engine's hooks on them
        assert all(model(x).isfinite().all() for x in shares)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([model(x).sin().square().mean() for x in shares]).mean().backward()
        gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        optimizer.step()
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}  # type: ignore[misc, union-attr]


def _sharded(model: Any, by_network: bool) -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        if by_network:
            for network in (block.f, block.g):
                fully_shard(network, mesh=mesh)
        else:
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


ENGINES: dict[str, Callable[[Any], Any]] = {
    "ddp": DDP,
    "ddp, static graph": lambda model: DDP(model, static_graph=True),
    "ddp, plain": lambda model: DDP(plain(model)),
    "fsdp": lambda model: _sharded(model, False),
    "fsdp, by network": lambda model: _sharded(model, True),
    "fsdp, whole": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ),
}


def _engines(rank: int, count: int) -> dict[str, Any]:
    share = _batch().chunk(count)[rank]
    found = {}
    for name, wrap in ENGINES.items():
        try:
            found[name] = _trained(wrap(net().double()), [share])
        except Exception as error:
            found[name] = repr(error)  # type: ignore[assignment]
    return found


def test_engines(tmp_path: Path) -> None:
    wanted = _trained(plain(net().double()), list(_batch().chunk(2)))
    for found in processes.results(_engines, 2, tmp_path):
        for name, gradients in found.items():
            assert not isinstance(gradients, str), (name, gradients)
            assert gradients.keys() == wanted.keys(), name
            assert worst(list(gradients.values()), list(wanted.values())) <= EXACT, name
