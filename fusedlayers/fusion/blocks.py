"""A module that is an MLP, fused where it stands: it keeps its layers, and computes them as one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..activations import must_call_reason
from ..functional import gated_mlp, mlp
from .attributes import Attributes
from .derived import Mixin
from .known import Known, known_of
from .pairs import Applies, is_transposed
from .watched import is_watched


class Plan(NamedTuple):
    """What a block consists of, by the names of its modules.

    Attributes:
        first: the layers that read the input: one; or gate and up; or one that makes both.
        activation: a module's path, or a function.
        dropout: of the hidden layer; None without.
        last: the layer that makes the output.
        after: modules that the output goes through.
        is_gated: whether there is a gate.
        save: what is kept of the hidden layer.
        dtype: of the layers, where the code asks for dtypes, and may do something else for others; else None.
    """

    first: tuple[str, ...]
    activation: str | Callable[[Tensor], Tensor]
    dropout: str | None
    last: str
    after: tuple[str, ...]
    is_gated: bool
    save: str
    dtype: torch.dtype | None

    @property
    def inner(self) -> tuple[str, ...]:
        """The modules that are not called where the block is one."""
        named = (*self.first, self.activation, self.dropout, self.last)
        return tuple(name for name in named if isinstance(name, str))


class Block(Mixin):
    """A module that is an MLP, as long as it and the modules in it with children have what they had."""

    OWN = ("fused_block", "fused_as", "known_activation")
    fused_block: Plan | None = None
    fused_as: dict[str, Attributes]
    known_activation: Known | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        itself: Any = self
        is_usual = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and not is_watched()
        plan = self.fused_block  # None of another instance that the class has made
        if plan is None or not is_usual or not self._is_what_it_was() or called_because(itself, plan) is not None:
            return super().forward(*args, **kwargs)
        return whole(itself, plan, args[0], self.known_activation)

    def _is_what_it_was(self) -> bool:
        itself: Any = self
        return all(known.are_still_of(itself.get_submodule(path)) for path, known in self.fused_as.items())


def whole(module: Any, plan: Plan, x: Tensor, known: Known | None = None) -> Tensor:
    y = compute(module, plan, x, known)
    for path in plan.after:
        y = module.get_submodule(path)(y)
    return y


def compute(module: Any, plan: Plan, x: Tensor, known: Known | None = None) -> Tensor:
    """The block without what comes after it."""
    parts = {name: module.get_submodule(name) for name in plan.inner}
    activation: Any = parts[plan.activation] if isinstance(plan.activation, str) else plan.activation
    if isinstance(activation, Applies):
        activation = activation.activation()
    else:
        activation = known_of(activation, known) or activation
    drop: Any = parts[plan.dropout] if plan.dropout is not None else None
    settings: dict[str, Any] = {
        "dropout": float(drop.p) if drop is not None and drop.training else 0.0,
        "save": plan.save,
    }
    tensors: list[Any] = [x, *(tensor for name in (*plan.first, plan.last) for tensor in _weight_and_bias(parts[name]))]
    if plan.is_gated and len(plan.first) == 1:
        tensors[3:3] = [None, None]
    block: Any = gated_mlp if plan.is_gated else mlp
    return cast(Tensor, block(*tensors, activation, **settings))


def _weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight.t() if is_transposed(layer) else layer.weight, layer.bias


def called_because(module: nn.Module, plan: Plan) -> str | None:
    """Why the block's modules are called one by one, or None."""
    dtypes = set()
    for path in plan.inner:
        inner: Any = module
        for name in path.split("."):
            inner = inner._modules.get(name)
            if inner is None:
                return f"{path} is gone"
            reason = must_call_reason(inner)
            if reason is not None:
                return f"{path} must be called: {reason}"
        if path in (*plan.first, plan.last):
            if type(inner) is not nn.Linear and not is_transposed(inner):
                return f"{path} is a {type(inner).__name__}"
            for tensor in (inner.weight, inner.bias):
                if isinstance(tensor, Tensor):
                    if type(tensor) not in (Tensor, nn.Parameter):
                        return f"{path} has a {type(tensor).__name__}, which may compute something else"
                    dtypes.add(tensor.dtype)
        elif path == plan.dropout and type(inner) is not nn.Dropout:
            return f"{path} is a {type(inner).__name__}"
    if len(dtypes) != 1:
        return "its layers have different dtypes"
    return "its code asks for dtypes, and this is another one" if plan.dtype not in (None, *dtypes) else None
