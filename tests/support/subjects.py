"""What the contracts are tested on: each kind of layer with its input, the same in PyTorch and in float64, and the
activations."""

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.utils.storages import sizes_of


class BiasAct(nn.Module):
    """``fl.bias_act`` with a bias of its own, or none."""

    def __init__(self, activation: Any, channels: int = 0, **options: Any) -> None:
        super().__init__()
        self.activation, self.options = activation, options
        self.bias = nn.Parameter(torch.randn(channels)) if channels else None

    def forward(self, input: Tensor) -> Tensor:
        return fl.bias_act(input, self.bias, self.activation, **self.options)


class WithResidual(nn.Module):
    """``fl.dense_bias_act`` or ``fl.conv_bias_act``, to whose product the input is added."""

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module, activation: Any, **options: Any) -> None:
        super().__init__()
        self.function, self.layer, self.activation, self.options = function, layer, activation, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.layer.weight, self.layer.bias, self.activation, residual=x, **self.options)


class Sine(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.sin(z)


class Block(nn.Module):
    """A norm and an MLP of PyTorch's modules; ``once``: it saves every value once."""

    #: The modules that compute what the functions and names of ``ACTIVATIONS`` do.
    KINDS: ClassVar[dict[Any, type[nn.Module]]] = {
        "tanh": nn.Tanh, "gelu": nn.GELU, F.silu: nn.SiLU, torch.sin: Sine, None: nn.Identity,
    }  # fmt: skip

    def __init__(self, activation: Any, once: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 40), nn.Linear(40, 7)
        self.activation = activation if isinstance(activation, nn.Module) else self.KINDS[activation]()
        if once:
            fl.fuse(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Subject(NamedTuple):
    """A kind of layer.

    ``make(activation, **options)`` makes it, ``eager(layer, activation, x)`` is what it computes, by plain PyTorch and
    with its parameters.
    """

    make: Callable[..., Any]
    shape: tuple[int, ...]
    eager: Callable[[Any, Callable[[Tensor], Tensor], Tensor], Tensor]
    #: How many numbers the activation's input has, or those of a gate.
    hidden: int


def _dense(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act(F.linear(x, m.weight, m.bias))


def _conv(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    call = (F.conv1d, F.conv2d, F.conv3d)[m.weight.dim() - 3]
    return act(call(x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups))


def _residual(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act(m.layer(x) + x)


def _mlp(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return m.fc2(act(m.fc1(x)))


def _gated(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return m.down_proj(act(m.gate_proj(x)) * m.up_proj(x))


def _packed(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = m.gate_up_proj(x).chunk(2, -1)
    return m.down_proj(act(gate) * up)


def _block(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return m.down(act(m.up(m.norm(x))))


def _fused_block(activation: Any, save: str = "auto") -> nn.Module:
    block = Block(activation)
    fl.fuse(block)
    return block


_padded = partial(fl.conv_bias_act, padding=1)

SUBJECTS: dict[str, Subject] = {
    "dense": Subject(partial(fl.FusedDenseAct, 12, 40), (30, 12), _dense, 1200),
    "dense, three dimensions": Subject(partial(fl.FusedDenseAct, 12, 40, bias=False), (5, 6, 12), _dense, 1200),
    "dense with a residual": Subject(
        lambda act, **options: WithResidual(fl.dense_bias_act, nn.Linear(40, 40), act, **options),
        (30, 40),
        _residual,
        1200,
    ),
    "conv": Subject(
        lambda act, **options: fl.FusedConvAct2d(3, 8, 3, stride=2, padding=1, activation=act, **options),
        (4, 3, 11, 11),
        _conv,
        4 * 8 * 36,
    ),
    "conv, one dimension": Subject(
        lambda act, **options: fl.FusedConvAct1d(4, 8, 3, groups=2, padding="same", activation=act, **options),
        (4, 4, 50),
        _conv,
        4 * 8 * 50,
    ),
    "conv, three dimensions": Subject(
        lambda act, **options: fl.FusedConvAct3d(2, 4, 3, padding=1, bias=False, activation=act, **options),
        (2, 2, 5, 4, 3),
        _conv,
        2 * 4 * 60,
    ),
    "conv with a residual": Subject(
        lambda act, **options: WithResidual(_padded, nn.Conv1d(8, 8, 3, padding=1), act, **options),
        (4, 8, 50),
        _residual,
        4 * 8 * 50,
    ),
    "bias": Subject(
        lambda act, **options: BiasAct(act, 40, **options), (30, 40), lambda m, act, x: act(x + m.bias), 1200
    ),
    "bias along channels": Subject(
        lambda act, **options: BiasAct(act, 8, dim=1, **options),
        (4, 8, 9, 9),
        lambda m, act, x: act(x + m.bias[:, None, None]),
        4 * 8 * 81,
    ),
    "activation": Subject(BiasAct, (30, 40), lambda m, act, x: act(x), 1200),
    "mlp": Subject(partial(fl.FusedMLP, 12, 40, 7), (30, 12), _mlp, 1200),
    "gated mlp": Subject(partial(fl.FusedGatedMLP, 12, 40, 7, bias=True), (5, 6, 12), _gated, 2400),
    "packed gated mlp": Subject(partial(fl.FusedGatedMLP, 12, 40, 7, bias=True, packed=True), (30, 12), _packed, 2400),
    "block, fused": Subject(_fused_block, (30, 12), _block, 1200),
    "block, saved once": Subject(lambda act, save="auto": Block(act, once=True), (30, 12), _block, 1200),
}

LAYERS = [name for name in SUBJECTS if not name.startswith("block")]
#: Those that are one module of the package.
MODULES = [name for name in LAYERS if not name.startswith(("bias", "activation")) and "residual" not in name]


# What may be done to a layer: then it must be called.


def hooked(layer: Any) -> Any:
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


def replaced(layer: Any) -> Any:
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)
    return layer


def parametrized(layer: Any) -> Any:
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


class Swish(nn.Module):
    """Reads a trainable tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.beta * z)


class TrainedELU(nn.Module):
    """Reads a trainable tensor, and states its derivative in terms of its output."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full(channels, 0.5))

    def forward(self, z: Tensor) -> Tensor:
        return torch.where(z > 0, z, self.alpha * torch.expm1(z))

    def derivative_given_output(self, y: Tensor) -> Tensor:
        return torch.where(y > 0, 1.0, y + self.alpha)

    def input_given_output(self, y: Tensor) -> Tensor:
        return torch.where(y > 0, y, torch.log1p(y.clamp(max=0) / self.alpha))


#: Saved by their output, by a folded one, by their input; a user's own, with trainable tensors too, by its input and by
#: its output; left to PyTorch; none at all.
ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "tanh": lambda: "tanh",
    "elu": nn.ELU,
    "gelu": lambda: "gelu",
    "silu": lambda: F.silu,
    "leaky_relu": lambda: nn.LeakyReLU(-0.5),
    "sine": lambda: torch.sin,
    "prelu": nn.PReLU,
    "swish": Swish,
    "trained elu": TrainedELU,
    "softmax": lambda: nn.Softmax(-1),
    "none": lambda: None,
}


class Twins(NamedTuple):
    """A layer, the same computed by PyTorch, and in float64; ``wrap`` is applied to the activation of the others."""

    name: str
    subject: Subject
    own: Any
    eager: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    sources: list[Tensor]
    exact_sources: list[Tensor]
    dtype: torch.dtype
    device: torch.device | None
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(
        cls,
        name: str,
        activation: str,
        dtype: torch.dtype = torch.float32,
        wrap: Callable[[Any], Any] = lambda act: act,
        device: torch.device | None = None,
        **options: Any,
    ) -> "Twins":
        subject = SUBJECTS[name]
        torch.manual_seed(0)
        own = subject.make(ACTIVATIONS[activation](), **options).to(device, dtype)
        other, exact = copy.deepcopy(own), copy.deepcopy(own).double()
        for parameter, (key, _) in zip(own.parameters(), list(other.named_parameters()), strict=True):
            path, _, last = key.rpartition(".")
            setattr(other.get_submodule(path), last, parameter)
        for module in (other, exact):
            fl.unfuse(module)
        return cls(
            name,
            subject,
            own,
            lambda x: subject.eager(other, wrap(resolve(other.activation).plain), x),
            lambda x: subject.eager(exact, wrap(resolve(exact.activation).plain), x),
            list(own.parameters()),
            list(exact.parameters()),
            dtype,
            device,
            (own, other, exact),
        )

    @property
    def is_block(self) -> bool:
        """Whether it is a model of PyTorch's modules, which ``save`` says nothing of."""
        return self.name.startswith("block")

    def input(self, *, trains: bool = True, seed: int = 0, times: int = 1) -> Tensor:
        """The same at every call; of so many ``times`` the batch."""
        batch, *rest = self.subject.shape
        x = torch.randn(times * batch, *rest, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x.to(self.device, self.dtype).requires_grad_(trains)

    def gradients(self, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
        """The result, and the gradients of x and of the parameters."""
        sources = [x, *(self.exact_sources if call is self.exact else self.sources)]
        for source in sources:
            source.grad = None
        y = call(x)
        y.backward(dy.to(y.dtype))
        found = [source.grad for source in sources]
        assert all(gradient is not None for gradient in found)
        return [y.detach(), *found]  # type: ignore[list-item]  # as has just been asserted


#: What rounded outputs, and a branch in the last bit, may add to the error of a gradient, by dtype, of its norm.
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_as_exact(
    ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], floor: float = 0.0
) -> None:
    """No result errs more than twice what eager PyTorch's errs, plus a floor, by their norms."""
    for number, (one, other, right) in enumerate(zip(ours, eager, exact, strict=True)):
        assert one.dtype is other.dtype and one.shape == other.shape
        norm = float(right.norm())
        error, torchs = (float((t.detach().double() - right).norm()) for t in (one, other))
        assert error <= 2 * torchs + (floor + 1e-6) * norm, number


def living_bytes(run: Callable[[], Tensor], own: Sequence[Tensor]) -> int:
    """The bytes of all storages that are alive after the forward pass, over those before, without the result's."""
    tracking = pytest.importorskip("torch.distributed._tools.mem_tracker")
    tracker = tracking.MemTracker()
    tracker.track_external(*own)
    gc.freeze()  # what was there before is not looked through, which would take a second
    with tracker:
        y = run()
        gc.collect()
        (device,) = tracker.get_tracker_snapshot("current").values()
    gc.unfreeze()
    return int(device["Total"]) - sum(sizes_of(own).values()) - y.untyped_storage().nbytes()
