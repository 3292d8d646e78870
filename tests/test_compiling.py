"""``torch.compile(backend="fusedlayers")``: what the graph becomes, the bytes that it saves, and that it computes the
same."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import fusedlayers as fl
from fusedlayers.fusion import dynamo_backend
from fusedlayers.fusion.graph_norms import norms_in
from fusedlayers.memory import saved_bytes
from fusedlayers.ops.compiled import output_saved

ROWS, IN, HIDDEN = 96, 16, 64

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")


def gelu_by_hand(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))


def odd(z: Tensor) -> Tensor:
    return z * torch.atan(z)


class MLP(nn.Module):
    """One hidden layer, with a gate or without; ``middle`` is what comes between the activation and the last layer."""

    def __init__(self, act: Callable[[Tensor], Tensor], gated: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(IN, HIDDEN)
        self.up = nn.Linear(IN, HIDDEN) if gated else None
        self.down = nn.Linear(HIDDEN, IN)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate(x))
        return self.down(hidden if self.up is None else hidden * self.up(x))


def rewritten(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The graph that Inductor is handed over."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        dynamo_backend.rewrite(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module)
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*args)
    (graph,) = graphs
    return graph


def replaced(graph: GraphModule) -> list[str]:
    return [str(node.args[1]) for node in graph.graph.nodes if node.target is output_saved]


def computed_again(graph: GraphModule) -> list[str]:
    return [node.name for node in graph.graph.nodes if "recompute" in node.meta]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, IN)


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "name"),
    [(F.gelu, "gelu"), (F.silu, "silu"), (nn.Mish(), "mish"), (gelu_by_hand, "gelu_tanh"), (nn.ELU(), "elu")],
)
def test_activations_of_the_table_are_replaced(x: Tensor, act: Any, name: str) -> None:
    graph = rewritten(MLP(act), x)
    assert replaced(graph) == [name] and computed_again(graph) == []


def test_parameters_come_along(x: Tensor) -> None:
    graph = rewritten(MLP(nn.LeakyReLU(0.3)), x)
    assert replaced(graph) == [] and computed_again(graph)  # a slope that no row has by default
    graph = rewritten(MLP(nn.LeakyReLU()), x)
    assert replaced(graph) == ["leaky_relu"]


@pytest.mark.parametrize("act", [F.relu, torch.tanh, torch.sigmoid])
def test_what_torch_keeps_the_output_of_is_left(x: Tensor, act: Any) -> None:
    graph = rewritten(MLP(act), x)
    assert replaced(graph) == [] and computed_again(graph) == []


def test_other_functions_are_computed_again(x: Tensor) -> None:
    graph = rewritten(MLP(odd), x)
    assert replaced(graph) == [] and computed_again(graph) == ["atan", "hidden"]


def test_float64_outputs_do_not_tell(x: Tensor) -> None:
    graph = rewritten(MLP(F.gelu).double(), x.double())
    assert replaced(graph) == [] and len(computed_again(graph)) == 1


@pytest.mark.parametrize("act", [F.silu, gelu_by_hand, odd])
def test_gates_are_computed_again(x: Tensor, act: Any) -> None:
    graph = rewritten(MLP(act, gated=True), x)
    again = computed_again(graph)
    assert replaced(graph) == [] and any(node.startswith("mul") for node in again)
    ids = {node.meta["ac_graph_id"] for node in graph.graph.nodes if node.name in again}
    assert len(ids) == 1


def test_what_others_read_is_left(x: Tensor) -> None:
    model = MLP(F.gelu)

    def both(x: Tensor) -> Tensor:
        z = model.gate(x)
        return model.down(F.gelu(z) + z)

    def view(x: Tensor) -> Tensor:
        return model.down(F.gelu(model.gate(x))).sum() + F.gelu(model.gate(x)).sum()

    assert replaced(rewritten(both, x)) == []
    assert replaced(rewritten(view, x)) == ["gelu"]  # the other one's output is nobody's operand


@pytest.mark.parametrize(
    "middle", [lambda y: F.dropout(y, 0.5), lambda y: F.layer_norm(y, (HIDDEN,)), lambda y: y.sin()]
)
def test_something_between_activation_and_matmul(x: Tensor, middle: Any) -> None:
    model = MLP(lambda z: middle(F.gelu(z)))
    graph = rewritten(model, x)
    assert replaced(graph) == []


class Llama(nn.Module):
    """The RMS norm of LLaMA and its successors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Gemma(Llama):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "llama": Llama,
    "gemma": Gemma,
}
every_norm = pytest.mark.parametrize("norm", NORMS)


@every_norm
def test_norms_that_matmuls_read_are_computed_again(x: Tensor, norm: str) -> None:
    graph = rewritten(nn.Sequential(nn.Linear(IN, IN), NORMS[norm](IN), nn.Linear(IN, 4)), x)
    first, second = (node for node in graph.graph.nodes if node.target is F.linear)
    again = computed_again(graph)
    assert second.args[0].name in again and first.name not in again
    assert len(again) >= {"layer": 1, "rms": 1}.get(norm, 7)


@every_norm
def test_norms_that_no_matmul_reads_or_that_are_written_over_are_left(x: Tensor, norm: str) -> None:
    linear, layer = nn.Linear(IN, IN), NORMS[norm](IN)
    assert computed_again(rewritten(lambda x: layer(linear(x)).sin(), x)) == []
    assert computed_again(rewritten(lambda x: linear(layer(linear(x)).mul_(2)), x)) == []
    with torch.no_grad():
        assert computed_again(rewritten(lambda x: linear(layer(linear(x))), x)) == []


def test_a_norm_of_which_others_read_a_part_is_left(x: Tensor) -> None:
    linear = nn.Linear(IN, IN)

    def read(x: Tensor) -> Tensor:
        x = linear(x)
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return linear(x * root) * root

    def other(x: Tensor) -> Tensor:  # no norm: what is divided is not what the root is of
        return linear(linear(x) * torch.rsqrt(linear(x.sin()).pow(2).mean(-1, keepdim=True) + 1e-6))

    def without_mean(x: Tensor) -> Tensor:
        x = linear(x)
        return linear(x * torch.rsqrt(x.pow(2) + 1.0))

    assert computed_again(rewritten(read, x)) == computed_again(rewritten(other, x)) == []
    assert not [*norms_in(rewritten(without_mean, x).graph)]  # but an activation


@every_norm
def test_norms_whose_output_autocast_copies_are_left(x: Tensor, norm: str) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), NORMS[norm](IN), nn.Linear(IN, 4))
    with torch.autocast("cpu", torch.bfloat16):
        graph = rewritten(model, x)
    cast = {
        node.name
        for node in graph.graph.nodes
        if node.target is F.linear and node.args[0].meta["example_value"].dtype is torch.float32
    }
    assert all(node.args[0].name not in computed_again(graph) for node in graph.graph.nodes if node.name in cast)


def test_long_chains_of_parameters_take_no_time(x: Tensor) -> None:
    linear, layer = nn.Linear(IN, IN), Llama(IN)

    def chained(x: Tensor) -> Tensor:
        w = layer.weight
        for _ in range(60):
            w = w.sin() * w.cos()
        x = linear(x)
        return linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)

    assert computed_again(rewritten(chained, x))


@every_norm
def test_compiled_norms_keep_their_input_alone(x: Tensor, norm: str) -> None:
    """Of two blocks: hidden outputs, the inputs of two norms, and some numbers for each row."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = NORMS[norm](IN), MLP(F.gelu)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x))

    model = nn.Sequential(nn.Linear(IN, IN), Block(), Block())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fusedlayers", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    found, wanted = (torch.autograd.grad(net(x).square().sum(), [*model.parameters()]) for net in (compiled, model))
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert saved_bytes(compiled, x, exclude=x) <= 2 * ROWS * (HIDDEN + IN + 4) * 4


def test_without_gradients_nothing_changes(x: Tensor) -> None:
    with torch.no_grad():
        graph = rewritten(MLP(F.gelu), x)
    assert replaced(graph) == [] and computed_again(graph) == []


def without_gradients_within(z: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(z)
    return z * gate


@pytest.mark.parametrize(
    "act",
    [
        without_gradients_within,
        lambda z: z.detach() * torch.sigmoid(z),
        lambda z: z * torch.sigmoid(z).detach(),
        lambda z: z * torch.sigmoid(z).detach_(),
        lambda z: z + (F.gelu(z) - z).detach(),
        lambda z: z + torch.atan(z).detach(),
    ],
    ids=["no-grad", "detached-z", "detached-gate", "detached-in-place", "straight-through", "not-of-the-table"],
)
def test_where_a_gradient_stops_nothing_changes(x: Tensor, act: Any) -> None:
    graph = rewritten(MLP(act), x)
    assert replaced(graph) == [] and computed_again(graph) == []


def test_what_is_fused_already_is_left(x: Tensor) -> None:
    model = MLP(F.gelu)
    fl.fuse(model, x)
    graph = rewritten(model, x)
    assert replaced(graph) == ["gelu"] and computed_again(graph) == []


# --- compiled code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "gated", "buffers"),
    [(F.gelu, False, 1), (gelu_by_hand, False, 1), (odd, False, 1), (F.silu, True, 2), (gelu_by_hand, True, 2)],
)
def test_compiled(x: Tensor, act: Any, gated: bool, buffers: int) -> None:
    torch.compiler.reset()
    model = MLP(act, gated)
    compiled = torch.compile(model, backend="fusedlayers", fullgraph=True)
    wanted, found = model(x), compiled(x)
    assert saved_bytes(compiled, x, exclude=x) == buffers * ROWS * HIDDEN * 4
    assert saved_bytes(model, x, exclude=x) > buffers * ROWS * HIDDEN * 4
    parameters = list(model.parameters())
    exact = MLP(act, gated).double()
    exact.load_state_dict(model.state_dict())
    references = torch.autograd.grad(exact(x.double()).square().sum(), list(exact.parameters()))
    for ours, theirs, reference in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(wanted.square().sum(), parameters),
        references,
        strict=True,
    ):
        error, torchs = ((g - reference).norm() / reference.norm() for g in (ours, theirs))
        assert error <= 2 * torchs + 2e-6  # the floor of outputs that tell gelu's derivative, and once as much


def test_caches_do_not_mix_what_is_marked_with_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate's graph is the same code with marks and without them. Each compilation finds what those before left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = MLP(F.silu, gated=True), torch.randn(96, IN)
    found, hits = [], []
    for backend in ("inductor", "fusedlayers", "fusedlayers"):
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(model, backend=backend)
        compiled(x)
        found.append(saved_bytes(compiled, x, exclude=x) // (96 * HIDDEN * 4))
        hits.append(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    assert found[1] == found[2] == 2 < found[0]
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


def _written_through_a_view(z: Tensor, v: Tensor) -> Tensor:
    half = F.silu(z[:, : HIDDEN // 2], inplace=True)
    return half @ v[: HIDDEN // 2] + z.mean()


def _written_as_a_whole(z: Tensor, v: Tensor) -> Tensor:
    F.silu(z.view(-1), inplace=True)
    return z @ v


def _written_later(z: Tensor, v: Tensor) -> Tensor:
    y = z * torch.sigmoid(z)
    y.mul_(2)
    return y @ v


def _as_a_statement(z: Tensor, v: Tensor) -> Tensor:
    F.silu(z, inplace=True)
    return z @ v


def _converted(z: Tensor, v: Tensor) -> Tensor:
    return F.silu(z.type(torch.float32)) @ v


@pytest.mark.parametrize(
    "function", [_written_through_a_view, _written_as_a_whole, _written_later, _as_a_statement, _converted]
)
def test_what_is_written_over(x: Tensor, function: Callable[..., Tensor]) -> None:
    w, v = (torch.randn(shape, requires_grad=True) for shape in ((IN, HIDDEN), (HIDDEN, IN)))
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w, v: function(x @ w, v), backend="fusedlayers", fullgraph=True)
    found, wanted = compiled(x, w, v), function(x @ w, v)
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().mean(), (w, v)) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_options_are_inductors(x: Tensor) -> None:
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(MLP(F.gelu), backend="fusedlayers", options={"no_such_option": 1})(x)
    compiled = torch.compile(MLP(F.gelu), backend="fusedlayers", options={"max_fusion_size": 8})
    assert compiled(x).shape == (ROWS, IN)


def test_the_name_is_known_without_an_import() -> None:
    code = "import torch; assert 'fusedlayers' in torch.compiler.list_backends()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
