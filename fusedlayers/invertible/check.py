"""Measure how far computed inputs are from the true ones, and what that does to gradients.

Each module of a chain runs forward. Then the chain is inverted from its last output, as in the backward pass, so that a
module's input errs by what all later modules have added up. Gradients are those of the module as it trains, and as it
is left to autograd, for the same random gradient of the output.

All inputs and outputs are held meanwhile: the check takes the memory that the chain saves in training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..utils.module_state import unchanged
from ..utils.report import Report
from .inversion import InvertibleFunction, Mode, RunState, in_mode, is_float

if TYPE_CHECKING:
    from .module import InvertibleModule


@dataclass(frozen=True)
class CheckRow:
    """A module of the chain. Errors are norms of differences over norms, the largest of all tensors.

    Attributes:
        name: the module's place in the chain.
        kind: the module's class.
        inverse_error: of inputs that are computed from the module's own outputs.
        drift: of inputs that are computed from the chain's last output.
    """

    name: str
    kind: str
    inverse_error: float
    drift: float

    @property
    def label(self) -> str:
        """The module's name and class, as the table shows them."""
        return f"{self.name} ({self.kind})" if self.name else self.kind


@dataclass(frozen=True)
class CheckReport(Report):
    """The errors that ``InvertibleModule.check`` has found. It is true if everything is within the tolerance.

    Attributes:
        rows: the modules, in order.
        gradient_error: of the gradients of the inputs, and of each module's parameters.
        is_within: whether all computed inputs, and the gradients, are within the tolerance.
        dtype: of the inputs.
    """

    rows: tuple[CheckRow, ...]
    gradient_error: float
    is_within: bool
    dtype: str

    @property
    def drift(self) -> float:
        """The largest drift of a row, usually of the first one."""
        return max((row.drift for row in self.rows), default=0.0)

    def __bool__(self) -> bool:
        return self.is_within

    def __str__(self) -> str:
        width = max((len(row.label) for row in self.rows), default=0)
        lines = [f"{'':<{width}}  inverse    drift"]
        lines += [f"{row.label:<{width}}  {row.inverse_error:7.1e}  {row.drift:7.1e}" for row in self.rows]
        found = f"gradients err by {self.gradient_error:.1e}, {'' if self.is_within else 'not '}within the tolerance"
        return "\n".join([*lines, f"in {self.dtype}: {found}"])


@dataclass
class _Run:
    """A module after its first run. ``is_inverted``: whether its inputs are computed; else they are saved."""

    name: str
    is_inverted: bool
    function: InvertibleFunction
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    state: RunState

    @property
    def visible(self) -> tuple[Any, ...]:
        return self.outputs[: self.function.num_outputs]

    def inverted(self, visible: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, from outputs that the caller sees and the others; what is not returned is saved."""
        if not self.is_inverted:
            return self.inputs
        with self.state.again():
            computed = self.function.inverse(*visible, *self.outputs[len(visible) :])
        return (*computed, *self.inputs[len(computed) :])


def checked(module: InvertibleModule, inputs: tuple[Any, ...], rtol: float, atol: float) -> CheckReport:
    """The report of ``InvertibleModule.check``, after its warning where a bound is exceeded."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    rows, errors = list[CheckRow](), list[tuple[float, float, int]]()
    with unchanged(list(module.modules()), tensors), torch.no_grad():
        chain = list(_runs(module, inputs))
        computed = chain[-1].visible if chain else ()
        for run in reversed(chain):
            computed = run.inverted(computed)
            own, drift = _errors(run.inverted(run.visible), run.inputs), _errors(computed, run.inputs)
            errors += drift
            rows.insert(0, CheckRow(run.name, run.function.name, _largest(own), _largest(drift)))
    of_gradients = _errors(*(_gradients(module, chain, inputs, mode) for mode in ("chain", "plain")))
    is_within = all(norm <= rtol * size + atol * count**0.5 for norm, size, count in (*errors, *of_gradients))
    dtype = str(next((t.dtype for t in tensors if is_float(t)), "no dtype")).removeprefix("torch.")
    report = CheckReport(tuple(rows), _largest(of_gradients), is_within, dtype)
    if not report.is_within:
        worst = max(report.rows, key=lambda row: row.inverse_error)
        warnings.warn(
            f"{type(module).__name__}.check: in {report.dtype}, over {len(chain)} modules, computed inputs drift by "
            f"{report.drift:.1e} of their norm, and gradients by {report.gradient_error:.1e}. Most is lost in "
            f"{worst.label}. Orthogonal weights, a cheap layer with checkpoint=False now and then, or float64 reduce "
            "it. Behind a kink, as leaky ReLU has, computed inputs on its other side get the other slope",
            stacklevel=3,
        )
    return report


def _runs(module: InvertibleModule, inputs: tuple[Any, ...]) -> Iterator[_Run]:
    for name, part in module._leaf_modules():
        function, is_inverted = part._as_function(), part.checkpoint and part.invertible and part._can_invert(inputs)
        state = RunState(function, inputs)
        # Gradients are on, because activations record the branch then. Copies, for the function may overwrite its
        # inputs, and a later one its outputs.
        copies = (value.detach().requires_grad_().clone() if is_float(value) else value for value in inputs)
        with state.recording(), torch.enable_grad():
            outputs = function.forward(*copies)
        copies = (y.detach().clone() if is_float(y) else y for y in outputs)
        run = _Run(name, is_inverted, function, inputs, tuple(copies), state)
        yield run
        inputs = run.visible


def _gradients(
    module: InvertibleModule, chain: Sequence[_Run], inputs: tuple[Any, ...], mode: Mode
) -> tuple[Tensor, ...]:
    """The gradients of the inputs, and of the parameters of each module, as one vector each: some are zero but for
    rounding, as that of a bias before a batch norm."""
    leaves = [value.detach().clone().requires_grad_() if is_float(value) else value for value in inputs]
    owned = [[p for m in run.function.modules for p in m.parameters(recurse=False)] for run in chain]
    groups = [[leaf for leaf in leaves if is_float(leaf)], *([p for p in own if p.requires_grad] for own in owned)]
    wanted = [tensor for group in groups for tensor in group]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    with unchanged(list(module.modules()), tensors), torch.enable_grad(), in_mode(mode):
        found = module(*(leaf.clone() if is_float(leaf) else leaf for leaf in leaves))
        outputs = [y for y in (found if isinstance(found, tuple) else (found,)) if is_float(y) and y.requires_grad]
        if not (outputs and wanted):
            return ()
        dy = [torch.randn_like(y) for y in outputs]
        gradients = iter(torch.autograd.grad(outputs, wanted, dy, allow_unused=True))
    of_groups = [[g for _ in group if (g := next(gradients)) is not None] for group in groups]
    return tuple(torch.cat([_as_float64(g).flatten() for g in own]) for own in of_groups if own)


def _errors(found: Sequence[Any], expected: Sequence[Any]) -> list[tuple[float, float, int]]:
    """The errors of floating-point tensors (others are saved, and not computed): the norm of the difference, that of
    the true tensor, and how many numbers that has."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        if is_float(b):
            is_alike = isinstance(a, Tensor) and a.shape == b.shape
            norm = float((_as_float64(a) - _as_float64(b)).norm()) if is_alike else math.inf
            errors.append((math.inf if math.isnan(norm) else norm, float(_as_float64(b).norm()), b.numel()))
    return errors


def _largest(errors: Sequence[tuple[float, float, int]]) -> float:
    return max((norm / (size or 1.0) for norm, size, _ in errors), default=0.0)


def _as_float64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
