"""``fit_compiled``: find the budget of torch.compile's partitioner with which a model keeps to a number of bytes.

The partitioner has ``activation_memory_budget``, a part of what it would save by itself, and solves a knapsack problem
to choose what is computed again ("Current and New Activation Checkpointing Techniques in PyTorch", PyTorch's blog,
2025). What a part comes to in bytes is not said. Here it is measured, for one part after the other: the partitioned
graph saves the same before Inductor has made code of it, which takes most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .._torch import inductor, is_optimized
from ..profiling.step import Step
from ..utils.example import arguments_from
from ..utils.formatting import size_text
from ..utils.module_state import unchanged
from ..utils.progress import OnStage, asked
from ..utils.reports import Report
from ..utils.storages import tensors_in
from .agreement import together
from .arguments import check_arguments, readable
from .report import Measurement
from .training import Of, Training

#: So many parts are tried, and the search ends with one that takes so much of the budget.
TRIES = 5
CLOSE = 0.97


@dataclass(frozen=True)
class CompiledFit(Report):
    """What ``fit_compiled`` returns. ``str()`` is a table.

    Attributes:
        name: of the model's class.
        of: what counts: "saved" or "peak".
        budget_bytes: of the plan.
        activation_memory_budget: the compiler's, with which the budget holds: 0 to 1.
        as_it_is: the compiled model without a budget, measured.
        measured: the compiled model with it.
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
        """For ``torch.compile(model, backend=...)``: Inductor with this budget, for this model alone."""
        return partial(budgeted, self.activation_memory_budget)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        what = "saved for backward" if self.of == "saved" else "allocated at the peak"
        yield f"{self.name}, compiled: at most {size_text(self.budget_bytes)} {what}"
        yield ""
        chosen = self.activation_memory_budget
        rows: list[tuple[str, str, str]] = [("activation_memory_budget", self.of, "a step")]
        for part, found in sorted([*self.tried, (chosen, self.measured.bytes)]):
            known = {1.0: self.as_it_is.time_ms, chosen: self.measured.time_ms}.get(part)
            time = "" if known is None else f"{known:.4g} ms"
            mark = " (chosen)" if part == chosen else ""
            rows.append((f"{part:.3g}{mark}", size_text(found), time))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def budgeted(
    memory_budget: float, module: GraphModule, inputs: Sequence[Any], *, mode: Any = None, options: Any = None
) -> Callable[..., Any]:
    """A backend of ``torch.compile``, but for its first argument."""
    return inductor(module, inputs, mode=mode, options=options, memory_budget=memory_budget, is_compiled=True)


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

    ``torch.compile`` recomputes by itself, more cheaply than checkpoints do, because what it computes again becomes
    part of other kernels. But its ``activation_memory_budget`` is a part of what it would save, 0 to 1, and what that
    comes to is not said. Here the largest part is found with which the bytes hold. The model is not changed; the report
    has the ``backend``:

        report = fl.fit_compiled(model, inputs, memory_budget_bytes=8 << 30)
        compiled = torch.compile(model, backend=report.backend)

    In a distributed job all processes call it, and the budget is for the one that takes most. What has been compiled
    before is compiled again when it is next called.

    Args:
        model: a module in training mode, not compiled. Its buffers, gradients and attributes are put back.
        inputs: what it is called with: a tensor, a tuple of positional arguments, or a mapping of keywords.
        memory_budget_bytes: how much there may be: bytes, or a size such as "8GiB".
        fraction: the same as a part of what the compiled model takes without a budget. One of the two must be given.
        of: what counts: "saved", what the forward pass saves for the backward pass; or "peak", the most that a step
            has allocated at once, without parameters, their gradients and the states of an optimizer. That needs
            compiled code for each part that is tried, and so minutes.
        loss: of the model's result, a scalar. By default the sum of the means of all tensors that require grad.
        progress: True shows how far it has come and the time left: a bar on stderr in a terminal (with ``rich``
            installed), elsewhere a line every 10 seconds. A function is told each stage, and which part of all is done.
        options: of ``torch.compile``, but for ``backend``: ``mode``, ``dynamic``, ``fullgraph``. Give it the same.

    Returns:
        a report: the compiler's budget, the bytes and the time of a step with it and without, and the other parts that
        were tried.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: both or neither of the budgets, or one that makes no sense, or that cannot be met; inputs that the
            model does not run on; a model that is compiled already, or of which nothing can be compiled.

    Saved for the backward pass: what the report says.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> report = fl.fit_compiled(model, torch.randn(512, 64), fraction=0.5)  # doctest: +SKIP
    >>> compiled = torch.compile(model, backend=report.backend)  # doctest: +SKIP
    """
    step = Step(model, *arguments_from(inputs), loss, function="fit_compiled")
    with asked("fit_compiled", progress) as on_stage:
        return fit_compiled_step(step, memory_budget_bytes, fraction, of, on_stage, **options)


def fit_compiled_step(
    step: Step,
    memory_budget_bytes: int | str | None,
    fraction: float | None,
    of: Of,
    on_stage: OnStage,
    **options: Any,
) -> CompiledFit:
    """``fit_compiled`` with this training step for the example."""
    model, allowed = check_arguments(step, memory_budget_bytes, fraction, of)
    if is_optimized(model) or model._compiled_call_impl is not None:
        raise ValueError(
            "fit_compiled: the model is compiled already; give it the one that torch.compile was called on"
        )
    if "backend" in options:
        raise ValueError("fit_compiled: the backend is the report's; give it the other options of torch.compile")
    tensors = [*tensors_in((step.args, step.kwargs))]
    with unchanged([*model.modules()], tensors, attributes=True) as reset_random:
        parts = _Parts(step, model, of, reset_random, options)
        try:
            on_stage("measuring the compiled model", 0.0)
            taken = parts.bytes(1.0)
            budget = allowed(taken)
            on_stage("trying budgets", 0.2)
            part, measured = parts.within(budget)
            on_stage("measuring times", 0.8)
            as_it_is_ms, time_ms = parts.times_ms([1.0, part])
        finally:
            torch.compiler.reset()  # else the parts that were tried count for the compiler's limit of recompilations
    others = tuple(sorted((other, found) for other, found in parts.tried.items() if other != part))
    return CompiledFit(
        type(model).__name__, of, budget, part, Measurement(taken, as_it_is_ms), Measurement(measured, time_ms), others
    )


class _Parts:
    """A model that is compiled with one part after the other for the compiler's budget.

    Attributes:
        tried: the bytes that they take.
    """

    def __init__(
        self, step: Step, model: nn.Module, of: Of, reset_random: Callable[[], None], options: dict[str, Any]
    ) -> None:
        self._model, self._of, self._options = model, of, options
        self._run = _Run(model)
        self._training = Training(Step(self._run, step.args, step.kwargs, step.loss, step.function), of, reset_random)
        self.tried: dict[float, int] = {}

    def bytes(self, part: float) -> int:
        """What the budget counts, of the process that takes most."""
        # A peak has what compiled code alone allocates.
        if part not in self.tried:
            self.tried[part] = self._bytes(part, is_compiled=self._of == "peak")
        return self.tried[part]

    def within(self, budget: int) -> tuple[float, int]:
        """The largest part of those that keep to the budget, and its bytes, as compiled code takes them."""
        allowed = budget
        while True:
            part = self._largest(allowed)
            measured = self._bytes(part, is_compiled=True)
            if measured <= budget:
                return part, measured
            if part == 0:
                raise self._unmet(budget, measured)
            allowed = min(self.tried[part], allowed - (measured - budget)) - 1

    def _largest(self, budget: int) -> float:
        low, low_bytes, high, high_bytes = 0.0, 0, 1.0, self.bytes(1.0)
        if high_bytes <= budget:
            return 1.0
        for _ in range(TRIES):
            # Bytes grow with the part almost in proportion.
            part = low + (high - low) * (budget - low_bytes) / (high_bytes - low_bytes)
            part = round(min(max(part, low + 0.02 * (high - low)), high - 0.02 * (high - low)), 4)
            found = self.bytes(part)
            if found <= budget:
                low, low_bytes = part, found
            else:
                high, high_bytes = part, found
            if CLOSE * budget <= low_bytes or high - low < 0.02 * high:
                break
        if low == 0 and self.bytes(0.0) > budget:
            raise self._unmet(budget, self.bytes(0.0))
        return low

    def times_ms(self, parts: Sequence[float]) -> list[float]:
        """Of a step, with each of the parts."""
        torch.compiler.reset()
        switches = [partial(setattr, self._run, "call", self._compiled(part)) for part in parts]
        return together(lambda: self._training.times_ms(switches))[0]

    def _bytes(self, part: float, *, is_compiled: bool) -> int:
        torch.compiler.reset()
        self._run.call = self._compiled(part, is_compiled=is_compiled)
        try:
            self._training.gradients()  # compiles
            found = max(together(self._training.bytes))
        except Exception as error:
            raise readable(error, "fit_compiled") from error
        if not self._run.graphs:
            raise ValueError("fit_compiled: torch.compile has found nothing in the model that it can compile")
        return found

    def _compiled(self, part: float, *, is_compiled: bool = True) -> Callable[..., Any]:
        self._run.graphs = 0

        def backend(module: GraphModule, inputs: Sequence[Any], *, mode: Any = None, options: Any = None) -> Any:
            self._run.graphs += 1
            return inductor(module, inputs, mode=mode, options=options, memory_budget=part, is_compiled=is_compiled)

        compiled: Any = torch.compile(self._model, backend=backend, **self._options)
        return compiled.__call__  # type: ignore[no-any-return]

    def _unmet(self, budget: int, smallest: int) -> ValueError:
        what = "saves" if self._of == "saved" else "allocates"
        return ValueError(
            f"fit_compiled: a budget of {size_text(budget)} cannot be met: without one the compiled model {what} "
            f"{size_text(self.bytes(1.0))}, with activation_memory_budget=0 {size_text(smallest)} ({smallest} bytes)"
        )


class _Run(nn.Module):
    """Holds the model, and calls what was last compiled of it.

    Attributes:
        call: what was last compiled.
        graphs: how many graphs the compiler has found.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.call: Callable[..., Any] = model.__call__
        self.graphs = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)
