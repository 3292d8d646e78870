"""What Triton's interpreter can find that a GPU shows by chance alone: races, accesses out of bounds, numbers that
nobody has written, and results that depend on the order in which programs run."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


class Findings(list[str]):
    """What was wrong; ``launches`` and ``programs`` say how much was looked at."""

    launches = 0
    programs = 0


@contextmanager
def examined(seed: int) -> Iterator[Findings]:
    """While this is open, the programs of every launch run in a random order, and the addresses that each reads and
    writes are compared with the launch's tensors and with those of the others. New buffers are filled with NaN."""
    patch = pytest.MonkeyPatch()
    found = Findings()
    try:
        _install(patch, found, random.Random(seed))
        # The switch makes operators raise that have no deterministic kernel; what is asked for is the filling alone.
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield found
    finally:
        torch.use_deterministic_algorithms(False)
        patch.undo()


def _install(patch: pytest.MonkeyPatch, found: Findings, rng: random.Random) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    launch = _Launch()

    def set_grid_dim(self: Any, *grid: int) -> None:
        launch.begin(grid, rng)
        dims(self, *grid)

    def set_grid_idx(self: Any, *place: int) -> None:
        index(self, *launch.next())

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        launch.read.append(_spans(ptrs, mask, launch.program))
        return load(self, ptrs, mask, *rest, **options)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        launch.written.append(_spans(ptrs, mask, launch.program))
        return store(self, ptrs, value, mask, *rest, **options)

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = args_on_host(self, args, kwargs)
        launch.bounds = [_bounds(tensor) for tensor in _tensors(interpreter, (*on_host[0], *on_host[1].values()))]
        return on_host

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        execute(self, *args, **kwargs)
        found.launches += 1
        found.programs += launch.program + 1
        found.extend(f"{self.fn.__name__}: {what}" for what in launch.problems())

    dims, index = builder.set_grid_dim, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store
    executor = interpreter.GridExecutor
    args_on_host, execute = executor._init_args_hst, executor.__call__
    patch.setattr(builder, "set_grid_dim", set_grid_dim)
    patch.setattr(builder, "set_grid_idx", set_grid_idx)
    patch.setattr(builder, "create_masked_load", masked_load)
    patch.setattr(builder, "create_masked_store", masked_store)
    patch.setattr(executor, "_init_args_hst", init_args)
    patch.setattr(executor, "__call__", call)


class _Launch:
    """The programs of a launch, and the addresses that they have touched: rows of (first byte, last byte, program)."""

    bounds: list[tuple[int, int]]

    def begin(self, grid: tuple[int, ...], rng: random.Random) -> None:
        self.places = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        rng.shuffle(self.places)
        self.program = -1
        self.read: list[np.ndarray] = []
        self.written: list[np.ndarray] = []

    def next(self) -> tuple[int, int, int]:
        self.program += 1
        return self.places[self.program]

    def problems(self) -> Iterator[str]:
        touched = {}
        for what, parts in (("read", self.read), ("written", self.written)):
            spans = np.concatenate([np.empty((0, 3), np.int64), *parts])
            inside = np.zeros(len(spans), bool)
            for first, last in self.bounds:
                inside |= (spans[:, 0] >= first) & (spans[:, 1] <= last)
            if not inside.all():
                yield f"{int((~inside).sum())} places are {what} out of bounds"
            touched[what] = np.unique(spans[:, [0, 2]], axis=0)
        for part in self.written:
            if len(np.unique(part[:, 0])) < len(part):
                yield "one store writes a place twice"
        addresses, writers = np.unique(touched["written"][:, 0], return_counts=True)
        if (writers > 1).any():
            yield f"{int((writers > 1).sum())} places are written by several programs"
        if len(addresses) and len(touched["read"]):
            writer = dict(touched["written"].tolist())
            others = sum(writer.get(address, program) != program for address, program in touched["read"].tolist())
            if others:
                yield f"{others} places are read by another program than the one that writes them"


def _spans(ptrs: Any, mask: Any, program: int) -> np.ndarray:
    size = ptrs.get_element_ty().primitive_bitwidth // 8
    addresses, masks = np.broadcast_arrays(np.asarray(ptrs.data), np.asarray(mask.data))
    first = addresses[masks.astype(bool)].ravel().astype(np.int64)
    return np.stack([first, first + size - 1, np.full_like(first, program)], axis=1)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 1, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size() - 1


def _tensors(interpreter: Any, arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, interpreter.TensorDescriptor):
            yield argument.base
        elif isinstance(argument, tuple):
            yield from _tensors(interpreter, argument)
        elif hasattr(argument, "data_ptr"):
            yield interpreter._unwrap_tensor(argument)
