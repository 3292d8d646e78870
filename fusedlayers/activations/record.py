"""What an activation is: one record that answers everything anyone asks about it.

``Row`` is a line of the table in ``builtin.py``: a function with parameters. ``Activation`` is a row with its
parameters bound, and what autograd, the backends, reports and tests work with. ``lookup.py`` turns what a user passes
into one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..derivative import branch_bit
from ..derivative.analysis import Analysis, MonotoneDerivative
from ..derivative.features import Fold
from ..derivative.folded import FoldedDerivative, FoldedInverse, fit, fit_inverse
from ..derivative.polynomial import PRECISIONS
from ..utils.isolation import in_clean_state

Function = Callable[..., Tensor]
Saved = Literal["nothing", "output", "input", "recompute"]

#: The floating dtypes that the layers accept. Their outputs' bit patterns are what "given the output" means.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def upcast(tensor: Tensor) -> Tensor:
    """In float32, or float64 if it is that: what activations are computed in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class Native:
    """ATen kernels that compute the same as the row's function and derivative in one vectorised pass; eager only.

    ``activate_(z, **parameters)`` overwrites z. ``gradient`` is the operator that computes ``dy * f'`` and what gives
    its arguments from ``(dy, y, **parameters)``; ``gradient_given_input(dy, z, **parameters)`` computes it from z.
    ``post_op`` is what oneDNN calls the function: ``(name, scalars, algorithm)``.
    """

    activate_: Function | None = None
    gradient: tuple[Any, Callable[..., tuple[Any, ...]]] | None = None
    gradient_given_input: Function | None = None
    post_op: Callable[..., tuple[str, list[float], str]] | None = None


_NO_KERNELS = Native()


@dataclass(frozen=True, eq=False)
class Row:
    """A line of the table.

    Attributes:
        name: what a user writes.
        function: ``function(z, **parameters)``, in torch operations; the single source of the mathematics.
        parameters: names and defaults.
        derivative: ``derivative(z, **parameters)``, where autograd's is not to be used.
        derivative_given_output: ``(y, **parameters)``, the derivative in terms of the output; "fold" to have it fitted
            on both branches, a ``FoldedDerivative`` to state it for both, an ``Analysis`` of a function without
            parameters for what that found.
        inverse: ``inverse(y, **parameters)``, the input in terms of the output; "fold" to have it fitted on both
            branches. None where different inputs have one output.
        flat_levels: the parameters that are values of the output where it is flat. Outputs are rounded to their dtype,
            so ``derivative_given_output`` and ``native.gradient`` get these rounded alike.
        parameter_refusal: ``(**parameters)``, why the output does not suffice with these parameters, or None.
        stands_for: torch modules and functions that this row replaces, each with the arguments that select it.
        native: ATen's own kernels for it.
        plain: what to call where nothing is fused; by default the first torch function that the row stands for.
        is_custom: registered by a user: it is traced and compared before it is used, and may be registered again.
        dtype_refusals: by dtype, why outputs of it do not tell the derivative by what ``derivative_given_output`` says.
    """

    name: str
    function: Function
    parameters: Mapping[str, float] = field(default_factory=dict)
    derivative: Function | None = None
    derivative_given_output: Function | FoldedDerivative | Analysis | Literal["fold"] | None = None
    inverse: Function | Literal["fold"] | None = None
    flat_levels: tuple[str, ...] = ()
    parameter_refusal: Callable[..., str | None] | None = None
    stands_for: tuple[tuple[Any, Mapping[str, object]], ...] = ()
    native: Native = Native()
    plain: Function | None = None
    is_custom: bool = False
    dtype_refusals: Mapping[torch.dtype, str] = field(default_factory=dict)

    def bind(self, **parameters: float) -> Activation:
        """The record for these parameters; the same object for the same values."""
        unknown = sorted(parameters.keys() - self.parameters.keys())
        if unknown:
            raise ValueError(
                f"activation {self.name!r} got unknown parameters {unknown}; it takes {sorted(self.parameters)}"
            )
        values = tuple({**self.parameters, **parameters}.values())
        # A trace is guarded by all that it reads, and a cache grows.
        return _bind(self, values) if torch.compiler.is_compiling() else _bound(self, values)


def _bind(row: Row, values: tuple[float, ...]) -> Activation:
    bound = dict(zip(row.parameters, values, strict=True))
    function = functools.partial(row.function, **bound) if bound else row.function
    return Activation(row.name, function, bound, row, needs_tracing=row.is_custom)


#: One object for each set of values, as long as a parameter that changes from step to step has not replaced it.
_bound = functools.lru_cache(1024)(_bind)


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation with its parameters bound: ``Row.bind`` makes them, and ``custom.py`` from a user's function."""

    name: str
    function: Callable[..., Tensor]
    parameters: Mapping[str, float] = field(default_factory=dict)
    row: Row | None = None
    #: Why this function is left to plain PyTorch, or None where it is fused.
    fallback_reason: str | None = None
    #: What ``function`` takes besides z: for each tensor the dimension of z, from the end, along which it runs, or None
    #: for one of a single element.
    operand_dims: tuple[int | None, ...] = ()
    #: A user's function as it is: ``custom.trace_activation`` makes an activation of it for z of a shape and dtype.
    needs_tracing: bool = False
    #: ``function`` is a trace of a user's.
    is_traced: bool = False

    is_identity: bool = field(init=False)
    #: Whether the function turns once, so that an output needs its branch to tell the derivative.
    is_folded: bool = field(init=False)
    #: What a user of plain PyTorch would call: torch's own function where there is one, which saves the least.
    plain: Callable[[Tensor], Tensor] = field(init=False)
    #: Why the derivative cannot be had from the output in any dtype, or None where it can.
    needs_input_reason: str | None = field(init=False)

    def __post_init__(self) -> None:
        # Here and not when first asked for: functools.cached_property takes a lock, which torch.compile cannot trace.
        def set_once(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        stated = None if self.row is None else self.row.derivative_given_output
        set_once("is_identity", self.name == "identity" and self.row is not None and not self.is_traced)
        turns = stated.kind == "folded" if isinstance(stated, Analysis) else isinstance(stated, FoldedDerivative)
        set_once("is_folded", turns or stated == "fold")
        set_once("plain", self._plain())
        set_once("needs_input_reason", self._find_needs_input_reason())

    def _plain(self) -> Callable[[Tensor], Tensor]:
        if self.row is None:
            return self.function
        if self.row.plain is not None:
            return functools.partial(self.row.plain, **self.parameters)
        for target, arguments in self.row.stands_for:
            if not isinstance(target, type):
                keywords = {**arguments, **self.parameters}
                return functools.partial(target, **keywords) if keywords else target
        return self.function

    def _find_needs_input_reason(self) -> str | None:
        if self.row is None:
            if self.operand_dims:
                return f"{self.name} reads tensors that training may change"
            return self.fallback_reason or f"the derivative of {self.name} is not known in terms of its output"
        if self.row.derivative_given_output is None:
            return f"the derivative of {self.name} is not known in terms of its output"
        if isinstance(self.row.derivative_given_output, Analysis) and self.row.derivative_given_output.kind == "input":
            return self.row.derivative_given_output.reason
        return self.row.parameter_refusal(**self.parameters) if self.row.parameter_refusal is not None else None

    def output_refusal(self, dtype: torch.dtype) -> str | None:
        """Why an output of ``dtype`` does not tell the derivative within its rounding floor, or None if it does."""
        stated = None if self.row is None else self.row.derivative_given_output
        is_fitted = self.is_folded or isinstance(stated, Analysis)
        if self.needs_input_reason is None and is_fitted and dtype is torch.float64:
            return f"the fitted derivative of {self.name} is accurate to float32, not to float64"
        if self.needs_input_reason is None and isinstance(stated, Analysis):
            return stated.output_refusal(dtype)
        return self.needs_input_reason or (None if self.row is None else self.row.dtype_refusals.get(dtype))

    def fitted_derivative(
        self, dtype: torch.dtype = torch.float32, *, closest: bool = False
    ) -> FoldedDerivative | MonotoneDerivative | None:
        """The derivative as a fit to outputs of ``dtype``, as closely as they tell it, or as closely as can be.

        None where the row states a formula.
        """
        if self.row is None:
            return None
        stated = self.row.derivative_given_output
        if isinstance(stated, Analysis):
            return stated.derivative(dtype, closest=closest)
        if isinstance(stated, FoldedDerivative):
            return stated
        return _fitted(self.name, torch.float32 if closest else dtype) if stated == "fold" else None

    def folded_derivative(self, dtype: torch.dtype = torch.float32) -> FoldedDerivative | None:
        """The fold, and the derivative on both sides as closely as outputs of ``dtype`` tell it; None without one."""
        fitted = self.fitted_derivative(dtype) if self.is_folded else None
        return fitted if isinstance(fitted, FoldedDerivative) else None

    @property
    def fold(self) -> Fold | None:
        """Where the function turns, if it does."""
        if self.row is None or not self.is_folded:
            return None
        stated = self.row.derivative_given_output
        if isinstance(stated, Analysis):
            return stated.fold
        folded = self.folded_derivative()
        assert folded is not None
        return folded.fold

    def encoded(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """The output for float32 (or wider) ``z`` as it is saved, with the branch in it where there is one."""
        y = self.function(z)
        fold = self.fold
        if fold is None:
            return y
        return branch_bit.encode(y.to(torch.float32), fold.marks(z), dtype, fold.ambiguous, bounded=fold.bounded)

    def derivative_given_output(self, y: Tensor, dtype: torch.dtype, *, differentiable: bool = False) -> Tensor:
        """The derivative from outputs of ``dtype``, upcast to float32 (or float64)."""
        fitted = self.fitted_derivative(dtype)
        if isinstance(fitted, FoldedDerivative):
            marked = branch_bit.decode(y.to(torch.float32), dtype, fitted.fold.ambiguous)
            return fitted.differentiable(y, marked) if differentiable else fitted(y, marked)
        if fitted is not None:
            return fitted.differentiable(y) if differentiable else fitted(y)
        assert self.row is not None
        formula: Any = self.row.derivative_given_output  # fits have been dealt with
        return formula(y, **self.rounded_parameters(dtype))

    @property
    def has_inverse(self) -> bool:
        """Whether the input can be had from the output; how well is for ``inverse.told`` to say."""
        return self.row is not None and self.row.inverse is not None

    def input_given_output(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The input from outputs of ``dtype``, upcast to float32 (or float64)."""
        assert self.row is not None and self.row.inverse is not None
        if self.row.inverse == "fold":
            fitted = _fitted_inverse(self.name)
            return fitted(y, branch_bit.decode(y.to(torch.float32), dtype, fitted.fold.ambiguous))
        return self.row.inverse(y, **self.parameters)

    def fitted_inverse(self) -> FoldedInverse | None:
        """The inverse as a fit, or None where the row states a formula."""
        return _fitted_inverse(self.name) if self.row is not None and self.row.inverse == "fold" else None

    def rounded_parameters(self, dtype: torch.dtype) -> Mapping[str, float]:
        """The parameters as outputs of ``dtype`` show them."""
        if self.row is None or not self.row.flat_levels:
            return self.parameters
        return {k: _rounded(v, dtype) if k in self.row.flat_levels else v for k, v in self.parameters.items()}

    def gradient_function(self, needs: tuple[bool, ...]) -> Callable[..., tuple[Tensor, ...]]:
        """``(dy, z, *operands)`` to dz and, for each operand that needs one, ``dy`` times the derivative by it: all of
        the shape that the arguments have."""

        stated = None if self.row is None else self.row.derivative
        if stated is not None:
            return lambda dy, z: (dy * stated(z, **self.parameters),)

        def function(dy: Tensor, z: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
            def of_wanted(z: Tensor, *wanted: Tensor) -> Tensor:
                given = iter(wanted)
                return self.function(z, *(next(given) if n else p for p, n in zip(operands, needs, strict=True)))

            wanted = [p for p, n in zip(operands, needs, strict=True) if n]
            return torch.func.vjp(of_wanted, z, *wanted)[1](dy)

        return function

    @property
    def depends_on_dtype(self) -> bool:
        """Whether what is computed for, or from, an output depends on its dtype: on a branch bit or a rounded level."""
        if self.row is None:
            return False
        return self.is_folded or bool(self.row.flat_levels) or isinstance(self.row.derivative_given_output, Analysis)

    @property
    def is_fusible(self) -> bool:
        return self.fallback_reason is None and not self.needs_tracing

    @property
    def native(self) -> Native:
        return _NO_KERNELS if self.row is None else self.row.native

    def describe(self, save: str, dtype: torch.dtype) -> str:
        """What a layer keeps for the backward pass, and why, in a few words."""
        assert not self.needs_tracing
        if self.is_identity:
            return "saves nothing"
        if self.fallback_reason is not None:
            return f"not fused: {self.fallback_reason}"
        refused = self.output_refusal(dtype)
        if save == "auto" and refused is not None:
            return f"saves the input: {refused}"
        if save == "output" and refused is not None:
            return f"cannot save the output: {refused}"
        if save in ("auto", "output"):
            return "saves the output (branch in its last bit)" if self.is_folded else "saves the output"
        return "saves the input" if save == "input" else "saves nothing and recomputes"

    def __reduce__(self) -> Any:
        # Rows hold lambdas; a record is found again by its name.
        if self.row is None:
            parts = self.fallback_reason, self.operand_dims, self.needs_tracing, self.is_traced
            return Activation, (self.name, self.function, self.parameters, None, *parts)
        assert not self.is_traced  # nobody holds these but caches
        return _rebind, (self.name, dict(self.parameters))

    def __fx_create_arg__(self, tracer: Any) -> Any:
        # How torch.fx writes it into a graph.
        if self.row is None:
            raise NotImplementedError(f"torch.fx cannot write a call of {self.name} into a graph")
        return tracer.create_node("call_function", _rebind, (self.name, dict(self.parameters)), {})

    def __repr__(self) -> str:
        bound = ", ".join(f"{k}={v:g}" for k, v in self.parameters.items() if v != self.defaults.get(k))
        return f"{self.name}({bound})" if bound else self.name

    @property
    def defaults(self) -> Mapping[str, float]:
        return {} if self.row is None else self.row.parameters


class WithOperands(NamedTuple):
    """An activation, and what it takes besides z: tensors of one element, or of one per channel along ``dim``."""

    activation: Activation
    operands: tuple[Tensor, ...] = ()
    dim: int | None = None


_rows: dict[str, Row] = {}
by_name: dict[str, Activation] = {}
#: What is replaced by which row: with these arguments, and if those are given that have no default.
stand_ins: dict[Any, list[tuple[Row, Mapping[str, object], frozenset[str]]]] = {}


def register(row: Row) -> Row:
    """Add a row to the table; its name and what it stands for become known to ``resolve``."""
    known = _rows.get(row.name)
    if known is not None:
        if not (known.is_custom and row.is_custom and _defined_at(known.function) == _defined_at(row.function)):
            raise ValueError(f"activation {row.name!r} is already registered")
        _forget(known)  # a notebook's cell that is run again
    _rows[row.name] = row
    by_name[row.name] = row.bind()
    for target, arguments in row.stands_for:
        register_stand_in(row.name, target, arguments)
    return row


def _defined_at(function: Function) -> tuple[object, object]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _forget(row: Row) -> None:
    for stands_for in stand_ins.values():
        stands_for[:] = [entry for entry in stands_for if entry[0] is not row]


def register_stand_in(name: str, target: Any, arguments: Mapping[str, object] = MappingProxyType({})) -> None:
    """Let ``resolve`` replace ``target``, if it is called with ``arguments``, by the row of that name."""
    stand_ins.setdefault(target, []).append((_rows[name], arguments, _required(target)))


def _required(target: Any) -> frozenset[str]:
    """The arguments that a function must be given besides the tensor."""
    if not inspect.isfunction(target):  # a module, whose attributes say all, or a builtin with defaults
        return frozenset()
    arguments = list(inspect.signature(target).parameters.values())[1:]
    return frozenset(a.name for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD)


def _rebind(name: str, parameters: Mapping[str, float]) -> Activation:
    return _rows[name].bind(**parameters)


def activations() -> tuple[str, ...]:
    """The names of all registered activations."""
    return tuple(_rows)


def rows() -> tuple[Row, ...]:
    return tuple(_rows.values())


@functools.cache
@in_clean_state
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


@functools.cache
def _fitted(name: str, dtype: torch.dtype) -> FoldedDerivative:
    return fit(_rows[name].function, PRECISIONS[dtype])


@functools.cache
def _fitted_inverse(name: str) -> FoldedInverse:
    return fit_inverse(_rows[name].function)
