"""Saved rows summed up for a table or a picture: the modules of repeated blocks are one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..utils.formatting import merged_path, pattern_of
from .saved_rows import Row


@dataclass(frozen=True)
class Group:
    """Rows of similar modules: those of ``encoder.layer.0.output`` and ``encoder.layer.1.output``, say."""

    path: str
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)


@dataclass(frozen=True)
class Entry:
    """What similar modules save by one operation, in one shape: a line of a table."""

    path: str
    operation: str
    tensors: str
    bytes: int


def groups_of(rows: Iterable[Row], model: str) -> list[Group]:
    """The saved activations, by modules whose paths differ in numbers alone; the largest group first. The model itself
    has the path ``model``.

    Modules of different classes are apart. So are modules that are numbered themselves, as in a Sequential, where they
    save tensors of different shapes or by different operations.
    """
    by_module: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind == "activation":
            by_module.setdefault(row.module, []).append(row)
    similar: dict[object, list[str]] = {}
    for module, own in by_module.items():
        is_numbered = module.rpartition(".")[2].isdecimal()
        saves = tuple(sorted((row.operation, row.shape) for row in own)) if is_numbered else ()
        similar.setdefault((pattern_of(module), own[0].module_class, saves), []).append(module)
    groups = [
        Group(merged_path(modules) or model, tuple(row for module in modules for row in by_module[module]))
        for modules in similar.values()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


def bytes_by_module(rows: Iterable[Row]) -> Counter[str]:
    """What the modules save of activations, by their paths."""
    sums: Counter[str] = Counter()
    for row in rows:
        if row.kind == "activation":
            sums[row.module] += row.bytes
    return sums


def entries_of(rows: Iterable[Row], model: str) -> list[Entry]:
    """The entries of all groups, the largest first."""
    entries = [entry for group in groups_of(rows, model) for entry in entries_in(group, model)]
    return sorted(entries, key=lambda entry: -entry.bytes)


def entries_in(group: Group, model: str) -> Iterator[Entry]:
    """The entries of one group."""
    similar: dict[tuple[str, str], list[Row]] = {}
    for row in group.rows:
        operation = row.operation + (f" +{len(row.shared_with)}" if row.shared_with else "")
        similar.setdefault((operation, f"{_shape(row.shape)} {row.dtype}{_of_more(row)}"), []).append(row)
    for (operation, tensor), rows in similar.items():
        path = merged_path(dict.fromkeys(row.module for row in rows)) or model
        count = f"{len(rows)} of " if len(rows) > 1 else ""
        yield Entry(path, operation, count + tensor, sum(row.bytes for row in rows))


def _of_more(row: Row) -> str:
    """Of a view, that its storage is larger."""
    own = math.prod(row.shape) * getattr(torch, row.dtype).itemsize
    return ", of a larger buffer" if row.bytes > own else ""


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
