"""Activations: the record, the table, the branch bit, inverses and traces."""

from . import builtin as _builtin  # fills the table
from .capture import must_be_called_because
from .register import activation
from .spec import (
    DTYPES,
    Activation,
    Row,
    Saved,
    Specialised,
    activations,
    record_of,
    register,
    register_stand_in,
    resolve,
    rows,
    widened,
)

__all__ = [
    "DTYPES",
    "Activation",
    "Row",
    "Saved",
    "Specialised",
    "activation",
    "activations",
    "must_be_called_because",
    "record_of",
    "register",
    "register_stand_in",
    "resolve",
    "rows",
    "widened",
]

del _builtin
