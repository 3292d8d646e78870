"""Measure how far computed inputs are from the true ones, and what that does to gradients.

Each module of a chain runs forward. Then the chain is inverted from its last output, as in the backward pass, so that a
module's input errs by what all later modules have added up. Gradients are those of the module as it trains, and as it
is left to autograd, for the same random gradient of the output.

All inputs and outputs are held meanwhile: the check takes the memory that the chain saves in training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..utils.module_state import unchanged
from ..utils.report import Report
from .inversion import InvertibleFunction, RunState, in_mode, is_float

if TYPE_CHECKING:
    from .module import InvertibleModule


@dataclass(frozen=True)
class CheckRow:
    """A part of the chain. Errors are norms of differences over norms, the largest of all tensors.

    Attributes:
        name: the module's place in the chain; in a coupling its network's.
        kind: the module's class.
        inverse_error: of inputs that are computed from the module's own outputs.
        drift: of inputs that are computed from the chain's last output.
        second_error: of the outputs of a recomputation.
    """

    name: str
    kind: str
    inverse_error: float
    drift: float
    second_error: float

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} ({self.kind})" if self.name else self.kind


@dataclass(frozen=True)
class CheckReport(Report):
    """What ``InvertibleModule.check`` has found. It is true if everything is within the tolerance.

    Attributes:
        rows: the modules, in order.
        gradient_error: of the gradients of the inputs, and of each module's parameters.
        is_within: whether all computed inputs, the outputs of all recomputations, and the gradients are within the
            tolerance.
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
        lines = [f"{'':<{width}}  inverse    drift   recompute"]
        lines += [
            f"{row.label:<{width}}  {row.inverse_error:7.1e}  {row.drift:7.1e}  {row.second_error:10.1e}"
            for row in self.rows
        ]
        found = f"gradients err by {self.gradient_error:.1e}, {'' if self.is_within else 'not '}within the tolerance"
        return "\n".join([*lines, f"in {self.dtype}: {found}"])


@dataclass
class _StepRecord:
    """A step after its first run."""

    name: str
    step: InvertibleFunction
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    state: RunState

    @property
    def visible(self) -> tuple[Any, ...]:
        return self.outputs[: self.step.num_outputs]

    def inverted(self, visible: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, from outputs that the caller sees and the others; what is not returned is saved."""
        with self.state.again():
            computed = self.step.inverse(*visible, *self.outputs[len(self.visible) :])
        return (*computed, *self.inputs[len(computed) :])


#: Computed values, and the true ones.
_Pair = tuple[Sequence[Any], Sequence[Any]]


def checked(module: InvertibleModule, inputs: tuple[Any, ...], rtol: float, atol: float) -> CheckReport:
    """What ``InvertibleModule.check`` returns, after its warning where a bound is exceeded."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    dtype = str(next((t.dtype for t in tensors if is_float(t)), "no dtype")).removeprefix("torch.")
    with unchanged(list(module.modules()), tensors), torch.no_grad():
        chain = list(_run(module, inputs))
        rows, pairs = _inverted(chain)
    gradients = list(zip(*(_gradients(module, chain, inputs, way) for way in ("chain", "plain")), strict=True))
    pairs += [([found], [wanted]) for found, wanted in gradients]
    is_within = all(_is_close(a, b, rtol, atol) for found, wanted in pairs for a, b in zip(found, wanted, strict=True))
    gradient_error = max((_error([found], [wanted]) for found, wanted in gradients), default=0.0)
    report = CheckReport(rows, gradient_error, is_within, dtype)
    if not report.is_within:
        worst = max(report.rows, key=lambda row: row.inverse_error)
        warnings.warn(
            f"{type(module).__name__}.check: in {report.dtype}, over {len(chain)} modules, computed inputs drift by "
            f"{report.drift:.1e} of their norm, and gradients by {report.gradient_error:.1e}. Most is lost in "
            f"{worst.label}. Orthogonal weights, fewer modules between saved inputs (keep=), or float64 reduce it. "
            "Behind a kink, as leaky ReLU has, computed inputs on its other side get the other slope",
            stacklevel=3,
        )
    return report


def _run(module: InvertibleModule, inputs: tuple[Any, ...]) -> Iterator[_StepRecord]:
    for name, part in module._leaf_modules():
        for inner, step in part._steps(len(inputs)):
            state = RunState(step, inputs)
            with state.recording():
                outputs = _with_gradients(step.forward, inputs)
            record = _StepRecord(".".join(filter(None, (name, inner))), step, inputs, outputs, state)
            yield record
            inputs = record.visible


def _with_gradients(function: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function returns before a backward pass; without gradients, activations would leave their branch bit
    out."""
    with torch.enable_grad():
        # Copies, for the function may overwrite its inputs, and a later one its outputs.
        found = function(*(value.detach().requires_grad_().clone() if is_float(value) else value for value in values))
    return tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in found)


def _inverted(chain: Sequence[_StepRecord]) -> tuple[tuple[CheckRow, ...], list[_Pair]]:
    """Invert the chain from its last output."""
    rows: list[CheckRow] = []
    pairs: list[_Pair] = []
    computed = chain[-1].visible if chain else ()
    for record in reversed(chain):
        computed = record.inverted(computed)
        with record.state.again():
            second = _with_gradients(record.step.forward, record.inputs)
        pairs += [(computed, record.inputs), (second, record.outputs)]
        own = _error(record.inverted(record.visible), record.inputs)
        drift, second_error = _error(computed, record.inputs), _error(second, record.outputs)
        rows.append(CheckRow(record.name, record.step.name, own, drift, second_error))
    return tuple(reversed(rows)), pairs


def _gradients(
    module: InvertibleModule, chain: Sequence[_StepRecord], inputs: tuple[Any, ...], way: Any
) -> list[Tensor]:
    """Those of the inputs, and of the parameters of each step, as one vector each: some are zero but for rounding, as
    that of a bias before a batch norm."""
    leaves = [value.detach().clone().requires_grad_() if is_float(value) else value for value in inputs]
    owned = [[p for m in record.step.modules for p in m.parameters(recurse=False)] for record in chain]
    groups = [[leaf for leaf in leaves if is_float(leaf)], *([p for p in own if p.requires_grad] for own in owned)]
    wanted = [tensor for group in groups for tensor in group]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    with unchanged(list(module.modules()), tensors), torch.enable_grad(), in_mode(way) if way else nullcontext():
        found = module(*(leaf.clone() if is_float(leaf) else leaf for leaf in leaves))
        outputs = [y for y in (found if isinstance(found, tuple) else (found,)) if is_float(y) and y.requires_grad]
        if not (outputs and wanted):
            return []
        dy = [torch.randn_like(y) for y in outputs]
        gradients = iter(torch.autograd.grad(outputs, wanted, dy, allow_unused=True))
    of_groups = [[g for _ in group if (g := next(gradients)) is not None] for group in groups]
    return [torch.cat([_as_float64(g).flatten() for g in own]) for own in of_groups if own]


def _error(found: Sequence[Any], expected: Sequence[Any]) -> float:
    errors = [0.0]
    for a, b in zip(found, expected, strict=True):
        if is_float(a) and is_float(b) and b.numel():
            difference, size = (_as_float64(a) - _as_float64(b)).norm(), _as_float64(b).norm()
            error = float(difference / size) if size else float(difference)
            errors.append(error if error == error else float("inf"))
    return max(errors)


def _is_close(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if not isinstance(b, Tensor):
        return not isinstance(a, Tensor)
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return False
    if not is_float(b):
        return torch.equal(a, b)
    allowed = rtol * _as_float64(b).norm() + atol * b.numel() ** 0.5
    return bool((_as_float64(a) - _as_float64(b)).norm() <= allowed)  # of NaN it is not


def _as_float64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
