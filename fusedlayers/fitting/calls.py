"""A call of a module that can be made again, by itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._torch import TreeSpec, tree_flatten, tree_unflatten
from ..utils.storages import tensors_in


class Call(NamedTuple):
    """The arguments of a call, as they were, and autocast.

    Attributes:
        requires_grad: of each leaf.
    """

    leaves: list[Any]
    structure: TreeSpec
    requires_grad: list[bool]
    autocast: dict[str, tuple[bool, torch.dtype]]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, structure = tree_flatten((args, kwargs))
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        kinds = {"cpu", *(tensor.device.type for tensor in tensors_in(leaves))} - {"meta"}
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        return cls([_copied(leaf) for leaf in leaves], structure, requires_grad, autocast)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Copies of the arguments, and the leaves of autograd among what they were computed from."""
        sources: list[Tensor] = []
        leaves: list[Any] = []
        for leaf, requires_grad in zip(self.leaves, self.requires_grad, strict=True):
            fresh = _copied(leaf)
            if requires_grad:
                sources.append(torch.empty(0, device=fresh.device, requires_grad=True))
                fresh = _Interior.apply(sources[-1], [fresh])
            leaves.append(fresh)
        args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", tree_unflatten(leaves, self.structure))
        return args, kwargs, sources

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        """Autocast as the call found it."""
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.autocast.items():
                if (enabled, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    @property
    def signature(self) -> Any:
        """What calls have in common that cost the same."""
        described = [
            (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride()) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in self.leaves
        ]
        return described, self.requires_grad, str(self.structure), self.autocast


class _Interior(torch.autograd.Function):
    """Makes a tensor an interior one of a graph, which may be written over, as a leaf may not."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.zeros(0, device=grads[0].device), None


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    try:
        return copy.deepcopy(leaf)  # a cache, say, that the call would write to
    except Exception:
        return leaf
