"""Gates that save their two factors, and the matrix products behind them, which multiply these once more."""

import copy
import functools
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu import DEVICE
from reference import check_orders, compare, leaves, relative
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fusedlayers as fl
from fusedlayers import backends, gates
from fusedlayers.activations import resolve
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import product
from fusedlayers.ops.gate import Gate, split
from fusedlayers.utils.autograd_graph import raw_saved

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKINGS = ("gate_up", "up_gate", "interleaved")
ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "gelu_tanh", "mish", "softsign")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ENDS = torch.tensor([3, 20, 32], dtype=torch.int32)

#: Each product with torch's, the shapes of what is multiplied and of the weight, and how often eager holds the former.
PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (fl.linear, F.linear, (4, 8, 64), (24, 64)),
    "matmul": (fl.matmul, torch.matmul, (4, 8, 64), (64, 24)),
    "batched": (fl.matmul, torch.matmul, (2, 4, 8, 64), (2, 4, 64, 24)),
    "bmm": (fl.bmm, torch.bmm, (4, 8, 64), (4, 64, 24)),
    "grouped": (
        lambda h, w: fl.grouped_mm(h, w, ENDS), lambda h, w: F.grouped_mm(h, w, offs=ENDS), (32, 64), (3, 64, 24)
    ),
}  # fmt: skip
#: What torch's compiler and torch.func use of torch is deprecated.
_compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
each_product = pytest.mark.parametrize("name", PRODUCTS)


def _gated(gate: Tensor, up: Tensor, activation: Any) -> Tensor:
    return fl.gated_act(gate, up, activation)


def _is_saved_by(y: Tensor) -> str:
    return type(y.grad_fn).__name__


def _keeps_factors(y: Tensor) -> bool:
    """Whether a node of the last product has saved the factors of what it multiplied."""
    node: Any = y.grad_fn
    while node.name() in ("ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward1"):
        ((node, _),) = node.next_functions
    return any(type(saved.data) is product._Packed for saved in raw_saved(node))


# --- the gate ---------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_as_exact_as_torch(name: str, dtype: torch.dtype) -> None:
    activation = resolve(name)
    gate, up = leaves((7, 5, 300), (7, 5, 300), dtype=dtype)
    assert _is_saved_by(fl.gated_act(gate, up, activation)) == "GatedActBackward"
    compare(_gated, lambda g, u, act: act(g) * u, activation, gate, up, folded=False)


@each_dtype
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shape", [(600,), (1, 600), (33, 598), (3, 5, 2), (40, 3, 4096)], ids=str)
def test_packed_halves(packing: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    (packed,) = leaves(shape, dtype=dtype)

    def ours(packed: Tensor, act: Any) -> Tensor:
        return fl.gated_act(packed, activation=act, packing=packing)

    def eager(packed: Tensor, act: Any) -> Tensor:
        gate, up = split(packed, packing)
        return act(gate) * up

    compare(ours, eager, resolve("gelu"), packed, folded=False)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t(),
    "channels last": lambda t: t.view(4, 8, 5, 10).contiguous(memory_format=torch.channels_last),
    "rows with gaps": lambda t: t[:, 10:],
    "every second": lambda t: t[::2],
    "every second column": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(40, 40),
    "one row": lambda t: t[3],
    "three dimensions of a permuted": lambda t: t.view(4, 10, 40).permute(1, 0, 2),
}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(first: str, dtype: torch.dtype) -> None:
    both = leaves((40, 40), (40, 40), dtype=dtype)
    view = LAYOUTS[first]
    for other in (view, lambda t: view(t).contiguous()):

        def ours(gate: Tensor, up: Tensor, act: Any, other: Any = other) -> Tensor:
            return fl.gated_act(view(gate), other(up), act)

        compare(ours, lambda g, u, act: act(view(g)) * view(u), resolve("silu"), *both, folded=False)
        compare(
            lambda u, g, act, f=ours: f(g, u, act), lambda u, g, act: act(view(g)) * view(u), resolve("silu"), *both
        )


@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_backends_agree_on_rows_with_gaps(name: str) -> None:
    whole, among_others = torch.randn(50, 700, device=DEVICE), torch.randn(3, 1, 10, 60, device=DEVICE)[:, :, :5]
    for packed, packing in itertools.product((whole, among_others), PACKINGS):
        dy = torch.randn_like(packed[..., ::2])
        if name == "cpu":
            packed, dy = packed.cpu(), dy.cpu()
        found = []
        for backend in (backends.torch, importlib.import_module(f"fusedlayers.backends.{name}")):
            gate = Gate(resolve("mish"), backend, packing)  # type: ignore[arg-type]
            found.append([gate.product([packed], ()), *gate.gradients(dy, [packed], (), ())])
        for ours, reference in zip(*found, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_offsets_between_rows_have_64_bits_where_32_do_not_suffice() -> None:
    """However few elements there are."""
    triton_gates = pytest.importorskip("fusedlayers.backends.triton.gates")
    rows = torch.empty(2**31 + 64, dtype=torch.float16, device="meta").as_strided((3, 16), (2**30, 1))
    assert rows.numel() == 48 and triton_gates._extent(rows) == 2**31 + 16
    assert triton_gates.index_of(triton_gates._extent(rows)).primitive_bitwidth == 64
    assert triton_gates.index_of(triton_gates._extent(rows[:2])).primitive_bitwidth == 32


def test_a_users_function_that_reads_parameters() -> None:
    slope = torch.nn.Parameter(torch.full((300,), 0.2))

    def leaky(z: Tensor) -> Tensor:
        return torch.where(z > 0, z, slope * z)

    for packing, shape in ((None, (50, 300)), ("interleaved", (50, 600))):
        tensors = leaves(*([shape] * (2 if packing is None else 1)))
        ours = fl.gated_act(*tensors, activation=leaky, **({} if packing is None else {"packing": packing}))
        gate, up = tensors if packing is None else split(tensors[0], "interleaved")
        eager = leaky(gate) * up
        assert _is_saved_by(ours) == "GatedActBackward"
        dy = torch.randn_like(ours)
        for a, b in zip(*(torch.autograd.grad(y, (*tensors, slope), dy) for y in (ours, eager)), strict=True):
            torch.testing.assert_close(a, b)


def test_what_is_left_to_pytorch() -> None:
    gate, up = leaves((40, 40), (40, 40))
    assert _is_saved_by(fl.gated_act(gate, up.detach())) == "MulBackward0"
    assert _is_saved_by(fl.gated_act(gate.detach(), up)) == "MulBackward0"
    assert _is_saved_by(fl.gated_act(gate, up, None)) == "MulBackward0"  # which saves no more
    assert _is_saved_by(fl.gated_act(gate, up, lambda z: z.cumsum(0))) == "MulBackward0"
    assert _is_saved_by(fl.gated_act(gate[:2, :2], up[:2, :2])) == "MulBackward0"
    assert fl.gated_act(gate, up.double()).dtype is torch.float64
    assert fl.gated_act(gate.detach(), up.detach()).grad_fn is None
    assert fl.gated_act(torch.ones(0, 4).requires_grad_(), torch.ones(0, 4).requires_grad_()).shape == (0, 4)
    (plan,) = fl.plan_of(fl.gated_act, gate, up)
    assert (plan.path, plan.saved, str(plan)) == ("fused", "input", "saves gate and up")


# --- products ---------------------------------------------------------------------------------------------------------


@each_product
def test_the_factors_are_saved_and_their_product_is_not(name: str) -> None:
    ours, eager, shape, w_shape = PRODUCTS[name]
    gate, up, w = leaves(shape, shape, w_shape)
    one = gate.numel() * gate.itemsize
    hidden = [lambda: gate * 1, lambda: up * 1]

    def run(product: Any, multiply: Any) -> Any:
        return lambda: product(multiply(hidden[0](), hidden[1]()), w)

    ends = 12 if name == "grouped" else 0
    assert saved_bytes(run(ours, fl.gated_act)) <= 2 * one + ends
    assert saved_bytes(run(ours, lambda g, u: fl.silu(g) * u)) <= 2 * one + ends  # torch's product of a saved output
    assert saved_bytes(run(eager, lambda g, u: F.silu(g) * u)) >= 4 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["linear", "conv1d", "dropout"])
def test_the_result_of_glu_is_not_saved(case: str, dtype: torch.dtype) -> None:
    """PyTorch's ``F.glu`` saves what it is given; the layer after it computes its result from that."""
    shape, w_shape, dim = ((2, 48, 512), (8, 24, 3), 1) if case == "conv1d" else ((40, 128), (8, 64), -1)
    x, w = leaves(shape, w_shape, dtype=dtype)
    function = F.conv1d if case == "conv1d" else F.linear

    def run(product: Any) -> Tensor:
        torch.manual_seed(0)
        h = F.glu(x * 1, dim)
        y: Tensor = product((fl.dropout if product is ours else F.dropout)(h, 0.3) if case == "dropout" else h, w)
        return y

    ours = functools.partial(gates.keeping_factors, function)
    y, theirs = run(ours), run(function)
    assert _keeps_factors(y) and torch.equal(y, theirs)
    half = x.nbytes // 2
    assert saved_bytes(lambda: run(function)) - saved_bytes(lambda: run(ours)) >= half
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(theirs, (x, w), dy), strict=True):
        assert torch.equal(a, b)


@each_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_products(name: str, dtype: torch.dtype) -> None:
    ours, eager, shape, w_shape = PRODUCTS[name]
    gate, up, w = leaves(shape, shape, w_shape, dtype=dtype)
    y = ours(fl.gated_act(gate, up), w)
    assert _keeps_factors(y)
    if name == "grouped":  # CPUs multiply groups of the dtypes that GPUs do; float64 is not among them
        dy = torch.randn_like(y)
        theirs = eager(F.silu(gate) * up, w)
        for a, b in zip(*(torch.autograd.grad(r, (gate, up, w), dy) for r in (y, theirs)), strict=True):
            assert relative(a, b.double()) <= 8 * torch.finfo(dtype).eps
        return
    compare(
        lambda g, u, w, act: ours(fl.gated_act(g, u, act), w), lambda g, u, w, act: eager(act(g) * u, w),
        resolve("silu"), gate, up, w, folded=False,
    )  # fmt: skip


def test_a_bias() -> None:
    gate, up, w, b = leaves((3, 5, 20), (3, 5, 20), (7, 20), (7,), dtype=torch.bfloat16)
    compare(
        lambda g, u, w, b, act: fl.linear(fl.gated_act(g, u, act), w, b),
        lambda g, u, w, b, act: F.linear(act(g) * u, w, b),
        resolve("gelu"), gate, up, w, b, folded=False,
    )  # fmt: skip


def test_products_that_are_not_what_they_seem() -> None:
    """Edited, reshaped, of a weight that all rows share, or with one factor that needs no gradient: torch's own."""
    a, b, w = leaves((40, 40), (40, 40), (8, 40))
    makers: dict[str, Callable[[], Tensor]] = {
        "edited": lambda: fl.gated_act(a, b).mul_(2),
        "written to": lambda: fl.gated_act(a, b).index_fill_(0, torch.tensor([1]), 3.0),
        "reshaped": lambda: fl.gated_act(a, b).view(1600).view(40, 40),
        "a weight": lambda: a * b[0],
        "a number": lambda: a * 2.0,
        "a constant": lambda: a * torch.randn(40, 40, generator=torch.Generator().manual_seed(0)),
        "detached": lambda: (a * b).detach().requires_grad_(),
        "a part": lambda: (a * b)[:8],
        "edited halves": lambda: F.glu(torch.cat((a, b), 1)).mul_(2),
        "reshaped halves": lambda: F.glu(torch.cat((a, b), 1)).view(1600).view(40, 40),
    }
    for name, make in makers.items():
        h = make()
        assert not _keeps_factors(fl.linear(h, w)), name
        (ours,), (eager,) = (torch.autograd.grad(f(make(), w).sin().sum(), w) for f in (fl.linear, F.linear))
        assert torch.equal(ours, eager), name
    h = a * b
    with torch.no_grad():
        h.add_(1)  # its node does not know
    assert not _keeps_factors(fl.linear(h, w))
    h = fl.gated_act(a, b)
    with torch.no_grad():
        h.add_(1)
    assert not _keeps_factors(fl.linear(h, w))


_CONVOLUTIONS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": (F.conv1d, (2, 24, 512), (8, 24, 3), {"padding": 1}),
    "2d": (F.conv2d, (2, 24, 18, 40), (8, 24, 1, 1), {}),
    "2d, strides": (F.conv2d, (2, 24, 18, 40), (8, 12, 3, 3), {"stride": (2, 1), "padding": "valid", "groups": 2}),
    "2d, depthwise": (F.conv2d, (2, 24, 18, 40), (24, 1, 3, 3), {"dilation": 2, "padding": "same", "groups": 24}),
    "2d, one number for both": (F.conv2d, (2, 24, 18, 40), (8, 24, 3, 3), {"stride": (2,), "padding": [1]}),
    "3d": (F.conv3d, (2, 24, 6, 18, 10), (8, 24, 1, 3, 1), {"padding": (0, 1, 0)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_convolutions_of_scaled_channels(name: str, dtype: torch.dtype) -> None:
    """As behind squeeze and excitation: the scale is one for each channel of each image."""
    function, shape, w_shape, options = _CONVOLUTIONS[name]
    x, scale, w, b = leaves(shape, (*shape[:2], *(1 for _ in shape[2:])), w_shape, w_shape[:1], dtype=dtype)

    def ours(x: Tensor, scale: Tensor, w: Tensor, b: Tensor, act: Any) -> Tensor:
        return gates.keeping_factors(function, fl.bias_act(x, None, act) * scale, w, b, **options)

    assert _keeps_factors(ours(x, scale, w, b, "silu"))
    compare(
        ours, lambda x, scale, w, b, act: function(act(x) * scale, w, b, **options),
        resolve("silu"), x, scale, w, b,
    )  # fmt: skip


def test_a_convolutions_factors_are_saved_and_their_product_is_not() -> None:
    x, scale, w = leaves((2, 24, 18, 40), (2, 24, 1, 1), (8, 24, 1, 1))
    one = x.numel() * x.itemsize

    def saved(conv: Any) -> int:
        return saved_bytes(lambda: conv((x * 1) * scale, w))

    assert saved(F.conv2d) - saved(functools.partial(gates.keeping_factors, F.conv2d)) == one
    dy = torch.randn(2, 8, 18, 40)
    y, theirs = gates.keeping_factors(F.conv2d, x * scale, w), F.conv2d(x * scale, w)
    for a, b in zip(*(torch.autograd.grad(r, (x, scale, w), dy) for r in (y, theirs)), strict=True):
        assert torch.equal(a, b)
    calls = (functools.partial(conv, F.conv2d) for conv in (gates.keeping_factors, lambda f, h, w: f(h, w)))
    check_orders(*((lambda x, scale, w, f=call: f(x * scale, w)) for call in calls), (x, scale, w))


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize(
    ("shape", "w_shape", "options"),
    [
        ((24, 18, 80), (8, 24, 1, 1), {}),  # without a batch
        ((2, 24, 18, 40), (8, 24, 1, 4), {"padding": "same"}),  # one end is padded by more
    ],
)
def test_convolutions_that_are_torchs_own(shape: Any, w_shape: Any, options: Any) -> None:
    x, other, w = leaves(shape, shape, w_shape)
    y = gates.keeping_factors(F.conv2d, x * other, w, **options)
    assert _is_saved_by(y) != "ConvBackward" and torch.equal(y, F.conv2d(x * other, w, **options))


def test_convolutions_refuse_as_torch_does() -> None:
    x, other = leaves((2, 24, 18, 40), (2, 24, 18, 40))
    for w_shape, options in (
        ((8, 12, 1, 1), {}),
        ((8, 24, 99, 1), {}),
        ((8, 24, 1, 1), {"stride": 0}),
        ((8, 24, 1, 1), {"stride": (1, 2, 1)}),
    ):
        (w,) = leaves(w_shape)
        messages = []
        for conv in (F.conv2d, functools.partial(gates.keeping_factors, F.conv2d)):
            with pytest.raises(RuntimeError) as error:
                conv(x * other, w, **options)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_factors_that_are_edited_before_backward() -> None:
    """As in eager PyTorch, backward says so; it says so too if they were edited before the matmul."""
    for edits_first in (True, False):
        gate, up, w = leaves((40, 40), (40, 40), (8, 40))
        gate = gate * 1
        h = fl.gated_act(gate, up)
        if edits_first:
            with torch.no_grad():
                gate.add_(1)
        y = fl.linear(h, w)
        with torch.no_grad():
            gate.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_weight_that_is_edited_before_backward() -> None:
    """Under hooks autograd does not look at versions."""
    gate, up, w = leaves((40, 40), (40, 40), (8, 40))
    y = fl.linear(fl.gated_act(gate, up), w)
    assert _keeps_factors(y)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*saved at version 0 and is at version 1"):
        y.sum().backward()


def test_hooks_may_be_forbidden() -> None:
    gate, up, w = leaves((40, 40), (40, 40), (8, 40))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        y = fl.linear(fl.gated_act(gate, up), w)
    assert not _keeps_factors(y)
    assert torch.equal(y, fl.linear(fl.gated_act(gate, up), w))


def test_a_view_of_the_product_is_what_the_matmul_saves() -> None:
    """One of other strides, where rows and columns change places."""
    a, b, w = leaves((600, 1), (600, 1), (5, 1))
    for call in (lambda: fl.linear(a * b, w), lambda: fl.matmul(a * b, w.t())):
        assert _keeps_factors(call())
        for ours, theirs in zip(*(torch.autograd.grad(f().sin().sum(), (a, b, w)) for f in (
            call, lambda: F.linear(a * b, w),
        )), strict=True):  # fmt: skip
            torch.testing.assert_close(ours, theirs)


def test_a_transposed_gate_that_reads_a_parameter() -> None:
    """Of which the kernel's product is contiguous, and the formula's is not."""
    x, u, w = leaves((40, 48), (40, 48), (8, 40))
    beta = torch.full((40,), 0.3)

    def act(z: Tensor) -> Tensor:
        return z * torch.sigmoid(beta * z)

    found = []
    for gated, linear in ((fl.gated_act, fl.linear), (lambda g, u, f: f(g) * u, F.linear)):
        y = linear(gated(x.t(), u.t(), act), w)
        (dw,) = torch.autograd.grad(y.sin().sum(), w, create_graph=True)
        dy = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape)
        batched = torch.func.vmap(lambda d, y=y: torch.autograd.grad(y, w, d, retain_graph=True)[0])(dy)
        found.append([dw, batched, *torch.autograd.grad(dw.square().sum(), (x, u, w))])
    for ours, theirs in zip(*found, strict=True):
        assert relative(ours, theirs.double()) < 1e-5


def test_conjugates_and_negatives_of_the_product() -> None:
    a, b = (torch.randn(40, 40, dtype=torch.complex128).requires_grad_() for _ in range(2))
    for view in (lambda h: h.conj().t(), lambda h: torch._neg_view(h).t()):
        found = []
        for matmul in (fl.matmul, torch.matmul):
            h = a * b
            found.append(torch.autograd.grad(matmul(h, view(h)).abs().square().sum(), (a, b)))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_weights() -> None:
    a, b, w = leaves((40, 40), (40, 40), (8, 40))
    w = w.detach().to_sparse_csr().requires_grad_()
    found = [torch.autograd.grad(f(a * b, w).sin().sum(), (a, b)) for f in (fl.linear, F.linear)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_product_whose_graph_was_freed() -> None:
    a, b, w = leaves((40, 40), (40, 40), (8, 40))
    for h in (a * b, fl.gated_act(a, b)):
        h.sum().backward()
        assert not _keeps_factors(fl.linear(h, w))


def test_a_frozen_weight_keeps_nothing_of_its_input() -> None:
    gate, up, w = leaves((40, 40), (40, 40), (8, 40))
    one = gate.numel() * gate.itemsize
    w = w.detach()
    assert saved_bytes(lambda: fl.linear(fl.gated_act(gate * 1, up * 1), w), exclude=w) == 2 * one


def test_second_derivatives_batched_gradients_and_retained_graphs() -> None:
    gate, up, w = leaves((8, 34), (8, 34), (5, 34))
    calls = (lambda g, u, w: fl.linear(fl.gated_act(g, u), w)), (lambda g, u, w: F.linear(F.silu(g) * u, w))
    check_orders(*calls, (gate, up, w))
    (packed,) = leaves((8, 68))
    for packing in PACKINGS:
        ours = functools.partial(fl.gated_act, packing=packing)
        check_orders(ours, lambda p, k=packing: F.silu(split(p, k)[0]) * split(p, k)[1], [packed])
    for call, eager in (
        (lambda: fl.linear(fl.gated_act(gate, up), w), lambda: F.linear(F.silu(gate) * up, w)),
        (lambda: fl.matmul(fl.gated_act(gate, up), w.t()), lambda: F.linear(F.silu(gate) * up, w)),
    ):
        y, expected = call(), eager()
        dys = torch.randn(3, *y.shape, dtype=y.dtype)
        ours = torch.autograd.grad(y, (gate, up, w), dys, is_grads_batched=True, retain_graph=True)
        theirs = torch.autograd.grad(expected, (gate, up, w), dys, is_grads_batched=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        first = torch.autograd.grad(y, (gate, up, w), dys[0], retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(y, (gate, up, w), dys[0]), strict=True):
            assert torch.equal(a, b)


@_compiles
def test_transforms_and_forward_mode() -> None:
    gate, up, w = (t.detach() for t in leaves((4, 300), (4, 300), (5, 300)))

    def block(g: Tensor, u: Tensor, linear: Any = fl.linear, gated: Any = fl.gated_act) -> Tensor:
        return linear(gated(g, u), w)

    eager = lambda g, u: block(g, u, F.linear, lambda g, u: F.silu(g) * u)
    torch.testing.assert_close(torch.func.vmap(block)(gate, up), torch.func.vmap(eager)(gate, up))
    for a, b in zip(*(torch.func.jvp(f, (gate, up), (up, gate)) for f in (block, eager)), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(torch.func.jacrev(f)(gate, up) for f in (block, eager)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_and_hooks_keep_what_they_keep(use_reentrant: bool) -> None:
    x, w1, w2, w3 = leaves((40, 30), (60, 30), (60, 30), (20, 60))

    def block(x: Tensor, linear: Any = fl.linear, gated: Any = fl.gated_act) -> Tensor:
        return linear(gated(F.linear(x, w1), F.linear(x, w2)), w3).mul(0.01).sin()

    expected = torch.autograd.grad(block(x, F.linear, lambda g, u: F.silu(g) * u).sum(), (w1, w2, w3))
    sources = (w1, w2, w3)
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.sum().backward()
    for source, truth in zip(sources, expected, strict=True):
        torch.testing.assert_close(source.grad, truth)
    with torch.autograd.graph.save_on_cpu():
        y = block(x)
    for ours, truth in zip(torch.autograd.grad(y.sum(), sources), expected, strict=True):
        torch.testing.assert_close(ours, truth)
    unpacked = 0

    def unpack(t: Tensor) -> Tensor:
        nonlocal unpacked
        unpacked += 1
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        block(x)
    assert not unpacked  # nothing was brought back in the forward pass


def test_autocast_casts_as_torch_does() -> None:
    x, w1, w2, w3, b = leaves((40, 30), (60, 30), (60, 30), (20, 60), (20,))
    results, kept = [], []
    for linear, gated in ((fl.linear, fl.gated_act), (F.linear, lambda g, u: F.silu(g) * u)):

        def block(linear: Any = linear, gated: Any = gated) -> Tensor:
            return linear(gated(F.linear(x, w1), F.linear(x, w2)), w3, b)

        with torch.autocast("cpu", torch.bfloat16):
            y = block()
            kept.append(saved_bytes(block))
        assert y.dtype is torch.bfloat16
        results.append(torch.autograd.grad(y, (x, w1, w2, w3, b), torch.ones_like(y)))
    for ours, eager in zip(*results, strict=True):
        assert ours.dtype is eager.dtype and relative(ours, eager.double()) < 0.02
    assert kept[1] - kept[0] == 2 * 40 * 60 * 2


@_compiles
def test_compiled_with_the_same_bytes() -> None:
    gate, up, w = leaves((64, 128), (64, 128), (32, 128))

    def block(g: Tensor, u: Tensor) -> Tensor:
        return fl.linear(fl.gated_act(g * 1, u * 1), w)

    compiled = torch.compile(block, fullgraph=True)
    dy = torch.randn(64, 32)
    for a, b in zip(*(torch.autograd.grad(f(gate, up), (gate, up, w), dy) for f in (compiled, block)), strict=True):
        torch.testing.assert_close(a, b)
    assert saved_bytes(compiled, gate, up) <= saved_bytes(block, gate, up)


@_compiles
def test_compiled_within_a_selective_checkpoint_it_is_recomputed() -> None:
    """That one keeps the product, which ``save="recompute"`` does not."""
    x, w = leaves((64, 16), (128, 16))
    keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def layer(x: Tensor) -> Tensor:
        return fl.dense_bias_act(x, w, None, "silu", save="recompute")

    whole = lambda x: checkpoint(layer, x * 1, use_reentrant=False, context_fn=keeps)
    torch.compiler.reset()
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    dy = torch.randn(64, 128)
    (ours,), (expected,) = (torch.autograd.grad(f(x), x, dy) for f in (compiled, layer))
    assert relative(ours, expected.double()) < 1e-6
    if torch.__version__ >= "2.12":  # of two checkpoints the compiler of 2.11 keeps the inputs
        assert saved_bytes(compiled, x, exclude=[x, w]) <= 64 * 16 * 4


@_compiles
@pytest.mark.parametrize("save", ["auto", "recompute"])
def test_compiled_within_a_checkpoint_no_more_is_kept_than_its_input(save: str) -> None:
    x, w1, w2, w3 = leaves((64, 16), (128, 16), (128, 16), (32, 128))

    def gate(x: Tensor) -> Tensor:
        return fl.linear(fl.gated_act(F.linear(x, w1), F.linear(x, w2)), w3)

    def block(x: Tensor) -> Tensor:
        return fl.gated_mlp(x, w1, None, w2, None, w3, None, "silu", save=save)

    dy = torch.randn(64, 32)
    for function in (gate, block, lambda x: fl.dense_bias_act(x, w1, None, "silu", save="recompute")[:, :32]):
        whole = lambda x, f=function: checkpoint(f, x * 1, use_reentrant=False)
        torch.compiler.reset()
        compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
        (ours,), (expected,) = (torch.autograd.grad(f(x), x, dy) for f in (compiled, function))
        assert relative(ours, expected.double()) < 1e-6
        assert saved_bytes(compiled, x, exclude=[x, w1, w2, w3]) <= 64 * 16 * 4


def test_subclasses_and_graphs_see_torchs_own() -> None:
    class Block(torch.nn.Module):
        def forward(self, gate: Tensor, up: Tensor, w: Tensor) -> Tensor:
            return fl.linear(fl.gated_act(gate, up, "relu"), w)

    graph = torch.fx.symbolic_trace(Block())
    gate, up, w = leaves((40, 40), (40, 40), (8, 40))
    torch.testing.assert_close(graph(gate, up, w), F.linear(gate.relu() * up, w))
    assert copy.deepcopy(graph)(gate, up, w).shape == (40, 8)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 4), torch.ones(2, 3)), ValueError, r"gate \(2, 4\) and up \(2, 3\) must have the same shape"),
        ((torch.ones(2, 3),), ValueError, r"without up, gate must hold both, \(\.\.\., 2 \* hidden\), got \(2, 3\)"),
        ((torch.tensor(1.0),), ValueError, "without up, gate must hold both"),
        ((torch.ones(2, 4, dtype=torch.int64),), TypeError, "gate must have a floating dtype"),
        ((torch.ones(2, 4), [1.0]), TypeError, "up must be a tensor, got list"),
        ((torch.ones(2, 4), torch.ones(2, 4, device="meta")), ValueError, "up is on meta"),
        ((torch.ones(2, 4), None, "swiglu"), ValueError, "swiglu"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fl.gated_act(*arguments)


def test_packings_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="packing must be one of gate_up, up_gate, interleaved, got 'last'"):
        fl.gated_act(torch.ones(2, 4), packing="last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="but there is up; drop one of them"):
        fl.gated_act(torch.ones(2, 4), torch.ones(2, 4), packing="up_gate")


def test_products_refuse_as_torch_does() -> None:
    a, b, w = leaves((40, 40), (40, 40), (8, 30))
    for ours, torchs in ((fl.linear, F.linear), (fl.matmul, torch.matmul), (fl.bmm, torch.bmm)):
        for arguments in ((a * b, w), (a * b, w.double()), (a * b, "w"), (torch.ones(2, 2), torch.ones(3, 3, 3))):
            with pytest.raises((RuntimeError, TypeError)) as expected:
                torchs(*arguments)
            with pytest.raises(type(expected.value)) as found:
                ours(*arguments)
            assert str(found.value) == str(expected.value)
    assert fl.linear(torch.ones(2, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.int64)).dtype is torch.int64


def test_numbers_that_are_not_real_are_torchs() -> None:
    a, b, w = (torch.randn(8, 40, dtype=torch.complex64).requires_grad_() for _ in range(3))
    for ours, torchs in ((fl.linear, F.linear), (lambda h, w: fl.matmul(h, w.t()), lambda h, w: h @ w.t())):
        found, expected = (torch.autograd.grad(f(a * b, w).abs().sum(), (a, b, w)) for f in (ours, torchs))
        torch.testing.assert_close(found, expected)


def test_ends_of_groups_that_were_edited_are_noticed() -> None:
    gate, up, w = leaves((32, 64), (32, 64), (3, 64, 24))
    ends = ENDS.clone()
    y = fl.grouped_mm(fl.gated_act(gate, up), w, ends)
    ends.sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 1), (1,), ()])
def test_biases_that_torch_broadcasts(shape: tuple[int, ...]) -> None:
    gate, up, w, b = leaves((5, 60), (5, 60), (7, 60), shape)
    found, expected = (
        torch.autograd.grad(f(g(gate, up), w, b).sin().sum(), (gate, up, w, b))
        for f, g in ((fl.linear, fl.gated_act), (F.linear, lambda g, u: F.silu(g) * u))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _laid_out_otherwise(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


@pytest.mark.parametrize("packed", [False, True])
def test_factors_that_hooks_have_laid_out_in_another_way(packed: bool) -> None:
    sources = leaves((4, 16, 64)) if packed else leaves((4, 16, 32), (4, 16, 32))
    with torch.autograd.graph.saved_tensors_hooks(_laid_out_otherwise, lambda t: t):
        y = fl.gated_act(*sources)
    gate, up = split(sources[0], "gate_up") if packed else sources
    expected = torch.autograd.grad((F.silu(gate) * up).sin().sum(), sources)
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), sources), expected)


@pytest.mark.parametrize("gated", [fl.gated_act, lambda g, u: fl.silu(g) * u], ids=["one", "two"])
def test_factors_that_hooks_have_got_are_left_with_them(gated: Any) -> None:
    """A checkpoint would compute them once more in the forward pass."""
    gate, up, w = leaves((40, 40), (40, 40), (8, 40))
    runs = 0

    def block(gate: Tensor, up: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return gated(gate.sin(), up)

    y = fl.linear(checkpoint(block, gate, up, use_reentrant=False), w)
    assert runs == 1 and _is_saved_by(y) == "MmBackward0"
    h = checkpoint(lambda g, u: fl.dropout(gated(g, u), 0.3), gate, up, use_reentrant=False)
    assert not _keeps_factors(fl.linear(h, w))
