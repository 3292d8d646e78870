"""A call of a module that can be made again, by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._torch import TreeSpec, tree_flatten, tree_unflatten
from ..utils.autograd_graph import as_interior
from ..utils.storages import tensors_in

#: What cannot be changed by a call.
PLAIN = (NoneType, bool, int, float, complex, str, bytes, Enum, slice, torch.dtype, torch.device, torch.Size)


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
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(leaves, structure, requires_grad, autocast)

    @property
    def changeable(self) -> Any:
        """An argument that the call may change, or that may hold tensors; None if there is none."""
        return next((leaf for leaf in self.leaves if not isinstance(leaf, (Tensor, *PLAIN))), None)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments. Those that required grad are no leaves, so that they may be written over."""
        leaves: list[Any] = []
        for leaf, requires_grad in zip(self.leaves, self.requires_grad, strict=True):
            fresh = leaf.clone() if isinstance(leaf, Tensor) else leaf
            if requires_grad:
                fresh = as_interior(fresh)
            leaves.append(fresh)
        return cast("tuple[tuple[Any, ...], dict[str, Any]]", tree_unflatten(leaves, self.structure))

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        """Autocast as the call found it."""
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.autocast.items():
                if (enabled, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    @property
    def form(self) -> Any:
        """What calls have in common that cost the same."""
        described = [
            (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride()) if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        ]
        return described, str(self.structure), self.autocast
