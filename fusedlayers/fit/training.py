"""The training step that ``fit`` and ``fit_compiled`` run again and again: its bytes, its times and its gradients, and
the budget that it is to keep to.

In a distributed job all processes follow the first one, because their times differ. A budget is compared with the most
that one of them takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist
from torch import Tensor, nn

from ..memory import device_of, peak_bytes, saved_bytes
from ..recompute.segments import budget_from
from ..utils.example import check_model
from ..utils.formatting import first_line, size_text
from ..utils.module_state import isolated_gradients, random_state
from ..utils.step import Step, step_times
from ..utils.storages import trained_in

#: The bytes that a budget counts: those that are saved for the backward pass, or the most that is allocated in a step.
Of = Literal["saved", "peak"]
T = TypeVar("T")
COUNTED = {"saved": "saved for backward", "peak": "allocated at the peak"}


@dataclass(frozen=True)
class Measurement:
    """Bytes that count for the budget, and milliseconds of a step."""

    bytes: int
    time_ms: float


class Training:
    """A step and its budget. Every run starts with the same random numbers, and leaves gradients as they were.

    Raises:
        TypeError, ValueError: the model is none, or is in evaluation; there is not one budget that makes sense.
    """

    def __init__(self, step: Step, of: Of, memory_budget_bytes: object, fraction: object) -> None:
        check_model(function := step.function, step.model)
        if (memory_budget_bytes is None) == (fraction is None):
            both = "neither" if fraction is None else "both"
            raise ValueError(f"{function}: give one of memory_budget_bytes and fraction, got {both}")
        if of not in get_args(Of):
            raise ValueError(f"{function}: of must be one of {', '.join(map(repr, get_args(Of)))}, got {of!r}")
        step.check_loss()
        if fraction is None:
            self._asked, self._fraction = f"memory_budget_bytes={memory_budget_bytes!r}", None
            self._bytes = budget_from(function, memory_budget_bytes)
        elif isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < float(fraction) <= 1:
            raise ValueError(f"{function}: fraction must be above 0 and at most 1 (30 % are 0.3), got {fraction!r}")
        else:
            self._asked, self._fraction = f"fraction={fraction!r}", float(fraction)
        assert isinstance(step.model, nn.Module)
        if not step.model.training:
            raise ValueError(
                f"{function}: the model is in evaluation (model.eval(), which from_pretrained calls too), and a budget "
                "is for training steps, which save more where there are dropouts; call model.train() first"
            )
        self.step, self.of, self._model = step, of, step.model
        self._leaves = trained_in((step.model, step.args, step.kwargs))
        self.reset_random = random_state()

    def allowed(self, taken: int | None) -> int:
        """The bytes of the budget, where the model as it is takes so many; None: more than there are."""
        if self._fraction is None:
            return self._bytes
        if taken is None:
            function = self.step.function
            raise ValueError(f"{function}: {self._asked} of more memory than there is; pass memory_budget_bytes")
        return math.floor(self._fraction * taken)

    def unmet(self, taken: int | None, least: int, way: str) -> ValueError:
        """The error of a budget that is too small. ``taken``: by the model as it is; ``way``: how it takes least."""
        verb = "saves" if self.of == "saved" else "allocates"
        as_it_is = "" if taken is None else f"as it is the model {verb} {size_text(taken)}, "
        part = "" if taken is None or least > taken else f", fraction={math.ceil(1e4 * least / taken) / 1e4:g}"
        return ValueError(
            f"{self.step.function}: {self._asked} ({size_text(self.allowed(taken))}) cannot be met: {as_it_is}{way} it "
            f"{verb} {size_text(least)} ({least} bytes{part}); ask for that, pass a smaller batch, or switch off the "
            "model's own checkpoints if it has any, in which nothing is planned"
        )

    def bytes(self) -> int:
        """The bytes that the budget counts."""
        if self.of == "saved":
            return self.saved()
        self.reset_random()
        with isolated_gradients(self._leaves, zeros=True):
            return peak_bytes(self.step.run, device=device_of((self._model, self.step.args, self.step.kwargs)))

    def saved(self) -> int:
        """The bytes that are saved for the backward pass."""
        self.reset_random()
        exclude = [*self._model.buffers(), self.step.args, self.step.kwargs]
        return saved_bytes(self.step.forward, exclude=exclude)

    def times_ms(self, variants: Sequence[Callable[[], None]]) -> list[float]:
        """The times of a step, for each of the functions that make the model another one."""
        return step_times(self.step, variants, self.reset_random)

    def gradients(self) -> list[Tensor | None]:
        """The gradients of all parameters, and of inputs that need one."""
        self.reset_random()
        with isolated_gradients(self._leaves):
            for leaf in self._leaves:
                leaf.grad = None
            self.step.run()
            return [leaf.grad for leaf in self._leaves]

    def together(self, work: Callable[[], T]) -> list[T]:
        """The results of ``work`` in all processes. An error of one is raised in all, so that none waits for it."""
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            problem = error
        found = everyone((result, problem and f"{type(problem).__name__}: {first_line(problem)}"))
        if problem is not None:
            raise problem
        for _, reason in found:
            if reason is not None:
                raise ValueError(f"{self.step.function}: another process has raised {reason}")
        return [result for result, _ in found]  # type: ignore[misc]  # nobody has raised


def everyone(value: T) -> list[T]:
    """The values of all processes, on all."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
