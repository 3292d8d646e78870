"""The table of activations: the rows by name and spelling, and the modules and functions that they stand in for.

``builtin.py`` fills it, ``registration.py`` adds the users' functions, and ``lookup.py`` reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .record import Activation, Function, Row

_rows: dict[str, Row] = {}
#: Each row with its default parameters.
by_name: dict[str, Activation] = {}
#: Names by how they are spelled (``spelled``). Those that users register may share a spelling.
by_spelling: dict[str, tuple[str, ...]] = {}
#: By replaced module or function: the row, the arguments that select it, and the arguments that have no default.
stand_ins: dict[Any, list[tuple[Row, Mapping[str, object], frozenset[str]]]] = {}


def register(row: Row) -> Row:
    """Add a row to the table, so that ``resolve`` finds its name and what it stands for.

    Raises:
        ValueError: the name is taken. (A user's function may be registered again, as a notebook's cell does that runs
            twice.)
    """
    old = _rows.get(row.name)
    if old is not None:
        if not (old.is_custom and row.is_custom and _defined_at(old.function) == _defined_at(row.function)):
            raise ValueError(f"activation {row.name!r} is already registered; name= gives this one another name")
        for entries in stand_ins.values():
            entries[:] = [entry for entry in entries if entry[0] is not old]
    else:
        for spelling in map(spelled, (row.name, *row.also_called)):
            by_spelling[spelling] = (*by_spelling.get(spelling, ()), row.name)
    _rows[row.name] = row
    by_name[row.name] = row.bind()
    for target, arguments in row.stands_for:
        register_stand_in(row.name, target, arguments)
    return row


def spelled(name: str) -> str:
    """A name without what people write in different ways: case, underscores and hyphens. torch's classes are spelled
    like the rows that they stand for: ``LeakyReLU`` like ``leaky_relu``."""
    return name.lower().replace("_", "").replace("-", "")


def _defined_at(function: Function) -> tuple[object, object]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def register_stand_in(name: str, target: Any, arguments: Mapping[str, object] = MappingProxyType({})) -> None:
    """Let ``resolve`` replace ``target`` by the row of that name wherever ``arguments`` match."""
    stand_ins.setdefault(target, []).append((_rows[name], arguments, _required(target)))


def _required(target: Any) -> frozenset[str]:
    """The arguments without a default of a function, its tensor left out."""
    if not inspect.isfunction(target):  # a module, whose attributes hold all values, or a builtin with defaults
        return frozenset()
    arguments = list(inspect.signature(target).parameters.values())[1:]
    return frozenset(a.name for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD)


def bound(name: str, parameters: Mapping[str, float]) -> Activation:
    """The row of that name with these parameters."""
    return _rows[name].bind(**parameters)


def activations() -> tuple[str, ...]:
    """The names of all registered activations."""
    return tuple(_rows)


def rows() -> tuple[Row, ...]:
    """The lines of the table, in their order."""
    return tuple(_rows.values())
