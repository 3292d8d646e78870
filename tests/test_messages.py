"""What is said of wrong arguments, by functions, layers, ``fuse``, ``save_once`` and ``fit``: a table of functions that
take tensors, and one of all other calls. Nothing is written before."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from subjects import MODULES, SUBJECTS, hooked, parametrized, replaced
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.calls import plan, sizes

# --- functions of tensors ---------------------------------------------------------------------------------------------

X, W, B = torch.randn(2, 4, 9, 7), torch.randn(8, 4, 3, 3), torch.randn(8)
R = torch.randn(2, 8, 7, 5)

#: Functions, and arguments that fit.
GOOD: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "dense_bias_act": (
        fl.dense_bias_act, {"input": torch.randn(3, 4), "weight": torch.randn(8, 4), "bias": B, "activation": "gelu"},
    ),
    "conv_bias_act": (fl.conv_bias_act, {"input": X, "weight": W, "bias": B, "activation": "gelu"}),
    "bias_act": (fl.bias_act, {"input": torch.randn(3, 4), "activation": "gelu"}),
    "mlp": (
        fl.mlp,
        {
            "input": torch.randn(3, 4), "weight1": torch.randn(8, 4), "bias1": B,
            "weight2": torch.randn(4, 8), "bias2": torch.randn(4),
        },
    ),
    "gated_mlp": (
        fl.gated_mlp,
        {
            "input": torch.randn(3, 4), "weight_gate": torch.randn(8, 4), "bias_gate": B,
            "weight_up": torch.randn(8, 4), "bias_up": B, "weight_down": torch.randn(4, 8), "bias_down": None,
        },
    ),
}  # fmt: skip
_ONE = {"weight_up": None, "bias_up": None}
#: Function, what is passed instead, and what is said behind the function's name, as a pattern.
ROWS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("conv_bias_act", {"input": X[0, 0]}, ValueError, r"expected input \(batch, in, ...\) or \(in, ...\) with 2 .*got"),
    ("conv_bias_act", {"input": X[:, :3]}, ValueError, r"expected input .* in = 4, got \(2, 3, 9, 7\)"),
    ("conv_bias_act", {"input": X.long()}, TypeError, "input must have a floating dtype"),
    ("conv_bias_act", {"weight": W[0, 0]}, ValueError, "expected weight .* one to three .*, got a weight with 2"),
    ("conv_bias_act", {"weight": W.cfloat()}, TypeError, "weight must have a floating dtype"),
    ("conv_bias_act", {"bias": B[:7]}, ValueError, r"expected bias \(8,\) for weight \(8, 4, 3, 3\), got \(7,\)"),
    ("conv_bias_act", {"stride": 0}, ValueError, "stride must be 2 numbers, or one, of at least 1, got 0"),
    ("conv_bias_act", {"stride": "2"}, ValueError, "stride must be 2 numbers, or one, of at least 1, got '2'"),
    ("conv_bias_act", {"dilation": (1, None)}, ValueError, "dilation must be 2 numbers, or one"),
    ("conv_bias_act", {"padding": -1}, ValueError, "padding must be 'same', 'valid', 2 numbers, or one, .* got -1"),
    ("conv_bias_act", {"padding": "full"}, ValueError, "padding must be 'same', 'valid', 2 numbers, .* got 'full'"),
    ("conv_bias_act", {"groups": 3}, ValueError, "expected input .* in = 12, got"),
    ("conv_bias_act", {"activation": nn.PReLU(), "save": "output"}, ValueError, "save='output' is not possible for"),
    ("conv_bias_act", {"save": "all"}, ValueError, "save must be one of auto, output, input, recompute, got 'all'"),
    ("conv_bias_act", {"dropout": 1.5}, ValueError, "dropout must"),
    ("conv_bias_act", {"residual": R[..., :-1]}, ValueError, r"expected residual \(2, 8, 7, 5\), like the result, got"),
    ("conv_bias_act", {"residual": R.long()}, TypeError, "residual must have a floating dtype"),
    ("dense_bias_act", {"weight": torch.randn(8, 5)}, ValueError,
     r"expected input \(..., in\) and weight \(out, in\), got \(3, 4\) and \(8, 5\); the input's last dimension must "
     "be the weight's second"),
    ("dense_bias_act", {"weight": B}, ValueError, r"expected input .* and weight \(out, in\), got \(3, 4\) and \(8,\)"),
    ("dense_bias_act", {"weight": torch.randn(8, 4).double()}, ValueError, "all tensors must have one dtype, got input "
     "torch.float32, weight torch.float64, bias torch.float32; convert them, or use torch.autocast"),
    ("dense_bias_act", {"input": torch.randn(3, 4, device="meta")}, ValueError, "weight is on cpu but input is on"),
    ("dense_bias_act", {"input": [1.0]}, TypeError, "input must be a tensor, got list"),
    ("dense_bias_act", {"bias": B[:, None]}, ValueError, r"expected bias \(8,\) for weight \(8, 4\), got \(8, 1\)"),
    ("dense_bias_act", {"save": "outputs"}, ValueError, "save must be one of auto, output, input, recompute, got"),
    ("dense_bias_act", {"activation": "gleu"}, ValueError, "unknown activation 'gleu'; did you mean 'gelu'.? The known "
     f"ones are: {', '.join(fl.activations())}"),
    ("bias_act", {"bias": B[:3]}, ValueError, r"expected bias \(4,\) along dim -1 of \(3, 4\), got \(3,\)"),
    ("bias_act", {"bias": B[:4], "dim": 0}, ValueError, r"expected bias \(3,\) along dim 0 of \(3, 4\), got \(4,\)"),
    ("bias_act", {"bias": B[:4], "dim": 2}, ValueError, r"dim must lie in \[-2, 2\) for \(3, 4\), got 2"),
    ("bias_act", {"bias": B[:4], "dim": 1.0}, TypeError, "dim must be an int, got float: 1.0"),
    ("bias_act", {"bias": B[:4].double()}, ValueError, "all .*float32, bias torch.float64; convert one of"),
    ("bias_act", {"input": torch.tensor(1.0), "bias": B[:1]}, ValueError,
     r"an input of shape \(\) has no dim along which a bias could run; pass None"),
    ("bias_act", {"input": 3.5, "inplace": True}, TypeError, "input must be a tensor, got float"),
    ("bias_act", {"save": ["auto"]}, ValueError, r"save must be one of .*, got \['auto'\]"),
    ("bias_act", {"save": "recompute", "inplace": True}, ValueError,
     "save='recompute' needs the input, which inplace=True overwrites; drop one of them"),
    ("bias_act", {"dropout": 0.5, "inplace": True}, ValueError, "dropout and inplace=True; drop one of them"),
    ("bias_act", {"activation": 3}, TypeError, "activation must be a name, a module, a function or None, got int: 3"),
    ("dense_bias_act", {"residual": R.sum()}, ValueError, r"expected residual \(3, 8\), .*, got \(\)"),
    ("dense_bias_act", {"residual": 1.0}, TypeError, "residual must be a tensor, got .*; pass None for no residual"),
    ("dense_bias_act", {"dropout": float("nan")}, ValueError, "dropout must"),
    ("dense_bias_act", {"dropout": True}, TypeError, "dropout must"),
    ("mlp", {"input": torch.randn(3, 5)}, ValueError, r"expected input \(..., in\) and weight1 \(out, in\), got \(3"),
    ("bias_act", {"bias": torch.ones(4).to(torch.float8_e4m3fn)}, TypeError, "bias must have a floating dtype"),
    ("bias_act", {"input": torch.ones(3, 4) > 0}, TypeError, "input must have a floating dtype .*; convert it first"),
    ("mlp", {"weight1": [1.0]}, TypeError, "weight1 must be a tensor, got list"),
    ("mlp", {"bias1": torch.randn(7)}, ValueError, r"expected bias1 \(8,\) for weight1 \(8, 4\), got \(7,\)"),
    ("mlp", {"bias1": 0.0}, TypeError, "bias1 must be a tensor, got float; pass None for no bias1"),
    ("mlp", {"weight2": torch.randn(4, 9)}, ValueError, r"expected weight2 \(out, hidden\) for weight1 \(hidden,"),
    ("mlp", {"weight2": torch.randn(4, 8, device="meta")}, ValueError, "weight2 is on meta but input is on cpu"),
    ("mlp", {"bias2": B}, ValueError, r"expected bias2 \(4,\)"),
    ("mlp", {"bias2": torch.randn(4).double()}, ValueError, "all tensors must have one dtype, .*bias2 torch.float64"),
    ("mlp", {"dropout": "much"}, TypeError, "dropout must be a number"),
    ("mlp", {"chunks": 0}, ValueError, "chunks must be at least 1"),
    ("mlp", {"chunks": 2.0}, TypeError, "chunks must be an int"),
    ("gated_mlp", {"weight_up": torch.randn(9, 4), "bias_up": None}, ValueError, r"expected weight_up \(8, 4\),"),
    ("gated_mlp", {**_ONE, "weight_gate": torch.randn(9, 4), "bias_gate": None}, ValueError,
     r"expected weight_down \(out, hidden\) for weight_gate \(2 \* hidden, in\), got .* \(9, 4\)"),
    ("gated_mlp", _ONE, ValueError,
     r"expected weight_down \(out, hidden\) for weight_gate \(2 \* hidden, in\), got \(4, 8\) and \(8, 4\); "
     r"weight_down\.shape\[1\] must be half of weight_gate\.shape\[0\]"),
    ("gated_mlp", {**_ONE, "bias_gate": B[:4]}, ValueError, r"expected bias_gate \(8,\) for weight_gate \(8, 4\), got"),
    ("gated_mlp", {"weight_up": None}, ValueError,
     "bias_up without weight_up; packed weights have packed biases, in bias_gate"),
    ("gated_mlp", {"weight_down": torch.randn(4, 9)}, ValueError, r".*expected weight_down \(out, hidden\) for weight"),
    ("gated_mlp", {"save": "output"}, ValueError,
     "save='output' is not possible: a product does not determine its factors; use save='auto', 'input' or 'recomp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "change", "error", "said"),
    ROWS,
    ids=[f"{i} {row[0]}: {', '.join(row[1])}" for i, row in enumerate(ROWS)],
)
def test_functions(
    function: str, change: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a call like it was refused before, and where one was made, fused or by PyTorch, whose plan is kept."""
    call, good = GOOD[function]
    given = {**good, **change}
    tensors = [t for t in given.values() if isinstance(t, Tensor) and not t.is_meta]
    before = [t.clone() for t in tensors]
    for small_bytes, grad in ((1 << 10, True), (1 << 10, False), (0, True), (0, False)):
        monkeypatch.setattr(sizes, "SMALL_BYTES", small_bytes)
        monkeypatch.setattr(sizes, "MEDIUM_BYTES", small_bytes)
        plan._plans.clear()
        for is_first in (True, False):
            with pytest.raises(error, match=f"^{function}: {said}"), torch.set_grad_enabled(grad):
                call(**given)
            if is_first:
                call(**good)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize(
    ("activation", "dtype", "reason"),
    [
        (nn.LeakyReLU(-0.1), torch.float32, "negative_slope = -0.1"),
        (nn.CELU(-1.0), torch.bfloat16, "alpha = -1"),
        (nn.Threshold(0.0, 1.0), torch.float32, "value > threshold"),
        (nn.Softplus(1.0, 2.0), torch.float32, "threshold = 2"),
        ("gelu", torch.float64, "float64 is computed by PyTorch"),
        (torch.sin, torch.float32, "a derivative that does not settle to a constant"),
        (nn.PReLU(), torch.float32, "PReLU reads tensors that training may change"),
    ],
    ids=["leaky_relu", "celu", "threshold", "softplus", "float64", "sin", "prelu"],
)
def test_save_output_where_the_output_does_not_suffice(activation: object, dtype: torch.dtype, reason: str) -> None:
    x, w = torch.randn(3, 4, dtype=dtype), torch.randn(8, 4, dtype=dtype)
    before = x.clone()
    for call in (partial(fl.dense_bias_act, x, w, None), partial(fl.bias_act, x, None, inplace=True)):
        said = rf"^{call.func.__name__}: save='output' is not possible for .* in {dtype}: .*{re.escape(reason)}.*"
        with pytest.raises(ValueError, match=said + "; use save='auto', 'input' or 'recompute'$"):
            call(activation=activation, save="output")
    assert torch.equal(x, before)


# --- layers -----------------------------------------------------------------------------------------------------------


#: What is done to a layer of torch's, and the reason to refuse it then; {} is its class.
CHANGES: dict[Callable[[Any], Any], str] = {
    hooked: "the nn.{} must be called: it has hooks; leave it as it is",
    replaced: "the nn.{} must be called: its forward has been replaced; leave it as it is",
    parametrized: "expected a plain nn.{}, got Parametrized{}, which may compute something else",
}
#: A layer, torch's, and others that are much like that.
KINDS: list[tuple[Any, Callable[[], Any], list[Callable[[], Any]]]] = [
    (fl.FusedDenseAct, partial(nn.Linear, 4, 8), [lambda: nn.LazyLinear(8), lambda: fl.FusedDenseAct(4, 8)]),
    (fl.FusedConvAct1d, partial(nn.Conv1d, 6, 8, 3), [lambda: nn.ConvTranspose1d(6, 8, 3)]),
    (fl.FusedConvAct2d, partial(nn.Conv2d, 6, 8, 3), [lambda: nn.LazyConv2d(8, 3)]),
    (fl.FusedConvAct3d, partial(nn.Conv3d, 6, 8, 3), [lambda: nn.Conv2d(6, 8, 3)]),
]


def _modules_of_a_layer() -> Iterator[Any]:
    for ours, make, others in KINDS:
        torchs = type(make()).__name__
        own = type("Own", (type(make()),), {})
        given = [(change(make()), said.format(torchs, torchs)) for change, said in CHANGES.items()]
        for other in (*(other() for other in others), own(*make.args)):  # type: ignore[attr-defined]
            kind = type(other).__name__
            given.append((other, f"expected a plain nn.{torchs}, got {kind}, which may compute something else"))
        for module, said in given:
            call = partial(ours.from_modules, module, "relu")
            yield call, TypeError, f"^{re.escape(f'{ours.__name__}.from_modules: {said}')}"


_linear = partial(nn.Linear, bias=False)


def _modules_of_a_block() -> Iterator[Any]:
    def mlp(*layers: Any) -> Callable[[], Any]:
        return lambda: fl.FusedMLP.from_modules(layers[0], "relu", layers[1])

    def gated(*layers: Any) -> Callable[[], Any]:
        return lambda: fl.FusedGatedMLP.from_modules(layers[0], "relu", *layers[1:])

    first, last = _linear(4, 8), _linear(8, 4)
    swapped = "fc2 must be a plain nn.Linear, got GELU; the activation comes second, and a layer"
    for call, error, said in (
        (mlp(first, nn.Conv1d(1, 1, 1)), TypeError, "fc2 must be a plain nn.Linear, got Conv1d"),
        (lambda: fl.FusedMLP.from_modules(first, last, nn.GELU()), TypeError, swapped),
        (mlp(fl.FusedDenseAct(4, 8), last), TypeError, "fc1 must be a plain nn.Linear, got FusedDenseAct"),
        (gated(first, first, None), TypeError, "down_proj must be a plain nn.Linear, got NoneType"),
        (mlp(first, _linear(9, 4)), ValueError, "fc1 makes 8 features of 4, where fc2 with 9 input features needs 9"),
        (gated(first, _linear(4, 9), last), ValueError, "up_proj makes 9 features of 4, where down_proj with 8"),
        (gated(first, None, last), ValueError, "gate_up_proj makes 8 features of 4, where down_proj with 8"),
    ):
        ours = "FusedGatedMLP" if "proj" in said else "FusedMLP"
        yield call, error, f"^{re.escape(f'{ours}.from_modules: {said}')}"


#: Activation, options, and what is said of them when a layer is made.
LAYERS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("gleu", {}, ValueError, "unknown activation 'gleu'; did you mean 'gelu'? The known ones are: "),
    (3, {}, TypeError, "activation must be a name, a module, a function or None, got int: 3"),
    (nn.GELU, {}, TypeError, "activation must be an instance"),
    ("gelu", {"save": "all"}, ValueError, "save must be one of auto, output, input, recompute, got 'all'"),
    (nn.PReLU(), {"save": "output"}, ValueError, "save='output' is not possible"),
    (torch.sin, {"save": "output"}, ValueError, "save='output' is not possible"),
    (nn.LeakyReLU(-0.1), {"save": "output"}, ValueError, "save='output' is not possible"),
    ("gelu", {"dropout": 2.0}, ValueError, "dropout must lie in"),
    ("gelu", {"dropout": True}, TypeError, "dropout must"),
]


def _layers() -> Iterator[Any]:
    for name in MODULES:
        make = SUBJECTS[name].make
        for activation, options, error, said in LAYERS:
            yield partial(make, activation, **options), error, f"^{type(make('relu')).__name__}: {re.escape(said)}"


# --- models, and all the others ---------------------------------------------------------------------------------------


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.GELU())


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(Model())


def _compiled_in_place() -> nn.Module:
    model = Model()
    model.compile(backend="eager")
    return model


def _compiled() -> Any:
    return torch.compile(Model(), backend="eager")


ROW = torch.ones(2, 4)
_fit = partial(fl.fit, Model(), ROW)
_linear_fit = partial(fl.fit, fraction=0.5)
_fit_compiled = partial(fl.fit_compiled, Model(), ROW)
_BYTES = r"fit: memory_budget_bytes"
Z = torch.linspace(-8, 8, 101)
LEAF = torch.randn(30, 40, requires_grad=True)

CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fl.FusedDenseAct(64, "gelu"), TypeError,
     r"^FusedDenseAct: out_features must be an int, got str: 'gelu'; if .* is meant, write activation='gelu'$"),
    (lambda: fl.FusedMLP(64, 256, "gelu"), TypeError, "^FusedMLP: out_features must be an int, got str: 'gelu'; if an"),
    (lambda: fl.FusedGatedMLP(64, 2.5), TypeError, r"^FusedGatedMLP: hidden_features must be an int, got float: 2\.5$"),
    (lambda: fl.FusedConvAct2d(3, 8, "relu"), TypeError,
     "^FusedConvAct2d: kernel_size must be an int, or one for each dimension, got 'relu'"),
    (lambda: fl.FusedDenseAct(-1, 64), ValueError, "^FusedDenseAct: in_features must not be negative, got -1$"),
    (lambda: fl.FusedDenseAct(3, 4, False), TypeError,
     "^FusedDenseAct: activation must be a name, .* or None, got bool: False; other arguments, such as bias, are"),
    (lambda: fl.bias_act(LEAF, inplace=True), RuntimeError,
     "^bias_act: inplace=True on a leaf that requires grad; use inplace=False or detach the input"),
    (lambda: fl.bias_act(LEAF[3:], inplace=True), RuntimeError, "^bias_act: inplace=True on a view of a leaf that"),
    (lambda: fl.elu(Z, 1.0, 2.0), TypeError, r"elu\(\) takes input, alpha, got 3 positional arguments"),
    (lambda: fl.elu(Z, 1.0, alpha=2.0), TypeError, "got multiple values for keyword argument 'alpha'"),
    (lambda: fl.activation(F.silu, name="odd", input_given_output=F.silu), TypeError,
     "^activation: derivative_given_output must be stated, of a function .* got input_given_output of <function"),
    (lambda: fl.activation(torch.sinh, derivative_given_output=torch.cosh), TypeError,
     "^activation: derivative_given_output must be stated, .*; got derivative_given_output of <built-in method sinh"),
    (lambda: fl.silu(Z, beta=2.0), ValueError, r"'silu' got unknown parameters \['beta'\]"),
    (lambda: fl.GELU("erf")(Z), RuntimeError, "approximate argument must be either none or tanh"),  # torch's own
    (lambda: fl.fuse(Model), TypeError, r"fuse: model must be an instance, Model\(\.\.\.\), and not the class"),
    (lambda: fl.fuse(F.gelu), TypeError, r"fuse: model must be an nn\.Module, got builtin"),
    (lambda: fl.fuse(ROW, Model()), TypeError, "got a tensor; the model comes first, then its inputs"),
    (lambda: fl.unfuse(F.gelu), TypeError, r"unfuse: model must be an nn\.Module"),
    (lambda: fl.fuse(_scripted()), TypeError, "fuse: the model is of TorchScript.*pass the module that was"),
    (lambda: fl.fuse(_compiled()), TypeError, "fuse: the model is compiled.*pass the model as it was"),
    (lambda: fl.fuse(_compiled_in_place(), ROW), TypeError, "fuse: the model is compiled"),
    (lambda: fl.fuse(nn.LazyLinear(3)), ValueError, "fuse: weight has no shape yet; call the model once"),
    (lambda: fl.fuse(Model(), ROW, time=1), TypeError, "fuse: time must be True or False, got 1"),
    (lambda: fl.fuse(Model(), time=True), ValueError, "fuse: time=True runs the model; pass inputs too"),
    (lambda: fl.fuse(Model(), ROW, ROW), TypeError, r"fuse: inputs must be one tuple or dict: fuse\(model, \(x, y\)\)"),
    (lambda: fl.sublinear(3, ROW), TypeError, "sublinear: function must be a callable of the tensors"),
    (lambda: fl.fuse(Model(), ROW, progress="bar"), TypeError, "fuse: progress must be True, False, or a"),
    (lambda: fl.fuse(Model(), ROW)(ROW), TypeError, "FuseReport cannot be called"),
    (lambda: fl.save_once(lambda x: x), TypeError, r"save_once\(\) takes 0 positional arguments"),  # @save_once
    (_fit, ValueError, "fit: give one of memory_budget_bytes and fraction, got neither"),
    (partial(_fit, memory_budget_bytes=1, fraction=0.5), ValueError, "got both"),
    (partial(_fit, memory_budget_bytes=-1), ValueError,
     _BYTES + ' must be a number of bytes, 0 or more, or a size such as "8GiB", got -1'),
    (partial(_fit, memory_budget_bytes="8 gigs"), ValueError, _BYTES + ": expected bytes, .* got '8 gigs'"),
    (partial(_fit, memory_budget_bytes=0.3), ValueError, _BYTES + r" must be a number of bytes, .*, got 0\.3"),
    (partial(_fit, memory_budget_bytes="8g"), ValueError, _BYTES + r": .* got '8g'; did you mean 8GiB, or 8GB\?"),
    (partial(_fit, memory_budget_bytes="0.5"), ValueError, _BYTES + r": expected bytes with a unit, .* got '0\.5'"),
    (partial(_fit, fraction=0), ValueError, r"fit: fraction must be above 0 and at most 1 \(30 % are 0\.3\), got 0"),
    (partial(_fit, fraction=0.5, of="all"), ValueError, "fit: of must be one of 'saved', 'peak', got 'all'"),
    (partial(_fit, fraction=0.5, progress="bar"), TypeError, "fit: progress must be True, False, or a function of"),
    (partial(_fit, fraction=0.5, plan_only=1), TypeError, "fit: plan_only must be True or False, got 1"),
    (partial(_fit, fraction=0.5, loss=5), TypeError, "fit: loss must be a function of the model's result, got 5"),
    (lambda: _linear_fit(nn.Linear(32, 8), (4, 32)), ValueError, r"if a .* is meant, pass torch.randn\(4, 32\)"),
    (lambda: _linear_fit(lambda x: x, ROW), TypeError, r"fit: model must be an nn.Module, got function"),
    (lambda: _linear_fit(nn.Linear(2, 2), ROW), ValueError, "fit: the model does not run on these inputs: Runti"),
    (lambda: _linear_fit(nn.Linear(4, 2), [ROW, ROW]), ValueError, r"inputs \(a tuple or a list holds positional"),
    (lambda: _linear_fit(Model().requires_grad_(False), ROW), ValueError, "all of its 2 parameters are frozen"),
    (torch.no_grad()(lambda: _linear_fit(Model(), ROW)), ValueError, "fit: .* gradients are switched off here"),
    (lambda: _linear_fit(Model().eval(), ROW), ValueError, "^fit: the model is in evaluation .* call model.train"),
    (_fit_compiled, ValueError, "fit_compiled: give one of memory_budget_bytes and fraction, got neither"),
    (partial(_fit_compiled, fraction=0.5, backend="eager"), ValueError, "fit_compiled: the backend is the report's"),
    (partial(_fit_compiled, fraction=0.5, loss=lambda y: y), ValueError, "fit_compiled: loss returned a float32 "),
    (lambda: fl.fit_compiled(Model().eval(), ROW, fraction=0.5), ValueError, "^fit_compiled: the model is in eval"),
    (lambda: fl.fit_compiled(_compiled(), ROW, fraction=0.5), ValueError, "the model is compiled already; pass"),
    (lambda: fl.fit_compiled(nn.Linear(8, 8), ROW, fraction=0.5), ValueError, "fit_compiled: the model does not run"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")  # of torch's compiler
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        pytest.param(*row, id=f"{number} {row[2][:40]}")
        for number, row in enumerate([*CALLS, *_layers(), *_modules_of_a_layer(), *_modules_of_a_block()])
    ],
)
def test_calls(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()
