"""The checks of layer, RMS and group norms, as ``validation.py`` has those of layers and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

from torch import Tensor

from .backends.norms import GroupNorm, RowNorm
from .utils.formatting import described
from .validation import check_tensors, dims_of, is_whole


def normalized_shape(function: str, shape: object) -> tuple[int, ...]:
    """The dimensions that a norm takes together, as a tuple."""
    if type(shape) is tuple and {int} == {*map(type, shape)}:  # as most are given
        return shape
    found = (shape,) if is_whole(shape) else shape
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(is_whole(size) for size in found):
        raise TypeError(f"{function}: normalized_shape must be an int or a sequence of them, got {shape!r}")
    if not found:
        raise ValueError(f"{function}: normalized_shape must have at least one dimension, got {shape!r}")
    return tuple(int(size) if isinstance(size, Integral) else size for size in found)


def check_norm_save(function: str, save: str) -> None:
    """Refuse what norms over rows do not save."""
    if save not in ("auto", "output", "input"):
        raise ValueError(f"{function}: save must be 'auto', 'output' or 'input', got {save!r}")


def check_row_norm(norm: RowNorm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str) -> None:
    """All checks of a norm over rows, before anything is computed."""
    function, shape = norm.function, norm.shape
    check_norm_save(function, save)
    numbers: dict[str, object] = {"eps": norm.eps, "weight_offset": norm.offset}
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Real)):
            raise TypeError(f"{function}: {name} must be a number, got {type(number).__name__}")
    check_tensors(function, {"input": x}, weight=w, bias=b)
    if x.is_nested:
        return  # which does not tell its sizes
    if x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{function}: the last dimensions of input {dims_of(x)} must be normalized_shape {shape}; pass those"
        )
    for name, p in (("weight", w), ("bias", b)):
        if p is not None and p.shape != shape:
            raise ValueError(f"{function}: expected {name} {shape}, of normalized_shape, got {dims_of(p)}")


def check_group_norm(norm: GroupNorm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str) -> None:
    """All checks of a group norm, before anything is computed."""
    function, groups = norm.function, norm.groups
    check_norm_save(function, save)
    if not is_whole(groups):
        raise TypeError(f"{function}: num_groups must be an int, got {described(groups)}")
    eps: object = norm.eps
    if isinstance(eps, bool) or not isinstance(eps, Real):
        raise TypeError(f"{function}: eps must be a number, got {type(eps).__name__}")
    check_tensors(function, {"input": x}, weight=w, bias=b)
    if x.is_nested:
        return  # which does not tell its sizes
    if x.dim() < 2:
        raise ValueError(f"{function}: expected input (batch, channels, ...), got {dims_of(x)}")
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(
            f"{function}: the channels of input {dims_of(x)}, {x.shape[1]}, must be a multiple of num_groups, {groups}"
        )
    for name, p in (("weight", w), ("bias", b)):
        if p is not None and p.shape != (x.shape[1],):
            raise ValueError(f"{function}: expected {name} ({x.shape[1]},), one for each channel, got {dims_of(p)}")
    if x.numel() and x[0].numel() == groups:
        raise ValueError(f"{function}: expected more than 1 value per group, got input {dims_of(x)}")
