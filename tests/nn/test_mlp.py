"""MLP blocks: what they keep, what they need at their worst moment, and that gradients are right in every context."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.ops import mlp_forward

ROWS, IN, HIDDEN, OUT = 150, 12, 40, 7


class Kind(NamedTuple):
    """A block by function: which it is, and its tensors."""

    name: str
    function: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    #: How many first products there are, and how many parts each has.
    first: int
    halves: int = 1
    saves: tuple[str, ...] = ("auto", "recompute")

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> int:
        """Pre-activations."""
        return self.first * self.halves

    def leaves(self, rows: int = ROWS) -> list[Any]:
        first = [(self.halves * HIDDEN, IN), (self.halves * HIDDEN,)] * self.first
        found = reference.leaves((rows, IN), *first, (OUT, HIDDEN), (OUT,))
        with torch.no_grad():
            for w in found[1::2]:
                w.mul_(w.shape[1] ** -0.5)
        return found


def _packed(x: Tensor, w: Tensor, b: Tensor | None, *last_and_rest: Any, **options: Any) -> Tensor:
    return fl.gated_mlp(x, w, b, None, None, *last_and_rest, **options)


def _packed_eager(x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor, b2: Tensor | None, function: Any) -> Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.linear(function(gate) * up, w2, b2)


PLAIN = Kind("mlp", fl.mlp, reference.mlp, 1, saves=("auto", "output", "input", "recompute"))
GATED = Kind("gated_mlp", fl.gated_mlp, reference.gated_mlp, 2)
#: Gate and up of one weight.
PACKED = Kind("packed", _packed, _packed_eager, 1, halves=2)
KINDS = [PLAIN, GATED, PACKED]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
def little_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks are cut into chunks too."""
    monkeypatch.setattr(mlp_forward, "LEAST_ROWS", 8)


# --- bytes ------------------------------------------------------------------------------------------------------------


#: Rows, in: many and few rows, and more that comes in than is hidden.
SIZES = [(150, 12), (10, 12), (10, 60)]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("save", ["auto", "recompute"])
@every_kind
def test_never_more_than_eager_is_kept(kind: Kind, save: str, rows: int, size: int, autocast: bool) -> None:
    """Whatever is frozen. The caller holds what it gives, but x is another layer's result, and b1 may be."""
    first = [(kind.halves * HIDDEN, size), (kind.halves * HIDDEN,)] * kind.first
    tensors = reference.leaves((rows, size), *first, (OUT, HIDDEN), (OUT,))

    def kept(function: Callable[..., Tensor], bias_is_made: bool, *args: Any, **options: Any) -> int:
        def call() -> Tensor:
            x, w, b, *rest = tensors
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return function(x * 1, w, b * 1 if bias_is_made else b, *rest, *args, **options)

        return saved_bytes(call, exclude=tensors)

    for needs in itertools.product((True, False), repeat=len(tensors)):
        for t, need in zip(tensors, needs, strict=True):
            t.requires_grad_(need)
        for name, bias_is_made in (("gelu", False), ("relu", True), (None, False)) if any(needs) else ():
            plain = resolve(name).plain
            here = kept(kind.function, bias_is_made, name, save=save)
            assert here <= kept(kind.eager, bias_is_made, plain), (needs, name)


@pytest.mark.parametrize(
    ("kind", "name", "save", "most"),
    [
        (PLAIN, "gelu", "auto", 1.2),
        (PLAIN, "gelu", "input", 1.2),
        (PLAIN, "relu", "auto", 1.2),
        (PLAIN, "gelu", "recompute", 0.3),
        (PLAIN, "tanh", "recompute", 0.3),
        (GATED, "silu", "auto", 2.3),
        (GATED, "gelu", "auto", 2.3),
        (GATED, "silu", "recompute", 0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_through_forward_and_backward(
    kind: Kind, name: str, save: str, most: float, dtype: torch.dtype, device: str
) -> None:
    """In hidden buffers; x and the weights are small beside these, and count."""
    rows, width, size = 2048 * 4 // dtype.itemsize, 16, 2048
    x, w, b, last, last_bias = (
        torch.randn(shape).to(device, dtype).requires_grad_()
        for shape in ((rows, width), (size, width), (size,), (width, size), (width,))
    )
    tensors = [x, *[w, b] * kind.first, last, last_bias]
    sources = list(dict.fromkeys(tensors))

    def step(function: Callable[..., Tensor], activation: object, **options: Any) -> None:
        torch.autograd.grad(function(*tensors, activation, **options).sum(), sources)

    ours = functools.partial(step, kind.function, name, save=save)
    ours()
    product = reference.scratch_bytes(x, w)
    assert peak_bytes(ours, device=device) <= most * rows * size * dtype.itemsize + product
    eager = functools.partial(step, kind.eager, resolve(name).plain)
    eager()
    assert peak_bytes(eager, device=device) >= (2.9 if kind is PLAIN else 4.9) * rows * size * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "rows", "save", "kind"),
    [  # every three of the first, and every pair with a kind
        (dtype, rows, save, KINDS[(i + j + k) % len(KINDS)])
        for i, dtype in enumerate((torch.float32, torch.bfloat16))
        for j, rows in enumerate((64, 256, 1024))
        for k, save in enumerate(("auto", "input", "recompute"))
    ],
    ids=str,
)
def test_the_peak_where_few_rows_meet_large_weights(kind: Kind, save: str, rows: int, dtype: torch.dtype) -> None:
    """Gradients of weights are what memory is needed for there; in 16 bits they are summed in float32 only where that
    takes less than it spares."""
    width, size = 256, 1024
    shapes = (rows, width), (kind.halves * size, width), (width, size)
    x, w, last = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    weights = [w, *[w.detach().clone().requires_grad_()] * (kind.first - 1), last]
    tensors = [x, *(t for w in weights for t in (w, None))]

    def step(function: Callable[..., Tensor], activation: object, **options: Any) -> None:
        torch.autograd.grad(function(*tensors, activation, **options).sum(), [x, *weights])

    ours = functools.partial(step, kind.function, "gelu", save=save)
    eager = functools.partial(step, kind.eager, resolve("gelu").plain)
    for call in (ours, eager):
        call()
    # Of what is computed again a chunk is there while all weights' gradients are.
    most = (1.15 if save == "recompute" else 1.01) * peak_bytes(eager, device="cpu")
    assert peak_bytes(ours, device="cpu") <= most


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("save", ["auto", "recompute"])
@every_kind
def test_without_gradients_it_needs_no_more_than_eager(kind: Kind, save: str, dropout: float) -> None:
    tensors = [None if t is None else t.detach() for t in kind.leaves(rows=512)]

    def eager() -> Tensor:
        return kind.eager(*tensors, lambda z: F.dropout(F.gelu(z), dropout) if dropout else F.gelu(z))

    ours = functools.partial(kind.function, *tensors, "gelu", save=save, dropout=dropout)
    for call in (ours, eager):
        call()
    assert peak_bytes(ours, device="cpu") <= peak_bytes(eager, device="cpu")


def test_more_chunks_need_less() -> None:
    x, w1, w2 = torch.randn(2048, 16), torch.randn(4096, 16), torch.randn(16, 4096)
    tensors = [t.requires_grad_() for t in (x, w1, w2)]

    def step(chunks: int) -> None:
        y = fl.mlp(x, w1, None, w2, None, "relu", save="recompute", chunks=chunks)
        torch.autograd.grad(y.sum(), tensors)

    step(1)
    peaks = [peak_bytes(functools.partial(step, chunks), device="cpu") for chunks in (1, 4, 32)]
    assert peaks[0] > 2.5 * peaks[1] and peaks[1] > 2 * peaks[2]


# --- gradients --------------------------------------------------------------------------------------------------------


@every_kind
def test_what_is_kept_is_overwritten_unless_somebody_can_read_it(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[int] = []
    gradients = mlp_forward.Block.gradients

    def noted(self: Any, dy: Tensor, parts: Sequence[Tensor], *rest: Any) -> Any:
        addresses.append(parts[0].data_ptr())
        return gradients(self, dy, parts, *rest)

    monkeypatch.setattr(mlp_forward.Block, "gradients", noted)
    for who in ("nobody", "the graph", "the user"):
        tensors = kind.leaves()
        y = kind.function(*tensors, "silu")
        kept = y.grad_fn.saved_tensors[-kind.parts]
        before, address = kept.clone(), kept.data_ptr()
        if who == "nobody":
            del kept
        addresses.clear()
        torch.autograd.grad(y.sum(), tensors, retain_graph=who == "the graph")
        assert (addresses[0] == address) == (who == "nobody")
        assert who == "nobody" or torch.equal(kept, before)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "save"), [(kind, save) for kind in KINDS for save in kind.saves], ids=str)
def test_dropout_under_a_checkpoint(kind: Kind, save: str) -> None:
    tensors, results = kind.leaves(), []
    call = functools.partial(kind.function, activation="gelu", dropout=0.5, save=save)
    for run in (call, functools.partial(checkpoint, call, use_reentrant=False)):
        torch.manual_seed(5)
        results.append(torch.autograd.grad(run(*tensors).square().sum(), tensors))
    reference.assert_near(results[1], results[0])


@pytest.mark.parametrize("save", ["auto", "recompute"])
def test_a_bit_is_kept_for_each_hidden_number(save: str) -> None:
    x, *params = PLAIN.leaves()
    kept = saved_bytes(lambda: fl.mlp(x, *params, "gelu", dropout=0.5, save=save), exclude=x)
    assert kept == (ROWS * HIDDEN * 4 if save == "auto" else 0) + -(-ROWS * HIDDEN // 8)


# --- contexts ---------------------------------------------------------------------------------------------------------


@every_kind
def test_a_prelu_runs_along_its_own_dimension(kind: Kind) -> None:
    _, *params = kind.leaves()
    x, prelu = torch.randn(3, 20, IN), nn.PReLU(20)
    nn.init.uniform_(prelu.weight)
    torch.testing.assert_close(kind.function(x, *params, prelu), kind.eager(x, *params, prelu))


# --- modules ----------------------------------------------------------------------------------------------------------


def test_names_of_the_parameters() -> None:
    assert list(fl.FusedMLP(4, 8).state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert list(fl.FusedGatedMLP(4, 8).state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert list(fl.FusedGatedMLP(4, 8, packed=True, bias=True).state_dict()) == [
        "gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias",
    ]  # fmt: skip


def test_from_modules_shares_the_layers() -> None:
    gate, up, down = nn.Linear(IN, HIDDEN), nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
    block = fl.FusedGatedMLP.from_modules(gate.eval(), "gelu", up, down, dropout=0.5)
    assert block.gate_proj is gate and block.up_proj is up and block.down_proj is down and not block.training
    mlp = fl.FusedMLP.from_modules(gate, nn.GELU(), down, save="recompute")
    x = torch.randn(50, IN)
    torch.testing.assert_close(mlp(x), down(F.gelu(gate(x))))
    torch.testing.assert_close(block(x), down(F.gelu(gate(x)) * up(x)))
    fl.FusedGatedMLP.from_modules(nn.Linear(4, 16), "silu", None, nn.Linear(8, 4))(torch.randn(2, 4))


@pytest.mark.parametrize("save", ["auto", "recompute"])
@every_kind
def test_masks_do_not_depend_on_what_needs_a_gradient(kind: Kind, save: str) -> None:
    """What is computed without gradients and then with them, by whatever route, is the same."""
    tensors = kind.leaves()
    for needs in itertools.product((True, False), repeat=len(tensors)):
        for t, need in zip(tensors, needs, strict=True):
            t.requires_grad_(need)
        for autocast, name in ((False, "gelu"), (True, "gelu"), (False, None)):
            outs = []
            for grad in (False, True):
                torch.manual_seed(1)
                with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    x, *params = tensors
                    outs.append(kind.function(x * 1, *params, name, save=save, dropout=0.5).detach())
            size = float(outs[0].abs().max())
            torch.testing.assert_close(*outs, atol=(0.02 if autocast else 1e-5) * size, rtol=0.0)


@every_kind
def test_masks_do_not_depend_on_chunks(kind: Kind) -> None:
    tensors = kind.leaves()
    outs = []
    for chunks in (1, 3, 100):
        torch.manual_seed(1)
        outs.append(kind.function(*tensors, "gelu", save="recompute", dropout=0.5, chunks=chunks))
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])


@every_kind
def test_recorded_dropouts_are_torchs(kind: Kind) -> None:
    """A mask would be recorded as it is, and be the same at every replay."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, *params = (t.detach() for t in kind.leaves())
    traced = make_fx(lambda x: kind.function(x, *params, "gelu", dropout=0.5))(x)
    assert not torch.equal(traced(x), traced(x))
