"""What invertible modules offer, and what is said of wrong inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inverting import EXACT, Scale, assert_exact, dense, linears, net, plain, randn, step, steps, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes


class Rotate(fl.InvertibleModule):
    """Two tensors, and a number that is none."""

    reversible = True

    def function(self, a: Tensor, b: Tensor, angle: float = 0.5) -> tuple[Tensor, Tensor]:
        c, s = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        return a * c - b * s, a * s + b * c

    def inverse(self, a: Tensor, b: Tensor, angle: float = 0.5) -> tuple[Tensor, Tensor]:
        return self.function(a, b, -angle)


class Noisy(fl.InvertibleModule):
    """The inverse draws what the function drew."""

    def function(self, x: Tensor) -> Tensor:
        return x * (1 + torch.rand_like(x)) + torch.rand_like(x).sin()

    def inverse(self, y: Tensor) -> Tensor:
        scale = 1 + torch.rand_like(y)
        return (y - torch.rand_like(y).sin()) / scale


class Powers(fl.InvertibleModule):
    """One output is for the inverse only."""

    num_outputs = 1

    def function(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.square(), x.sign().to(torch.int8)

    def inverse(self, y: Tensor, sign: Tensor | None = None) -> Tensor:
        return y.sqrt() if sign is None else y.sqrt() * sign


# --- what there is ---------------------------------------------------------------------------------------------------


def test_without_checkpoint_autograd_saves() -> None:
    scale = Scale()
    scale.checkpoint = False
    scale(randn(3)).sum().backward()
    assert scale.runs == ["function"]
    module = fl.InvertibleSequential(scale, Scale(), Scale())
    module.checkpoint = False
    x = randn(64).requires_grad_()
    assert saved_bytes(module, x) == saved_bytes(plain(module), x)


def test_without_inverses_inputs_are_saved_and_functions_run_again() -> None:
    scale, x = Scale(), randn(64).requires_grad_()
    scale.invertible = False
    assert saved_bytes(lambda x: scale(1 * x), x, exclude=[scale]) == x.nbytes
    scale.runs.clear()
    scale(x).sum().backward()
    assert scale.runs == ["function", "function"]
    scale.invertible = True
    scale(x).sum().backward()
    assert scale.runs[2:] == ["function", "inverse", "function"]
    # Nothing inside of a container is inverted, whatever its flags.
    module = fl.InvertibleSequential(*(Scale() for _ in range(3)))
    module.invertible = False
    assert saved_bytes(lambda x: module(1 * x), x, exclude=[module]) == x.nbytes
    module(x).sum().backward()
    assert [part.runs.count("inverse") for part in module] == [0, 0, 0]
    assert not module[1:].invertible  # type: ignore[union-attr]
    # One in the middle holds its input, from which errors do not add up, and the chain its output.
    for flag in ("checkpoint", "invertible"):
        chain, x = linears(3).double(), randn(4, 16)
        setattr(chain[1], flag, False)
        assert saved_bytes(lambda x, chain=chain: chain(1 * x), x, exclude=[chain]) == 2 * x.nbytes
        assert [row.drift > 0 for row in chain.check(x).rows] == [True, False, True]
        assert_exact(chain, x)


@pytest.mark.parametrize(
    "make",
    [
        Noisy,
        lambda: fl.InvertibleBatchNorm1d(16),
        lambda: fl.InvertibleActivation("gelu"),
        lambda: fl.InvertibleSequential(fl.InvertibleBatchNorm1d(16), Noisy(), fl.InvertibleLinear(16, 16)),
        lambda: fl.AdditiveCoupling(net(1, 4), dense(8)),  # there are modules with inverses inside
    ],
)
def test_without_inverses_gradients_are_autograds_to_the_bit(make: Any) -> None:
    module, x = make().double(), randn(4, 16)
    module.invertible = False
    found, wanted = steps(module, x)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    chain = fl.InvertibleSequential(fl.InvertibleLinear(16, 16), module, fl.InvertibleLinear(16, 16)).double()
    assert_exact(chain, x)
    checkpoint(chain, x.requires_grad_(), use_reentrant=False).sum().backward()


def test_values_of_the_inverse_that_the_caller_does_not_see() -> None:
    class Roots(fl.InvertibleModule):
        """``Powers``, the other way round."""

        reversible, num_inputs = True, 1
        function, inverse = Powers.inverse, Powers.function  # type: ignore[assignment]

    roots, powers, x = Roots().reverse(), Powers(), randn(64)
    assert torch.equal(roots(x), powers(x))
    for module in (roots, powers):
        assert_exact(module, x)
        assert saved_bytes(lambda x, module=module: module(1 * x), x.requires_grad_()) == x.nbytes + 64
        x = x.detach()
    chain = fl.InvertibleSequential(Roots(), Scale()).reverse()
    assert_exact(chain, x)
    assert_exact(fl.InvertibleSequential(powers, chain), x)
    assert torch.equal(fl.InvertibleSequential(Scale(), Roots()).inverse(x), Scale().inverse(x.square()))
    assert repr(roots) == "Roots(reversed=True)"
    roots.num_inputs = None
    assert len(roots(x)) == 2 and repr(roots) == "Roots(reversed=True, num_inputs=None)"


def test_reversing() -> None:
    scale, x = Scale(), randn(3)
    y = scale(x)
    assert scale.call_function == scale.function and scale.call_inverse == scale.inverse
    assert scale.reverse() is scale and scale.reversed
    assert scale.call_function == scale.inverse and scale.call_inverse == scale.function
    torch.testing.assert_close(scale(y), x)
    assert_exact(scale, x)
    assert not scale.reverse(False).reversed and not scale.reverse(mode=False).reversed
    with pytest.raises(RuntimeError, match="Noisy is not reversible: its inverse cannot stand for its function"):
        Noisy().reverse()
    assert not Noisy().reverse(False).reversed


def test_reversing_a_container() -> None:
    x = randn(2, 8)
    module = fl.InvertibleSequential(*net(), fl.InvertibleActivation("tanh")).double()
    y = module(x)
    module.reverse()
    torch.testing.assert_close(module(y), x)
    assert all(inner.reversed for inner in module)
    assert_exact(module, y.detach())
    assert module.check(y.detach()).is_within
    torch.testing.assert_close(module.reverse()(x), y)
    with pytest.raises(RuntimeError, match="InvertibleSequential is not reversible"):
        fl.InvertibleSequential(Scale(), Noisy()).reverse()


@pytest.mark.parametrize("count", [1, None, -1])
def test_num_outputs(count: int | None) -> None:
    class Some(Powers):
        num_outputs = count

    x = randn(6)
    assert isinstance(Some()(x), Tensor) if count else len(Some()(x)) == 2
    assert_exact(Some(), x)


def test_check() -> None:
    assert (report := Scale().check(randn(3))) and report.drift < 1e-15 and report.dtype == "float64"
    assert str(report).endswith(f"gradients err by {report.gradient_error:.1e}, within the tolerance")

    class Wrong(Scale):
        def inverse(self, y: Tensor) -> Tensor:
            return y * self.log_scale.exp()

    with pytest.warns(UserWarning, match=r"Wrong.check: in float64, over 1 modules.*Most is lost in Wrong"):
        report = Wrong().check(randn(3))
    assert not report and report.gradient_error > 0.01

    class Doubled(fl.InvertibleModule):
        """Its gradient does not depend on the input."""

        def function(self, x: Tensor) -> Tensor:
            return 2 * x

        def inverse(self, y: Tensor) -> Tensor:
            return y / 3

    with pytest.warns(UserWarning, match=r"Doubled.check"):
        report = Doubled().check(randn(3))
    assert not report and report.gradient_error == 0 and report.drift == pytest.approx(1 / 3)

    class Changing(Scale):
        def function(self, x: Tensor) -> Tensor:
            return super().function(x) + len(self.runs)

    with pytest.warns(UserWarning, match=r"Changing.check"):
        assert not Changing().check(randn(3))
    report = fl.InvertibleSequential(Scale(), net()).double().check(randn(2, 8))
    assert [row.name for row in report.rows] == ["0", "1.0", "1.1", "1.2"]
    assert report.to_dict()["rows"][0]["name"] == report.rows[0].name


def test_a_plain_call_without_gradients() -> None:
    scale, x = Scale(), randn(3).requires_grad_()
    with torch.no_grad():
        assert scale(x).grad_fn is None
    with torch.inference_mode():
        assert scale(x).is_inference()
    assert scale(x).grad_fn.name() == "InvertibleOutputBackward"
    assert torch.func.grad(lambda x: scale(x).sum())(x).equal(scale.log_scale.exp().expand(3).to(x.dtype))
    assert Scale().requires_grad_(False)(randn(3)).grad_fn is None


def test_each_output_requires_gradients_as_it_would() -> None:
    class Apart(fl.InvertibleModule):
        def function(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * a, 3 * b

        def inverse(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a / 2, b / 3

    a, b = Apart()(randn(3).requires_grad_(), randn(3))
    assert a.requires_grad and not b.requires_grad
    a, b = Apart()(randn(3), randn(3).requires_grad_())
    assert b.requires_grad and not a.requires_grad


def test_aliased_and_kept_inputs_can_be_read() -> None:
    x = randn(2, 6).requires_grad_()
    base = 1 * x
    view = base[:, :3]
    y = fl.invertible_checkpoint(torch.exp, view, inverse=torch.log)
    found = torch.autograd.grad((y + base[:, 3:] * view).sum(), x)
    wanted = torch.autograd.grad((x[:, :3].exp() + x[:, 3:] * x[:, :3]).sum(), x)
    assert worst(found, wanted) <= EXACT
    # One tensor twice, and the output is the input.
    assert_exact(fl.InvertibleSequential(fl.InvertibleIdentity(), fl.InvertibleIdentity()), randn(3))
    found, wanted = (step(lambda x, f=f: f(2 * x, 2 * x), (randn(3),)) for f in (Rotate(), Rotate().function))
    assert worst(found, wanted) <= EXACT

    def twice(module: Any) -> Any:
        def function(x: Tensor) -> Any:
            y = module[0](x)
            return module[1](y, y)

        return function

    modules = nn.ModuleList([Scale(), Rotate()])
    assert worst(step(twice(modules), (randn(3),)), step(twice(plain(modules)), (randn(3),))) <= EXACT


def test_arguments_that_are_no_tensors() -> None:
    a, b = randn(3), randn(3, seed=2)
    assert_exact(Rotate(), a, b, 0.25)

    class Gather(fl.InvertibleModule):
        """The order is an integer tensor, and the mode a string."""

        def function(self, x: Tensor, order: Tensor, mode: str) -> Tensor:
            assert mode == "rows"
            return 3 * x[order]

        def inverse(self, y: Tensor) -> Any:
            return (y[self.back] / 3,)

        back = torch.tensor([2, 0, 1])

    order = torch.tensor([1, 2, 0])
    assert_exact(Gather(), randn(3, 2), order, "rows")
    x = randn(3, 2).requires_grad_()
    y = Gather()(x, order, "rows")
    order.zero_()
    with pytest.raises(RuntimeError, match="Gather: input 1, which is saved, was modified by an in-place"):
        y.sum().backward()


def test_random_numbers_are_drawn_again() -> None:
    """By inverses, and by dropout in couplings; and afterwards the generator is where it would be."""
    module = fl.InvertibleSequential(
        Noisy(),
        *(fl.AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Dropout(0.3)) for _ in range(3)),
    ).double()
    assert_exact(module, randn(8, 8))
    states = []
    for inner in (module, plain(module)):
        torch.manual_seed(5)
        y = inner(randn(8, 8))
        torch.rand(3)  # drawn between the passes
        y.sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


IMAGES = randn(2, 8, 6, 6)
AS_TORCH: dict[str, tuple[Any, nn.Module]] = {
    "flatten": (fl.InvertibleFlatten(), nn.Flatten()),
    "unflatten": (fl.InvertibleFlatten(1, 2, unflattened=(2, 4)).reverse(), nn.Unflatten(1, (2, 4))),
    "shuffle": (fl.InvertiblePixelShuffle(2), nn.PixelShuffle(2)),
    "unshuffle": (fl.InvertiblePixelShuffle(2).reverse(), nn.PixelUnshuffle(2)),
    "pad": (fl.InvertiblePad((1, 2, 3, 0)), nn.ConstantPad2d((1, 2, 3, 0), 0.0)),
}


@pytest.mark.parametrize("name", AS_TORCH)
def test_reshaping_is_torchs(name: str) -> None:
    module, torchs = AS_TORCH[name]
    assert torch.equal(module(IMAGES), torchs(IMAGES))
    assert_exact(module, IMAGES)


def test_sequential() -> None:
    module = net(4)
    assert list(module.state_dict()) == list(nn.Sequential(*module).state_dict())
    assert len(module) == 4 and module[1] is list(module)[1] and module[-1] is module[3]
    assert isinstance(module[1:3], fl.InvertibleSequential) and next(iter(module[1:3].state_dict())).startswith("1.")
    module.append(Scale()).extend([Scale()])
    assert_exact(module.double(), randn(2, 8))
    nested = fl.InvertibleSequential(module, fl.InvertibleSequential(Scale(), module[0]))
    x = randn(2, 8)
    assert torch.equal(fl.InvertibleSequential()(x), x)
    assert nested.check(x).is_within
    assert_exact(nested, x)
    module.checkpoint = False
    part = module[1:]
    assert isinstance(part, fl.InvertibleSequential) and not part.checkpoint and part[0] is module[1]
    module[0] = nn.ReLU()
    with pytest.raises(TypeError, match="0 is a ReLU, which is not invertible"):
        module(x)


def test_orthogonal() -> None:
    layers: list[Any] = [fl.InvertibleLinear(4, 4), fl.InvertibleLinear(4, 6), fl.InvertibleConv2d(4, 4, 1)]
    for layer in layers:
        with torch.no_grad():
            layer.weight.mul_(3).add_(torch.rand_like(layer.weight))
        fl.orthogonal(layer.double())
        for p in layer.parameters():
            p.data.add_(torch.rand_like(p))
        weight = layer.weight.flatten(1)
        torch.testing.assert_close(weight.T @ weight, torch.eye(4, dtype=torch.float64))
        assert_exact(layer, randn(2, 4, 4, 4))

    for out in (4, 6):  # weight decay has left torch's own choice for those that are not square with a weight of zero
        layer = fl.orthogonal(fl.InvertibleLinear(4, out))
        optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.1)
        layer(randn(8, 4, dtype=torch.float32)).square().sum().backward()
        optimizer.step()
        torch.testing.assert_close(layer.weight.T @ layer.weight, torch.eye(4))


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "linear": (lambda: fl.InvertibleLinear(3, 2), ValueError, "2 outputs do not tell 3 inputs; out_features must be"),
    "conv": (lambda: fl.InvertibleConv2d(3, 3, 2), ValueError, "3 output channels.* 12 numbers.* at least 12"),
    "chain": (lambda: fl.InvertibleSequential(nn.ReLU()), TypeError, "0 is a ReLU, which is not invertible"),
    "coupling": (lambda: fl.AdditiveCoupling(torch.tanh), TypeError, "f must be an nn.Module, got"),  # type: ignore[arg-type]
    "coupling, shape": (
        lambda: fl.AdditiveCoupling(nn.Linear(2, 3).double())(randn(2, 2), randn(2, 2)),
        ValueError,
        r"to transform a stream of shape \(2, 2\), Linear must return a tensor of shape \(2, 2\), "
        r"but returned \(2, 3\)",
    ),
    "pad": (lambda: fl.InvertiblePad((1, -1)), ValueError, r"pad must be pairs .* negative, .* got \(1, -1\)"),
    "pad, a number": (lambda: fl.InvertiblePad(1), ValueError, r"as \(1, 1\) for the last dimension, got 1"),  # type: ignore[arg-type]
    "activation": (lambda: fl.InvertibleActivation("relu"), ValueError, "relu.*leaky_relu.*can be inverted"),
    "orthogonal": (lambda: fl.orthogonal(nn.BatchNorm1d(2)), ValueError, r"weight is no matrix, but has shape \(2,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_an_inverse_that_returns_too_few() -> None:
    class Short(Rotate):
        def inverse(self, *outputs: Any) -> Any:
            return super().inverse(*outputs)[0]

    a, b = Short()(randn(2).requires_grad_(), randn(2))
    with pytest.raises(RuntimeError, match="Short: inverse returned 1 values for 2 inputs; it must return all"):
        (a + b).sum().backward()


def test_a_deep_healthy_chain_is_within_the_tolerance_in_float32() -> None:
    chain = fl.InvertibleSequential(*(fl.AdditiveCoupling(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(16)))
    report = chain.check(torch.randn(64, 16))
    assert report and report.drift < 1e-3
