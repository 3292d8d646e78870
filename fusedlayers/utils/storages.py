"""The tensors in nested containers, and the plain tensors that hold their memory."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch import is_traceable_wrapper_subclass, storage_id, tree_leaves


def strided_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the memory of ``tensor``: itself, or what a subclass or sparse layout wraps."""
    if is_traceable_wrapper_subclass(tensor):
        wrapper: Any = tensor
        for name in wrapper.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh as well
                yield from strided_parts(part)
    elif tensor.layout == torch.strided:
        yield tensor
    else:
        yield from (getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ()))


#: The methods that return the plain tensors of a sparse one.
_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def sizes_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' storages, by address."""
    storages = (part.untyped_storage() for tensor in tensors for part in strided_parts(tensor))
    return {storage_id(storage): storage.nbytes() for storage in storages}


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor of torch's own whose memory holds its values: kernels may read it. That of a negative view
    holds others, and that of a zero tensor is none."""
    return type(tensor) is Tensor and not tensor.is_neg() and tensor.data_ptr() != 0


def trained_in(tree: Any) -> list[Tensor]:
    """The tensors in it that gradients are accumulated into."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad and tensor.is_leaf]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of containers and modules. Iterators are left alone: they are the function's."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
