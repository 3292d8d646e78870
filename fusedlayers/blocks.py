"""MLP blocks by function: what a user may pass is checked here; ``block_routes.py`` decides how it is computed."""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import validation
from .activations import resolve
from .block_routes import Settings, block
from .ops.mlp_forward import Product

#: Into how many chunks the rows are cut. What is hidden and needed for a moment only is made for one of them at a time,
#: in two buffers, or three of a gated block.
CHUNKS = 16


def mlp(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: object = "gelu",
    *,
    dropout: float = 0.0,
    save: str = "auto",
    chunks: int = CHUNKS,
) -> Tensor:
    """``F.linear(dropout(activation(F.linear(input, weight1, bias1))), weight2, bias2)`` that keeps one hidden buffer.

    Args:
        input: (..., in), float16, bfloat16, float32 or float64.
        weight1: (hidden, in), of the same dtype and device; under autocast all are cast as ``F.linear`` casts them.
        bias1: (hidden,) or None.
        weight2: (out, hidden).
        bias2: (out,) or None.
        activation: as for ``fusedlayers.dense_bias_act``.
        dropout: the probability with which hidden numbers are zeroed; 0 in evaluation. The mask is not kept: it is made
            again from a seed, which is drawn from torch's generator for CPUs.
        save: what is kept of the hidden layer. "output": what the activation returns. "input": what it is given, from
            which backward computes the other again. "recompute": nothing; forward and backward run over chunks of rows
            (as "auto" where input or weights would be kept for this alone, and be more).
            "auto": "output" where the derivative can be had from it within the dtype's rounding floor, else "input".
        chunks: into how many chunks the rows are cut where something hidden is needed for a moment only.

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError, ValueError: as ``dense_bias_act``.

    Saved: one hidden buffer or none (the pre-activation where ``input`` would be kept for nothing else, or a cast or
    computed weight), ``input`` if ``weight1`` needs a gradient, and the weights that gradients go through. Backward
    writes over the buffer, unless the graph is kept for another backward pass.

    >>> import torch, fusedlayers as fl
    >>> fl.mlp(torch.ones(2, 3), torch.ones(8, 3), None, torch.ones(3, 8), None, "relu")
    tensor([[24., 24., 24.],
            [24., 24., 24.]])
    """
    resolved = resolve(activation, "mlp")
    settings = Settings("mlp", dropout, save, chunks, is_gated=False)
    tensors = input, weight1, bias1, weight2, bias2
    if has_torch_function(tensors):
        known = resolved if resolved.is_fusible else activation
        return handle_torch_function(mlp, tensors, *tensors, known, dropout=dropout, save=save, chunks=chunks)
    _check(
        settings,
        input,
        {"weight1": weight1},
        {"bias1": bias1},
        {"weight2": weight2},
        {"bias2": bias2},
    )
    return block(settings, input, [Product(weight1, bias1)], Product(weight2, bias2), resolved)


def gated_mlp(
    input: Tensor,
    weight_gate: Tensor,
    bias_gate: Tensor | None,
    weight_up: Tensor | None,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    activation: object = "silu",
    *,
    dropout: float = 0.0,
    save: str = "auto",
    chunks: int = CHUNKS,
) -> Tensor:
    """``F.linear(dropout(activation(gate) * up), weight_down, bias_down)`` with ``gate = F.linear(input, weight_gate,
    bias_gate)`` and ``up`` likewise, that keeps two hidden buffers (Shazeer 2020: SwiGLU, GEGLU, ReGLU, GLU, and with
    ``activation=None`` bilinear).

    Args:
        input: (..., in), float16, bfloat16, float32 or float64.
        weight_gate, weight_up: (hidden, in); or both in ``weight_gate``, (2 hidden, in), the gate's rows first, and
            None for ``weight_up`` and ``bias_up``.
        bias_gate, bias_up: (hidden,) or None; (2 hidden,) for packed weights.
        weight_down, bias_down: (out, hidden), and (out,) or None.
        activation, dropout, chunks: as for ``fusedlayers.mlp``.
        save: "input": gate and up. "recompute": neither; forward and backward run over chunks of rows. "auto": "input".

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError, ValueError: as ``fusedlayers.mlp``; ``save="output"``, for the product does not tell its factors.

    Saved: as ``fusedlayers.mlp``, but two hidden buffers.

    >>> import torch, fusedlayers as fl
    >>> w = torch.ones(8, 3)
    >>> fl.gated_mlp(torch.ones(2, 3), w, None, w, None, w.t(), None, "relu")[0]
    tensor([72., 72., 72.])
    """
    resolved = resolve(activation, "gated_mlp")
    settings = Settings("gated_mlp", dropout, save, chunks, is_gated=True)
    tensors = input, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down
    if has_torch_function(tensors):
        known = resolved if resolved.is_fusible else activation
        return handle_torch_function(gated_mlp, tensors, *tensors, known, dropout=dropout, save=save, chunks=chunks)
    first = {"weight_gate": weight_gate}, {"bias_gate": bias_gate}
    products = [Product(weight_gate, bias_gate)]
    if weight_up is not None:
        first = {**first[0], "weight_up": weight_up}, {**first[1], "bias_up": bias_up}
        products.append(Product(weight_up, bias_up))
    elif bias_up is not None:
        raise ValueError("gated_mlp: bias_up without weight_up; packed weights have packed biases, in bias_gate")
    _check(settings, input, *first, {"weight_down": weight_down}, {"bias_down": bias_down})
    return block(settings, input, products, Product(weight_down, bias_down), resolved)


def _check(
    settings: Settings,
    input: Tensor,
    weights: dict[str, Tensor],
    biases: dict[str, Tensor | None],
    last: dict[str, Tensor],
    last_bias: dict[str, Tensor | None],
) -> None:
    """Before anything is computed. Each tensor comes with its name."""
    settings.check()
    function = settings.function
    validation.check_tensors(function, {"input": input, **weights, **last}, **biases, **last_bias)
    if input.is_nested:
        return  # which does not tell its sizes
    for name, bias_name in zip(weights, biases, strict=True):
        validation.check_dense(function, input, weights[name], biases[bias_name], (name, bias_name))
    ((name, w),), ((bias_name, b),) = last.items(), last_bias.items()
    packed = 1 + settings.is_packed(weights)
    validation.check_last(function, weights, w, b, (name, bias_name), packed)
    validation.check_one_dtype(function, input, autocast_casts=True, **weights, **biases, **last, **last_bias)
