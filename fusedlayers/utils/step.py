"""A training step, as reports run and time it: one call of a model, the loss, and the backward pass."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from .autograd_graph import leaves_of, nodes_of
from .example import mistake_in
from .formatting import first_line
from .module_state import isolated_gradients
from .progress import OnStage
from .storages import tensors_in, trained_in

#: Each time is of so many steps, after one that is not timed. The variants take turns, so that a busy machine slows all
#: of them.
ROUNDS = 7


@dataclass(frozen=True)
class Step:
    """One call of a model on its arguments, the loss, and the backward pass; ``function`` is the one that errors name.
    The loss is a function of the result, or the sum of the means of all that requires grad in it."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None = None
    function: str = "memory_report"

    def check_loss(self) -> None:
        """Raise where the loss is no function."""
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"{self.function}: loss must be a function of the model's result, got {self.loss!r}")

    @contextmanager
    def readable(self, way: str = "") -> Iterator[None]:
        """Raise errors of the model as those of its inputs, or of the way in which it is trained."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith(f"{self.function}: "):
                raise
            hint = "" if way else mistake_in(self.args, error)
            way = way or f"on these inputs{hint and f' ({hint})'}"
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{self.function}: the model does not run {way}: {reason}") from error

    def forward(self) -> Tensor:
        """The loss of one call. No reference to the outputs is held."""
        torch.clear_autocast_cache()  # a training step begins without 16-bit copies of the weights, and saves its own
        result = self.model(*self.args, **self.kwargs)
        if self.loss is not None:
            loss = self.loss(result)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"{self.function}: loss returned {_described(loss)}, expected a tensor with one element that "
                    "requires grad; return the scalar that you would call backward() on"
                )
            return loss
        outputs = [t for t in tensors_of(result) if t.requires_grad and t.is_floating_point()]
        if not outputs:
            raise ValueError(
                f"{self.function}: the model returned {_described(result)}, expected a floating-point tensor that "
                f"requires grad, alone or in a tuple, list, mapping or dataclass: {no_gradient_because(self.model)}"
            )
        total = outputs[0].mean()
        for output in outputs[1:]:
            total = total + output.mean().to(total.device, total.dtype)
        return total

    def run(self) -> None:
        self.forward().backward()

    def trained(self, loss: Tensor, modules: Iterable[torch.nn.Module]) -> list[Tensor]:
        """The tensors that gradients are accumulated into, in the backward pass of a loss of these modules.

        They are leaves of its graph. A reentrant checkpoint hides what its function reads, and has a backward pass of
        its own: there it may be any argument, parameter, or other attribute of a module.
        """
        known = trained_in((self.args, self.kwargs, [(module, vars(module)) for module in modules]))
        return [*dict.fromkeys((*leaves_of(nodes_of([loss])), *known))]


def no_gradient_because(model: Any) -> str:
    """Why nothing that a model returns requires grad, and what to do."""
    parameters = [p for p in tensors_in(model) if isinstance(p, torch.nn.Parameter)]
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are switched off here; call it outside torch.no_grad() and torch.inference_mode()"
    if parameters and not any(p.requires_grad for p in parameters):
        return f"all of its {len(parameters)} parameters are frozen; unfreeze some, or let an input require grad"
    return "let a parameter or an input require grad, and return what is computed from it"


def tensors_of(result: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of tuples, lists, mappings and dataclasses."""
    if isinstance(result, Tensor):
        yield result
        return
    if isinstance(result, Mapping):
        result = list(result.values())
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    if isinstance(result, tuple | list):
        for part in result:
            yield from tensors_of(part)


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        grad = "requires grad" if result.requires_grad else "does not require grad"
        return f"a {str(result.dtype).removeprefix('torch.')} tensor of shape {tuple(result.shape)} that {grad}"
    found = sum(1 for _ in tensors_of(result))
    return f"{type(result).__name__} with {found} tensor{'' if found == 1 else 's'} in it"


# --- times ------------------------------------------------------------------------------------------------------------


def step_times(step: Step, variants: Sequence[Callable[[], None]], reset_random: Callable[[], None]) -> list[float]:
    """The milliseconds of forward and backward, for each of the ``variants``: functions that make the model one.

    The median of the first one's times; of the others that of their ratio to the first in the same round, because how
    fast a machine is changes between rounds.
    """
    modules = step.model.modules() if isinstance(step.model, torch.nn.Module) else ()
    leaves: list[Tensor] | None = None
    times: list[list[float]] = [[] for _ in variants]
    for number in range(ROUNDS + 1):
        for switch, found in zip(variants, times, strict=True):
            switch()
            leaves = step.trained(step.forward(), modules) if leaves is None else leaves
            reset_random()
            with isolated_gradients(leaves):
                start = now()
                step.run()
                time_ms = 1e3 * (now() - start)
            if number:  # the first step makes plans, and compiles
                found.append(time_ms)
    first = times[0]
    return [statistics.median(first) * statistics.median(map(truediv, found, first)) for found in times]


def telling(variant: Callable[[], None], on_stage: OnStage) -> Callable[[], None]:
    """The first of the variants; it tells when a round begins."""
    rounds = itertools.count()

    def tell() -> None:
        done = next(rounds)
        on_stage(f"timing steps, round {done + 1}", done / (ROUNDS + 1))
        variant()

    return tell


def now() -> float:
    """Seconds, when the GPU has done all its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
