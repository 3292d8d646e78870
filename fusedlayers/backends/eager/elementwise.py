"""Bias, activation and gradient in torch operations: the readable reference, and what runs on CPUs.

Large tensors are walked in chunks that fit the cache, so that temporaries stay small and every pass but the first finds
its operands there. Three ways to evaluate, by dtype:

* ATen's own kernel where the table names one: a single vectorised pass;
* 16-bit dtypes otherwise: a table over all 65,536 values, made once in float64, and one gather. Exact and branch-free;
* float32 and float64 otherwise: the activation's own function, and ``fold.py`` for the derivative of folded
activations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from ...activations import Activation, branch
from ...broadcast import along, is_dense, sum_along
from ...clean import in_clean_state
from . import fold

#: Elements per chunk. At most, what keeps a handful of float32 chunks in the caches: every operation is a barrier among
#: threads, and on a busy machine a barrier may cost milliseconds, so that fewer and longer ones win (2^19 was best or
#: next to it at 2 and 4 threads of a Zen 4 machine). At least, what torch gives to one thread without any barrier.
#: Between them a sixteenth of the tensor, so that the few temporaries together stay well below one hidden-sized buffer.
CHUNK_MAXIMUM = 1 << 19
CHUNK_MINIMUM = 1 << 15
CHUNKS = 16


def bias_act(
    z: Tensor, b: Tensor | None, activation: Activation, *, dim: int, encode: bool, out: Tensor | None
) -> Tensor:
    """``activation(z + b)``, b along ``dim``, in ``out`` (which may be z) or in a new buffer of z's memory format."""
    y = out if out is not None and is_dense(out) else torch.empty_like(z)
    if b is not None:
        torch.add(z, along(b, dim, z.dim()), out=y)
    elif y is not z:
        y.copy_(z)
    forward_(y, activation, encode=encode)
    return y if out is None or y is out else out.copy_(y)


def forward_(z: Tensor, activation: Activation, *, encode: bool) -> None:
    """Overwrite the pre-activation with the activation's output."""
    if activation.is_identity or z.numel() == 0:
        return
    assert activation.row is not None
    encode = encode and activation.is_folded
    native = activation.row.native.forward_
    if native is not None and not encode:
        native(z, **activation.parameters)
        return
    flat = _flat(z)
    if z.dtype.itemsize == 2:
        table = _forward_table(activation, z.dtype, encode, z.device)
        for part in _chunks(flat):
            torch.index_select(table, 0, _index(part), out=part)
    elif encode:
        folded = activation.folded()
        assert folded is not None and z.dtype is torch.float32
        for part in _chunks(flat):
            fold.forward_(part, activation.function, folded.fold.position)
    else:
        for part in _chunks(flat):
            part.copy_(activation.function(part))


def gradient(
    dy: Tensor,
    saved: Tensor,
    activation: Activation,
    *,
    given: Literal["output", "input"],
    overwrite: bool,
    bias_dim: int | None,
) -> tuple[Tensor, Tensor | None]:
    """``dz = dy * f'``, the derivative from the saved output or input, and the bias gradient.

    dz is written over ``saved`` if ``overwrite``. The bias gradient is dz summed over all dimensions but ``bias_dim``,
    or None if that is None.
    """
    assert activation.row is not None
    if not is_dense(saved):  # an output that was written over a view with gaps
        saved, overwrite = torch.empty_like(saved).copy_(saved), True
    native = activation.row.native.gradient
    if given == "output" and native is not None:
        operator, arguments = native
        values = arguments(dy, saved, **activation.parameters_for_outputs(saved.dtype))
        dz = operator.grad_input(*values, grad_input=saved) if overwrite else operator.default(*values)
    else:
        dz = saved if overwrite else torch.empty_like(saved)
        if dz.numel():
            _gradient(dy, saved, activation, given, dz)
    return dz, None if bias_dim is None else sum_along(dz, bias_dim)


def _gradient(dy: Tensor, saved: Tensor, activation: Activation, given: Literal["output", "input"], dz: Tensor) -> None:
    if dy.stride() != saved.stride():
        dy = torch.empty_like(saved).copy_(dy)
    parts = zip(_chunks(_flat(dy)), _chunks(_flat(saved)), _chunks(_flat(dz)), strict=True)
    if saved.dtype.itemsize == 2:
        table = _derivative_table(activation, saved.dtype, given, saved.device)
        for dy_part, part, dz_part in parts:
            torch.mul(dy_part, torch.index_select(table, 0, _index(part)), out=dz_part)
    elif given == "output" and activation.is_folded:
        derivative = fold.derivative(activation)
        for dy_part, part, dz_part in parts:
            torch.mul(dy_part, derivative(part), out=dz_part)
    else:
        for dy_part, part, dz_part in parts:
            if given == "output":
                slope = activation.derivative_given_output(part, part.dtype)
            else:
                slope = _differentiate(activation, part)
            torch.mul(dy_part, slope, out=dz_part)


def _differentiate(activation: Activation, z: Tensor) -> Tensor:
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        # torch's own function: its backward is one kernel, and for mish and gelu_tanh three times as accurate as the
        # derivatives of the row's operations.
        y = activation.plain(z)
        return torch.autograd.grad(y, z, torch.ones_like(y))[0]


def _flat(tensor: Tensor) -> Tensor:
    """All elements in memory order. Callers hand over tensors without gaps: buffers made here, or copies."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _chunks(flat: Tensor) -> Iterator[Tensor]:
    size = min(CHUNK_MAXIMUM, max(CHUNK_MINIMUM, flat.numel() // CHUNKS))
    return iter((flat,)) if flat.numel() <= size else iter(flat.split(size))


def _index(part: Tensor) -> Tensor:
    # Signed 16-bit patterns run from -32768: the tables start there. (uint16 has no vectorised conversion.)
    return part.view(torch.int16).to(torch.int32).add_(32768)


def _all_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).double()


@functools.cache
@in_clean_state
def _forward_table(activation: Activation, dtype: torch.dtype, encode: bool, device: torch.device) -> Tensor:
    z = _all_values(dtype)
    y = activation.encoded(z, dtype) if encode else activation.function(z)
    return y.to(dtype).to(device)


@functools.cache
@in_clean_state
def _derivative_table(activation: Activation, dtype: torch.dtype, given: str, device: torch.device) -> Tensor:
    # float32, not dtype: the product dy * f' is then rounded once.
    values = _all_values(dtype)
    if given == "output":
        # A table costs the same whatever it holds: it takes the closest fit there is.
        folded = activation.folded()
        left = branch.decode(values.float(), dtype)
        slope = activation.derivative_given_output(values, dtype) if folded is None else folded(values, left)
    else:
        slope = _differentiate(activation, values)
    return slope.float().to(device)
