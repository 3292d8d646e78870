"""What a plan says that a call will save, by which path and why: compared with what the result's graph really keeps."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import covering
from plans import plans_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.calls import decide, plan, sizes
from fusedlayers.memory import saved_bytes

#: By their output, folded, by their input, read by nobody, a user's own.
ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "leaky_relu": nn.LeakyReLU(-0.5),
    "identity": None,
    "sine": torch.sin,
}
SAVES = ("auto", "input", "recompute")


BOOLS = (True, False)


def _kept(call: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> int:
    """Beside the input and the parameters."""
    return saved_bytes(call, x, exclude=[x, module])


def test_a_block_and_its_layers() -> None:
    x = torch.randn(100, 16, requires_grad=True)
    block = fl.FusedMLP(16, 64)
    hidden = 100 * 64 * 4
    (found,) = plans_of(block, x)
    assert (found.path, found.saved) == ("fused", "output") and _kept(block, x, block) == hidden
    (found,) = plans_of(fl.FusedMLP(16, 64, save="recompute"), x)
    assert (found.path, found.saved) == ("fused", "recompute")
    gated = fl.FusedGatedMLP(16, 64)
    assert plans_of(gated, x)[0].saved == "input" and _kept(gated, x, gated) == 2 * hidden
    # A frozen first layer: layer by layer.
    block.fc1.requires_grad_(False)
    outer, inner = plans_of(block, x * 1)
    assert outer.path == "by_layer" and "frozen" in str(outer)
    assert inner.saved == "output" and saved_bytes(lambda x: block(x * 1), x, exclude=[x, block]) == hidden
    # Adapters elsewhere: a wholly frozen gated block saves two buffers, where eager saves three.
    gated.requires_grad_(False)
    outer, inner = plans_of(gated, x * 1)
    assert outer.path == "by_layer" and inner.saved == "output"
    assert saved_bytes(lambda x: gated(x * 1), x, exclude=[x, gated]) == 2 * hidden
    with torch.no_grad():
        assert [p.path for p in plans_of(block, x)] == ["by_layer", "no_grad"]
    assert [p.path for p in plans_of(block.requires_grad_(True), x, compiled=True)] == ["by_layer", "compiled"]


def test_float64_is_pytorchs() -> None:
    """Its values and gradients to the bit, and a reason that says so."""
    x, w, b, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((30, 40), (40, 40), (40,), (8, 40)))
    by_pytorch: dict[Any, Any] = {
        lambda: fl.dense_bias_act(x, w, b, "gelu"): lambda: F.gelu(F.linear(x, w, b)),
        lambda: fl.bias_act(x, b, "tanh", save="input"): lambda: torch.tanh(x + b),
        lambda: fl.dense_bias_act(x, w, b, torch.sin, save="recompute"): lambda: torch.sin(F.linear(x, w, b)),
        lambda: fl.mlp(x, w, b, v, None, "silu", save="recompute"): lambda: F.linear(F.silu(F.linear(x, w, b)), v),
    }
    for ours, eager in by_pytorch.items():
        (found,) = plans_of(ours)
        assert (found.path, str(found)) == ("composite", "not fused: float64 is computed by PyTorch")
        y, expected = ours(), eager()
        gradients = (torch.autograd.grad(t.sin().sum(), (x, w, b, v), materialize_grads=True) for t in (y, expected))
        assert torch.equal(y, expected) and all(map(torch.equal, *gradients))


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_the_reason_names_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = fl.FusedDenseAct(12, 40), torch.randn(30, 12, requires_grad=True)

    def reason(function: Callable[..., Any] = layer, *args: Any, **kwargs: Any) -> str:
        (found,) = plans_of(function, *(args or (x,)), **kwargs)
        assert found.path == "composite"
        return str(found)

    assert "torch.func" in reason(lambda x: torch.func.vmap(layer)(x[None]))
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in reason()
    residual = torch.randn(30, 40, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        assert "residual" in reason(lambda x: fl.dense_bias_act(x, layer.weight, layer.bias, residual=residual.float()))
    assert "no backend for meta" in reason(fl.FusedDenseAct(12, 40, device="meta"), torch.empty(30, 12, device="meta"))
    assert "softmax" in reason(fl.FusedDenseAct(12, 40, nn.Softmax(-1)), x).lower()
    monkeypatch.setattr(sizes, "SMALL_BYTES", 1 << 15)
    assert "less than 32.0 KiB" in reason()


@pytest.mark.usefixtures("sizes_that_ship")
def test_sizes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and medium results are larger there, small ones by how many processors a GPU has."""
    monkeypatch.setattr(sizes, "processors", lambda device: 132)
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    small = 132 * (128 << 10)
    assert sizes.limits_of(on_gpu) == (small, 32 << 20)
    assert sizes.limits_of(torch.empty(1)) == (sizes.SMALL_BYTES, 2 << 20)
    x, w = torch.randn(4096, 8, requires_grad=True), torch.randn(1024, 8)  # 16 MiB
    for limits, activation, options, path in (
        ((small, 2 * small), "gelu", {}, "composite"),
        ((small, 2 * small), "gelu", {"save": "output"}, "fused"),
        ((1, small), "gelu", {}, "fused"),
        ((1, small), "relu", {}, "composite"),  # which saves what PyTorch saves
        ((1, small), "relu", {"save": "output"}, "fused"),
        ((1, 2), "relu", {}, "fused"),
    ):
        monkeypatch.setattr(decide, "limits_of", lambda x, limits=limits: limits)
        (found,) = plans_of(fl.dense_bias_act, x, w, None, activation, **options)
        assert found.path == path
        assert path != "composite" or "results of less than 16.5 MiB are left to PyTorch" in str(found)


def test_fake_tensors_may_be_on_a_gpu_that_is_not_there() -> None:
    with FakeTensorMode():
        on_gpu = torch.empty(1 << 20, device="cuda:0" if torch.cuda.is_available() else "cuda:99")
    assert sizes.limits_of(on_gpu)[0] == sizes.SMALL_BYTES


def test_what_is_small_may_be_large_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's facts hold its shape, not its bytes: no limit may make two activations one plan."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", 2 * sizes.MEDIUM_BYTES)
    x, w = torch.randn(1, 4, 64, 64), torch.randn(8, 4, 3, 3, requires_grad=True)
    for activation in ("tanh", "relu", "gelu"):
        expected = resolve(activation).function(nn.functional.conv2d(x, w))
        torch.testing.assert_close(fl.conv_bias_act(x, w, activation=activation), expected)


def test_repr_and_plan_say_the_same() -> None:
    x = torch.randn(300, 12, requires_grad=True)
    for activation, save in covering(list(ACTIVATIONS.values()), SAVES):
        layer = fl.FusedDenseAct(12, 40, activation, save=save)
        assert str(plans_of(layer, x)[0]) in repr(layer)
    for block in (fl.FusedMLP(12, 40), fl.FusedGatedMLP(12, 40, save="recompute")):
        assert str(plans_of(block, x)[0]) in repr(block)


def test_repr_does_not_depend_on_where_it_is_asked_for() -> None:
    layers = fl.FusedDenseAct(12, 40), fl.FusedMLP(12, 40), fl.FusedConvAct2d(3, 8, 3, activation="gelu")
    for layer in layers:
        said = repr(layer)
        assert "saves the output" in said
        for context in (
            torch.no_grad,
            torch.inference_mode,
            lambda: torch.autocast("cpu", torch.float16),
            FakeTensorMode,
        ):
            with context():
                assert repr(layer) == said
        assert repr(layer.requires_grad_(False).to("meta")) == said


# --- remembering ------------------------------------------------------------------------------------------------------


def test_a_situation_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(plan, "decide", lambda *found: made.append(found) or decide.decide(*found))
    layer = fl.FusedDenseAct(12, 40)
    for rows in range(30, 60):  # lengths change
        layer(torch.randn(rows, 12))
    assert len(made) == 1
    layer.eval(), layer(torch.randn(31, 12))
    assert len(made) == 1
    with torch.no_grad():
        layer(torch.randn(31, 12))
    layer(torch.randn(31, 12, requires_grad=True))
    layer.weight.requires_grad_(False), layer(torch.randn(31, 12))
    layer.to(torch.bfloat16)(torch.randn(31, 12, dtype=torch.bfloat16))
    assert len(made) == 5


def test_plans_are_bounded_and_hold_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan._plans, "limit", 20)
    w = torch.randn(40, 12)
    for rows in range(30, 60):  # a residual's shape is checked, so each length has a plan
        fl.dense_bias_act(torch.randn(rows, 12), w, residual=torch.randn(rows, 40))
        fl.dense_bias_act(torch.randn(rows, 12), w, None, lambda z, r=rows: torch.sin(z) * r)
    assert len(plan._plans) == 20
    flat = [value for found in plan._plans.values() for value in found]
    assert not any(isinstance(value, Tensor) for value in flat)


def test_what_pytorch_computes_is_not_held() -> None:
    w = torch.randn(40, 12, requires_grad=True)

    def step() -> Any:
        gate = (w * 2).sum() * torch.ones(10)  # with a graph
        fl.dense_bias_act(torch.randn(30, 12), w, None, lambda z: torch.softmax(z * gate.sum(), -1))
        return weakref.ref(gate)

    held = [step() for _ in range(5)]
    gc.collect()
    assert [found() for found in held] == [None] * 5
    assert len(plan._plans) == 1


def test_checks_under_a_torch_function_mode() -> None:
    x, w = torch.ones(3, 12, dtype=torch.int64), torch.ones(40, 12, dtype=torch.int64)
    for _ in range(2):
        with torch.device("cpu"), pytest.raises(TypeError, match="must have a floating dtype"):
            fl.dense_bias_act(x, w, None, "gelu")
        with torch.device("cpu"), pytest.raises(ValueError, match="is on meta but input is on cpu"):
            fl.dense_bias_act(x.float(), w.float().to("meta"))


# --- facts ------------------------------------------------------------------------------------------------------------


def _leaf(*shape: int, dtype: torch.dtype = torch.float32, trains: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=trains)


_FROZEN = {"trains_x": False, "trains_w": False, "trains_b": False}


def _situations() -> Iterator[tuple[str, Callable[[], Tensor], Any]]:
    """Calls that differ from another in one thing each, with the context in which they are made."""
    nowhere = nullcontext
    for operation in ("dense", "conv", "bias_act", "mlp", "gated_mlp"):
        for trains in product(BOOLS, repeat=3):
            for dtype in (torch.float32, torch.float64):
                yield f"{operation} {trains} {dtype}", partial(_call, operation, *trains, dtype=dtype), nowhere
        for options in (
            {"bias": False},
            {"activation": "relu"},
            {"activation": None},
            {"activation": torch.sin},
            {"activation": nn.PReLU()},
            {"activation": nn.PReLU().requires_grad_(False)},
            {"save": "input"},
            {"save": "recompute"},
            {"rows": 3},
            {"rows": 3, "activation": "relu"},
            {"rows": 200, "activation": "relu"},
            {"dims": 3},
            {"computed": True},
            *({"negative": name} for name in "xwb"),
            {"negative": "r", "residual": True},
            {"negative": "b", "computed": True},
            *({"residual": value, **frozen} for value in BOOLS for frozen in ({}, _FROZEN)),
            {"inplace": True},
        ):
            yield f"{operation} {options}", partial(_call, operation, **options), nowhere  # type: ignore[arg-type]
        for context in (
            torch.no_grad,
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: torch.autocast("cpu", torch.float16),
            lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
            forward_ad.dual_level,
            lambda: FlopCounterMode(display=False),
            lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])[0],
        ):
            for activation in ("gelu", "relu"):
                yield f"{operation} under a context", partial(_call, operation, activation=activation), context


def _call(
    operation: str,
    trains_x: bool = True,
    trains_w: bool = True,
    trains_b: bool = True,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    activation: Any = "gelu",
    save: str = "auto",
    rows: int = 30,
    dims: int = 2,
    computed: bool = False,
    negative: str = "",
    residual: bool | None = None,
    inplace: bool = False,
) -> Tensor:
    if isinstance(activation, nn.Module):
        activation = activation.to(dtype)
    if operation == "conv":
        x, w = _leaf(rows, 3, 9, 9, dtype=dtype, trains=trains_x), _leaf(8, 3, 3, 3, dtype=dtype, trains=trains_w)
        b, result = _leaf(8, dtype=dtype, trains=trains_b), (rows, 8, 7, 7)
    else:
        shape = (rows, 12) if dims == 2 else (rows // 3, 3, 12)
        x, w = _leaf(*shape, dtype=dtype, trains=trains_x), _leaf(40, 12, dtype=dtype, trains=trains_w)
        b, result = _leaf(40, dtype=dtype, trains=trains_b), (*shape[:-1], 40)
    if computed:
        w, b = w * 1, b * 1
    added = None if residual is None else _leaf(*result, dtype=dtype, trains=residual)
    x, w, b, added = (
        t if t is None or name != negative else torch.complex(torch.zeros_like(t), t).conj().imag
        for name, t in zip("xwbr", (x, w, b, added), strict=True)
    )
    if operation in ("dense", "conv"):
        call = fl.dense_bias_act if operation == "dense" else fl.conv_bias_act
        return call(x, w, b if bias else None, activation, residual=added, save=save)
    if operation == "bias_act":
        if isinstance(activation, nn.PReLU) or (inplace and save == "recompute"):
            return x
        x = _leaf(*result, dtype=dtype, trains=trains_x)
        return fl.bias_act(x * 1 if inplace else x, b if bias else None, activation, inplace=inplace, save=save)
    down, out = _leaf(12, 40, dtype=dtype, trains=trains_w), _leaf(12, dtype=dtype, trains=trains_b)
    if operation == "mlp":
        return fl.mlp(x, w, b if bias else None, down, out, activation, save=save, chunks=1 + inplace)
    gate = _leaf(40, 12, dtype=dtype, trains=trains_x)
    return fl.gated_mlp(x, gate, None, w, b if bias else None, down, out, activation, save=save)


def test_facts_tell_situations_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decided for one situation is never taken for another: with an empty cache a call decides the same."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", 1 << 11)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 1 << 14)
    taken: list[Any] = []
    for name, path in plan.PATHS.items():
        monkeypatch.setitem(plan.PATHS, name, lambda *given, run=path: taken.append(given[0]) or run(*given))
    situations = list(_situations())
    warm, cold = [], []
    for found, is_warm in ((warm, True), (cold, False)):
        for name, make, context in situations:
            if not is_warm:
                plan._plans.clear()
            taken.clear()
            torch.manual_seed(0)
            with context():
                make()
            found.append((name, *taken))
    assert len({str([tuple(found) for found in plans]) for _, *plans in warm}) > 30
    for one, other in zip(warm, cold, strict=True):
        assert one == other
