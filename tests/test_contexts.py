"""The layers under everything that PyTorch may have switched on around them."""

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import reference
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.activations import Activation, resolve, rows
from fusedlayers.derivative import branch_bit
from fusedlayers.memory import saved_bytes

TABLE = [row.bind() for row in rows()]
SAVES = ("output", "input", "recompute")
#: One folded, one with ATen's own kernels, one in plain operations, one that is left to PyTorch, none at all.
KINDS = ["gelu", "tanh", "softplus", torch.sin, None]

every_activation = pytest.mark.parametrize("activation", TABLE, ids=str)
every_kind = pytest.mark.parametrize("activation", KINDS, ids=reference.label)
every_save = pytest.mark.parametrize("save", SAVES)

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")

#: What saving the output costs a folded derivative in float32.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 5e-4}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def layer() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(s, requires_grad=True) for s in ((30, 12), (40, 12), (40,)))  # type: ignore[return-value]


def _torchs(activation: object) -> Callable[[Tensor], Tensor]:
    return resolve(activation).plain


def _save_for(activation: object, save: str) -> str:
    return "input" if save == "output" and resolve(activation).needs_input_reason is not None else save


# --- backward, twice and again ----------------------------------------------------------------------------------------


def test_backward_on_another_thread_and_after_the_layer_is_gone() -> None:
    module = fl.FusedDenseAct(12, 40, "silu")
    x = torch.randn(30, 12, requires_grad=True)
    y = module(x)
    del module
    y.sum().backward()
    assert x.grad is not None


# --- autocast ---------------------------------------------------------------------------------------------------------


@every_activation
@every_save
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(layer: tuple[Tensor, ...], activation: Activation, save: str, dtype: torch.dtype) -> None:
    x, w, b = layer
    with torch.autocast("cpu", dtype):
        y = fl.dense_bias_act(x, w, b, activation, save=save)
        z = F.linear(x, w, b)
    assert y.dtype is z.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), activation.function(z.double()), rtol=1.01 * eps, atol=1e-6)
    dy = torch.randn(30, 40).to(dtype)
    got = torch.autograd.grad(y, layer, dy)
    dz = (dy.double() * reference.derivative(activation.function, z)).to(dtype)
    for a, e, t in zip(got, torch.autograd.grad(z, layer, dz), layer, strict=True):
        assert a.dtype is t.dtype is torch.float32
        assert float((a - e).norm() / e.norm()) < (3 if activation.is_folded else 2) * eps


# --- torch.compile ----------------------------------------------------------------------------------------------------


def _layers(x: Tensor, w: Tensor, b: Tensor, activations: Sequence[Activation], save: str) -> list[Tensor]:
    return [fl.dense_bias_act(x, w, b, a, save=save) for a in activations]


def _forward_and_gradients(
    function: Callable[..., list[Tensor]], *tensors: Tensor
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    ys = function(*tensors)
    dy = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)  # any dtype holds it
    return ys, [torch.autograd.grad(y, tensors, dy.to(y.dtype), retain_graph=True) for y in ys]


@compiles
@pytest.mark.parametrize(
    ("save", "dtype"),
    [("auto", torch.float32), ("auto", torch.bfloat16), ("input", torch.bfloat16), ("recompute", torch.float32)],
    ids=str,
)
def test_compiled_by_inductor(save: str, dtype: torch.dtype) -> None:
    # All of them take the C++ compiler a minute and a half, and formulas that differ in numbers are lowered alike. (The
    # next test has all.)
    alike = {"gelu_tanh", "quick_gelu", "mish", "hardtanh", "trelu", "selu", "celu"}
    _check_compiled("inductor", save, dtype, [a for a in TABLE if a.name not in alike])


@compiles
@pytest.mark.parametrize(("save", "dtype"), [("auto", torch.float16), ("recompute", torch.float32)], ids=str)
def test_compiled_without_inductor(save: str, dtype: torch.dtype) -> None:
    _check_compiled("aot_eager", save, dtype)


def _check_compiled(backend: str, save: str, dtype: torch.dtype, activations: Sequence[Activation] = TABLE) -> None:
    torch.compiler.reset()
    x, w, b = (torch.randn(s).to(dtype).requires_grad_() for s in ((30, 12), (40, 12), (40,)))
    compiled = torch.compile(
        functools.partial(_layers, activations=activations, save=save), fullgraph=True, backend=backend
    )
    got = _forward_and_gradients(compiled, x, w, b)
    doubles = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = _forward_and_gradients(
        lambda *t: [reference.dense_bias_act(*t, a.function) for a in activations], *doubles
    )
    eager = _forward_and_gradients(lambda *t: [reference.dense_bias_act(*t, a.plain) for a in activations], x, w, b)
    for i, activation in enumerate(activations):
        assert got[0][i].dtype is dtype
        tolerance = 4 * torch.finfo(dtype).eps + (1e-5 if activation.is_folded else 0)
        for ours, eagers, truth in zip(
            (got[0][i], *got[1][i]), (eager[0][i], *eager[1][i]), (expected[0][i], *expected[1][i]), strict=True
        ):
            error, eager_error = ((t.double() - truth).detach().norm() / truth.detach().norm() for t in (ours, eagers))
            assert float(error) <= 2 * float(eager_error) + tolerance, activation


@compiles
@pytest.mark.parametrize("name", ["gelu", "tanh"])
def test_compiled_outputs_carry_the_branch_only_for_a_backward_pass(name: str) -> None:
    torch.compiler.reset()
    z = torch.linspace(-6, 6, 1001)
    compiled = torch.compile(lambda z: fl.bias_act(z, None, name), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(z), resolve(name).plain(z))
    assert torch.equal(compiled(z), resolve(name).plain(z))
    y = compiled(z.clone().requires_grad_())
    if name == "gelu":
        fold = resolve(name).folded_derivative()
        assert fold is not None
        assert torch.equal(branch_bit.decode(y, torch.float32), z < fold.fold.position)


@compiles
def test_compiled_with_dynamic_shapes() -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = fl.FusedDenseAct(12, 40, "gelu")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counting)
    for batch in (30, 7, 64):
        x = torch.randn(batch, 12, requires_grad=True)
        torch.testing.assert_close(compiled(x), F.gelu(F.linear(x, module.weight, module.bias)))
    assert len(graphs) == 1
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (30, 7, 64):
        x = torch.randn(batch, 12, requires_grad=True)
        got = torch.autograd.grad(compiled(x).sum(), [x, *module.parameters()])
        expected = torch.autograd.grad(F.gelu(F.linear(x, module.weight, module.bias)).sum(), [x, *module.parameters()])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-3)


@compiles
@pytest.mark.parametrize(
    "function",
    [
        lambda x: fl.gelu(x, approximate="tanh"),
        fl.SiLU(),
        fl.LeakyReLU(0.2),
        lambda x: fl.bias_act(x, x[0].detach(), nn.ELU(0.5)),
        lambda x: fl.bias_act(x.t(), x[:, 0], functools.partial(F.leaky_relu, negative_slope=0.3)),
        lambda x: fl.bias_act(x * 1, None, "gelu", inplace=True),
        lambda x: fl.bias_act(x, None, torch.sin),
        lambda x: fl.bias_act(x, None, "gelu", save="input"),
    ],
    ids=["gelu_tanh", "SiLU", "LeakyReLU", "nn.ELU", "partial", "inplace", "sin", "input"],
)
def test_whatever_is_passed_compiles(function: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    x = torch.randn(30, 30, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(function(x).sum(), x), **CLOSE
    )


def test_the_first_use_may_be_compiled() -> None:
    # In a process of its own: nothing has been looked up, fitted or registered with the compiler.
    code = """
import torch, fusedlayers as fl
from fusedlayers.derivative import branch_bit
model = torch.nn.Sequential(fl.FusedDenseAct(20, 40, torch.nn.LeakyReLU(0.3)), fl.FusedDenseAct(40, 20, "mish"))
x = (10 * torch.randn(50, 20)).requires_grad_()
y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
assert branch_bit.decode(y, torch.float32).any()
torch.testing.assert_close(y, model(x))
torch.testing.assert_close(
    torch.autograd.grad(y.sum(), x), torch.autograd.grad(model(x).sum(), x), rtol=1e-4, atol=1e-3
)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[1])


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_tensor_hooks_see_the_gradients(layer: tuple[Tensor, ...]) -> None:
    seen: dict[str, Tensor] = {}
    y = fl.dense_bias_act(*layer, "gelu")
    y.register_hook(lambda g: seen.update(dy=g) or 2 * g)
    layer[1].register_hook(lambda g: seen.update(dw=g))
    layer[2].register_post_accumulate_grad_hook(lambda p: seen.update(db=p.grad))
    y.sum().backward()
    assert torch.equal(seen["dy"], torch.ones_like(y))
    assert torch.equal(seen["dw"], layer[1].grad)  # type: ignore[arg-type]
    expected = torch.autograd.grad(2 * F.gelu(F.linear(*layer)).sum(), layer)
    torch.testing.assert_close(layer[1].grad, expected[1], **CLOSE)
    torch.testing.assert_close(seen["db"], expected[2], **CLOSE)


# --- torch.func and forward mode --------------------------------------------------------------------------------------


@compiles
@every_kind
@every_save
def test_torch_func(layer: tuple[Tensor, ...], activation: object, save: str) -> None:
    x, w, b = (t.detach() for t in layer)
    keep = _save_for(activation, save)

    def ours(x: Tensor) -> Tensor:
        return fl.dense_bias_act(x, w, b, activation, save=keep)

    def eager(x: Tensor) -> Tensor:
        return reference.dense_bias_act(x, w, b, _torchs(activation))

    def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x).square().sum()

    func = torch.func
    direction = torch.randn_like(x)
    for transform in (
        lambda f: func.grad(loss(f))(x),
        lambda f: func.vmap(func.grad(loss(f)))(x),
        lambda f: func.vmap(f)(x),
        lambda f: func.jacrev(f)(x[0]),
        lambda f: func.jacfwd(f)(x[0]),
        lambda f: func.jvp(f, (x,), (direction,))[1],
        lambda f: func.vjp(f, x)[1](torch.ones(30, 40))[0],
        lambda f: func.hessian(loss(f))(x[0]),
        lambda f: func.vmap(func.hessian(loss(f)))(x[:3]),
        lambda f: func.grad(lambda x: func.grad(loss(f))(x).square().sum())(x),
        lambda f: func.functionalize(f)(x),
    ):
        torch.testing.assert_close(transform(ours), transform(eager), rtol=1e-4, atol=1e-3)


@compiles
@every_activation
def test_torch_func_for_every_activation(activation: Activation) -> None:
    z = torch.tensor([-4.1, -1.7, -0.7, -0.2, 0.3, 0.8, 2.2, 4.4, 7.3])
    b = torch.full((9,), 0.05)
    got = torch.func.vmap(torch.func.grad(lambda z, b: fl.bias_act(z[None], b[None], activation).sum()))(z, b)
    torch.testing.assert_close(got, reference.derivative(activation.function, z + b).float(), rtol=1e-5, atol=1e-5)
    second = torch.func.hessian(lambda z: fl.bias_act(z, b, activation).sum())(z).diagonal()
    expected = reference.second_derivative(activation.function, z + b).float()
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)


# --- subclasses, meta, DTensor ----------------------------------------------------------------------------------------


class Tagged(Tensor):
    """A subclass that travels through torch functions."""


@every_kind
def test_tensor_subclasses_stay_what_they_are(layer: tuple[Tensor, ...], activation: object) -> None:
    x, w, b = layer
    tagged = x.detach().as_subclass(Tagged)
    expected = reference.dense_bias_act(x, w, b, _torchs(activation))
    y = fl.dense_bias_act(tagged, w, b, activation)
    assert type(y) is Tagged
    torch.testing.assert_close(y.as_subclass(Tensor), expected)
    assert type(fl.bias_act(tagged, None, "gelu")) is Tagged
    y.sum().backward()
    assert w.grad is not None


@every_kind
@every_save
def test_meta_and_fake_tensors(activation: object, save: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    keep = _save_for(activation, save)
    x, w, b = (torch.empty(s, device="meta", requires_grad=True) for s in ((30, 12), (40, 12), (40,)))
    y = fl.dense_bias_act(x, w, b, activation, save=keep)
    assert y.is_meta and y.shape == (30, 40)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    with FakeTensorMode():
        x, w, b = (torch.empty(s, requires_grad=True) for s in ((30, 12), (40, 12), (40,)))
        y = fl.dense_bias_act(x, w, b, activation, save=keep)
        assert y.shape == (30, 40)
        y.sum().backward()


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.*", "ignore::DeprecationWarning:torch.*", "ignore::FutureWarning"
)
def test_dtensors(mesh: Any, layer: tuple[Tensor, ...]) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    placements = ([Shard(0)], [Replicate()], [Replicate()])
    x, w, b = (distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in zip(layer, placements, strict=True))
    for activation in ("gelu", "tanh", "relu"):
        y = fl.dense_bias_act(x, w, b, activation)
        assert isinstance(y, DTensor)
        expected = reference.dense_bias_act(*layer, _torchs(activation))
        torch.testing.assert_close(y.full_tensor(), expected)
        got = torch.autograd.grad(y.sum(), (x, w, b))
        torch.testing.assert_close([g.full_tensor() for g in got], list(torch.autograd.grad(expected.sum(), layer)))
        assert isinstance(fl.bias_act(x, None, activation), DTensor)


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.*", "ignore::DeprecationWarning:torch.*", "ignore::FutureWarning"
)
def test_saved_bytes_of_dtensors(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = distribute_tensor(torch.randn(30, 12), mesh, [Replicate()]).requires_grad_()
    assert saved_bytes(lambda: (2 * x).tanh()) == 30 * 12 * 4


@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.*", "ignore::DeprecationWarning:torch.*", "ignore::FutureWarning"
)
def test_fully_sharded_modules(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(fl.FusedDenseAct(12, 40, "gelu"), fl.FusedDenseAct(40, 12, "silu"))
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    x = torch.randn(30, 12)
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    plain(x).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, **CLOSE)


# --- torch.jit, batched gradients, edits between the passes -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("layer", [fl.FusedDenseAct(64, 300), fl.FusedMLP(64, 300), fl.FusedGatedMLP(64, 300)])
def test_torchscript_traces(layer: nn.Module, grad: bool) -> None:
    x = torch.randn(80, 64)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(layer, x)
        torch.testing.assert_close(traced(x), layer(x), **CLOSE)


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_a_bias_may_be_edited_between_the_passes(activation: str) -> None:
    layer, x = fl.FusedDenseAct(64, 64, activation), torch.randn(30, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    y = layer(x)
    with torch.no_grad():
        layer.bias.add_(1)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # without the bias of that time z is not known
    torch.testing.assert_close(dx, expected, rtol=0, atol=1e-3)


def _scaled(y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 0.5)
    return y


def bent(z: Tensor) -> Tensor:
    return z * torch.tanh(torch.exp(z))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x, w, b: fl.gelu(x @ w), lambda x, w, b: F.gelu(x @ w)),
        (lambda x, w, b: fl.bias_act(x @ w, None, "silu", inplace=True), lambda x, w, b: F.silu(x @ w, inplace=True)),
        (lambda x, w, b: fl.dense_bias_act(x, w, b, "silu"), lambda x, w, b: F.silu(F.linear(x, w, b))),
        (lambda x, w, b: fl.bias_act(x @ w, b, "elu"), lambda x, w, b: F.elu(x @ w + b)),
        (lambda x, w, b: fl.bias_act(x @ w, b, "mish"), lambda x, w, b: F.mish(x @ w + b)),
        (
            lambda x, w, b: fl.dense_bias_act(x, w, b, "gelu", residual=x.sin()),
            lambda x, w, b: F.gelu(F.linear(x, w, b) + x.sin()),
        ),
        (
            lambda x, w, b: fl.dense_bias_act(x, w, b, "gelu", dropout=0.5),
            lambda x, w, b: F.dropout(F.gelu(F.linear(x, w, b)), 0.5),
        ),
        (lambda x, w, b: fl.bias_act(x @ w, b, bent), lambda x, w, b: bent(x @ w + b)),
    ],
    ids=[
        *("gelu", "silu_", "dense", "bias", "folded bias"),
        *("residual", "dense dropout", "a user's"),
    ],
)
def test_second_derivatives_pass_no_hooks_on_the_output(ours: Any, theirs: Any) -> None:
    given = [torch.randn(size, generator=torch.Generator().manual_seed(3)) for size in ((60, 64), (64, 64), (64,))]
    found = []
    for call, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaves = [(t * 0.3).to(dtype).requires_grad_() for t in given]
        torch.manual_seed(0)
        y = _scaled(call(*leaves))
        (g,) = torch.autograd.grad(y.sin().sum(), leaves[0], create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum() + y.sum(), leaves[0], create_graph=True)
        found.append([h, *torch.autograd.grad(h.square().sum(), leaves[:2])])
    for got, expected in zip(*found, strict=True):
        assert (got.double() - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_left_to_torch() -> None:
    x = torch.nested.nested_tensor([torch.randn(20, 30), torch.randn(25, 30)])
    w = torch.randn(40, 30)
    for got, part in zip(fl.dense_bias_act(x, w, None, "gelu").unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, F.gelu(F.linear(part, w)))
    for got, part in zip(fl.gelu(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, F.gelu(part))


def test_hooks_see_nothing_twice() -> None:
    layer, x = fl.FusedDenseAct(64, 64), torch.randn(64, 64, requires_grad=True)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x)
    assert len(packed) == 3  # x, w, y


# --- torch.fx ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    ["gelu", nn.LeakyReLU(0.2), functools.partial(F.elu, alpha=0.5)],
    ids=["name", "module", "partial"],
)
def test_symbolic_traces_hold_the_layer(activation: Any) -> None:
    model = nn.Sequential(fl.FusedDenseAct(8, 300, activation), fl.SiLU(), fl.FusedDenseAct(300, 8, "mish"))
    traced = torch.fx.symbolic_trace(model)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called.count(fl.dense_bias_act) == 2 and called.count(fl.bias_act) == 1
    x = torch.randn(5, 8)
    assert torch.equal(traced(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_hold_the_composite(strict: bool) -> None:
    layer, x = fl.FusedDenseAct(64, 300), torch.randn(50, 64)
    exported = torch.export.export(layer, (x,), strict=strict)
    called = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert len(called) <= 3
    torch.testing.assert_close(exported.module()(x), layer(x), **CLOSE)


def test_a_subclass_that_overrides_torch_functions_is_asked() -> None:
    class Counting(Tensor):
        calls: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(40, 8).as_subclass(Counting)
    w = torch.randn(16, 8)
    y = fl.dense_bias_act(x, w, None, "gelu")
    assert type(y) is Counting and fl.dense_bias_act in Counting.calls
    torch.testing.assert_close(y.as_subclass(Tensor), F.gelu(F.linear(x.as_subclass(Tensor), w)))
    assert type(fl.bias_act(x, None, "gelu", inplace=True)) is Counting and fl.bias_act in Counting.calls


# --- the first use inside something -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the fake mode
@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "default_device", "autocast", "vmap", "fake"])
def test_constants_made_inside_a_context_serve_outside(context: str) -> None:
    from fusedlayers.activations.record import _fitted
    from fusedlayers.backends.cpu import elementwise, table

    caches = (_fitted, elementwise.forward_kernel, elementwise.gradient_kernel, table.derivative_table)
    for cache in caches:
        cache.cache_clear()
    z = torch.linspace(-4, 4, 1000)
    leaves = {d: z.to(d).requires_grad_() for d in (torch.float32, torch.bfloat16)}
    first = {d: fl.bias_act(leaf, None, "mish") for d, leaf in leaves.items()}
    expected = {d: torch.autograd.grad(y, leaves[d], torch.ones_like(y))[0] for d, y in first.items()}
    for cache in caches:
        cache.cache_clear()
    contexts: dict[str, Any] = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "default_device": torch.device("meta"),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    if context == "fake":
        outputs = {leaf: fl.bias_act(leaf, None, "mish") for leaf in leaves.values()}
        with FakeTensorMode(allow_non_fake_inputs=True):
            for leaf, y in outputs.items():
                torch.autograd.grad(y, leaf, torch.ones_like(y))
    elif context == "vmap":
        torch.func.vmap(lambda z: fl.bias_act(z, None, "mish"))(z[None])
    else:
        with contexts[context]:
            for leaf in leaves.values():
                y = fl.bias_act(leaf, None, "mish")
                if y.requires_grad:
                    torch.autograd.grad(y, leaf, torch.ones_like(y))
    for dtype, leaf in leaves.items():
        y = fl.bias_act(leaf, None, "mish")
        (slope,) = torch.autograd.grad(y, leaf, torch.ones(1000, dtype=dtype))
        assert torch.equal(slope, expected[dtype])


def test_small_layers_are_left_to_torch_and_large_ones_are_not() -> None:
    x, w = torch.randn(16, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    assert sizes.SMALL_BYTES == 4 * 16 * 16  # as conftest.py has it
    assert "BiasAct" in fl.dense_bias_act(x, w, None, "gelu").grad_fn.name()  # type: ignore[union-attr]
    assert "Gelu" in fl.dense_bias_act(x[:15], w, None, "gelu").grad_fn.name()  # type: ignore[union-attr]
    assert "BiasAct" in fl.dense_bias_act(x[:15], w, None, "gelu", save="output").grad_fn.name()  # type: ignore[union-attr]
    assert "BiasAct" in fl.bias_act(torch.randn(256, requires_grad=True), None, "gelu").grad_fn.name()  # type: ignore[union-attr]
    assert "Gelu" in fl.bias_act(torch.randn(255, requires_grad=True), None, "gelu").grad_fn.name()  # type: ignore[union-attr]
