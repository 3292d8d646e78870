"""Modules that spell an activation or an RMS norm out in plain operations, as the models of transformers do.

Such a module has no children, and its free variables (``free_variables.py``) say what its code reads. An activation is
traced, for the shape that the example gives it: parameters may run along one of its dimensions (channels). The forward
pass of a norm is followed: it may call nothing but arithmetic, change nothing that it reads, and must compute a norm,
and the gradients of one. At each call the free variables are found anew: a module that reads something else by then, or
whose class was given another forward pass, is looked at again. One that is not recognised runs as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import autocast_is_active
from ..activations import DTYPES, Activation
from ..activations.free_variables import FreeVariables, find_variables
from ..backends.operations import Pointwise
from ..call import followed_by, plan_for, with_operands
from ..execute import POINTWISE
from ..norms import rms_norm
from ..utils.bounded_cache import BoundedCache
from ..utils.isolation import in_clean_state
from ..utils.layout import of_rows
from ..validation import are_usual, is_autocast

#: What a module is tried on where nobody says what it is given: no parameter of several numbers fits.
_ANY_SHAPE = (2, 6)
_ALONE = Pointwise(-1)


class SpelledNorm(NamedTuple):
    """An RMS norm over the last dimension, by the options of ``fusedlayers.rms_norm``."""

    eps: float
    weight_offset: float
    rounds_first: bool

    def __call__(self, x: Tensor, weight: Tensor | None, save: str = "auto") -> Tensor:
        return rms_norm(
            x,
            x.shape[-1],
            weight,
            self.eps,
            weight_offset=self.weight_offset if weight is not None else 0.0,
            rounds_first=self.rounds_first,
            save=save,
        )


class StandIn(NamedTuple):
    """What a module was recognised as: "activation" or "rms_norm", and a name for people."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
        """What the module computes, or None where its own code is to run."""
        if len(args) != 1 or kwargs or type(args[0]) is not Tensor or args[0].dtype not in DTYPES or followed_by():
            return None
        (x,) = args
        if self.kind == "activation":
            return _activated(x, _activation(module))
        if x.dtype is not torch.float32 and autocast_is_active() and is_autocast(x.device.type):
            return None  # autocast computes what a norm calls in float32, and returns that
        variables = find_variables(_twin(module))
        norm = _norm(variables, x.dtype)
        if norm is None:
            return None
        weight = next(iter(variables.tensors), None)
        return of_rows(lambda rows: norm(rows, weight), x)


def recognise(module: nn.Module, dtype: torch.dtype, shape: Sequence[int] = _ANY_SHAPE) -> StandIn | None:
    """What a module without children computes of inputs of a shape, if that is an activation or an RMS norm."""
    if not _may_be_recognised(module):
        return None
    variables = find_variables(_twin(module))
    if variables.refusal is None and _norm(variables, dtype) is not None:
        return StandIn("rms_norm", "rms_norm")
    found = computed_by(_activation(module), dtype, shape)
    return None if found is None or found.writes_argument else StandIn("activation", found.name)


def _activated(x: Tensor, activation: Activation) -> Tensor | None:
    """``bias_act`` of x alone, or None where the module's own code is to run: where PyTorch computes it, because it may
    do more than it returns (count its calls), and where it writes over x."""
    if not are_usual((x,), ()):
        return None
    shapes = _ALONE, x.dim()
    plan, traced, operands = plan_for(_ALONE, x, None, None, None, activation, "auto", shapes, x.numel())
    if plan.path == "composite" or traced.writes_argument:
        return None
    return POINTWISE[plan.path](plan, _ALONE, x, None, None, None, traced, operands)


def computed_by(activation: Activation, dtype: torch.dtype, shape: Sequence[int]) -> Activation | None:
    """What a function computes, if that is an activation that bends."""
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import without_logging

    with without_logging():  # what is no activation is not worth a word
        found, operands, _ = with_operands(activation, shape, dtype)
        is_one = found.is_fusible and not found.is_identity and not _is_straight(found, operands)
    return found if is_one else None


def _may_be_recognised(module: nn.Module) -> bool:
    kind = type(module)
    is_plain = not any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers.")) and "forward" not in vars(module)
    tensors = (*module.parameters(), *module.buffers())
    return is_plain and is_users and all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in tensors)


_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}


def _twin(module: nn.Module) -> Any:
    """The module as it would be without its region, and without hooks: who calls the module runs these."""
    twin: Any = object.__new__(type(module))
    twin.__dict__ = {**vars(module), **_NO_HOOKS}
    for name in ("forward", "extra_repr", "__prepare_scriptable__"):
        twin.__dict__.pop(name, None)
    return twin


def _activation(module: nn.Module) -> Activation:
    return Activation(type(module).__name__, _twin(module), needs_tracing=True)


def _is_straight(activation: Activation, operands: tuple[Tensor, ...]) -> bool:
    """Whether it does no more than to scale and to shift, of which PyTorch keeps no input either."""
    size = max((p.numel() for p in operands), default=1)
    z = torch.linspace(-4, 4, 9, dtype=torch.float64, device="cpu").unsqueeze(1).expand(9, size)
    y = activation.function(z, *(p.detach().to("cpu", torch.float64).flatten() for p in operands))
    bends = y[2:] - 2 * y[1:-1] + y[:-2]
    return bool((bends.abs() <= 1e-9 * y.abs().max()).all())


# --- RMS norms --------------------------------------------------------------------------------------------------------

#: By what a module reads, and the dtype of its input.
_norms: BoundedCache[SpelledNorm | bool] = BoundedCache(256)
_COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


def _norm(variables: FreeVariables, dtype: torch.dtype) -> SpelledNorm | None:
    if variables.refusal is not None or len(variables.tensors) > 1 or any(t.dim() != 1 for t in variables.tensors):
        return None
    key: Hashable = variables.key, dtype
    found = _norms.get(key)
    if found is None:
        found = _norms.put(key, _recognised(variables, dtype) or False)
    return found or None  # type: ignore[return-value]  # True is never put


@in_clean_state
def _recognised(variables: FreeVariables, dtype: torch.dtype) -> SpelledNorm | None:
    """The norm with which a module agrees, to the last bit but for sums that are rounded in another order."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(t.shape, generator=generator).add_(0.5).to(t.dtype) for t in variables.tensors]
    # A number of dimensions, or of columns where no weight says it, may be in the code.
    widths = [weights[0].numel()] * 3 if weights else [64, 40, 72]
    shapes = {1.0: (2, 3, widths[0]), 1e-3: (6, widths[1]), 30.0: (1, 2, 3, widths[2])}
    made = [scale * torch.randn(shape, generator=generator) for scale, shape in shapes.items()]
    inputs = [x.to(dtype).requires_grad_() for x in made]
    sources = [*inputs, *(w.requires_grad_() for w in weights)]
    module = variables.rebind(weights)
    try:
        before, followed = find_variables(module).key, _Followed()
        with followed:
            expected = [module(x) for x in inputs]
        if not followed.is_arithmetic or find_variables(module).key != before:
            return None
        if any(
            not isinstance(y, Tensor) or y.shape != x.shape or y.dtype is not dtype
            for x, y in zip(inputs, expected, strict=True)
        ):
            return None
        gradients = torch.autograd.grad([y.square().sum() for y in expected], sources)
    except Exception:  # whatever code does with what it is not made for
        return None
    for norm in _candidates(module):
        found = [norm(x, next(iter(weights), None), save="input") for x in inputs]
        if all(_agree(*pair) for pair in zip(found, expected, strict=True)):
            ours = torch.autograd.grad([y.square().sum() for y in found], sources)
            is_same = all(_are_alike(*pair) for pair in zip(ours, gradients, strict=True))
            return norm if is_same else None
    return None


#: What the forward pass of a norm may call, by name.
_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "multiply", "divide", "true_divide", "pow", "square", "sqrt", "rsqrt"),
        *("__rdiv__", "__rpow__", "__rsub__", "reciprocal", "mean", "sum", "norm", "vector_norm"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
    }
)


class _Followed(TorchFunctionMode):
    """Meets what code calls of PyTorch."""

    is_arithmetic = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_known = getattr(func, "__name__", "") in _ARITHMETIC or func == Tensor.dtype.__get__  # type: ignore[attr-defined]
        if not (is_known and torch.is_grad_enabled()):
            self.is_arithmetic = False
        return func(*args, **(kwargs or {}))


def _candidates(module: Any) -> Iterator[SpelledNorm]:
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    for eps, offset, rounds_first in itertools.product((*numbers, *_COMMON_EPS), (0.0, 1.0), (True, False)):
        yield SpelledNorm(eps, offset, rounds_first)


def _agree(found: Tensor, expected: Tensor) -> bool:
    unit = torch.finfo(found.dtype).eps
    difference = (found.double() - expected.double()).abs()
    is_near = bool((difference <= 2 * unit * expected.double().abs()).all())
    # In 16 bits another order of roundings shows in every third number.
    return is_near and (found.dtype.itemsize > 2 or float((difference > 0).double().mean()) < 0.02)


def _are_alike(found: Tensor, expected: Tensor) -> bool:
    """Gradients: whether they differ by roundings alone."""
    return bool((found - expected).double().norm() <= 0.02 * expected.double().norm())
