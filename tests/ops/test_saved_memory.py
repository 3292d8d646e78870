"""What the layers keep for the backward pass, in bytes per hidden element, and the peak of a training step."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reference import scratch_bytes
from settings import compiles
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import Activation, definitions
from fusedlayers.memory import peak_bytes, saved_bytes

ALL = [row.bind() for row in definitions()]
OUTPUT_ONLY = [a for a in ALL if a.output_refusal(torch.float32) is None and not a.is_identity]
FOLDED = [a for a in OUTPUT_ONLY if a.is_folded]

ROWS, IN, HIDDEN = 64, 24, 96
ELEMENTS = ROWS * HIDDEN

every_activation = pytest.mark.parametrize("activation", OUTPUT_ONLY, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fused(activation: object, save: str = "auto") -> Layer:
    return lambda x, w, b: fl.dense_bias_act(x, w, b, activation, save=save)


def _eager(activation: Activation) -> Layer:
    return lambda x, w, b: activation.plain(F.linear(x, w, b))


def _tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, w1, b1, w2 and v."""
    shapes = (ROWS, IN), (HIDDEN, IN), (HIDDEN,), (IN, HIDDEN), (HIDDEN, IN)
    return [torch.randn(shape).to(dtype).requires_grad_(i > 0) for i, shape in enumerate(shapes)]


@every_activation
@every_dtype
def test_one_buffer(activation: Activation, dtype: torch.dtype) -> None:
    """A linear layer behind shares it; a product behind an activation alone does too."""
    x, w, b, w2, _ = _tensors(dtype)
    for bias in (b, None):
        saved = saved_bytes(lambda x, b=bias: F.linear(_fused(activation)(x, w, b), w2), x, exclude=x)
        assert saved == dtype.itemsize * ELEMENTS
    z = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    for inplace in (False, True):
        kept = saved_bytes(lambda inplace=inplace: fl.bias_act(z * 1, b, activation, inplace=inplace) * w2[0])
        assert kept == dtype.itemsize * ELEMENTS


@compiles
@every_activation
def test_compiled(activation: Activation) -> None:
    torch.compiler.reset()
    x, w, b, w2, _ = _tensors()
    step = torch.compile(lambda x: F.linear(_fused(activation)(x, w, b), w2), fullgraph=True, backend="aot_eager")
    step(x)
    assert saved_bytes(step, x, exclude=x) == 4 * ELEMENTS


@compiles
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float16, False), (torch.float32, True)])
def test_compiled_by_inductor(dtype: torch.dtype, autocast: bool) -> None:
    # One graph with a block per activation: compiling one by one would take minutes.
    torch.compiler.reset()
    x, w, b, w2, _ = _tensors(dtype)
    activations = FOLDED if autocast else OUTPUT_ONLY

    @torch.compile(fullgraph=True)
    def step(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [F.linear(_fused(a)(x, w, b), w2) for a in activations]

    step(x)
    copies = 2 * (ROWS * IN + HIDDEN * IN) if autocast else 0
    size = 2 if autocast else dtype.itemsize
    # From torch 2.14 on one input of two activations is kept in place of both outputs.
    assert 0 < saved_bytes(step, x, exclude=x) <= len(activations) * size * ELEMENTS + copies


#: What follows h = act(x w^T + b): function of h, x, w2 and v.
NEIGHBOURS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    # F.dropout keeps a float mask on CPUs; this is what it calls on GPUs.
    "dropout": lambda h, x, w2, v: F.linear(torch.native_dropout(h, 0.1, True)[0], w2),
    "residual": lambda h, x, w2, v: F.linear(h + F.linear(x, v), w2),
    "frozen_next": lambda h, x, w2, v: F.linear(h, w2.detach()),
    "gate": lambda h, x, w2, v: F.linear(h * F.linear(x, v), w2),
    "alone": lambda h, x, w2, v: h.sum(),
    "norm": lambda h, x, w2, v: F.layer_norm(h, (HIDDEN,)),
}


def _per_element(layer: Layer, neighbour: str, dtype: torch.dtype = torch.float32) -> float:
    x, w, b, w2, v = _tensors(dtype)
    following = NEIGHBOURS[neighbour]
    saved = saved_bytes(lambda x: following(layer(x, w, b), x, w2, v), x, exclude=[x, w2])  # what lives anyway
    return round(saved / ELEMENTS, 1)


@every_activation
@every_dtype
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_never_more_than_eager(activation: Activation, neighbour: str, dtype: torch.dtype) -> None:
    ours, eagers = (_per_element(layer(activation), neighbour, dtype) for layer in (_fused, _eager))
    assert ours <= eagers


@pytest.mark.parametrize("save", ["auto", "output", "input", "recompute"])
@pytest.mark.parametrize("frozen", ["nothing", "w", "x", "w and b", "b", "x and w"])
def test_only_what_a_needed_gradient_needs(save: str, frozen: str) -> None:
    tensors = dict(zip("xwb", (t.detach() * 1 for t in _tensors()), strict=False))
    needed = [name for name in "xwb" if name not in frozen.split()]
    for name in needed:  # no leaves, so that each counts where it is kept
        tensors[name] = tensors[name].requires_grad_() * 1
    x, w, b = tensors.values()
    # A bias is small, and where it is a leaf it is alive anyway.
    saved = saved_bytes(lambda: fl.dense_bias_act(x, w, b, "gelu", save=save), exclude=b)
    if save == "recompute":
        assert saved == x.nbytes + w.nbytes
    else:
        assert saved == x.nbytes * ("w" in needed) + w.nbytes * ("x" in needed) + 4 * ELEMENTS


def test_nothing_hangs_on_the_graph_after_backward() -> None:
    x, w, b, w2, _ = _tensors()
    y = _fused("gelu")(x, w, b)
    storage = torch.UntypedStorage._weak_ref(y.untyped_storage())  # type: ignore[attr-defined]
    loss = F.linear(y, w2).sum()
    del y
    loss.backward()
    del loss
    assert torch.UntypedStorage._expired(storage)  # type: ignore[attr-defined]
    torch.UntypedStorage._free_weak_ref(storage)  # type: ignore[attr-defined]


def _peak(layer: Layer, dtype: torch.dtype = torch.float32) -> float:
    """Hidden-sized buffers at the worst moment of a step through two layers, without the scratch memory of a product.

    The layers' own inputs, outputs and weights are small beside a hidden buffer of 32 MiB (16-bit: 16 MiB).
    """
    rows, size, hidden = 8192, 8, 1024
    w1, b1, w2 = (torch.randn(s).to(dtype).requires_grad_() for s in ((hidden, size), (hidden,), (size, hidden)))
    x = torch.randn(rows, size).to(dtype)

    def step() -> None:
        F.linear(layer(x, w1, b1), w2).sum().backward()

    step()
    return (peak_bytes(step, device="cpu") - scratch_bytes(x, w1)) / (rows * hidden * dtype.itemsize)


@every_activation
def test_the_peak_is_two_hidden_buffers(activation: Activation) -> None:
    # y and dy; dz takes y's place. The rest is for what a part of the tensor needs on the way.
    assert _peak(_fused(activation)) <= 2.4


@pytest.mark.parametrize("name", ["gelu", "relu", "tanh"])
def test_the_peak_in_bfloat16(name: str) -> None:
    # For a part of the tensor, look-ups take indices and slopes of two to four times its size.
    assert _peak(_fused(name), torch.bfloat16) <= 2.55
