"""Activations: the record, the table, the branch bit, inverses and traces."""

from . import builtin as _builtin  # fills the table
from .capture import must_be_called_because
from .register import activation
from .resolve import record_of, resolve
from .spec import (
    DTYPES,
    Activation,
    Row,
    Saved,
    Specialised,
    activations,
    register,
    register_stand_in,
    rows,
    widened,
)
from .told import Told, told

__all__ = [
    "DTYPES",
    "Activation",
    "Row",
    "Saved",
    "Specialised",
    "Told",
    "activation",
    "activations",
    "must_be_called_because",
    "record_of",
    "register",
    "register_stand_in",
    "resolve",
    "rows",
    "told",
    "widened",
]

del _builtin
