"""The layers under everything that PyTorch may have switched on around them."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import reference
import torch
import torch.distributed as dist
import torch.nn.functional as F
from settings import ROOT, compiles
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedlayers as fl
from fusedlayers.activations import Activation, definitions, resolve
from fusedlayers.derivative import branch_bit
from fusedlayers.memory import saved_bytes

TABLE = [row.bind() for row in definitions()]

every_activation = pytest.mark.parametrize("activation", TABLE, ids=str)


#: What saving the output costs a folded derivative in float32.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 5e-4}


# --- torch.compile ----------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aot_eager", torch.bfloat16), ("aot_eager", torch.float32), ("inductor", torch.float32)],
    ids=str,
)
def test_every_activation_compiles(backend: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    # Inductor's compiler takes long, and lowers formulas alike that differ in numbers.
    alike = {"gelu_tanh", "quick_gelu", "mish", "hardtanh", "trelu", "selu", "celu"} if backend == "inductor" else {}
    activations = [a for a in TABLE if a.name not in alike]
    z = (2 * torch.randn(30, 40)).to(dtype).requires_grad_()
    compiled = torch.compile(lambda z: [fl.bias_act(z, None, a) for a in activations], fullgraph=True, backend=backend)
    for activation, y in zip(activations, compiled(z), strict=True):
        eager, exact = activation.plain(z), activation.function(z.detach().double())
        slopes = (torch.autograd.grad(t, z, torch.ones_like(t), retain_graph=True)[0] for t in (y, eager))
        tolerance = 4 * torch.finfo(dtype).eps + (1e-5 if activation.is_folded else 0)
        for (ours, torchs), truth in (((y, eager), exact), (slopes, reference.derivative(activation.function, z))):
            assert ours.dtype is dtype
            assert reference.relative(ours, truth) <= 2 * reference.relative(torchs, truth) + tolerance, activation


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
        fold = resolve(name).fold
        assert fold is not None
        assert torch.equal(branch_bit.decode(y, torch.float32), z < fold.position)


@compiles
def test_compiled_with_dynamic_shapes() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    module = fl.FusedDenseAct(12, 40, "gelu")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (30, 7, 64):
        x = torch.randn(batch, 12, requires_grad=True)
        y, expected = compiled(x), F.gelu(F.linear(x, module.weight, module.bias))
        torch.testing.assert_close(y, expected)
        got, exact = (torch.autograd.grad(t.sum(), [x, *module.parameters()]) for t in (y, expected))
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=5e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


# --- torch.func and forward mode --------------------------------------------------------------------------------------


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
def test_dtensors(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    layer = reference.leaves((30, 12), (40, 12), (40,))
    placements = ([Shard(0)], [Replicate()], [Replicate()])
    x, w, b = (distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in zip(layer, placements, strict=True))
    for activation in ("gelu", "tanh", "relu"):
        y = fl.dense_bias_act(x, w, b, activation)
        assert isinstance(y, DTensor)
        expected = reference.dense_bias_act(*layer, resolve(activation).plain)
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


# --- torch.jit, batched gradients, edits between the passes -----------------------------------------------------------


def test_second_derivatives_pass_hooks_on_the_output_where_torchs_do() -> None:
    found = []
    for silu, dtype in ((fl.silu, torch.float32), (F.silu, torch.float64)):
        x = torch.linspace(-2, 2, 1000, dtype=dtype).requires_grad_()
        y = silu(1.5 * x, inplace=True)
        y.register_hook(lambda g: g * 0.5)
        (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum() + y.sum(), x)[0])
    assert (found[0].double() - found[1]).norm() <= 1e-4 * found[1].norm()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_left_to_torch() -> None:
    x = torch.nested.nested_tensor([torch.randn(20, 30), torch.randn(25, 30)])
    w = torch.randn(40, 30)
    for got, part in zip(fl.dense_bias_act(x, w, None, "gelu").unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, F.gelu(F.linear(part, w)))
    for got, part in zip(fl.gelu(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, F.gelu(part))


# --- torch.fx ---------------------------------------------------------------------------------------------------------


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
    from fusedlayers.kernels.cpu import elementwise
    from fusedlayers.kernels.cpu import value_tables as table

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


@compiles
def test_a_users_function_compiles_as_it_runs() -> None:
    layer, x = fl.FusedDenseAct(8, 16, lambda z: 1.2 * z * torch.sigmoid(z), save="output"), torch.randn(16, 8)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
