"""The activation record: one object answers every question about an activation.

``Definition`` is a row of the table (``table.py``): a function with parameters. ``Activation`` is a row with its
parameters bound, or a user's function. Autograd, the backends, the reports and the tests use only ``Activation``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..derivative import branch_bit
from ..derivative.analysis import Analysis
from ..derivative.features import Fold
from ..derivative.folded import FoldedDerivative, FoldedInverse, fit, fit_inverse
from ..derivative.input_of import input_of
from ..derivative.monotone import MonotoneDerivative
from ..derivative.polynomial import PRECISIONS
from ..utils.caching import in_clean_state

Function = Callable[..., Tensor]
Saved = Literal["nothing", "output", "input", "recompute"]

#: The floating dtypes that the layers accept.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Why nothing is fused in float64: whoever computes in it wants PyTorch's exact gradients.
FLOAT64_IS_TORCHS = "float64 is computed by PyTorch"
#: Activations of which PyTorch saves the output too.
KEPT_BY_TORCH = frozenset({"relu", "tanh", "sigmoid"})


def upcast(tensor: Tensor) -> Tensor:
    """``tensor`` in float32 (float64 stays): the dtype that activations are computed in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class Native:
    """Kernels that compute the row's function and gradient in one vectorised pass: ATen's, which only eager mode uses,
    and the package's own for CPUs.

    Attributes:
        activate_: ``activate_(z, **parameters)`` overwrites z with the output.
        gradient: the operator that computes ``dy * f'``, and a function of ``(dy, y, **parameters)`` that returns the
            operator's arguments.
        gradient_given_input: ``gradient_given_input(dy, z, **parameters)`` computes ``dy * f'`` from the input.
        loop: the function of the compiled loops for CPUs, and its parameter: a number, or the name of the row's
            parameter.
        is_piecewise: the function is a polynomial in pieces. To compute it takes less time than to look it up.
    """

    activate_: Function | None = None
    gradient: tuple[Any, Callable[..., tuple[Any, ...]]] | None = None
    gradient_given_input: Function | None = None
    loop: tuple[str, float | str] | None = None
    is_piecewise: bool = False


@dataclass(frozen=True, eq=False)
class Definition:
    """A row of the table.

    Attributes:
        name: the name that a user passes.
        function: ``function(z, **parameters)`` in torch operations, the single source of the mathematics.
        parameters: names and defaults.
        derivative_given_output: ``(y, **parameters)``, the derivative in terms of the output. "fold" asks for fits of
            the derivative and of the inverse on both branches; a ``FoldedDerivative`` states both branches; an
            ``Analysis`` (of a function without parameters) holds what was found. None: backward needs the input.
        inverse: ``inverse(y, **parameters)``, the input in terms of the output. None where different inputs have the
            same output, or the inverse is fitted.
        flat_levels: the parameters that are outputs of a flat part. Outputs are rounded to their dtype, so
            ``derivative_given_output`` and ``native.gradient`` receive these parameters rounded in the same way.
        parameter_refusal: ``(**parameters)``, why backward needs the input with these parameters, or None.
        stands_for: the torch modules and functions that this row replaces, each with the arguments that select it.
        native: ATen's kernels for it.
        plain: what to call where nothing is fused. Default: the first torch function in ``stands_for``.
        also_called: other names that people know it by.
    """

    name: str
    function: Function
    parameters: Mapping[str, float] = field(default_factory=dict)
    derivative_given_output: Function | FoldedDerivative | Analysis | Literal["fold"] | None = None
    inverse: Function | None = None
    flat_levels: tuple[str, ...] = ()
    parameter_refusal: Callable[..., str | None] | None = None
    stands_for: tuple[tuple[Any, Mapping[str, object]], ...] = ()
    native: Native = Native()
    plain: Function | None = None
    also_called: tuple[str, ...] = ()

    def bind(self, **parameters: float) -> Activation:
        """The activation with these parameters: the same object for the same values.

        Raises:
            ValueError: a parameter that the row does not have.
        """
        unknown = sorted(parameters.keys() - self.parameters.keys())
        if unknown:
            raise ValueError(
                f"activation {self.name!r} got unknown parameters {unknown}; it takes {sorted(self.parameters)}"
            )
        values = tuple({**self.parameters, **parameters}.values())
        # Dynamo guards everything that a trace reads, and this cache changes.
        return _bind(self, values) if torch.compiler.is_compiling() else _bound(self, values)


#: Answers for a callable without a definition: nothing is stated, nothing is native.
_NO_DEFINITION = Definition("", torch.clone)


def _bind(definition: Definition, values: tuple[float, ...]) -> Activation:
    bound = dict(zip(definition.parameters, values, strict=True))
    function = functools.partial(definition.function, **bound) if bound else definition.function
    return Activation(definition.name, function, bound, definition)


#: The cache is bounded because a parameter may change at every step.
_bound = functools.lru_cache(1024)(_bind)


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation with its parameters bound: made by ``Definition.bind``, or by ``custom.py`` from a user's function.

    Attributes:
        name: for messages; unique only among rows of the table.
        function: ``function(z, *operands) -> y``.
        parameters: the numbers that are bound.
        definition: the row of the table, or the like of a traced function; None for a callable that is not traced.
        fallback_reason: why the function is left to plain PyTorch, or None where it is fused.
        operand_dims: for each operand the dimension of z, counted from the end, along which it runs; None for an
            operand of one element.
        needs_tracing: ``function`` is a user's callable. ``custom.trace_activation`` makes an activation of it for a
            shape and dtype of z.
        is_traced: ``function`` is the trace of a user's callable.
        torch_keeps_less: its output does not determine its derivative, and PyTorch keeps less for it than its input
            and its output, as of ``torch.exp``.
        told: ``told(y, *operands)``, the derivative and the input, if a function that reads tensors states them.
        is_identity: y = z.
        is_folded: the function has a fold, so the saved output carries a branch bit.
        plain: ``plain(z)``, what a user of PyTorch would call: torch's own function where there is one, which saves the
            least.
        needs_input_reason: why no output of any dtype determines the derivative, or None.
    """

    name: str
    function: Callable[..., Tensor]
    parameters: Mapping[str, float] = field(default_factory=dict)
    definition: Definition | None = None
    fallback_reason: str | None = None
    operand_dims: tuple[int | None, ...] = ()
    needs_tracing: bool = False
    is_traced: bool = False
    torch_keeps_less: bool = False
    told: Any = None

    is_identity: bool = field(init=False)
    is_folded: bool = field(init=False)
    plain: Callable[[Tensor], Tensor] = field(init=False)
    needs_input_reason: str | None = field(init=False)
    _definition: Definition = field(init=False)

    def __post_init__(self) -> None:
        # Computed here because functools.cached_property takes a lock, which torch.compile cannot trace.
        def set_once(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_once("_definition", _NO_DEFINITION if self.definition is None else self.definition)
        stated = self._definition.derivative_given_output
        set_once("is_identity", self.name == "identity" and self.definition is not None and not self.is_traced)
        turns = stated.kind == "folded" if isinstance(stated, Analysis) else isinstance(stated, FoldedDerivative)
        set_once("is_folded", turns or stated == "fold")
        set_once("plain", self._plain())
        set_once("needs_input_reason", self._find_needs_input_reason())

    def _plain(self) -> Callable[[Tensor], Tensor]:
        if self._definition.plain is not None:
            return functools.partial(self._definition.plain, **self.parameters)
        for target, arguments in self._definition.stands_for:
            if not isinstance(target, type):
                keywords = {**arguments, **self.parameters}
                return functools.partial(target, **keywords) if keywords else target
        return self.function

    def _find_needs_input_reason(self) -> str | None:
        stated, refusal = self._definition.derivative_given_output, self._definition.parameter_refusal
        if self.told is not None:
            return None
        if self.operand_dims:
            changes = "reads tensors that training may change, so that no formula of the output stays right"
            return f"{self.name} {changes} (constants can be Python numbers)"
        if stated is None:
            return self.fallback_reason or f"the derivative of {self.name} is not known in terms of its output"
        if isinstance(stated, Analysis) and stated.kind == "input":
            return stated.reason
        return None if refusal is None else refusal(**self.parameters)

    def output_refusal(self, dtype: torch.dtype) -> str | None:
        """Why outputs of ``dtype`` do not determine the derivative (to three times GELU's error), or None."""
        if dtype is torch.float64:
            return FLOAT64_IS_TORCHS
        if self.needs_input_reason is not None:
            return self.needs_input_reason
        stated = self._definition.derivative_given_output
        return stated.output_refusal(dtype) if isinstance(stated, Analysis) else None

    def fitted_derivative(
        self, dtype: torch.dtype = torch.float32, *, closest: bool = False
    ) -> FoldedDerivative | MonotoneDerivative | None:
        """The fit of the derivative for outputs of ``dtype``, or None where the row states a formula.

        The fit is as accurate as these outputs allow. ``closest`` asks for the most accurate fit there is.
        """
        stated = self._definition.derivative_given_output
        if isinstance(stated, Analysis):
            return stated.derivative(dtype, closest=closest)
        if isinstance(stated, FoldedDerivative):
            return stated
        return _fitted(self._definition.function, torch.float32 if closest else dtype) if stated == "fold" else None

    @property
    def fold(self) -> Fold | None:
        """The fold, or None without one."""
        stated = self._definition.derivative_given_output
        if isinstance(stated, Analysis):
            return stated.fold
        fitted = self.fitted_derivative() if self.is_folded else None
        return fitted.fold if isinstance(fitted, FoldedDerivative) else None

    def encoded(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """The output for float32 (or wider) ``z`` as it is saved: with the branch bit of a folded activation."""
        y = self.function(z)
        fold = self.fold
        if fold is None:
            return y
        return branch_bit.encode(y.to(torch.float32), fold.marks(z), dtype)

    def marked(self, y: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Whether upcast outputs of ``dtype`` carry the branch bit; None without a fold."""
        fold = self.fold
        return None if fold is None else branch_bit.decode(y.to(torch.float32), dtype)

    def derivative_given_output(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The derivative at outputs of ``dtype`` that are upcast to float32 (or float64)."""
        fitted = self.fitted_derivative(dtype)
        if fitted is not None:
            return fitted(y, self.marked(y, dtype))
        formula: Any = self._definition.derivative_given_output
        slope: Tensor = formula(y, **self.rounded_parameters(dtype))
        return slope

    @property
    def has_inverse(self) -> bool:
        """Whether the output determines the input, by a formula or a fit."""
        return self._definition.inverse is not None or self._definition.derivative_given_output == "fold"

    def input_given_output(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The input for outputs of ``dtype`` that are upcast to float32 (or float64). Where the row states no inverse,
        the derivative is fitted."""
        if self._definition.inverse is not None:
            return self._definition.inverse(y, **self.parameters)
        fitted, marked = self.fitted_inverse(), self.marked(y, dtype)
        if fitted is not None and marked is not None:
            return fitted(y, marked)
        return input_of(self.function, y, self.fold, marked)

    def fitted_inverse(self) -> FoldedInverse | None:
        """The fit of the inverse, or None without one."""
        function, stated = self._definition.function, self._definition.derivative_given_output
        return _fitted_inverse(function) if stated == "fold" else None

    def rounded_parameters(self, dtype: torch.dtype) -> Mapping[str, float]:
        """The parameters, those in ``flat_levels`` rounded to ``dtype``."""
        levels = self._definition.flat_levels
        return {k: _rounded(v, dtype) if k in levels else v for k, v in self.parameters.items()}

    def gradient_function(self, needs: tuple[bool, ...], given: str = "input") -> Callable[..., tuple[Tensor, ...]]:
        """A function from ``(dy, z, *operands)`` to dz and, for each operand with a true entry in ``needs``, ``dy``
        times the derivative by that operand; with ``given="output"`` from ``(dy, y, *operands)``. All results have the
        arguments' common shape."""

        def function(dy: Tensor, z: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
            slope, z = self.told(z, *operands) if given == "output" else (None, z)

            def of_wanted(z: Tensor, *wanted: Tensor) -> Tensor:
                rest = iter(wanted)
                return self.function(z, *(next(rest) if n else p for p, n in zip(operands, needs, strict=True)))

            wanted = [p for p, n in zip(operands, needs, strict=True) if n]
            dz, *gradients = torch.func.vjp(of_wanted, z, *wanted)[1](dy)
            return dz if slope is None else dy * slope, *gradients

        return function

    @property
    def is_fusible(self) -> bool:
        return self.fallback_reason is None and not self.needs_tracing

    @property
    def native(self) -> Native:
        return self._definition.native

    def __reduce__(self) -> Any:
        # Rows hold lambdas, which cannot be pickled: an activation is looked up by its name.
        if self.definition is None:
            parts = self.fallback_reason, self.operand_dims, self.needs_tracing, self.is_traced, self.torch_keeps_less
            return Activation, (self.name, self.function, self.parameters, None, *parts)
        assert not self.is_traced  # only caches hold these
        return _rebind, (self.name, dict(self.parameters))

    def __fx_create_arg__(self, tracer: Any) -> Any:
        # torch.fx writes an argument of a call into a graph by this.
        if self.definition is None:
            raise NotImplementedError(f"torch.fx cannot write a call of {self.name} into a graph")
        return tracer.create_node("call_function", _rebind, (self.name, dict(self.parameters)), {})

    def __repr__(self) -> str:
        bound = ", ".join(f"{k}={v:g}" for k, v in self.parameters.items() if v != self._definition.parameters.get(k))
        return f"{self.name}({bound})" if bound else self.name


def _rebind(name: str, parameters: Mapping[str, float]) -> Activation:
    from .table import bound  # which is made of definitions

    return bound(name, parameters)


class WithOperands(NamedTuple):
    """An activation and its operands: tensors of one element, or of one element per channel along ``dim`` of z."""

    activation: Activation
    operands: tuple[Tensor, ...] = ()
    dim: int | None = None


@functools.cache
@in_clean_state
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


@functools.cache
def _fitted(function: Function, dtype: torch.dtype) -> FoldedDerivative:
    return fit(function, PRECISIONS[dtype])


_fitted_inverse = functools.cache(fit_inverse)
