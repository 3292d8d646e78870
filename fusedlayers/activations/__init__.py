"""Activations: the record, the table, the branch bit, inverses and traces."""

from . import library as _library  # fills the table
from .spec import DTYPES, Activation, Row, Saved, activations, record_of, register, resolve, rows

__all__ = ["DTYPES", "Activation", "Row", "Saved", "activations", "record_of", "register", "resolve", "rows"]

del _library
