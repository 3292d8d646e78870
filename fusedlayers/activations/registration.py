"""``fusedlayers.activation``: a decorator that gives a user's function a name and, optionally, its derivative in terms
of the output, which is compared with autograd's before it is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ..utils.caching import in_clean_state
from ..utils.formatting import described
from .record import Function, Row
from .table import register

F = TypeVar("F", bound=Callable[..., Tensor])


@overload
def activation(function: F) -> F: ...


@overload
def activation(*, derivative_given_output: Function | None = None, name: str | None = None) -> Callable[[F], F]: ...


def activation(
    function: Any = None, *, derivative_given_output: Function | None = None, name: str | None = None
) -> Any:
    """Register a function of tensors as an activation, under its name and as itself.

    Args:
        function: ``function(z, **parameters) -> y``, pointwise, in torch operations; y has z's shape and dtype.
            Parameters are numbers with defaults. (Trainable parameters belong in a module: any module can be passed to
            a layer as it is.)
        derivative_given_output: ``derivative_given_output(y, **parameters)``, the derivative in terms of the output. A
            layer then saves only the output. Without it the library finds out whether the output suffices.
        name: the name of the activation; by default the function's.

    Returns:
        the function itself; or a decorator, if called with options only.

    Raises:
        TypeError: not a function of a tensor, no name, or a parameter without a number as default.
        ValueError: a name that is taken, or a wrong derivative; the message has a counterexample.

    >>> import torch, fusedlayers as fl
    >>> @fl.activation(derivative_given_output=lambda y: 1 - y.abs())
    ... def two_sided_decay(z):
    ...     return torch.sign(z) * -torch.expm1(-z.abs())
    >>> fl.bias_act(torch.tensor([0.0, 1.0]), None, "two_sided_decay")
    tensor([0.0000, 0.6321])
    """
    if function is None:
        return lambda function: _register(function, derivative_given_output, name)
    return _register(function, derivative_given_output, name)


def _register(function: F, stated: Function | None, name: str | None) -> F:
    if isinstance(function, nn.Module) or not callable(function):
        hint = "; a module needs no name, pass it to a layer as it is" if isinstance(function, nn.Module) else ""
        hint = f"; write @activation(name={function!r})" if isinstance(function, str) else hint
        raise TypeError(f"activation: expected a function, got {type(function).__name__}{hint}")
    if stated is not None and not callable(stated):
        raise TypeError(f"activation: derivative_given_output must be a function, got {described(stated)}")
    name = str(name or getattr(function, "__name__", _LAMBDA))
    if name == _LAMBDA:
        raise TypeError("activation: the function has no name of its own; pass name=")
    numbers = _numeric_parameters(function)
    row = Row(name, function, numbers, stated, stands_for=((function, {}),), plain=function, is_custom=True)
    wrong = find_counterexample(row, row.parameters)
    if wrong is not None:
        raise ValueError(f"activation: {wrong}")
    register(row)
    return function


_LAMBDA = "<lambda>"


def _numeric_parameters(function: Callable[..., Any]) -> Mapping[str, float]:
    try:
        arguments = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin function without a signature
        return {}
    if not arguments:
        raise TypeError(f"activation: {function.__name__} takes no argument, and must take a tensor")
    parameters = arguments[1:]
    for parameter in parameters:
        if not isinstance(parameter.default, (int, float)):
            raise TypeError(
                f"activation: parameter {parameter.name!r} of {function.__name__} must have a number as default; "
                "pass tensors through functools.partial or an nn.Module instead of registering the function"
            )
    return {parameter.name: parameter.default for parameter in parameters}


#: Where a stated derivative is compared with autograd's, and the tolerances. The rounding of y to float64 leaves less
#: uncertain than these, even where f is flat.
_REACH = 12.0
_COUNT = 24_001
_RTOL, _ATOL = 1e-6, 1e-7
#: A stated derivative is refused for a dtype if at outputs rounded to it the error exceeds ``_FAR_OFF`` times the
#: steepest slope for more than the part ``_FEW`` of z ~ N(0, 1). (Near a kink it always does for some.)
_FAR_OFF, _FEW = 0.05, 0.01


@in_clean_state
def find_inaccurate_dtypes(row: Row, parameters: Mapping[str, float]) -> dict[torch.dtype, str]:
    """By dtype, why a correct derivative is too inaccurate at rounded outputs: large outputs leave few digits for z."""
    stated: Any = row.derivative_given_output
    z = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, true = _value_and_slope(row, parameters, z)
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        off = (stated(y.to(dtype).to(torch.float32), **parameters) - true).abs()
        share = float((off > _FAR_OFF * true.abs().max()).double().mean())
        if share > _FEW:
            found[dtype] = f"told outputs in {dtype} the stated derivative is far off for {share:.0%} of z ~ N(0, 1)"
    return found


@in_clean_state
def find_counterexample(row: Row, parameters: Mapping[str, float]) -> str | None:
    """A counterexample to a stated derivative, or None."""
    stated: Any = row.derivative_given_output
    if stated is None:
        return None
    # The shift keeps the numbers off the round ones where kinks are.
    near = torch.linspace(-_REACH, _REACH, _COUNT, dtype=torch.float64) + math.pi * 1e-4
    far = torch.logspace(math.log10(_REACH), 30, 400, dtype=torch.float64)
    z = torch.cat([near, far, -far])
    y, true = _value_and_slope(row, parameters, z)
    claimed = stated(y, **parameters)
    if not isinstance(claimed, Tensor) or claimed.shape != z.shape:
        got = tuple(claimed.shape) if isinstance(claimed, Tensor) else repr(claimed)
        return f"derivative_given_output of {row.name!r} must return a tensor of its argument's shape, got {got}"
    wrong = ~torch.isclose(claimed.to(z.dtype), true, rtol=_RTOL, atol=_ATOL, equal_nan=True)
    if not bool(wrong.any()):
        return None
    at = int(wrong.nonzero()[(z[wrong].abs()).argmin()])
    given = "".join(f", {name} = {value:g}" for name, value in parameters.items())
    return (
        f"derivative_given_output of {row.name!r} is wrong: at z = {float(z[at]):.6g}{given}, where f(z) = "
        f"{float(y[at]):.6g}, it gives {float(claimed[at]):.6g}, but the derivative is {float(true[at]):.6g}"
    )


def _value_and_slope(row: Row, parameters: Mapping[str, float], z: Tensor) -> tuple[Tensor, Tensor]:
    """The function's values at z and autograd's derivatives."""
    z = z.detach().requires_grad_()
    y = row.function(z, **parameters)
    return y.detach(), torch.autograd.grad(y.sum(), z)[0] if y.requires_grad else torch.zeros_like(z)
