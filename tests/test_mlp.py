"""MLP blocks: what they keep, what they need at their worst moment, and that gradients are right in every context."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from pairs import covering
from plans import plans_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import block_call
from fusedlayers.activations import Activation, resolve, rows
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.ops import mlp, mlp_forward

TABLE = [row.bind() for row in rows()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAVES = ("auto", "output", "input", "recompute")
#: One folded, one by its output, one without a kernel of ATen's, one that reads its input, none at all.
NAMES = ["gelu", "tanh", "softplus", "leaky_relu(-0.5)", None]
ROWS, IN, HIDDEN, OUT = 150, 12, 40, 7

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")


class Kind:
    """A block by function: which it is, and its tensors."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Tensor],
        eager: Callable[..., Tensor],
        first: int,
        saves: Sequence[str] = ("auto", "recompute"),
        halves: int = 1,
    ) -> None:
        self.name, self.function, self.eager, self.first, self.saves, self.halves = (
            name, function, eager, first, saves, halves,
        )  # fmt: skip

    def __repr__(self) -> str:
        return self.name

    @property
    def parts(self) -> int:
        """Pre-activations."""
        return self.first * self.halves

    def first_shapes(self, size: int, width: int) -> list[tuple[int, ...]]:
        return [(self.halves * size, width), (self.halves * size,)] * self.first

    def leaves(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        bias: bool = True,
        rows: int = ROWS,
        width: int = IN,
        size: int = HIDDEN,
        out: int = OUT,
    ) -> list[Any]:
        first = [(self.halves * size, width), (self.halves * size,) if bias else None] * self.first
        found = reference.leaves((rows, width), *first, (out, size), (out,) if bias else None, dtype=dtype)
        with torch.no_grad():
            for w in found[1::2]:
                w.mul_(w.shape[1] ** -0.5)
        return found


def _packed(x: Tensor, w: Tensor, b: Tensor | None, *last_and_rest: Any, **options: Any) -> Tensor:
    return fl.gated_mlp(x, w, b, None, None, *last_and_rest, **options)


def _packed_eager(x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor, b2: Tensor | None, function: Any) -> Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.linear(function(gate) * up, w2, b2)


PLAIN = Kind("mlp", fl.mlp, reference.mlp, 1, SAVES)
GATED = Kind("gated_mlp", fl.gated_mlp, reference.gated_mlp, 2)
#: Gate and up of one weight.
PACKED = Kind("packed", _packed, _packed_eager, 1, halves=2)
KINDS = [PLAIN, GATED, PACKED]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
KINDS_SAVED = [(kind, save) for kind in KINDS for save in kind.saves]
every_kind_saved = pytest.mark.parametrize(("kind", "save"), KINDS_SAVED, ids=str)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks are cut into chunks too."""
    torch.manual_seed(0)
    monkeypatch.setattr(mlp_forward, "LEAST_ROWS", 8)


def _save_for(activation: object, save: str, dtype: torch.dtype = torch.float32) -> str:
    return "input" if save == "output" and resolve(activation).output_refusal(dtype) is not None else save


def _activation(name: str | None) -> Any:
    return nn.LeakyReLU(-0.5) if name == "leaky_relu(-0.5)" else name


def _node(y: Tensor) -> str:
    return type(y.grad_fn.next_functions[0][0] if y.grad_fn.name() == "ViewBackward0" else y.grad_fn).__name__


# --- bytes ------------------------------------------------------------------------------------------------------------

#: Hidden buffers that are kept, by activation: eager, and here by ``save``.
KEPT = {
    ("mlp", "gelu"): (2, {"auto": 1, "output": 1, "input": 1, "recompute": 0}),
    ("mlp", "relu"): (1, {"auto": 1, "output": 1, "input": 1, "recompute": 0}),
    ("mlp", "leaky_relu(-0.5)"): (2, {"auto": 1, "input": 1, "recompute": 0}),
    ("mlp", None): (1, {"auto": 1, "recompute": 0}),
    ("gated_mlp", "silu"): (4, {"auto": 2, "input": 2, "recompute": 0}),
    ("gated_mlp", "relu"): (3, {"auto": 2, "input": 2, "recompute": 0}),
    ("packed", "silu"): (4, {"auto": 2, "input": 2, "recompute": 0}),
    ("packed", "relu"): (4, {"auto": 2, "input": 2, "recompute": 0}),
    ("gated_mlp", None): (3, {"auto": 2, "input": 2, "recompute": 0}),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, n) for k in KINDS for b, n in KEPT if b == k.name],
    ids=str,
)
@every_dtype
def test_what_is_kept(kind: Kind, name: str | None, dtype: torch.dtype) -> None:
    x, *params = kind.leaves(dtype)
    activation = _activation(name)
    buffer = ROWS * HIDDEN * dtype.itemsize
    eager, ours = KEPT[kind.name, name]
    assert saved_bytes(lambda: kind.eager(x, *params, resolve(activation).plain), exclude=x) == eager * buffer
    for save, buffers in ours.items():
        assert saved_bytes(lambda save=save: kind.function(x, *params, activation, save=save), exclude=x) == (
            buffers * buffer
        )
    # x is kept, as it is by eager PyTorch.
    kept = saved_bytes(lambda: kind.function(x * 1, *params, activation, save="recompute"))
    assert kept == x.nbytes
    with torch.no_grad():
        assert saved_bytes(lambda: kind.function(x, *params, activation)) == 0


#: Rows, in: many and few rows, and more that comes in than is hidden.
SIZES = [(150, 12), (10, 12), (10, 60)]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("save", ["auto", "recompute"])
@every_kind
def test_never_more_than_eager_is_kept(kind: Kind, save: str, rows: int, size: int, autocast: bool) -> None:
    """Whatever is frozen. The caller holds what it gives, but x is another layer's result, and b1 may be."""
    first = kind.first_shapes(HIDDEN, size)
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
    assert peak_bytes(ours, device=device) <= most * rows * size * dtype.itemsize
    eager = functools.partial(step, kind.eager, resolve(name).plain)
    eager()
    assert peak_bytes(eager, device=device) >= (2.9 if kind is PLAIN else 4.9) * rows * size * dtype.itemsize


def peaks(kind: Kind, save: str, rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of a block of large weights, and of eager PyTorch's."""
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
    return peak_bytes(ours, device="cpu"), peak_bytes(eager, device="cpu")


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
    ours, eager = peaks(kind, save, rows, dtype)
    # Of what is computed again a chunk is there while all weights' gradients are.
    assert ours <= (1.15 if save == "recompute" else 1.01) * eager


def test_matmuls_add_16_bit_products_in_float32_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, whose addmm takes ``out_dtype``."""
    added: list[torch.Size] = []
    addmm = torch.addmm

    def with_dtype(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: Any = None, out: Any = None) -> Tensor:
        if out_dtype is None:
            return addmm(total, a, b, out=out)
        assert out is total and total.dtype is out_dtype is torch.float32 and a.dtype is b.dtype is torch.bfloat16
        added.append(total.shape)
        return out.add_(a.float() @ b.float())

    monkeypatch.setattr(mlp, "_has_wide_products", lambda device: True)
    monkeypatch.setattr(torch, "addmm", with_dtype)
    monkeypatch.setattr(block_call, "_chunks", lambda key, block: block.chunks)
    made = (torch.randn(2048, 16), torch.randn(64, 16), torch.randn(16, 64))
    tensors = [t.bfloat16().requires_grad_() for t in made]
    exact = [t.detach().double().requires_grad_() for t in tensors]

    def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.double().square().mean(), leaves)

    x, w1, w2 = tensors
    found = gradients(fl.mlp(x, w1, None, w2, None, "relu", save="recompute", chunks=4), tensors)
    assert sorted(added) == sorted([w1.shape, w2.shape] * 4)
    theirs = gradients(F.linear(F.linear(x, w1).relu(), w2), tensors)
    truth = gradients(F.linear(F.linear(exact[0], exact[1]).relu(), exact[2]), exact)
    for ours, other, true in zip(found, theirs, truth, strict=True):
        assert ours.dtype is torch.bfloat16
        reference.assert_as_good_as_torch(ours, other, true)


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


@pytest.mark.parametrize(
    ("kind", "save", "activation", "dtype"),
    [(*saved, activation, dtype) for saved, activation, dtype in covering(KINDS_SAVED, TABLE, DTYPES)],
    ids=str,
)
def test_gradients_are_as_good_as_torchs(kind: Kind, save: str, activation: Activation, dtype: torch.dtype) -> None:
    if save == "output" and activation.output_refusal(dtype) is not None:
        with pytest.raises(ValueError, match="mlp: save='output' is not possible"):
            kind.function(*kind.leaves(dtype), activation, save=save)
        return
    call = functools.partial(kind.function, save=save)
    keeps_output = kind is PLAIN and save in ("auto", "output")
    reference.compare(call, kind.eager, activation, *kind.leaves(dtype), folded=keeps_output)


@pytest.mark.parametrize(
    ("kind", "save", "name", "bias"),
    [(*saved, name, bias) for saved, name, bias in covering(KINDS_SAVED, NAMES, (True, False))],
    ids=str,
)
def test_first_and_second_derivatives(kind: Kind, save: str, name: str | None, bias: bool) -> None:
    activation = _activation(name)
    found = kind.leaves(bias=bias)
    given = [t for t in found if t is not None]
    ours = functools.partial(kind.function, save=_save_for(activation, save), chunks=3)

    def filled(function: Callable[..., Tensor], activation: Any, *tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        return function(*(None if t is None else next(rest) for t in found), activation)

    calls = (
        functools.partial(filled, ours, activation),
        functools.partial(filled, kind.eager, resolve(activation).plain),
    )
    reference.check_orders(*calls, given, reference.added(resolve(activation), save) if kind is PLAIN else 3e-6)


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


@every_kind_saved
def test_an_activation_with_a_parameter(kind: Kind, save: str) -> None:
    alpha, slopes = torch.tensor(1.3, requires_grad=True), torch.rand(HIDDEN, requires_grad=True)
    save = "input" if save == "output" else save

    def snake(z: Tensor) -> Tensor:
        return z + slopes * torch.sin(alpha * z) ** 2

    sources = [*kind.leaves(), alpha, slopes]
    dy = torch.randn(ROWS, OUT)
    y = kind.function(*sources[:-2], snake, save=save)
    buffers = {"recompute": 0}.get(save, kind.parts)
    assert _node(y) == "MLPBackward"
    kept = saved_bytes(lambda: kind.function(*sources[:-2], snake, save=save), exclude=[*sources])
    assert kept <= buffers * ROWS * HIDDEN * 4 + slopes.nbytes + alpha.nbytes
    ours = reference.gradients(y, dy, *sources)
    theirs = reference.gradients(kind.eager(*sources[:-2], snake), dy, *sources)
    for a, b in zip(ours, theirs, strict=True):
        assert reference.relative(a, b) < 1e-5
    # And the second derivative.
    results = []
    for y in (kind.function(*sources[:-2], snake, save=save), kind.eager(*sources[:-2], snake)):
        (da,) = torch.autograd.grad(y.square().sum(), alpha, create_graph=True)
        results.append(torch.autograd.grad(da, sources))
    for a, b in zip(*results, strict=True):
        assert reference.relative(a, b) < 1e-4


# --- shapes -----------------------------------------------------------------------------------------------------------


@every_kind_saved
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (0, IN), (5, IN), (2, 3, 50, IN), (2, 0, IN)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_shapes(kind: Kind, save: str, shape: tuple[int, ...], layout: str) -> None:
    params = kind.leaves()[1:]
    x = torch.randn(shape)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "expanded":
        x = x[..., :1].expand(shape)
    x = x.requires_grad_()
    y = kind.function(x, *params, "silu", save=save)
    expected = kind.eager(x, *params, F.silu)
    torch.testing.assert_close(y, expected)
    for dy in (torch.randn(y.shape), torch.ones(()).expand(y.shape)):
        ours, theirs = (
            reference.gradients(t, dy, x, *params)
            for t in (kind.function(x, *params, "silu", save=save), kind.eager(x, *params, F.silu))
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@every_kind_saved
def test_odd_values(kind: Kind, save: str) -> None:
    tensors = kind.leaves()
    with torch.no_grad():
        tensors[0][3, 2], tensors[0][40, 0], tensors[0][77, 1] = math.nan, math.inf, -math.inf
    dy = torch.randn(ROWS, OUT)
    y, expected = kind.function(*tensors, "relu", save=save), kind.eager(*tensors, F.relu)
    torch.testing.assert_close(y, expected, equal_nan=True)
    for a, b in zip(reference.gradients(y, dy, *tensors), reference.gradients(expected, dy, *tensors), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-4)


@every_kind_saved
def test_values_without_gradients_are_exact(kind: Kind, save: str) -> None:
    tensors = kind.leaves()
    with torch.no_grad():
        torch.testing.assert_close(kind.function(*tensors, "gelu", save=save), kind.eager(*tensors, F.gelu))
        torch.testing.assert_close(kind.function(*tensors, "gelu", save=save, chunks=1), kind.eager(*tensors, F.gelu))


# --- dropout ----------------------------------------------------------------------------------------------------------


@every_kind_saved
@pytest.mark.parametrize("name", ["gelu", "tanh"])
def test_backward_makes_the_same_mask_again(kind: Kind, save: str, name: str) -> None:
    tensors = kind.leaves()

    def call(*tensors: Tensor | None) -> Tensor:
        torch.manual_seed(3)
        return kind.function(*tensors, name, dropout=0.4, save=_save_for(name, save))

    y = call(*tensors)
    assert torch.equal(y, call(*tensors)) and not torch.equal(y, kind.function(*tensors, name, dropout=0.4))
    keep = call(*tensors[:-2], torch.eye(HIDDEN), None).detach() != 0

    def eager(*tensors: Tensor) -> Tensor:
        hidden = kind.eager(*tensors[:-2], torch.eye(HIDDEN, dtype=tensors[0].dtype), None, resolve(name).plain)
        return F.linear(hidden * keep / 0.6, *tensors[-2:])

    reference.check_orders(call, eager, tensors, reference.added(resolve(name), save) if kind is PLAIN else 3e-6)


@every_kind_saved
@pytest.mark.parametrize("frozen", [None, "x", "w1"])
def test_batched_gradients_with_dropout(kind: Kind, save: str, frozen: str | None) -> None:
    tensors = kind.leaves()
    if frozen is not None:
        tensors[0 if frozen == "x" else 1].requires_grad_(False)
    sources = [t for t in tensors if t.requires_grad]
    y = kind.function(*tensors, "gelu", dropout=0.5, save=save)
    dy = torch.randn(3, *y.shape)
    batched = torch.autograd.grad(y, sources, dy, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(y, sources, dy[i], retain_graph=True)
        for a, b in zip(batched, one, strict=True):
            assert reference.relative(a[i], b) < 2e-5


@every_kind_saved
def test_dropout_under_a_checkpoint(kind: Kind, save: str) -> None:
    tensors = kind.leaves()
    results = []
    for reentrant in (None, True, False):
        torch.manual_seed(5)
        call = functools.partial(kind.function, activation="gelu", dropout=0.5, save=save)
        y = call(*tensors) if reentrant is None else checkpoint(call, *tensors, use_reentrant=reentrant)
        results.append(
            torch.autograd.grad(y.square().sum(), tensors) if reentrant is not True else _backward(y, tensors)
        )
    for a, b, c in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def _backward(y: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """By ``backward``, which reentrant checkpoints ask for."""
    y.square().sum().backward()
    found = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return found


@pytest.mark.parametrize("save", ["auto", "recompute"])
def test_a_bit_is_kept_for_each_hidden_number(save: str) -> None:
    x, *params = PLAIN.leaves()
    kept = saved_bytes(lambda: fl.mlp(x, *params, "gelu", dropout=0.5, save=save), exclude=x)
    assert kept == (ROWS * HIDDEN * 4 if save == "auto" else 0) + -(-ROWS * HIDDEN // 8)


@every_kind_saved
@pytest.mark.parametrize("p", [0.1, 1.0])
def test_what_is_dropped_is_what_torch_drops(kind: Kind, save: str, p: float) -> None:
    tensors = kind.leaves()
    x, *params = tensors
    outs, states = [], []
    for drop in (None, F.dropout):
        torch.manual_seed(11)
        if drop is None:
            y = kind.function(*tensors, "silu", dropout=p, save=_save_for("silu", save))
        else:
            *first, w, b = params
            parts = [F.linear(x, *pair) for pair in zip(first[::2], first[1::2], strict=True)]
            if kind.halves == 2:
                parts = list(parts[0].chunk(2, -1))
            hidden = functools.reduce(torch.mul, parts[1:], F.silu(parts[0]))
            y = F.linear(drop(hidden, p), w, b)
        states.append(torch.get_rng_state())
        outs.append([y.detach(), *torch.autograd.grad(y.square().sum(), tensors)])
    assert torch.equal(*states)
    for a, b in zip(*outs, strict=True):
        assert reference.relative(a, b) < 1e-4


# --- contexts ---------------------------------------------------------------------------------------------------------


@compiles
@every_kind_saved
def test_compiled_whole(kind: Kind, save: str) -> None:
    tensors = kind.leaves()
    torch.compiler.reset()
    call = functools.partial(kind.function, activation="gelu", save=save)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    y = compiled(*tensors)
    torch.testing.assert_close(y, call(*tensors), rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    for a, b in zip(
        reference.gradients(y, dy, *tensors), reference.gradients(call(*tensors), dy, *tensors), strict=True
    ):
        assert reference.relative(a, b) < 1e-4
    if save == "recompute":
        compiled(*tensors)
        assert saved_bytes(compiled, *tensors, exclude=tensors) < ROWS * HIDDEN * 4


@pytest.mark.parametrize("how", ["checkpoint", "save_on_cpu", "held", "held storage", "kept graph"])
@every_kind
def test_what_hooks_hand_back_is_copied_only_if_somebody_holds_it(
    kind: Kind, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = kind.leaves()
    sources = [t for t in tensors if t.requires_grad]
    call = functools.partial(kind.function, activation="gelu", save="auto")
    expected = torch.autograd.grad(call(*tensors).sum(), sources)
    held: list[Tensor] = []
    if how == "checkpoint":
        y = checkpoint(call, *tensors, use_reentrant=False)
    elif how == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            y = call(*tensors)
    else:
        keep = (lambda t: t.detach()) if how == "held storage" else lambda t: t
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(keep(t)) or t, lambda t: t):
            y = call(*tensors)
    if how == "kept graph":
        held.clear()
    before = [t.clone() for t in held]
    written = []
    real = mlp._gradients

    def watched(*args: Any) -> Any:
        kept = list(args[6])
        result = real(*args)
        written.extend(kept)
        return result

    copies = []
    clone = Tensor.clone
    monkeypatch.setattr(mlp, "_gradients", watched)
    monkeypatch.setattr(Tensor, "clone", lambda t, **options: copies.append(t.shape) or clone(t, **options))
    found = torch.autograd.grad(y.sum(), sources, retain_graph=how == "kept graph")
    monkeypatch.undo()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(t, b) for t, b in zip(held, before, strict=True))
    assert len(written) == kind.parts
    is_copied = torch.Size([ROWS, HIDDEN]) in copies
    assert is_copied == (how not in ("checkpoint", "save_on_cpu"))


@every_kind
def test_a_prelu_runs_along_its_own_dimension(kind: Kind) -> None:
    _, *params = kind.leaves()
    x, prelu = torch.randn(3, 20, IN), nn.PReLU(20)
    nn.init.uniform_(prelu.weight)
    torch.testing.assert_close(kind.function(x, *params, prelu), kind.eager(x, *params, prelu))


@pytest.mark.parametrize("kind", [PLAIN, GATED], ids=str)
def test_a_symbolic_trace_calls_the_block(kind: Kind) -> None:
    module = fl.FusedMLP(IN, HIDDEN) if kind is PLAIN else fl.FusedGatedMLP(IN, HIDDEN)
    traced = torch.fx.symbolic_trace(module)
    assert any(node.target is kind.function for node in traced.graph.nodes)
    x = torch.randn(30, IN)
    torch.testing.assert_close(traced(x), module(x))


@pytest.mark.parametrize("edited", [1, 2])
@every_kind
def test_edited_parameters_are_refused_only_where_they_are_needed(kind: Kind, edited: int) -> None:
    """What x, which needs no gradient, is multiplied by, and what is added."""
    x, *params = kind.leaves()
    x.requires_grad_(False)
    y = kind.function(x, *params, "gelu")
    expected = torch.autograd.grad(kind.eager(x, *params, F.gelu).sum(), params)
    with torch.no_grad():
        [x, *params][edited].add_(1)
    for ours, theirs in zip(torch.autograd.grad(y.sum(), params, retain_graph=True), expected, strict=True):
        assert reference.relative(ours, theirs) < 2e-5
    with pytest.raises(RuntimeError, match="mlp: a weight or bias was edited in place between forward and back"):
        torch.autograd.grad(y.sum(), params, create_graph=True)


@every_kind
def test_the_saved_weight_must_not_be_edited(kind: Kind) -> None:
    tensors = kind.leaves()
    y = kind.function(*tensors, "gelu")
    with torch.no_grad():
        tensors[-2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), tensors)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": torch.randn(3, 5)}, ValueError, r"mlp: expected input \(..., in\) and weight1 \(out, in\), got \(3"),
        ({"weight1": torch.randn(8)}, ValueError, "mlp: expected input"),
        ({"bias1": torch.randn(7)}, ValueError, r"mlp: expected bias1 \(8,\) for weight1 \(8, 4\), got \(7,\)"),
        ({"weight2": torch.randn(4, 9)}, ValueError, r"mlp: expected weight2 \(out, hidden\) for weight1 \(hidden,"),
        ({"weight2": torch.randn(4, 8, 1)}, ValueError, "mlp: expected weight2"),
        ({"bias2": torch.randn(8)}, ValueError, r"mlp: expected bias2 \(4,\)"),
        ({"bias2": torch.randn(4).double()}, ValueError, "mlp: all tensors must have one dtype, .*bias2 torch.float64"),
        ({"weight1": [1.0]}, TypeError, "mlp: weight1 must be a tensor, got list"),
        ({"weight2": None}, TypeError, "mlp: weight2 must be a tensor, got NoneType"),
        ({"bias1": 0.0}, TypeError, "mlp: bias1 must be a tensor, got float; pass None for no bias1"),
        ({"input": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "mlp: input must have a floating dtype"),
        ({"weight2": torch.randn(4, 8, device="meta")}, ValueError, "mlp: weight2 is on meta but input is on cpu"),
        ({"activation": "gleu"}, ValueError, "mlp: .*gleu"),
        ({"save": "nothing"}, ValueError, "mlp: save must be one of"),
        ({"dropout": 1.5}, ValueError, r"mlp: dropout must lie in \[0, 1\], got 1.5"),
        ({"dropout": "much"}, TypeError, "mlp: dropout must be a number"),
        ({"chunks": 0}, ValueError, "mlp: chunks must be at least 1"),
        ({"chunks": 2.0}, TypeError, "mlp: chunks must be an int"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "input": torch.randn(3, 4), "weight1": torch.randn(8, 4), "bias1": torch.randn(8),
        "weight2": torch.randn(4, 8), "bias2": torch.randn(4),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        fl.mlp(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_up": torch.randn(9, 4), "bias_up": None}, ValueError, r"expected weight_up .* like weight_gate"),
        ({"weight_up": None, "bias_up": None, "weight_gate": torch.randn(9, 4), "bias_gate": None}, ValueError,
         r"gated_mlp: expected weight_down \(out, hidden\) for weight_gate \(2 \* hidden, in\), got .* \(9, 4\)"),
        ({"weight_up": None, "bias_up": None}, ValueError,
         r"expected weight_down \(out, hidden\) for weight_gate \(2 \* hidden, in\), got \(4, 8\) and \(8, 4\); "
         r"weight_down\.shape\[1\] must be half of weight_gate\.shape\[0\]"),
        ({"weight_up": None, "bias_up": None, "bias_gate": torch.randn(4)}, ValueError,
         r"gated_mlp: expected bias_gate \(8,\) for weight_gate \(8, 4\), got \(4,\)"),
        ({"weight_up": None}, ValueError, "bias_up without weight_up"),
        ({"weight_down": torch.randn(4, 9)}, ValueError, r"expected weight_down \(out, hidden\) for weight_gate"),
        ({"save": "output"}, ValueError, "gated_mlp: save='output' is not possible: a product does not determine"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_arguments_of_a_gated_block(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "input": torch.randn(3, 4), "weight_gate": torch.randn(8, 4), "bias_gate": torch.randn(8),
        "weight_up": torch.randn(8, 4), "bias_up": torch.randn(8), "weight_down": torch.randn(4, 8), "bias_down": None,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        fl.gated_mlp(**{**good, **change})


# --- modules ----------------------------------------------------------------------------------------------------------

MODULES = {
    "mlp": lambda **options: fl.FusedMLP(IN, HIDDEN, OUT, **options),
    "gated": lambda **options: fl.FusedGatedMLP(IN, HIDDEN, OUT, **options),
    "packed": lambda **options: fl.FusedGatedMLP(IN, HIDDEN, OUT, packed=True, **options),
}
every_module = pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)


def _by_layers(module: Any, x: Tensor) -> Tensor:
    first, *others = module._parts(x)
    h = resolve(module.activation).plain(first)
    for other in others:
        h = h * other
    return module._last(h)


@every_module
@pytest.mark.parametrize("activation", ["gelu", nn.SiLU(), nn.PReLU(HIDDEN), torch.sin, None], ids=reference.label)
@pytest.mark.parametrize("bias", [True, False], ids=["", "no bias"])
def test_a_module_computes_its_layers(build: Any, activation: object, bias: bool) -> None:
    module = build(activation=activation, bias=bias)
    x = torch.randn(60, IN, requires_grad=True)
    y, expected = module(x), _by_layers(module, x)
    torch.testing.assert_close(y, expected)
    for a, b in zip(
        torch.autograd.grad(y.sum(), [x, *module.parameters()]),
        torch.autograd.grad(expected.sum(), [x, *module.parameters()]),
        strict=True,
    ):
        assert reference.relative(a, b) < 2e-5


def test_names_of_the_parameters() -> None:
    assert list(MODULES["mlp"]().state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert list(MODULES["gated"]().state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert list(MODULES["packed"](bias=True).state_dict()) == [
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


def test_the_plan_says_what_is_saved_where_layers_are_frozen() -> None:
    module = fl.FusedMLP(IN, HIDDEN, activation="gelu")
    x = torch.randn(50, IN, requires_grad=True) * 1
    assert _node(module(x)) == "MLPBackward" and "saves the output (last bit" in repr(module)
    module.fc1.requires_grad_(False)
    outer, inner = plans_of(module, x)
    assert outer.path == "by_layer" and "a weight is frozen" in str(outer) and inner.saved == "output"
    assert _node(module(x)) != "MLPBackward"
    module.save = "recompute"
    assert _node(module(x)) != "MLPBackward"


@every_module
def test_dropout_in_training_only(build: Any) -> None:
    module = build(dropout=0.5)
    x = torch.randn(50, IN)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    assert "dropout=0.5" in repr(module)
    with pytest.raises(ValueError, match="dropout must lie in"):
        build(dropout=2.0)


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
