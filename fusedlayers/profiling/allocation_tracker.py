"""Estimate the peak of one forward and backward pass from the lifetimes of storages, and say what is alive then.

A dispatch mode sees what every operator returns: in the forward pass, in the backward pass and in what a checkpoint
recomputes. A storage counts from the operator that returns it until it is freed, which a weak reference reports.
Storages that operators only read existed before and do not count. ``operator_scratch`` measures what an operator
allocates for itself. Compiled code cannot be followed, because under a dispatch mode it runs eagerly: its forward pass
is not tracked, and only what it saved is known.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import TorchDispatchMode, tree_leaves
from ..utils.storages import strided_parts
from .operator_scratch import CpuScratch, CudaScratch

#: CUDA's allocator hands out multiples of this.
CUDA_BLOCK = 512

SAVED = "saved for backward, still held"
PARAMETERS = "gradients of parameters"
LEAVES = "gradients of inputs"
GRADIENTS = "gradients of activations"
RECOMPUTED = "computed again by checkpoints"
OUTPUTS = "outputs of the forward pass, and temporaries"
TEMPORARIES = "temporaries of the backward pass"
SCRATCH = "scratch memory inside the operator"


@dataclass(frozen=True)
class Peak:
    """The peak: the bytes, what they consist of, and which operator was running for which module or node."""

    bytes: int
    parts: Mapping[str, int]
    moment: str


@dataclass
class _Operator:
    """A call of an operator: the module or node that made it, and where it ends in the log."""

    name: str
    phase: str
    caller: str
    is_recompute: bool
    log_end: int = 0


@dataclass
class _Allocation:
    bytes: int
    operator: _Operator


class AllocationTracker(TorchDispatchMode):
    """The log of the storages that are allocated and freed on a device.

    Args:
        current_module: returns the path of the module that is running; empty outside of all.
        model: the caller where no module is running; in the backward pass the node that ``enter_node`` names.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, current_module: Callable[[], str], model: str) -> None:
        super().__init__()
        self.device, self._current_module = device, current_module
        self.scratch = (CudaScratch if device.type == "cuda" else CpuScratch)(device)
        self.phase = "forward"
        self.allocations: list[_Allocation] = []
        self.operators: list[_Operator] = []
        self.kinds: dict[int, str] = {}
        self._log: list[tuple[int, int]] = []  # index of an allocation, and by how many bytes the memory changes
        #: Address of a storage -> its index in ``allocations``; None if it existed before.
        self._numbers: dict[int, int | None] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._preexisting: Container[int] | None = None
        self._caller = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            for storage in self._storages(tensor):
                if storage._cdata not in self._numbers:
                    if self._preexisting is None or storage._cdata in self._preexisting:
                        self._watch(storage, None)
                    elif self.operators:
                        self._record_storage(storage)
        return self._run(str(func), func, args, kwargs or {})

    def set_preexisting(self, addresses: Container[int]) -> None:
        """Declare that only the storages at these addresses existed before. Others that an operator reads and none has
        returned, such as the buffers of compiled code, count from the time they are read."""
        self._preexisting = addresses

    def record(self, name: str, result: Any) -> None:
        """Count tensors that no tracked operator returned, from now on, as the result of one with this name."""
        self._run(name, lambda: result, (), {})

    def _run(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        is_recompute = self.phase == "backward" and torch.is_grad_enabled()
        operator = _Operator(name, self.phase, self._current_module() or self._caller, is_recompute)
        self.operators.append(operator)
        try:
            result = self.scratch.call(function, args, kwargs)
            for tensor in _tensors(result):
                for storage in self._storages(tensor):
                    self._record_storage(storage)
        finally:
            operator.log_end = len(self._log)
        return result

    def enter_node(self, node: str, gradients: Iterable[Any]) -> None:
        """Record that a node of the graph is about to run, on these gradients."""
        self._caller = node
        self.set_kind(GRADIENTS, (gradient for gradient in gradients if isinstance(gradient, Tensor)))

    def set_kind(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Classify tensors; those that this run did not allocate are ignored."""
        for tensor in tensors:
            for storage in self._storages(tensor):
                number = self._numbers.get(storage._cdata)
                if number is not None and self.kinds.get(number) != SAVED:
                    self.kinds[number] = kind

    def allocated(self, storage: torch.UntypedStorage) -> bool:
        """Whether this run allocated the storage."""
        return self._numbers.get(storage._cdata) is not None

    def peak(self) -> Peak:
        live = most = start = 0
        worst, until = None, 0
        for operator, scratch in zip(self.operators, self.scratch.bytes, strict=True):
            live += sum(change for _, change in self._log[start : operator.log_end])
            start = operator.log_end
            if live + scratch > most:
                most, worst, until, parts = live + scratch, operator, start, Counter({SCRATCH: scratch})
        if worst is None:
            return Peak(0, {}, "")
        for number, change in self._log[:until]:
            parts[self._kind(number)] += change
        where = f"{worst.name.removesuffix('.default')} for {worst.caller}"
        return Peak(most, {kind: size for kind, size in parts.most_common() if size}, f"{worst.phase} pass, {where}")

    def _kind(self, number: int) -> str:
        if number in self.kinds:
            return self.kinds[number]
        operator = self.allocations[number].operator
        if operator.phase == "forward":
            return OUTPUTS
        return RECOMPUTED if operator.is_recompute else TEMPORARIES

    def _storages(self, tensor: Tensor) -> Iterable[torch.UntypedStorage]:
        return (part.untyped_storage() for part in strided_parts(tensor) if part.device == self.device)

    def _record_storage(self, storage: torch.UntypedStorage) -> None:
        """Record that the last operator returned this storage, or may have resized it."""
        key, size = storage._cdata, self._size(storage)
        if key not in self._numbers:
            self._watch(storage, len(self.allocations))
            self.allocations.append(_Allocation(size, self.operators[-1]))
            self._log.append((len(self.allocations) - 1, size))
        elif (number := self._numbers[key]) is not None and self.allocations[number].bytes != size:  # it was resized
            self._log.append((number, size - self.allocations[number].bytes))
            self.allocations[number].bytes = size

    def _size(self, storage: torch.UntypedStorage) -> int:
        size = storage.nbytes()
        return -(-size // CUDA_BLOCK) * CUDA_BLOCK if self.device.type == "cuda" else size

    def _watch(self, storage: torch.UntypedStorage, number: int | None) -> None:
        key = storage._cdata
        self._numbers[key] = number

        def freed(_: Any) -> None:
            del self._watched[key], self._numbers[key]  # the address may be reused
            if number is not None:
                self._log.append((number, -self.allocations[number].bytes))

        self._watched[key] = weakref.ref(storage, freed)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
