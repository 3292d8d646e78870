"""Invertible modules in what surrounds them: autograd's other features, and the library's own; and what might break the
mechanism in ``invertible/inversion.py``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from inverting import EXACT, Scale, assert_exact, dense, error, loss_of, net, plain, randn, step, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl


def mixed() -> fl.InvertibleSequential:
    return fl.InvertibleSequential(
        fl.InvertibleLinear(8, 8),
        fl.InvertibleBatchNorm1d(8),
        fl.AdditiveCoupling(dense(), dense()),
        fl.InvertibleActivation("leaky_relu"),
        fl.AffineCoupling(nn.Linear(4, 8), nn.Linear(4, 8)),
        Scale(),
    ).double()


def compared(use: Callable[[Any, Tensor], Any], module: Any = None) -> None:
    """``use(module, x)``, and of its plain copy, have equal values and gradients."""
    module = mixed() if module is None else module
    pair = module, plain(module)
    found, wanted = (step(lambda x, m=m: use(m, x), (randn(6, 8),), list(m.parameters())) for m in pair)
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


def test_function_transforms_see_plain_operations() -> None:
    module = mixed().eval()
    other = plain(module)
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


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast(enabled: bool) -> None:
    """It is replayed, also where the backward pass is itself under another one."""
    module, x = mixed().float(), randn(6, 8, dtype=torch.float32).requires_grad_()
    found, seen = [], []
    for part in module.modules():
        part.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for inner in (module, plain(module)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = loss_of(inner(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
            found.append(torch.autograd.grad(loss, [x, *inner.parameters()]))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predicted = module.check(x).gradient_error
    assert {*seen} == {enabled}
    # One pass computes in bfloat16: from inputs that err by float32's rounding the same, but where rounding turns.
    assert error(*found) <= 4 * predicted + 2**-6


def test_an_inverse_runs_under_its_own_autocast() -> None:
    """In the recomputation of the call before it, which ran under another one."""
    module, x = net(2), randn(6, 8, dtype=torch.float32).requires_grad_()
    y = module[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        z = module[1](y)
    found = torch.autograd.grad(loss_of(y.sin()), x)
    assert z.requires_grad and error(found, torch.autograd.grad(loss_of(plain(module)[0](x).sin()), x)) <= 1e-5


# Dynamo looks for a gradient of what comes out of a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled() -> None:
    module, x = net().double(), randn(2, 8)
    for module.invertible in (False, True):
        compiled = torch.compile(lambda x: module(x.sin()).cos(), backend="aot_eager")
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


def _auxiliary_after(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    z = m[1](y)
    return z, y.square().sum()


def _two_users(m: Any, x: Tensor) -> Any:
    y = m[0](x)
    return m[1](y), m[2](y)


def _residual(m: Any, x: Tensor) -> Any:
    for inner in m:
        x = x + inner(x)
    return x


def _chunks_between(m: Any, x: Tensor) -> Any:
    a, b = m[0](x).chunk(2, 0)
    return m[1](a), m[2](b)


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


USES = [f for name, f in list(globals().items()) if name.startswith("_") and getattr(f, "__code__", None)]


@pytest.mark.parametrize("use", [f for f in USES if not f.__name__.startswith("__")], ids=lambda f: f.__name__)
def test_uses(use: Any) -> None:
    compared(use, net().double())


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


@pytest.mark.parametrize("no_grad", [False, True])
def test_an_output_that_is_edited_in_place_raises(no_grad: bool) -> None:
    """Of one that another call computes edits do not matter, where autograd does not see them."""

    def edited(place: int, call: Any) -> list[Tensor | None]:
        def function(x: Tensor) -> Tensor:
            y = call(lambda x: 2 * x + 1, lambda y: (y - 1) / 2, 1 * x)
            z = call(torch.exp, torch.log, y)
            with torch.set_grad_enabled(not no_grad):
                (y, z)[place].mul_(3)
            return z

        return step(function, (randn(4),))

    def ours(function: Any, inverse: Any, x: Tensor) -> Any:
        return fl.invertible_checkpoint(function, x, inverse=inverse)

    with pytest.raises(RuntimeError, match="modified inplace"):  # what torch says of what a Function returned
        edited(1, ours)
    if no_grad:
        wanted = step(lambda x: (2 * x + 1).exp(), (randn(4),))
        assert worst(edited(0, ours), wanted) <= EXACT
    y = net()(randn(2, 8, dtype=torch.float32))
    loss = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"AdditiveCoupling: output 0 was modified by an in-place operation.*clone"):
        loss.backward()


def test_a_second_backward_pass() -> None:
    module, x = net().double(), randn(2, 8).requires_grad_()
    loss = loss_of(module(x))
    found = [torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=again) for again in (True, True, False)]
    assert all(error(found[0], other) == 0 for other in found[1:])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


# --- going on after errors, threads -----------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Raises in the run that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs_until_error = [-1]

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
    y = module(randn(2, 8)).sum()
    after = torch.get_rng_state()
    network.runs_until_error[0] = run % 2
    with pytest.raises(KeyError):
        y.backward(retain_graph=True) if run > 1 else module(randn(2, 8))
    network.runs_until_error[0] = -1
    if run > 1:
        assert torch.equal(after, torch.get_rng_state())
        y.backward()
    assert_exact(module, randn(2, 8))


def test_threads() -> None:
    """Several at once, each backward pass in another one than its forward pass."""
    module, x = net().double(), randn(2, 8)
    wanted = step(plain(module), (x,))
    found: list[Any] = []

    def work(_: int) -> None:
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            backward = threading.Thread(target=loss_of(y).backward, kwargs={"inputs": [leaf]})
            backward.start()
            backward.join()
            found.append([y.detach(), leaf.grad])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(found) == 20 and all(worst(one, wanted) <= EXACT for one in found)
