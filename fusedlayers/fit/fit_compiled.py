"""``fit_compiled``: find the budget of torch.compile's partitioner with which a model keeps to a number of bytes.

The partitioner's ``activation_memory_budget`` is a part of the bytes that it would save by itself ("Current and New
Activation Checkpointing Techniques in PyTorch", PyTorch's blog, 2025). Here one part after the other is measured: the
partitioned graph saves the same before Inductor has made code of it, which takes most of the time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import inductor, is_compiled
from ..utils.example import arguments_from
from ..utils.formatting import size_text
from ..utils.module_state import unchanged
from ..utils.progress import OnStage, asked
from ..utils.report import Report
from ..utils.step import Step
from ..utils.storages import tensors_in
from .training import COUNTED, Measurement, Of, Training

#: So many parts are tried, and the search ends with one that takes so much of the budget.
TRIES = 5
CLOSE = 0.97


@dataclass(frozen=True)
class CompiledFit(Report):
    """The report of ``fit_compiled``. ``str()`` is a table.

    Attributes:
        name, of, budget_bytes: as ``FitReport`` has them.
        activation_memory_budget: the compiler's, with which the budget holds: 0 to 1.
        as_it_is, measured: the compiled model without it and with it.
        tried: other budgets of the compiler's, and the bytes that they take, from the smallest.
    """

    name: str
    of: Of
    budget_bytes: int
    activation_memory_budget: float
    as_it_is: Measurement
    measured: Measurement
    tried: tuple[tuple[float, int], ...]

    @property
    def backend(self) -> Callable[..., Any]:
        """A backend for ``torch.compile(model, backend=...)``: Inductor with this budget, for this model alone."""
        return partial(inductor, memory_budget=self.activation_memory_budget)

    def __str__(self) -> str:
        lines = [f"{self.name}, compiled: at most {size_text(self.budget_bytes)} {COUNTED[self.of]}", ""]
        chosen = self.activation_memory_budget
        times = {1.0: self.as_it_is.time_ms, chosen: self.measured.time_ms}
        lines.append(f"{'activation_memory_budget':<26}{self.of:>9}  a step")
        for part, found in sorted([*self.tried, (chosen, self.measured.bytes)]):
            name = f"{part:.3g}{' (chosen)' * (part == chosen)}"
            lines.append(f"{name:<26}{size_text(found):>9}" + (f"  {times[part]:.4g} ms" if part in times else ""))
        return "\n".join(lines)


def fit_compiled(
    model: nn.Module,
    inputs: Any,
    *,
    memory_budget_bytes: int | str | None = None,
    fraction: float | None = None,
    of: Of = "saved",
    loss: Callable[[Any], Tensor] | None = None,
    progress: bool | OnStage = False,
    **options: Any,
) -> CompiledFit:
    """Find how a compiled model keeps to a number of bytes, in the least time.

    ``torch.compile`` recomputes by itself, more cheaply than checkpoints do, because recomputed values become part of
    other kernels. But its ``activation_memory_budget`` is a part of the bytes that it would save, 0 to 1. Here the
    largest part is found with which the budget holds. The model is not changed; the report has the ``backend``.

    In a distributed job all processes call it, and the budget is for the one that takes most. What has been compiled
    before is compiled again when it is next called.

    Args:
        model: a module in training mode, not compiled. Its buffers and gradients are put back.
        inputs, memory_budget_bytes, fraction, of, loss, progress: as for ``fit``; a fraction is one of the bytes that
            the compiled model takes without a budget. A peak needs compiled code for each part that is tried: minutes.
        options: of ``torch.compile``, but for ``backend``: ``mode``, ``dynamic``, ``fullgraph``. Give it the same.

    Returns:
        a report: the compiler's budget, the bytes and the time of a step with it and without, and other parts.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: both or neither of the budgets, or one that makes no sense, or that cannot be met; inputs that the
            model does not run on; a model that is compiled already.

    Saved for the backward pass: what the report says.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> report = fl.fit_compiled(model, torch.randn(512, 64), fraction=0.5)  # doctest: +SKIP
    >>> compiled = torch.compile(model, backend=report.backend)  # doctest: +SKIP
    """
    training = Training(
        Step(model, *arguments_from(inputs), loss, function="fit_compiled"), of, memory_budget_bytes, fraction
    )
    if is_compiled(model):
        raise ValueError("fit_compiled: the model is compiled already; pass the one that torch.compile was called on")
    if "backend" in options:
        raise ValueError("fit_compiled: the backend is the report's; give it the other options of torch.compile")
    compiled: list[Any] = []  # of which the last one is called
    training.step = replace(training.step, model=lambda *args, **kwargs: compiled[-1](*args, **kwargs))
    tried: dict[float, int] = {}

    def compile_with(part: float, is_compiled: bool = True) -> Callable[[], None]:
        backend = partial(inductor, memory_budget=part, is_compiled=is_compiled)
        return partial(compiled.append, torch.compile(model, backend=backend, **options))

    def bytes_with(part: float, is_compiled: bool) -> int:
        torch.compiler.reset()
        compile_with(part, is_compiled)()
        with training.step.readable():
            training.gradients()  # compiles
            return max(training.together(training.bytes))

    def quick_bytes_with(part: float) -> int:
        if part not in tried:
            tried[part] = bytes_with(part, of == "peak")  # a peak has what compiled code alone allocates
        return tried[part]

    tensors = tensors_in((training.step.args, training.step.kwargs))
    on_stage = asked("fit_compiled", progress)
    with unchanged([*model.modules()], tensors):
        try:
            on_stage("measuring the compiled model", 0.0)
            taken = quick_bytes_with(1.0)
            allowed = training.allowed(taken)
            on_stage("trying budgets", 0.2)
            part, measured = _largest_part(allowed, tried, quick_bytes_with, partial(bytes_with, is_compiled=True))
            if measured > allowed:
                raise training.unmet(taken, measured, "with activation_memory_budget=0")
            on_stage("measuring times", 0.8)
            torch.compiler.reset()
            calls = [compile_with(each) for each in (1.0, part)]
            as_it_is_ms, time_ms = training.together(lambda: training.times_ms(calls))[0]
        finally:
            torch.compiler.reset()  # else the parts that were tried count for the compiler's limit of recompilations
    others = tuple(sorted((other, size) for other, size in tried.items() if other != part))
    found = Measurement(taken, as_it_is_ms), Measurement(measured, time_ms)
    return CompiledFit(type(model).__name__, of, allowed, part, *found, others)


def _largest_part(
    budget: int, tried: dict[float, int], quick_bytes_with: Callable[[float], int], bytes_with: Callable[[float], int]
) -> tuple[float, int]:
    """The largest part with which compiled code keeps to the budget, and its bytes; 0 where it does with none."""
    low, low_bytes, high, high_bytes = 0.0, 0, 1.0, quick_bytes_with(1.0)
    for _ in range(TRIES):
        if high_bytes <= budget or CLOSE * budget <= low_bytes or high - low < 0.02 * high:
            break
        # Bytes grow with the part almost in proportion.
        part = low + (high - low) * (budget - low_bytes) / (high_bytes - low_bytes)
        part = round(min(max(part, low + 0.02 * (high - low)), high - 0.02 * (high - low)), 4)
        size = quick_bytes_with(part)
        if size <= budget:
            low, low_bytes = part, size
        else:
            high, high_bytes = part, size
    if low == 0 and high_bytes > budget:
        quick_bytes_with(0.0)
    for part in sorted((part for part, size in tried.items() if size <= budget or part == 0), reverse=True):
        size = bytes_with(part)
        if size <= budget:
            break
    return part, size
