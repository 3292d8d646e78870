"""What the functional interface says to a call that it refuses: one table, and nothing is written before."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl

X, W, B = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
LEAF = torch.randn(30, 40, requires_grad=True)
NOT_ONE = "all tensors must have one dtype, got "


def dense(x: Any = X, w: Any = W, b: Any = B, activation: Any = "gelu", **options: Any) -> Callable[[], Tensor]:
    return lambda: fl.dense_bias_act(x, w, b, activation, **options)


def act(x: Any = X, b: Any = None, activation: Any = "gelu", **options: Any) -> Callable[[], Tensor]:
    return lambda: fl.bias_act(x, b, activation, **options)


#: A call, the error, and how the message begins: it names the function, what it got, what it expected, what to do.
TABLE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # shapes
    (dense(w=torch.randn(5, 4)), ValueError, "dense_bias_act: expected input (..., in) and weight (out, in), got (4, 3)"
     " and (5, 4); the input's last dimension must be the weight's second"),
    (dense(w=W[0]), ValueError, "dense_bias_act: expected input (..., in) and weight (out, in), got (4, 3) and (3,)"),
    (dense(torch.tensor(1.0)), ValueError, "dense_bias_act: expected input (..., in) and weight (out, in), got ()"),
    (dense(b=torch.randn(3)), ValueError, "dense_bias_act: expected bias (5,) for weight (5, 3), got (3,)"),
    (dense(b=torch.randn(5, 1)), ValueError, "dense_bias_act: expected bias (5,) for weight (5, 3), got (5, 1)"),
    (dense(b=torch.tensor(1.0)), ValueError, "dense_bias_act: expected bias (5,) for weight (5, 3), got ()"),
    (dense(residual=B), ValueError, "dense_bias_act: expected residual (4, 5), like the result, got (5,)"),
    (act(b=torch.randn(4)), ValueError, "bias_act: expected bias (3,) along dim -1 of (4, 3), got (4,)"),
    (act(b=torch.randn(3), dim=0), ValueError, "bias_act: expected bias (4,) along dim 0 of (4, 3), got (3,)"),
    (act(b=X), ValueError, "bias_act: expected bias (3,) along dim -1 of (4, 3), got (4, 3)"),
    (act(b=B[:3], dim=2), ValueError, "bias_act: dim must lie in [-2, 2) for (4, 3), got 2"),
    (act(b=B[:3], dim=1.0), TypeError, "bias_act: dim must be an int, got float: 1.0"),
    (act(torch.tensor(1.0), B[:1]), ValueError, "bias_act: an input of shape () has no dim along which a bias could run"
     "; pass None"),
    # devices and dtypes
    (dense(w=W.to("meta")), ValueError, "dense_bias_act: weight is on meta but input is on cpu; move one of them"),
    (dense(X.to("meta")), ValueError, "dense_bias_act: weight is on cpu but input is on meta; move one of them"),
    (act(b=B[:3].to("meta")), ValueError, "bias_act: bias is on meta but input is on cpu; move one of them"),
    (dense(w=W.double()), ValueError, f"dense_bias_act: {NOT_ONE}input torch.float32, weight torch.float64, bias "
     "torch.float32; convert them, or use torch.autocast"),
    (dense(X.half(), b=None), ValueError, f"dense_bias_act: {NOT_ONE}input torch.float16, weight torch.float32; "),
    (act(b=B[:3].double()), ValueError, f"bias_act: {NOT_ONE}input torch.float32, bias torch.float64; convert one of"),
    # tensors
    (dense(None), TypeError, "dense_bias_act: input must be a tensor, got NoneType"),
    (dense(w=None), TypeError, "dense_bias_act: weight must be a tensor, got NoneType"),
    (dense([1.0]), TypeError, "dense_bias_act: input must be a tensor, got list"),
    (dense(b=True), TypeError, "dense_bias_act: bias must be a tensor, got bool; pass None for no bias"),
    (act(None), TypeError, "bias_act: input must be a tensor, got NoneType"),
    (act(math.pi, inplace=True), TypeError, "bias_act: input must be a tensor, got float"),
    # options
    (dense(save="outputs"), ValueError, "dense_bias_act: save must be one of auto, output, input, recompute, got"),
    (act(save=None), ValueError, "bias_act: save must be one of auto, output, input, recompute, got None"),
    (act(save=["auto"]), ValueError, "bias_act: save must be one of auto, output, input, recompute, got ['auto']"),
    (dense(dropout="much"), TypeError, "dense_bias_act: dropout must be a number, got str: 'much'"),
    (act(dropout=1.5), ValueError, "bias_act: dropout must lie in [0, 1], got 1.5"),
    (act(dropout=0.5, inplace=True), ValueError, "bias_act: dropout and inplace=True; drop one of them"),
    (act(inplace=True, save="recompute"), ValueError, "bias_act: save='recompute' needs the input, which inplace=True "
     "overwrites; drop one of them"),
    (act(LEAF, inplace=True), RuntimeError, "bias_act: inplace=True on a leaf that requires grad; use inplace=False or "
     "detach the input"),
    (act(LEAF[3:], inplace=True), RuntimeError, "bias_act: inplace=True on a view of a leaf that requires grad; use "),
    (act(LEAF.view(-1), activation=None, inplace=True), RuntimeError, "bias_act: inplace=True on a view of a leaf "),
    # activations
    (dense(activation="gleu"), ValueError, "dense_bias_act: unknown activation 'gleu'; did you mean 'gelu'? The known "
     f"ones are: {', '.join(fl.activations())}"),
    (act(activation=3), TypeError, "bias_act: activation must be a name, a module, a function or None, got int: 3"),
    (lambda: fl.FusedDenseAct(3, 4, False), TypeError, "FusedDenseAct: activation must be a name, a module, a function "  # type: ignore[arg-type]
     "or None, got bool: False; write bias=False"),
    # blocks: what is theirs alone; test_mlp.py has the shapes
    (lambda: fl.mlp(X, W, None, W.t(), None, chunks=4.0), TypeError, "mlp: chunks must be an int, got float: 4.0"),  # type: ignore[arg-type]
    (lambda: fl.mlp(X, W, None, W.t(), None, chunks=0), ValueError, "mlp: chunks must be at least 1, got 0"),
    (lambda: fl.gated_mlp(X, W, None, W, None, W.t(), None, save="output"), ValueError, "gated_mlp: save='output' is "
     "not possible: a product does not determine its factors; use save='auto', 'input' or 'recompute'"),
    (lambda: fl.gated_mlp(X, W, None, None, B, W.t(), None), ValueError, "gated_mlp: bias_up without weight_up; packed "
     "weights have packed biases, in bias_gate"),
    # layers
    (lambda: fl.FusedDenseAct(3, "gelu"), TypeError, "FusedDenseAct: out_features must be an int, got str: 'gelu'; if "  # type: ignore[arg-type]
     "an activation is meant, write activation='gelu'"),
    (lambda: fl.FusedDenseAct(-1, 4), ValueError, "FusedDenseAct: in_features must not be negative, got -1"),
    (lambda: fl.FusedConvAct2d(3, 4, "3"), TypeError, "FusedConvAct2d: kernel_size must be an int, or one for each "  # type: ignore[arg-type]
     "dimension, got '3'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "begins"), TABLE, ids=[begins[:60] for _, _, begins in TABLE])
def test_the_message(call: Callable[[], Any], error: type[Exception], begins: str) -> None:
    before = [t.detach().clone() for t in (X, W, B, LEAF)]
    for _ in range(2):  # also where a call like it was refused before
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(begins), str(caught.value)
    assert all(map(torch.equal, (X, W, B, LEAF), before))


BAD_DTYPES = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", BAD_DTYPES, ids=str)
def test_only_floating_dtypes(dtype: torch.dtype) -> None:
    bad = torch.ones(4, 3).to(dtype)
    hint = "" if dtype.is_complex else "; convert it first"
    for begins, call in {
        "dense_bias_act: input": dense(bad),
        "dense_bias_act: weight": dense(w=bad, b=None),
        "dense_bias_act: bias": dense(b=bad[0], activation=None),
        "dense_bias_act: residual": dense(residual=bad),
        "bias_act: input": act(bad, activation=torch.sin, inplace=True),
        "bias_act: bias": act(b=bad[0]),
    }.items():
        with pytest.raises(TypeError, match=rf"^{begins} must have a floating dtype \(.*\), got {dtype}{hint}$"):
            call()


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
    x, w = X.to(dtype), W.to(dtype)
    before = x.clone()
    options = {"activation": activation, "save": "output"}
    calls = {"dense_bias_act": dense(x, w, None, **options), "bias_act": act(x, **options, inplace=True)}
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: save='output' is not possible for .* in {dtype}: ") as error:
            call()
        assert reason in str(error.value) and str(error.value).endswith("; use save='auto', 'input' or 'recompute'")
    assert torch.equal(x, before)
