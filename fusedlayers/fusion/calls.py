"""What a forward pass calls: modules and functions, which calls are made by which, and which values they pass on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn


def _set_of(names: str) -> frozenset[str]:
    return frozenset(names.split())


#: Of a tensor these tell its sizes, and how it lies in memory.
SIZES = _set_of(
    """
    shape size dim ndim ndimension numel nelement nbytes __len__ is_same_size stride storage_offset is_contiguous
    """
)
#: Of a tensor these tell what is known before it is computed: who calls them does not read it.
METADATA = SIZES | _set_of(
    """
    dtype device layout names itemsize element_size requires_grad grad_fn is_leaf get_device has_names _version
    is_floating_point is_complex is_signed is_conj is_neg is_tensor is_inference is_pinned
    is_cuda is_cpu is_meta is_mps is_xpu is_mkldnn is_sparse is_quantized is_nested
    """
)


#: Python's statements that write over their first operand.
OPERATORS = _set_of("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor")
_WRITING = OPERATORS | {"setitem"}


class Value:
    """A tensor, as it was when it was passed on: what is written over is another value from then on.

    ``is_kept``: whether somebody holds it after the call that reads it: the caller, who got it; a module; or the code,
    if it goes on with the tensor after that call has written over it.
    ``is_written``: whether its memory is written over.
    """

    is_kept = False
    is_written = False


@dataclass(eq=False)
class Call:
    """A call of a module or a function.

    Attributes:
        target: what was called.
        name: of the function; of a module its path.
        within: the call of the module that made it; None for the first.
        args, kwargs: with a ``Value`` for each tensor.
        reads: the values among these.
        gives: the values in the result.
        calls: what it called itself, modules and functions, in order.
        is_closed: of a module, that what it calls is not known.
        sample: of a module that may be a block, the begin of its only argument.
    """

    target: nn.Module | Callable[..., Any]
    name: str
    within: Call | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()
    calls: list[Call] = field(default_factory=list)
    is_closed: bool = False
    sample: Any = None

    @property
    def module(self) -> nn.Module | None:
        return self.target if isinstance(self.target, nn.Module) else None

    @property
    def is_metadata(self) -> bool:
        return self.module is None and not self.gives and self.name in METADATA

    @property
    def may_read(self) -> bool:
        """Whether it reads its values by itself: modules do through the functions that they call."""
        return not self.is_metadata and (self.module is None or self.is_closed)

    @property
    def writes(self) -> bool:
        """Whether it may write over what it reads first, which torch says by its name or an option."""
        if self.module is not None:
            return bool(getattr(self.module, "inplace", False))
        is_named_so = self.name.endswith("_") and not self.name.endswith("__")
        is_asked_to = bool(self.kwargs.get("inplace")) or "out" in self.kwargs
        return is_named_so or is_asked_to or self.name.strip("_") in _WRITING

    def __iter__(self) -> Iterator[Call]:
        """The call and all that it led to, in order."""
        yield self
        for call in self.calls:
            yield from call

    def is_called_by(self, module: nn.Module) -> bool:
        """Whether a call of ``module`` led to it."""
        call = self.within
        while call is not None and call.target is not module:
            call = call.within
        return call is not None

    def is_in(self, other: Call) -> bool:
        """Whether ``other`` led to it."""
        call: Call | None = self
        while call is not None and call is not other:
            call = call.within
        return call is not None
