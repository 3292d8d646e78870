"""An MLP block: which route a call takes. No arithmetic.

What is fused is made of the nodes of ``ops/mlp.py``, so that no more is kept than PyTorch keeps:

* one node from the input to the output;
* PyTorch's products, and a node for the rest: where the one node would keep the input, a weight or a bias for second
  derivatives alone;
* PyTorch's last product: where nothing before it needs a gradient.

Layer by layer, by ``dense_bias_act`` and what follows, go a gate of which only one half needs a gradient, and that
keeps less than both halves; calls under ``torch.compile``; and all that ``dense_bias_act`` leaves to plain PyTorch.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from . import backends, validation
from ._torch import PROXY_MODE, infrastructure_mode
from .activations import Activation, Saved
from .backends.operations import MATMUL
from .functional import dense_bias_act
from .ops.autocast import shared_cast
from .ops.mlp import MLP, Rest
from .ops.mlp_forward import Block, Dropout, Product, constant, unpacked, without_gradients
from .routes import SAVES, Context, choose_save, needs_gradient, with_recompute


class Settings(NamedTuple):
    """What a block is asked for besides tensors."""

    function: str
    dropout: float
    save: str
    chunks: int
    is_gated: bool

    def is_packed(self, first: Sized) -> bool:
        """Whether one product makes gate and up; ``first`` are the first products."""
        return self.is_gated and len(first) == 1

    def check(self) -> None:
        function, dropout, save, chunks, is_gated = self
        if save not in SAVES:
            raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")
        if save == "output" and is_gated:
            raise ValueError(
                f"{function}: save='output' cannot be had: a product does not tell its factors; use save='auto', "
                "'input' or 'recompute'"
            )
        if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
            raise TypeError(f"{function}: dropout must be a number, got {type(dropout).__name__}: {dropout!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"{function}: dropout must lie in [0, 1], got {dropout}")
        if not validation.is_whole(chunks):
            raise TypeError(f"{function}: chunks must be an int, got {type(chunks).__name__}: {chunks!r}")
        if chunks < 1:
            raise ValueError(f"{function}: chunks must be at least 1, got {chunks}")


def block(settings: Settings, input: Tensor, products: list[Product], last: Product, activation: Activation) -> Tensor:
    """Of inputs that have been checked."""
    context = Context.of(input)
    tensors = [t for product in (*products, last) for t in product if t is not None]
    hidden = products[0].w.shape[0] // (1 + settings.is_packed(products))
    rows = input.numel() // max(1, input.shape[-1]) if not input.is_nested else 0
    is_ordinary = rows * hidden > 0 and validation.are_ordinary((input, *tensors), None)
    is_plain = context.is_plain(settings.save, rows * hidden, is_ordinary)
    is_plain = is_plain or bool(settings.dropout and _is_recorded(input))
    params: tuple[Tensor, ...] = ()
    record = activation
    if not is_plain:
        shape = (*input.shape[:-1], hidden)
        record, params, dim = context.with_operands(activation, shape, input.device)
        is_plain = not record.is_fusible or (dim is not None and dim % len(shape) != len(shape) - 1)
    keep = _choose_save(settings, record, context.dtype)
    if is_plain or context.compiling:
        by_layers = functools.partial(_by_layers, settings, activation, torchs_dropout(settings.dropout))
        if context.compiling and settings.save == "recompute" and needs_gradient(input, *tensors):
            return checkpoint(by_layers, input, products, last, use_reentrant=False)
        return by_layers(input, products, last)

    trains = Trains.of(settings, input, products, last, params)
    alone = _kept_alone(trains, context.dtype, input, products)
    if needs_gradient(input, *tensors, *params):
        keep = _least(keep, settings, record, context.dtype, trains, alone, rows * hidden)
    dropout = _dropout(settings)
    if keep == "nothing":
        drop = dropout.apply if dropout is not None else torchs_dropout(0.0)
        if settings.save == "recompute":  # which would keep more
            settings = settings._replace(save="auto")
        return _by_layers(settings, activation, drop, input, products, last)

    x = input if input.dim() == 2 else input.reshape(rows, -1)
    if context.cast is not None:
        x, *weights = (shared_cast(t, context.cast) for t in (x, *(w for w, _ in (*products, last))))
        *products, last = (Product(w, b) for w, (_, b) in zip(weights, (*products, last), strict=True))
    backend = backends.choose(x, record)
    is_packed = settings.is_packed(products)
    plan = Block(record, keep, settings.is_gated, is_packed, dropout, settings.chunks, backend)
    plan = plan._replace(chunks=_chunks(plan, rows, products, last))
    with torch.autocast(input.device.type, enabled=False):
        y = _by_nodes(plan, x, products, last, params, is_one=not alone)
    return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])


class Trains(NamedTuple):
    """What needs a gradient."""

    x: bool
    #: A weight of the first products.
    weights: bool
    #: Each half of a gate, or the one hidden layer.
    parts: list[bool]
    w: bool

    @classmethod
    def of(
        cls, settings: Settings, x: Tensor, products: Sequence[Product], last: Product, operands: Sequence[Tensor]
    ) -> Trains:
        parts = [x.requires_grad or any(t is not None and t.requires_grad for t in product) for product in products]
        parts = parts * 2 if settings.is_packed(products) else parts
        parts[0] |= any(p.requires_grad for p in operands)
        return cls(x.requires_grad, any(w.requires_grad for w, _ in products), parts, last.w.requires_grad)

    @property
    def half_a_gate(self) -> bool:
        """Whether PyTorch keeps one half, for the other's gradient, and not the product."""
        return not self.w and any(self.parts) and not all(self.parts)

    def hidden_buffers(self, activation: Activation) -> int:
        """How many are kept, at most, if nothing is computed again."""
        if not self.w:
            return 0 if activation.is_identity and len(self.parts) == 1 else sum(self.parts)
        return len(self.parts) if any(self.parts) else 1


def _choose_save(settings: Settings, activation: Activation, dtype: torch.dtype) -> Saved:
    if settings.save == "recompute":
        return "recompute"  # also without an activation: the last product keeps what it multiplies
    return "input" if settings.is_gated else choose_save(settings.function, activation, settings.save, dtype)


def _least(
    keep: Saved,
    settings: Settings,
    activation: Activation,
    dtype: torch.dtype,
    trains: Trains,
    alone: Sequence[Tensor],
    hidden: int,
) -> Saved:
    """What is kept where gradients are needed, so that it is no more than PyTorch keeps: "nothing" is layer by layer.
    ``alone`` is what one node would keep besides, and ``hidden`` the size of a hidden buffer."""
    if keep == "recompute" and sum(t.numel() for t in alone) > hidden * trains.hidden_buffers(activation):
        keep = _choose_save(settings._replace(save="auto"), activation, dtype)
    if keep != "recompute" and trains.half_a_gate:
        return "nothing"
    # The node after PyTorch's products has their results.
    return "input" if alone and keep == "output" else keep


def _kept_alone(trains: Trains, dtype: torch.dtype, x: Tensor, products: Sequence[Product]) -> list[Tensor]:
    """x, and weights and biases that are no parameters, which one node would keep and PyTorch does not: it keeps x
    where a weight needs its gradient, and weights where x does. Casts are made for the call."""
    alone = [] if trains.weights or _is_parameter(x) else [x]
    alone += [w for w, _ in products if not trains.x and not (w.dtype is dtype and _is_parameter(w))]
    alone += [b for _, b in products if b is not None and not _is_parameter(b)]
    return alone


def _chunks(block: Block, rows: int, products: Sequence[Product], last: Product) -> int:
    """Into how many chunks rows are cut: one, where more is needed to sum gradients over several than is hidden.

    Sums of 16-bit numbers are made in float32, of each weight's gradient twice the bytes that eager PyTorch needs, and
    what a chunk adds to them has once that. One chunk needs one hidden buffer, and one for each that is not kept, where
    eager PyTorch has as many.
    """
    if last.w.dtype.itemsize > 2:
        return block.chunks
    recomputes = block.keep == "recompute"
    summed = [w for w, _ in products] if recomputes else []
    summed += [] if block.is_whole else [last.w]
    sizes = [w.numel() for w in summed if w.requires_grad]
    hidden_buffers = 1 + (2 if block.is_gated else 1) * recomputes
    spared = hidden_buffers * last.w.shape[1] * (rows - block.chunk_rows(rows))
    return block.chunks if sum(sizes) + max(sizes, default=0) <= spared else 1


def _by_nodes(
    block: Block, x: Tensor, products: Sequence[Product], last: Product, operands: tuple[Tensor, ...], *, is_one: bool
) -> Tensor:
    weights, biases = [w for w, _ in products], [b for _, b in products]
    is_constant = not needs_gradient(x, *weights, *biases, *operands)
    needs = not is_constant or needs_gradient(*last)
    if needs and (block.keep == "recompute" or (is_one and not is_constant)):
        return MLP.apply(block, len(products), x, *last, *weights, *biases, *operands)
    products, last = block.unpacked([Product.of(*product) for product in products]), Product.of(*last)
    block = block._replace(is_packed=False)
    if not is_constant:
        parts = [with_recompute(MATMUL, block.backend, x, *product)[0] for product in products]
        return Rest.apply(block, len(parts), *last, *parts, *operands)
    if needs:
        return with_recompute(MATMUL, block.backend, constant(block, x, products, operands), *last)[0]
    return without_gradients(block, x, products, last, operands)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether it is alive anyway, itself or what it is a view of."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, Parameter) or (base.is_leaf and base.requires_grad)


Drop = Callable[[Tensor], Tensor]


def _by_layers(
    settings: Settings, activation: Activation, drop: Drop, input: Tensor, products: list[Product], last: Product
) -> Tensor:
    save = "auto" if torch.compiler.is_compiling() and settings.save == "recompute" else settings.save
    (w, b), *others = unpacked(products) if settings.is_packed(products) else products
    if torch.compiler.is_compiling() and others and not settings.dropout and needs_gradient(input, w, b, *others[0]):
        # Else the compiler keeps the gate's product with the other half, beside both.
        parts = [F.linear(input, *product) for product in ((w, b), *others)]
        hidden = checkpoint(lambda gate, up: activation.plain(gate) * up, *parts, use_reentrant=False)
        return F.linear(hidden, *last)
    activated = dense_bias_act(input, w, b, activation, save=save)
    return by_torch(activated, [F.linear(input, *other) for other in others], drop, lambda t: F.linear(t, *last))


def by_torch(activated: Tensor, others: Sequence[Tensor], drop: Drop, last: Callable[[Tensor], Tensor]) -> Tensor:
    """What comes after the activation."""
    return last(drop(functools.reduce(torch.mul, others, activated)))


def torchs_dropout(p: float) -> Drop:
    """For whose mask torch is left to care."""
    return functools.partial(F.dropout, p=p) if p else lambda hidden: hidden


def _is_recorded(input: Tensor) -> bool:
    """Whether what is done is recorded, to be done again: a seed would be a constant then, and all masks the same."""
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return infrastructure_mode(PROXY_MODE) is not None


def _dropout(settings: Settings) -> Dropout | None:
    if not settings.dropout:
        return None
    # From the generator that checkpoints put back before they compute again, whatever the device.
    return Dropout(settings.dropout, int(torch.randint(2**62, (), device="cpu")))
