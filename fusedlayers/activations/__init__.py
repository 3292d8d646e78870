"""Activations: the record, the table, look-up, registration, and traces of users' functions."""

from . import builtin as _builtin  # fills the table
from .free_variables import must_call_reason
from .record import DTYPES, FLOAT64_IS_TORCHS, KEPT_BY_TORCH, Activation, Definition, Saved, WithOperands, upcast
from .table import activation, activation_of_module, activations, definitions, register, register_stand_in, resolve

__all__ = [
    "DTYPES", "FLOAT64_IS_TORCHS", "KEPT_BY_TORCH", "Activation", "Definition", "Saved", "WithOperands", "activation",
    "activation_of_module", "activations", "definitions", "must_call_reason", "register", "register_stand_in",
    "resolve", "upcast",
]  # fmt: skip

del _builtin
