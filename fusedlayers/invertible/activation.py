"""Activations of the table that can be inverted: monotone ones by a formula, folded ones by a fit and a branch bit.

Where a function is flat, rounding of the output becomes a large error of the input: far from zero for tanh and sigmoid,
next to the minimum and in the tail for folded ones.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..activations import Activation, resolve, upcast
from ..functional import bias_act
from ..kernels.reference import packed, unpacked
from ..utils.caching import in_clean_state
from .inversion import is_float
from .module import InvertibleModule


class InvertibleActivation(InvertibleModule):
    """An activation whose input can be computed from its output.

    Monotone ones (leaky_relu, elu, selu, celu, softplus, softsign, tanh, sigmoid, ...) are inverted by a formula.
    Folded ones (gelu, silu, mish, ...) fall and rise; a bit for each number says on which branch the input was. (The
    last bit of the output, which carries the branch elsewhere, is not exact if the next module's inverse computes the
    output.) Their inverse is fitted, for float32 and half precision; float64 is left to autograd. Where a function is
    flat, the computed input is inaccurate: tanh and sigmoid far from zero, folded ones next to their minimum and in
    their tail. ``check`` measures it; leaky_relu loses nothing.

    Args:
        activation: a name, ``nn.Module`` or function, as for ``fusedlayers.bias_act``.

    Raises:
        ValueError: an activation whose output does not determine its input (relu, hardswish), or without a known
        inverse.

    Shapes: any.

    Saved for the backward pass: the output, unless it goes into another invertible module; of folded ones the bits, a
    32nd of a float32 output.

    >>> import fusedlayers as fl
    >>> fl.InvertibleActivation("leaky_relu")
    InvertibleActivation(leaky_relu)
    """

    num_outputs = 1

    def __init__(self, activation: object = "leaky_relu") -> None:
        super().__init__()
        found = resolve(activation, "InvertibleActivation")
        if not found.has_inverse or found.needs_input_reason is not None:
            reason = (
                found.needs_input_reason or f"the output of {found!r} does not determine its input, as far as is known"
            )
            raise ValueError(f"InvertibleActivation: {reason}; {', '.join(_invertible())} can be inverted")
        is_determined, self.between = _probed(found)
        if not is_determined:
            raise ValueError(f"InvertibleActivation: {found!r} is flat where inputs are negative")
        self.activation: Activation = found

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return not self.activation.is_folded  # the function alone knows the branch

    def _can_invert(self, inputs: tuple[Any, ...]) -> bool:
        # The inverse of folded ones is fitted, and accurate to float32.
        return not self.activation.is_folded or all(x.dtype is not torch.float64 for x in inputs if is_float(x))

    def function(self, x: Tensor) -> Any:
        refused = self.activation.output_refusal(x.dtype)
        y = bias_act(x, None, self.activation, save="input" if refused else "output")
        fold = self.activation.fold
        return y if fold is None else (y, packed(fold.marks(upcast(x.detach())).contiguous()))

    def inverse(self, y: Tensor, branch: Tensor | None = None) -> Tensor:
        wide, limits = upcast(y), torch.finfo(y.dtype)
        fitted, fold = self.activation.fitted_inverse(), self.activation.fold
        if branch is not None and fitted is not None and fold is not None:
            marked = unpacked(branch, y.shape)
            # All outputs of the marked branch are negative, but for rounding.
            wide = torch.where(marked, wide.clamp(max=-limits.tiny), wide)
            return fitted(wide, marked).to(y.dtype)
        # An output that was rounded to the function's limit, or was computed by the next module's inverse to lie beyond
        # it, counts as the number before the limit: the formula's infinities and NaNs would make all earlier
        # gradients NaN.
        low, high = self.between
        wide = wide.clamp(_before(low, 1, limits), _before(high, -1, limits))
        return self.activation.input_given_output(wide, y.dtype).to(y.dtype)

    def described(self) -> str:
        return repr(self.activation)


@in_clean_state
def _probed(activation: Activation) -> tuple[bool, tuple[float, float]]:
    """Whether inputs around zero can be computed from their outputs (a slope may be zero), and the outputs' limits."""
    x = torch.tensor([-1.0, 1.0])
    is_determined = activation.is_folded or activation.input_given_output(activation.function(x), x.dtype).isfinite()
    x = torch.tensor([-1e300, -1e200, 1e200, 1e300], dtype=torch.float64)
    low, lower, higher, high = activation.function(x).tolist()
    limits = low if low == lower else -math.inf, high if high == higher else math.inf
    return bool(torch.as_tensor(is_determined).all()), limits


def _before(limit: float, sign: int, dtype: torch.finfo) -> float:
    """The number of a dtype next to a limit, above it or below."""
    step = abs(limit) * dtype.eps / 2 or dtype.tiny * dtype.eps
    return limit if math.isinf(limit) else limit + sign * step


def _invertible() -> list[str]:
    from ..activations.table import by_name  # all that are registered by now

    return sorted(name for name, row in by_name.items() if row.has_inverse and not row.is_identity)
