"""MLP blocks by function: what a user may pass is checked here, and which route a call takes is decided.

* one node (``hidden.py``): owns the hidden buffers from the first product to the last;
* two layers: ``dense_bias_act`` and what follows, where the one node would keep more than these, under
  ``torch.compile``, and for everything that ``dense_bias_act`` leaves to plain PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from . import backends, operands
from .activations import Activation, Saved, resolve
from .functional import dense_bias_act
from .hidden import MLP, Block, Dropout, Product, without_gradients
from .routes import SAVES, SMALL, choose_save, is_transformed, needs_gradient, specialised

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
            which backward computes the other again. "recompute": nothing; forward and backward run over chunks of rows.
            "auto": "output" where the derivative can be had from it within the dtype's rounding floor, else "input".
        chunks: into how many chunks the rows are cut where something hidden is needed for a moment only.

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError, ValueError: as ``dense_bias_act``.

    Saved: one hidden buffer or none, ``input``, and the weights. Backward writes over the buffer, unless the graph is
    kept for another backward pass.

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
    return _block(settings, input, [Product(weight1, bias1)], Product(weight2, bias2), resolved)


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

    Saved: two hidden buffers or none, ``input``, and the weights. Backward writes over the buffers, unless the graph is
    kept for another backward pass.

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
    if weight_up is None:
        weight_gate, weight_up, bias_gate, bias_up = _unpacked(weight_gate, bias_gate, bias_up)
    _check(
        settings,
        input,
        {"weight_gate": weight_gate, "weight_up": weight_up},
        {"bias_gate": bias_gate, "bias_up": bias_up},
        {"weight_down": weight_down},
        {"bias_down": bias_down},
    )
    products = [Product(weight_gate, bias_gate), Product(weight_up, bias_up)]
    return _block(settings, input, products, Product(weight_down, bias_down), resolved)


class Settings(NamedTuple):
    """What a block is asked for besides tensors."""

    function: str
    dropout: float
    save: str
    chunks: int
    is_gated: bool

    def check(self) -> None:
        function, dropout, save, chunks, is_gated = self
        if save not in SAVES:
            raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")
        if save == "output" and is_gated:
            raise ValueError(
                f"{function}: save='output' cannot be had: a product does not tell its factors; use save='auto', "
                "'input' or 'recompute'"
            )
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
            raise TypeError(f"{function}: dropout must be a number, got {type(dropout).__name__}: {dropout!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"{function}: dropout must lie in [0, 1], got {dropout}")
        if isinstance(chunks, bool) or not isinstance(chunks, int):
            raise TypeError(f"{function}: chunks must be an int, got {type(chunks).__name__}: {chunks!r}")
        if chunks < 1:
            raise ValueError(f"{function}: chunks must be at least 1, got {chunks}")


def _unpacked(
    weight: Tensor, bias: Tensor | None, bias_up: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    operands.check_tensors("gated_mlp", {"weight_gate": weight}, bias_gate=bias)
    if bias_up is not None:
        raise ValueError("gated_mlp: bias_up without weight_up; packed weights have packed biases, in bias_gate")
    for name, tensor in (("weight_gate", weight), ("bias_gate", bias)):
        if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] % 2):
            raise ValueError(
                f"gated_mlp: without weight_up {name} holds both, (2 hidden, ...), got {tuple(tensor.shape)}"
            )
    gate, up = weight.unflatten(0, (2, -1)).unbind()
    bias_gate, bias_up = (None, None) if bias is None else bias.unflatten(0, (2, -1)).unbind()
    return gate, up, bias_gate, bias_up


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
    operands.check_tensors(function, {"input": input, **weights, **last}, **biases, **last_bias)
    if input.is_nested:
        return  # which does not tell its sizes
    for name, bias_name in zip(weights, biases, strict=True):
        operands.check_dense(function, input, weights[name], biases[bias_name], (name, bias_name))
    ((name, w),), ((bias_name, b),) = last.items(), last_bias.items()
    operands.check_last(function, weights, w, b, (name, bias_name))
    operands.check_one_dtype(function, input, autocast_casts=True, **weights, **biases, **last, **last_bias)


def _block(settings: Settings, input: Tensor, products: list[Product], last: Product, activation: Activation) -> Tensor:
    """A block of inputs that have been checked."""
    save = settings.save
    tensors = [t for product in (*products, last) for t in product if t is not None]
    compiling = torch.compiler.is_compiling()
    hidden = products[0].w.shape[0]
    rows = input.numel() // max(1, input.shape[-1]) if not input.is_nested else 0
    kind = input.device.type
    autocast = operands.is_autocast(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast and input.dtype is not torch.float64 else input.dtype
    is_plain = not operands.are_ordinary((input, *tensors), None) or (is_transformed() and not compiling)
    is_plain = is_plain or rows * hidden == 0 or (save == "auto" and rows * hidden < SMALL)
    params: tuple[Tensor, ...] = ()
    record = activation
    if activation.is_untraced and not is_plain and not compiling:
        shape = (*input.shape[:-1], hidden)
        record, params, dim = specialised(activation, shape, dtype, input.device)
        is_plain = dim is not None and dim % len(shape) != len(shape) - 1
    if settings.is_gated:
        keep: Saved = "recompute" if save == "recompute" else "input"
    else:
        keep = choose_save(settings.function, record, save, dtype)
        if keep == "nothing" and save == "recompute":  # without an activation the last product keeps what it multiplies
            keep = "recompute"
    is_plain = is_plain or compiling or not record.is_fusible or keep == "nothing"
    needs = needs_gradient(input, *tensors, *params)
    # Without x there are no second derivatives, and x is not kept for these alone.
    keeps_x = keep == "recompute" or any(w.requires_grad for w, _ in products)
    if compiling and needs and save == "recompute":
        by_layers = functools.partial(_by_layers, settings._replace(save="auto"), activation=activation)
        return checkpoint(by_layers, input, products, last, use_reentrant=False)
    # A checkpoint computes once without gradients and once with them, by the same route: the masks must be the same.
    if is_plain or ((needs or settings.dropout) and not keeps_x):
        return _by_layers(settings, input, products, last, activation)

    x = input if input.dim() == 2 else input.reshape(rows, -1)
    if autocast:
        x, last, products = x.to(dtype), _cast(last, dtype), [_cast(product, dtype) for product in products]
    block = Block(record, keep, settings.is_gated, _dropout(settings), settings.chunks, backends.choose(x, record))
    with torch.autocast(kind, enabled=False):
        if needs:
            weights, biases = [w for w, _ in products], [b for _, b in products]
            y = MLP.apply(block, len(products), x, *last, *weights, *biases, *params)
        else:
            y = without_gradients(block, x, products, last, params)
    return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])


def _by_layers(
    settings: Settings, input: Tensor, products: Sequence[Product], last: Product, activation: Activation
) -> Tensor:
    (w, b), *others = products
    hidden = dense_bias_act(input, w, b, activation, save=settings.save)
    for other_w, other_b in others:
        hidden = hidden * F.linear(input, other_w, other_b)
    if settings.dropout:
        hidden = F.dropout(hidden, settings.dropout)
    return F.linear(hidden, *last)


def _dropout(settings: Settings) -> Dropout | None:
    if not settings.dropout:
        return None
    # From the generator that checkpoints put back before they compute again, whatever the device.
    return Dropout(settings.dropout, int(torch.randint(2**62, (), device="cpu")))


def _cast(product: Product, dtype: torch.dtype) -> Product:
    w, b = product
    return Product(w.to(dtype), None if b is None else b.to(dtype))
