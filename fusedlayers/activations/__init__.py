"""Activations: the record, the table, the branch bit, inverses and traces."""

from . import builtin as _builtin  # fills the table
from .free_variables import must_be_called_because
from .inverse_error import Told, told
from .lookup import record_of, resolve
from .record import DTYPES, Activation, Row, Saved, Specialised, activations, register, register_stand_in, rows, widened
from .register import activation

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
