"""What the layers keep for the backward pass, in bytes per hidden element, and the peak of a training step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import Activation, resolve, rows
from fusedlayers.memory import peak_bytes, saved_bytes

OUTPUT_ONLY = [a for a in (row.bind() for row in rows()) if a.output_refusal(torch.float32) is None]
OUTPUT_ONLY = [a for a in OUTPUT_ONLY if not a.is_identity]
FOLDED = [a for a in OUTPUT_ONLY if a.is_folded]

ROWS, IN, HIDDEN = 64, 24, 96
ELEMENTS = ROWS * HIDDEN

every_activation = pytest.mark.parametrize("activation", OUTPUT_ONLY, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _fused(activation: object, save: str = "auto") -> Layer:
    return lambda x, w, b: fl.dense_bias_act(x, w, b, activation, save=save)


def _eager(activation: Activation) -> Layer:
    return lambda x, w, b: activation.plain(F.linear(x, w, b))


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"w1": (HIDDEN, IN), "b1": (HIDDEN,), "w2": (IN, HIDDEN), "v": (HIDDEN, IN)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, IN).to(dtype)


# --- with a Linear behind ---------------------------------------------------------------------------------------------


@every_activation
@every_dtype
def test_a_linear_behind_shares_the_one_buffer(activation: Activation, dtype: torch.dtype) -> None:
    p, x = _parameters(dtype), _x(dtype)
    for bias in (p["b1"], None):
        saved = saved_bytes(lambda x, b=bias: F.linear(_fused(activation)(x, p["w1"], b), p["w2"]), x, exclude=x)
        assert saved == dtype.itemsize * ELEMENTS


@compiles
@every_activation
def test_compiled(activation: Activation) -> None:
    torch.compiler.reset()
    p, x = _parameters(), _x()
    step = torch.compile(
        lambda x: F.linear(_fused(activation)(x, p["w1"], p["b1"]), p["w2"]), fullgraph=True, backend="aot_eager"
    )
    step(x)
    assert saved_bytes(step, x, exclude=x) == 4 * ELEMENTS


@compiles
@every_dtype
def test_compiled_by_inductor(dtype: torch.dtype) -> None:
    # One graph with a block per activation: compiling one by one would take minutes.
    torch.compiler.reset()
    p, x = _parameters(dtype), _x(dtype)

    def step(x: Tensor) -> list[Tensor]:
        return [F.linear(_fused(a)(x, p["w1"], p["b1"]), p["w2"]) for a in OUTPUT_ONLY]

    compiled = torch.compile(step, fullgraph=True)
    compiled(x)
    assert saved_bytes(compiled, x, exclude=x) == len(OUTPUT_ONLY) * dtype.itemsize * ELEMENTS


@compiles
def test_compiled_under_autocast() -> None:
    torch.compiler.reset()
    p, x = _parameters(), _x()

    @torch.compile(fullgraph=True)
    def step(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [F.linear(_fused(a)(x, p["w1"], p["b1"]), p["w2"]) for a in FOLDED]

    step(x)
    copies = 2 * (ROWS * IN + HIDDEN * IN)
    assert saved_bytes(step, x) == len(FOLDED) * 2 * ELEMENTS + copies


# --- other neighbours: never more than eager --------------------------------------------------------------------------


def _dropout(h: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
    # F.dropout keeps a float mask on CPUs; this is what it calls on GPUs.
    return F.linear(torch.native_dropout(h, 0.1, True)[0], p["w2"])


def _residual(h: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(h + F.linear(x, p["v"]), p["w2"])


def _frozen_next(h: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(h, p["w2"].detach())


def _gate(h: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(h * F.linear(x, p["v"]), p["w2"])


def _alone(h: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
    return h.sum()


def _norm(h: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.layer_norm(h, (HIDDEN,))


NEIGHBOURS = {f.__name__[1:]: f for f in (_dropout, _residual, _frozen_next, _gate, _alone, _norm)}


def _per_element(layer: Layer, neighbour: str, dtype: torch.dtype = torch.float32) -> float:
    p, x = _parameters(dtype), _x(dtype)
    following = NEIGHBOURS[neighbour]
    kept = [x, p["w2"]]  # what lives anyway
    saved = saved_bytes(lambda x: following(layer(x, p["w1"], p["b1"]), p, x), x, exclude=kept)
    return round(saved / ELEMENTS, 1)


@every_activation
@every_dtype
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_never_more_than_eager(activation: Activation, neighbour: str, dtype: torch.dtype) -> None:
    ours, eagers = (_per_element(layer(activation), neighbour, dtype) for layer in (_fused, _eager))
    assert ours <= eagers


@pytest.mark.parametrize(
    ("neighbour", "eager", "fused"), [("dropout", 9, 9), ("residual", 8, 8), ("frozen_next", 4, 4), ("gate", 16, 12)]
)
def test_gelu_in_its_neighbourhoods(neighbour: str, eager: int, fused: int) -> None:
    assert _per_element(_eager(resolve("gelu")), neighbour) == eager
    assert _per_element(_fused("gelu"), neighbour) == fused


# --- only what a needed gradient needs --------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["auto", "output", "input"])
@pytest.mark.parametrize("frozen", ["nothing", "w", "x", "w and b", "b", "x and w"])
def test_only_what_a_needed_gradient_needs(save: str, frozen: str) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(s) * 1 for s in ((ROWS, IN), (HIDDEN, IN), (HIDDEN,)))
    needed = [name for name in "xwb" if name not in frozen.split()]
    # Not leaves, so that each counts where it is kept.
    tensors = {"x": x, "w": w, "b": b}
    for name in needed:
        tensors[name] = tensors[name].requires_grad_() * 1
    # A bias that is a leaf is alive anyway, and costs nothing to keep.
    saved = saved_bytes(lambda: fl.dense_bias_act(*tensors.values(), "gelu", save=save), exclude=b)
    expected = x.nbytes * ("w" in needed) + w.nbytes * ("x" in needed) + 4 * ELEMENTS
    assert saved == expected


def test_recompute_keeps_the_layers_own_input_only() -> None:
    p, x = _parameters(), _x()
    layer = _fused("gelu", "recompute")
    assert saved_bytes(lambda x: layer(x, p["w1"], p["b1"]), x, exclude=x) == 0
    assert saved_bytes(lambda x: layer(x, p["w1"], p["b1"]), x) == x.nbytes
    # With a layer behind, y is that layer's.
    assert saved_bytes(lambda x: F.linear(layer(x, p["w1"], p["b1"]), p["w2"]), x, exclude=x) == 4 * ELEMENTS


def test_input_keeps_the_input_and_the_next_layer_the_output() -> None:
    p, x = _parameters(), _x()
    layer = _fused("gelu", "input")
    assert saved_bytes(lambda x: layer(x, p["w1"], p["b1"]), x, exclude=x) == 4 * ELEMENTS
    assert saved_bytes(lambda x: F.linear(layer(x, p["w1"], p["b1"]), p["w2"]), x, exclude=x) == 8 * ELEMENTS


@every_activation
@every_dtype
def test_bias_act_keeps_one_buffer(activation: Activation, dtype: torch.dtype) -> None:
    z = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    b = torch.randn(HIDDEN).to(dtype).requires_grad_()
    w = torch.randn(HIDDEN).to(dtype).requires_grad_()
    assert saved_bytes(lambda: fl.bias_act(z * 1, b, activation) * w) == dtype.itemsize * ELEMENTS
    assert saved_bytes(lambda: fl.bias_act(z * 1, b, activation, inplace=True) * w) == dtype.itemsize * ELEMENTS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_activation
def test_nothing_is_kept_without_gradients(activation: Activation, mode: Any) -> None:
    p, x = _parameters(), _x()
    layer = fl.FusedDenseAct(IN, HIDDEN, activation)
    with mode():
        assert saved_bytes(lambda: _fused(activation)(x, p["w1"], p["b1"])) == 0
        assert saved_bytes(layer, x) == 0
        assert layer(x).grad_fn is None
    for q in layer.parameters():
        q.requires_grad_(False)
    assert saved_bytes(layer, x) == 0
    assert layer(x).grad_fn is None


def test_nothing_hangs_on_the_graph_after_backward() -> None:
    p, x = _parameters(), _x()
    y = _fused("gelu")(x, p["w1"], p["b1"])
    storage = torch.UntypedStorage._weak_ref(y.untyped_storage())  # type: ignore[attr-defined]
    loss = F.linear(y, p["w2"]).sum()
    del y
    loss.backward()
    assert torch.UntypedStorage._expired(storage) or loss.grad_fn is not None
    del loss
    assert torch.UntypedStorage._expired(storage)  # type: ignore[attr-defined]
    torch.UntypedStorage._free_weak_ref(storage)  # type: ignore[attr-defined]


# --- the peak ---------------------------------------------------------------------------------------------------------


def _peak(layer: Layer, dtype: torch.dtype = torch.float32) -> float:
    """Hidden-sized buffers at the worst moment of a step through Linear-activation-Linear.

    The layers' own inputs, outputs and weights are small beside a hidden buffer of 32 MiB (16-bit: 16 MiB).
    """
    rows, size, hidden = 8192, 8, 1024
    torch.manual_seed(0)
    w1, b1, w2 = (torch.randn(s).to(dtype).requires_grad_() for s in ((hidden, size), (hidden,), (size, hidden)))
    x = torch.randn(rows, size).to(dtype)

    def step() -> None:
        F.linear(layer(x, w1, b1), w2).sum().backward()

    step()
    return peak_bytes(step, device="cpu") / (rows * hidden * dtype.itemsize)


@every_activation
def test_the_peak_is_two_hidden_buffers(activation: Activation) -> None:
    # y and dy; dz takes y's place. The rest is for what a part of the tensor needs on the way.
    assert _peak(_fused(activation)) <= 2.4


@pytest.mark.parametrize("name", ["gelu", "relu", "tanh"])
def test_the_peak_in_bfloat16(name: str) -> None:
    # For a part of the tensor, look-ups take indices and slopes of two to four times its size.
    assert _peak(_fused(name), torch.bfloat16) <= 2.55


def test_eager_gelu_takes_three() -> None:
    assert 2.95 <= _peak(_eager(resolve("gelu"))) <= 3.25
