"""Whether a module computes as a block what it computes by itself: outputs and gradients, in both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import DropoutBase
from ..plan import SMALL_BYTES
from ..utils.formatting import first_line
from ..utils.module_state import in_mode
from .blocks import Plan, whole

#: Of results that differ in the order of sums, and in where they are rounded; relative, by the norm. What another
#: structure computes differs by a hundred times as much.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Of noise, at least.
_ROWS = 8


def disagreement(module: nn.Module, plan: Plan, sample: Tensor) -> str | None:
    """Where the block differs from the module on the sample, or None. Dropouts are left out: chance cannot agree."""
    if sample.is_meta:
        return "its parameters are on the meta device, where nothing can be tried"
    sample = _with_noise(module, plan, sample)
    for training in (True, False):
        with in_mode(module, training), _without_dropouts(module):
            try:
                wanted, again = (_results(module, module.forward, sample) for _ in range(2))
                found = _results(module, lambda x: whole(module, plan, x), sample)
            except Exception as error:  # whatever a forward pass does with an input that is not its own
                return f"it could not be tried: {first_line(error)}"
        mode = "training" if training else "evaluation"
        if _differ(wanted, again, sample.dtype):
            return f"in {mode} it computes something else each time"
        if _differ(wanted, found, sample.dtype):
            return f"in {mode} the block's results are not the module's"
    return None


def _with_noise(module: nn.Module, plan: Plan, sample: Tensor) -> Tensor:
    """The sample, and rows of noise of its size: any structure makes the same of zeros, and of a few rows the block is
    computed as the module is."""
    if sample.dim() < 2 or not sample.numel():
        return sample
    weight: Any = module.get_submodule(plan.first[0]).weight
    hidden = weight.numel() // sample.shape[-1] // (2 if plan.is_gated else 1)
    rows = max(_ROWS, -(-SMALL_BYTES // (hidden * sample.itemsize)))
    count = -(-rows // sample[0, ..., 0].numel())
    scale = sample.double().square().mean().sqrt().nan_to_num(posinf=0.0).item() or 1.0
    noise = scale * torch.randn(count, *sample.shape[1:], dtype=torch.float64, device=sample.device)
    return torch.cat([sample, noise.to(sample.dtype)])


def _results(module: nn.Module, function: Callable[[Tensor], Tensor], sample: Tensor) -> list[Tensor]:
    """The output and the gradients of the input and of the parameters."""
    with torch.enable_grad():
        x = sample.detach().clone().requires_grad_()
        y = function(x)
        # Not the same for all outputs, or a transposed result would do.
        weights = torch.linspace(-1, 1, y.numel(), device=y.device).reshape(y.shape).to(y.dtype)
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(y, wanted, weights, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, gradients, strict=True))]


def _differ(one: Sequence[Tensor], other: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return any(
        a.shape != b.shape or not (a.double() - b.double()).norm() <= _TOLERANCES[dtype] * a.double().norm()
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def _without_dropouts(module: nn.Module) -> Iterator[None]:
    dropouts: list[Any] = [inner for inner in module.modules() if isinstance(inner, DropoutBase)]
    rates = [dropout.p for dropout in dropouts]
    try:
        for dropout in dropouts:
            dropout.p = 0.0
        yield
    finally:
        for dropout, p in zip(dropouts, rates, strict=True):
            dropout.p = p
