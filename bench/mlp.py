"""``python -m bench mlp``: MLP blocks, eager, by torch.compile and by this library, beside the bare matmuls.

How is said in ``layers``. The block is whole by itself: nothing comes behind it. The yardstick is ``matmuls``: the six
products of forward and backward, nine of a gated block, without bias or activation. On GPUs torch.compile is also asked
to tune its matmuls, which it then generates with what is around them in one kernel, where there is time for that; and
Liger Kernel and quack are measured where they are installed and compute the same function.
"""

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import fusedlayers as fl

from . import layers, plot, reference, shapes

MATMULS, RECOMPUTE, LIGER, QUACK = "matmuls", "recompute", "liger", "quack"
#: "At most this many times eager", forward+backward, per device kind, variant and dtype.
TARGETS: dict[str, dict[tuple[str, str], float]] = {
    "cpu": {(layers.OURS, "float32"): 1.05, (RECOMPUTE, "float32"): 1.5},
    "cuda": {(layers.OURS, dtype): 1.0 for dtype in shapes.DTYPES["cuda"]},
}
#: On GPUs: at most this many times the bare matmuls.
MATMUL_TARGETS = {"BERT-base": 1.05, "GPT-2 large": 1.05, "LLaMA-7B": 1.03}
#: Hidden buffers that are kept.
KEPT = {(layers.OURS, False): 1, (layers.OURS, True): 2, (RECOMPUTE, False): 0, (RECOMPUTE, True): 0}


def acceptance(result: dict[str, Any]) -> list[str]:
    """Which of the promised numbers this run meets: bytes, and times against eager and the bare matmuls."""
    lines = []
    kind = result["device"]["kind"]
    for row in result["cases"]:
        for name in (layers.OURS, RECOMPUTE):
            variant = row["variants"].get(name, {})
            if "error" in variant:
                lines.append(f"{row['id']}: {name}: MISSED: {variant['error']}")
            if "saved_bytes" not in variant:
                continue
            buffers = variant["saved_bytes"] / row["hidden_bytes"]
            if buffers > KEPT[name, row["gated"]] * 1.01:
                lines.append(f"{row['id']}: {name} keeps {buffers:.2f} hidden buffers: MISSED")
            times = variant["forward_backward"]
            target = None if result["quick"] else TARGETS[kind].get((name, row["dtype"]))
            if target is not None:
                verdict = "met" if times["ratio"] <= target else "MISSED"
                lines.append(f"{row['id']}: {name} {times['ratio']:.2f}x eager, target {target}: {verdict}")
        bare = row["variants"].get(MATMULS, {}).get("forward_backward")
        ours = row["variants"].get(layers.OURS, {}).get("forward_backward")
        target = MATMUL_TARGETS.get(row["shape"]) if kind == "cuda" and row["dtype"] != "float32" else None
        if bare and ours and target and not result["quick"]:
            ratio = ours["median_us"] / bare["median_us"]
            verdict = "met" if ratio <= target else "MISSED"
            lines.append(f"{row['id']}: {ratio:.2f}x the bare matmuls, target {target}: {verdict}")
    return lines


def _build(case: shapes.BlockCase, device: torch.device, quick: bool) -> layers.Work:
    tokens = case.shape.rows(device.type, quick)
    randn = partial(layers.randn, torch.Generator(device).manual_seed(0), case.dtype)
    width, hidden = case.shape.in_features, case.shape.hidden_features
    x, dy = randn((tokens, width)), randn((tokens, width), grad=False)
    w2 = randn((width, hidden), scale=hidden**-0.5)
    w1, *others = (randn((hidden, width), scale=width**-0.5) for _ in range(1 + case.is_gated))
    activation, function = case.activation, shapes.ACTIVATIONS[case.activation]
    if case.is_gated:
        params: tuple[Tensor, ...] = (w1, *others, w2)
        eager = partial(_eager_gated, function=function)
        ours, recompute = (partial(_gated, activation=activation, save=save) for save in ("auto", "recompute"))
        matmuls, liger = _NineMatmuls.apply, _liger(activation, device)
    else:
        b1, b2 = randn((hidden,), scale=0.1), randn((width,), scale=0.1)
        params = (w1, b1, w2, b2)
        eager = partial(reference.mlp, function=function)
        ours, recompute = (partial(fl.mlp, activation=activation, save=save) for save in ("auto", "recompute"))
        matmuls, liger = _SixMatmuls.apply, None
    quack = _quack(case, device)
    operands = x, params, dy
    return layers.Work(
        operands=(operands, operands),
        eager=(eager, eager),
        ours=(ours, ours),
        sizes={"tokens": tokens, "in_features": width, "hidden_features": hidden, "gated": case.is_gated},
        hidden_bytes=tokens * hidden * dy.element_size(),
        others={
            RECOMPUTE: (recompute, recompute),
            MATMULS: (matmuls, matmuls),
            LIGER: None if liger is None else (liger, liger),
            QUACK: None if quack is None else (quack, quack),
        },
        yardsticks=(MATMULS,),
        layouts={QUACK: _in_turns} if case.is_gated else {},
    )


def _eager_gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, function: layers.Function) -> Tensor:
    y: Tensor = reference.gated_mlp(x, w_gate, None, w_up, None, w_down, None, function)
    return y


def _gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str, save: str) -> Tensor:
    return fl.gated_mlp(x, w_gate, None, w_up, None, w_down, None, activation, save=save)


class _SixMatmuls(Function):
    """What a block multiplies. Gradients of biases are zero, and cost nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h = x @ w1.t()
        ctx.save_for_backward(x, w1, w2, h)
        return h @ w2.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, w1, w2, h = ctx.saved_tensors
        dh = dy @ w2
        return dh @ w1, dh.t() @ x, None, dy.t() @ h, None


class _NineMatmuls(Function):
    """What a gated block multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        gate, up = x @ w_gate.t(), x @ w_up.t()
        ctx.save_for_backward(x, w_gate, w_up, w_down, gate, up)
        return gate @ w_down.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        dh = dy @ w_down
        dx = dh @ w_gate
        return dx.addmm_(up, w_up), dh.t() @ x, up.t() @ x, dy.t() @ gate


def _liger(activation: str, device: torch.device) -> layers.Function | None:
    """Liger Kernel's gated block, where it is installed: its product of two hidden buffers is one kernel."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None or activation != "silu":
        return None
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]  # a peer

    def block(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        hidden = LigerSiLUMulFunction.apply(F.linear(x, w_gate), F.linear(x, w_up))
        return F.linear(hidden, w_down)

    return block


def _quack(case: shapes.BlockCase, device: torch.device) -> layers.Function | None:
    """quack's block, where it is installed and computes the same function: its activations are part of its matmuls.

    It takes biases, and gradients of them, in the blocks without a gate. Left out is what would be no comparison: a
    gated gelu, which it has in tanh's approximation only, and float32, which tensor cores round to TF32.
    """
    if device.type != "cuda" or case.dtype == "float32":
        return None
    try:
        from quack.activation import act_fn_map, gate_fn_map  # type: ignore[import-not-found]  # a peer
        from quack.mlp import mlp_func  # type: ignore[import-not-found]  # a peer
    except ImportError:
        return None
    name = (_QUACK_GATES if case.is_gated else _QUACK_ACTIVATIONS).get(case.activation)
    if name not in (gate_fn_map if case.is_gated else act_fn_map):
        return None

    def gated(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        y: Tensor = mlp_func(x, w_gate_up, w_down, name)
        return y

    def plain(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        y: Tensor = mlp_func(x, w1, w2, name, bias1=b1, bias2=b2)
        return y

    return gated if case.is_gated else plain


#: What quack calls the same functions: its "gelu_tanh_approx" and "geglu" are others.
_QUACK_ACTIVATIONS = {"gelu": "gelu_erf", "relu": "relu", "tanh": "tanh", "silu": "silu"}
_QUACK_GATES = {"silu": "swiglu", "relu": "reglu"}


def _in_turns(parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gate's rows and the others in turns, in one weight, as quack takes them."""
    w_gate, w_up, w_down = parameters
    return torch.stack((w_gate, w_up), 1).flatten(0, 1), w_down


SUBJECT = layers.Subject(
    name="mlp",
    behind=None,
    cases=shapes.block_cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=480,
    case_seconds=12.0,
    variants=(*layers.VARIANTS, RECOMPUTE, MATMULS, LIGER, QUACK, layers.MAX_AUTOTUNE),
    # quack tunes itself too.
    prepared={layers.COMPILE: 5.0, QUACK: 60.0, layers.MAX_AUTOTUNE: 60.0},
    for_gpus=(LIGER, QUACK, layers.MAX_AUTOTUNE),
    plot=plot.plot_mlp,
)
run = partial(layers.run, SUBJECT)
