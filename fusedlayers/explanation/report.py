"""``explain``: everything the library knows of an activation, measured where it can be measured."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ..activations import Activation, Specialised, resolve
from ..activations.capture import capture
from ..clean import in_clean_state
from ..functional import bias_act, specialised
from ..memory import saved_bytes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Inputs that derivatives are compared on.
COUNT = 1 << 16


@dataclass(frozen=True)
class Accuracy:
    """Errors of the derivative for z ~ N(0, 1), against float64: the norm of the error over that of the derivative, and
    the largest. ``eager`` is PyTorch's own in the same dtype; ``floor`` is what rounding the exact one to it costs."""

    rms: float
    largest: float
    eager_rms: float
    eager_largest: float
    floor_rms: float


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``str()`` is a report, ``plot(path)`` draws it.

    Attributes:
        name: of the activation.
        kind: "monotone", the output tells the derivative; "folded", it does with a branch bit; "needs input", the
            pre-activation is kept; "fallback", plain PyTorch computes it.
        reason: why.
        saves: what a layer keeps, by dtype.
        saved_bytes: kept for each element between two layers, by dtype: (eager, here).
        accuracy: of the derivative, by dtype.
        source: the generated Triton code; empty where there is none.
    """

    name: str
    kind: str
    reason: str
    saves: Mapping[str, str]
    saved_bytes: Mapping[str, tuple[float, float]]
    accuracy: Mapping[str, Accuracy]
    source: str
    curves: Mapping[str, Tensor] = field(repr=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "reason": self.reason,
            "saves": dict(self.saves),
            "saved_bytes": {dtype: {"eager": a, "here": b} for dtype, (a, b) in self.saved_bytes.items()},
            "accuracy": {dtype: vars(accuracy) for dtype, accuracy in self.accuracy.items()},
            "source": self.source,
        }

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the function, its derivative, the derivative as a layer has it, and the error, into a file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .plot import draw

        draw(self, path)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(activation: object) -> Explanation:
    """Say what a layer keeps of an activation, and why; measure what that costs; show the generated code.

    Args:
        activation: as for ``fusedlayers.dense_bias_act``: a name, a module, any callable.

    Raises:
        ValueError, TypeError: as ``fusedlayers.dense_bias_act``, for what is not an activation.

    >>> import torch, fusedlayers as fl
    >>> fl.explain(torch.tanh).kind
    'monotone'
    """
    resolved = resolve(activation, "explain")
    shape = _shape(resolved)
    found = specialised(resolved, shape, torch.float32) if resolved.is_untraced else Specialised(resolved)
    record = found.activation
    kind, reason = _kind(record)
    bytes_, accuracy = {}, {}
    for dtype in DTYPES:
        with contextlib.suppress(Exception):  # a user's function need not work in every dtype
            bytes_[dtype], accuracy[dtype] = _measure(resolved, shape, dtype)
    return Explanation(
        repr(record),
        kind,
        reason,
        {_name(dtype): record.describe("auto", dtype) for dtype in DTYPES},
        {_name(dtype): saved for dtype, saved in bytes_.items()},
        {_name(dtype): errors for dtype, errors in accuracy.items()} if kind != "fallback" else {},
        "" if kind == "fallback" or record.is_identity else _source(record),
        _curves(resolved, record),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(record: Activation) -> tuple[str, str]:
    if record.unfused_because is not None:
        return "fallback", record.unfused_because.partition(" because ")[2]
    if record.is_identity:
        return "monotone", "the derivative is 1"
    refused = record.output_refused_because(torch.float32)
    if refused is not None:
        return "needs input", refused
    if record.fold is None:
        return "monotone", "the output tells the derivative"
    where = {"negative": "negative outputs", "positive": "positive outputs", "both": "all outputs"}
    turn = f"it turns once, at z = {record.fold.position:.6g}"
    return "folded", f"{turn}; {where[record.fold.ambiguous]} carry the branch in their last bit"


# --- measuring --------------------------------------------------------------------------------------------------------


def _shape(record: Activation) -> tuple[int, ...]:
    """A shape that the function takes. Channels are tried as the last dimension, and as the second of four."""
    sizes = {size for tensor in capture(record.function).tensors for size in tensor.shape if size > 1}
    for channels in sorted(sizes, reverse=True):
        for shape in ((-(-COUNT // channels), channels), (8, channels, 8, -(-COUNT // (64 * channels)))):
            with contextlib.suppress(Exception):
                if record.function(torch.zeros(shape)).shape == shape and _is_fused(record, shape):
                    return shape
    return (COUNT // 64, 64)


def _is_fused(record: Activation, shape: tuple[int, ...]) -> bool:
    return not record.is_untraced or specialised(record, shape, torch.float32).activation.is_fusible


def _in_dtype(record: Activation, dtype: torch.dtype) -> tuple[Callable[..., Tensor], object]:
    """The function as PyTorch computes it, and what to hand to a layer; what it reads, in this dtype."""
    if not record.is_untraced or record.row is not None:
        return record.plain, record
    captured = capture(record.function)
    function = captured.on(
        [t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype) for t in captured.tensors]
    )
    return function, function


@in_clean_state
def _measure(record: Activation, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[float, float], Accuracy]:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    function, activation = _in_dtype(record, dtype)
    exact = _derivative(_in_dtype(record, torch.float64)[0], z.double())
    scale = float(exact.norm()) or 1.0

    fused = functools.partial(_applied, activation)

    def errors(slope: Tensor) -> tuple[float, float]:
        error = slope.double() - exact
        return float(error.norm()) / scale, float(error.abs().max())

    here, eager, floor = (errors(s) for s in (_derivative(fused, z), _derivative(function, z), exact.to(dtype)))
    kept = tuple(_kept_bytes(f, z, dtype) / z.numel() for f in (function, fused))
    return (kept[0], kept[1]), Accuracy(*here, *eager, floor[0])


def _applied(activation: object, z: Tensor) -> Tensor:
    return bias_act(z, None, activation)


def _derivative(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(function(z), z, torch.ones_like(z))[0]


def _kept_bytes(function: Callable[[Tensor], Tensor], z: Tensor, dtype: torch.dtype) -> int:
    """Between an operation that keeps nothing, as a matmul does not keep its result, and one that keeps its input."""
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    return saved_bytes(lambda z: function(z + 1) * weight, z.clone().requires_grad_(), exclude=[weight])


@in_clean_state
def _curves(resolved: Activation, record: Activation) -> Mapping[str, Tensor]:
    """What ``plot`` draws: over z the function, its derivative, and that as a layer has it in float32 and bfloat16."""
    z = torch.linspace(-6, 6, 4096).reshape(64, 64)
    curves = {"z": z.flatten()}
    with contextlib.suppress(Exception):  # where the function takes no such shape there is nothing to draw
        function = _in_dtype(resolved, torch.float64)[0]
        curves["y"] = function(z.double()).detach().flatten()
        curves["derivative"] = _derivative(function, z.double()).flatten()
        for dtype in (torch.float32, torch.bfloat16):
            activation = _in_dtype(resolved, dtype)[1]
            exact = _derivative(function, z.to(dtype).double())
            slope = _derivative(functools.partial(_applied, activation), z.to(dtype)).double()
            curves[f"{_name(dtype)} derivative"] = slope.flatten()
            curves[f"{_name(dtype)} error"] = (slope - exact).abs().flatten()
    return curves


def _source(record: Activation) -> str:
    if importlib.util.find_spec("triton") is None:
        return "# Triton is not installed; torch operations do the work."
    from ..activations.trace import NotPointwise
    from ..backends.triton.codegen import source

    given = "input" if record.output_refused_because(torch.float32) is not None else "output"
    needs = (True,) * len(record.operand_dims)
    try:
        parts = [
            source(record, "forward", given=given, dtype=torch.float32),
            source(record, "gradient", given=given, dtype=torch.float32, needs=needs),
        ]
    except NotPointwise as reason:
        return f"# On GPUs it is left to torch operations: {reason}."
    return "\n\n".join(parts)


# --- printing ---------------------------------------------------------------------------------------------------------


def _lines(found: Explanation) -> Iterator[str]:
    yield f"{found.name}: {found.kind}"
    yield f"  because {found.reason}"
    yield ""
    yield f"  {'':<10}{'saved bytes per element':<26}{'derivative, rms error':<36}{'largest error':<22}"
    yield f"  {'':<10}{'eager':<8}{'here':<18}{'eager':<12}{'here':<12}{'rounding':<12}{'eager':<12}{'here':<12}"
    for dtype, (eager, here) in found.saved_bytes.items():
        cells = f"{eager:<8.3g}{here:<18.3g}"
        if (errors := found.accuracy.get(dtype)) is not None:
            rms = (errors.eager_rms, errors.rms, errors.floor_rms, errors.eager_largest, errors.largest)
            cells += "".join(f"{value:<12.1e}" for value in rms)
        yield f"  {dtype:<10}{cells}".rstrip()
    yield ""
    for saves in dict.fromkeys(found.saves.values()):
        dtypes = [dtype for dtype, said in found.saves.items() if said == saves]
        yield f"  {', '.join(dtypes)}: {saves}"
    if found.source:
        yield ""
        yield found.source.rstrip()
