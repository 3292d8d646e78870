"""Measure how far computed inputs are from the true ones, and what that does to gradients.

Each module of a chain runs forward. Then the chain is inverted from its last output, as in the backward pass, so that a
module's input errs by what all later modules have added up. Gradients are computed twice as well, at the true inputs
and at the computed ones, from the same random gradient of the output.

All inputs and outputs are held meanwhile: the check takes the memory that the chain saves in training.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.state_snapshot import StateSnapshot
from ..utils.module_state import unchanged
from ..utils.reports import Report
from ..utils.storages import tensors_in
from .call import InvertibleFunction, is_float

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
        gradient_error: of the gradients of its inputs and parameters, at the computed inputs.
    """

    name: str
    kind: str
    inverse_error: float
    drift: float
    second_error: float
    gradient_error: float


@dataclass(frozen=True)
class CheckReport(Report):
    """What ``InvertibleModule.check`` has found. It is true if everything is within the tolerance.

    Attributes:
        rows: the modules, in order.
        is_within: whether all computed inputs, the outputs of all recomputations, and the gradients are within the
            tolerance.
        dtype: of the inputs.
    """

    rows: tuple[CheckRow, ...]
    is_within: bool
    dtype: str

    @property
    def drift(self) -> float:
        """The largest drift of a row, usually of the first one."""
        return max((row.drift for row in self.rows), default=0.0)

    @property
    def gradient_error(self) -> float:
        return max((row.gradient_error for row in self.rows), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "is_within": self.is_within, "rows": [asdict(row) for row in self.rows]}

    def __bool__(self) -> bool:
        return self.is_within

    def __str__(self) -> str:
        names = [f"{row.name} ({row.kind})" if row.name else row.kind for row in self.rows]
        width = max(map(len, names), default=0)
        lines = [f"{'':<{width}}  inverse    drift   recompute  gradients"]
        lines += [
            f"{name:<{width}}  {row.inverse_error:7.1e}  {row.drift:7.1e}  {row.second_error:10.1e}  "
            f"{row.gradient_error:9.1e}"
            for name, row in zip(names, self.rows, strict=True)
        ]
        return "\n".join([*lines, f"in {self.dtype}, {'' if self.is_within else 'not '}within the tolerance"])


@dataclass
class _StepRecord:
    """A step after its first run."""

    name: str
    step: InvertibleFunction
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    snapshot: StateSnapshot

    def recompute(self, function: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
        with self.snapshot.restored():
            return function(*values)

    @property
    def visible(self) -> tuple[Any, ...]:
        return self.outputs[: self.step.num_outputs]

    @property
    def extra(self) -> tuple[Any, ...]:
        return self.outputs[len(self.visible) :]

    def gradients(
        self, inputs: tuple[Any, ...], dy: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Of the inputs, and of the parameters that have one."""
        inputs = tuple(v.detach().requires_grad_() if is_float(v) else v for v in inputs)
        with torch.enable_grad():
            outputs = self.recompute(self.step.forward, inputs)[: len(self.visible)]
        owned = (p for module in self.step.free_state.modules for p in module.parameters(recurse=False))
        parameters = [p for p in dict.fromkeys(owned) if p.requires_grad]
        given = [(y, d) for y, d in zip(outputs, dy, strict=True) if d is not None and y.requires_grad]
        if not given:
            return [None for _ in inputs], []
        wanted = [v for v in inputs if is_float(v)]
        found = torch.autograd.grad(
            [y for y, _ in given], [*wanted, *parameters], [d for _, d in given], allow_unused=True
        )
        of_inputs = iter(found[: len(wanted)])
        return (
            [next(of_inputs) if is_float(v) else None for v in inputs],
            [g for g in found[len(wanted) :] if g is not None],
        )


def checked(module: InvertibleModule, inputs: tuple[Any, ...], rtol: float, atol: float) -> CheckReport:
    """What ``InvertibleModule.check`` returns, after its warning where a bound is exceeded."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    with unchanged(list(module.modules()), tensors, attributes=True), torch.no_grad():
        chain = list(_run(module, inputs))
        report = CheckReport(*_compared(chain, rtol, atol), _dtype_of(tensors))
    if not report.is_within:
        worst = max(report.rows, key=lambda row: row.inverse_error)
        place = f"{worst.name} ({worst.kind})" if worst.name else worst.kind
        warnings.warn(
            f"{type(module).__name__}.check: in {report.dtype}, over {len(chain)} modules, computed inputs drift by "
            f"{report.drift:.1e} of their norm, and gradients by {report.gradient_error:.1e}. Most is lost in {place}. "
            "Orthogonal weights, fewer modules between saved inputs (keep=), or float64 reduce it. Behind a kink, as "
            "leaky ReLU has, computed inputs on its other side get the other slope",
            stacklevel=3,
        )
    return report


def _run(module: InvertibleModule, inputs: tuple[Any, ...]) -> Iterator[_StepRecord]:
    for name, part in module._leaf_modules():
        for inner, step in part._steps(len(inputs)):
            snapshot = StateSnapshot(step.free_state, tensors_in(inputs))
            with snapshot.recording():
                outputs = _with_gradients(step.forward, inputs)
            record = _StepRecord(".".join(filter(None, (name, inner))), step, inputs, outputs, snapshot)
            yield record
            inputs = record.visible


def _with_gradients(function: Callable[..., tuple[Any, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function returns before a backward pass; without gradients, activations would leave their branch bit
    out."""
    with torch.enable_grad():
        # Copies, for the function may overwrite its inputs, and a later one its outputs.
        found = function(*(value.detach().requires_grad_().clone() if is_float(value) else value for value in values))
    return tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in found)


def _compared(chain: Sequence[_StepRecord], rtol: float, atol: float) -> tuple[tuple[CheckRow, ...], bool]:
    rows: list[CheckRow] = []
    is_within = True
    computed: tuple[Any, ...] | None = None
    dy: list[Tensor | None] = []
    dy_computed: list[Tensor | None] = []
    for record in reversed(chain):
        if computed is None:  # the last one
            computed = record.visible
            dy = [torch.randn_like(v) if is_float(v) else None for v in computed]
            dy_computed = list(dy)
        own = record.recompute(record.step.inverse, record.outputs)
        computed = record.recompute(record.step.inverse, (*computed, *record.extra))
        second = record.recompute(functools.partial(_with_gradients, record.step.forward), (record.inputs,))
        (dy, of_parameters), (dy_computed, of_computed) = (
            record.gradients(record.inputs, dy),
            record.gradients(computed, dy_computed),
        )
        # There may be fewer computed values than inputs: what is no floating-point tensor is saved.
        pairs = [*zip(computed, record.inputs, strict=False), *zip(second, record.outputs, strict=True)]
        gradients = [(_joined(dy_computed), _joined(dy)), (_joined(of_computed), _joined(of_parameters))]
        is_within = is_within and all(_is_close(a, b, rtol, atol) for a, b in (*pairs, *gradients))
        rows.append(
            CheckRow(
                record.name,
                record.step.name,
                inverse_error=_error(own, record.inputs),
                drift=_error(computed, record.inputs),
                second_error=_error(second, record.outputs),
                gradient_error=max(_error([a], [b]) for a, b in gradients),
            )
        )
        computed = (*computed, *record.inputs[len(computed) :])
    return tuple(reversed(rows)), is_within


def _joined(gradients: Sequence[Tensor | None]) -> Tensor:
    """All as one vector: some are zero but for rounding, as that of a bias before a batch norm."""
    return torch.cat([_as_float64(g).flatten() for g in gradients if g is not None] or [torch.zeros(0)])


def _error(found: Sequence[Any], expected: Sequence[Any]) -> float:
    errors = [0.0]
    for a, b in zip(found, expected, strict=False):
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


def _dtype_of(tensors: Sequence[Tensor]) -> str:
    return str(next((t.dtype for t in tensors if is_float(t)), "no dtype")).removeprefix("torch.")
