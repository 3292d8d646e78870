"""The training step that a memory report measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..utils.autograd_graph import leaves_of, nodes_of
from ..utils.example import what_was_meant
from ..utils.storages import tensors_in, trained_in


@dataclass(frozen=True)
class Step:
    """One call of a model on its arguments, the loss, and the backward pass."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None = None
    #: Whom errors name.
    function: str = "memory_report"

    def check_loss(self) -> None:
        """Raise where the loss is no function."""
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"{self.function}: loss must be a function of the model's result, got {self.loss!r}")

    def forward(self) -> Tensor:
        """The loss of one call. No reference to the outputs is held."""
        torch.clear_autocast_cache()  # a training step begins without 16-bit copies of the weights, and saves its own
        try:
            result = self.model(*self.args, **self.kwargs)
        except Exception as error:
            if hint := what_was_meant(self.args):
                error.add_note(f"{self.function}: {hint}")
            raise
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
            raise ValueError(self._no_gradient(result))
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

    def _no_gradient(self, result: Any) -> str:
        return (
            f"{self.function}: the model returned {_described(result)}, expected a floating-point tensor that requires "
            f"grad, alone or in a tuple, list, mapping or dataclass: {no_gradient_because(self.model)}"
        )


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
