"""``explain``: the values that an activation, a layer or a model saves, why, and the errors of the derivative, measured
on the CPU."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..activations import Activation, resolve
from ..activations.free_variables import find_variables
from ..calls.decide import describe
from ..calls.sizes import SMALL_BYTES
from ..calls.tracers import with_operands
from ..derivative.features import value_and_slope
from ..functional import bias_act
from ..memory import saved_bytes
from ..nn.layer import CONV_TYPES, LINEAR_TYPES, WithActivation
from ..nn.mlp import FusedBlock, FusedGatedMLP
from ..recipes.patch import patch_of, patches_of
from ..utils.caching import in_clean_state
from ..utils.formatting import counted_lines, path_text
from ..utils.report import Report

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEADER = ("", "a layer keeps", "bytes: eager", "here", "rms error: eager", "here", "largest: eager", "here")
#: Inputs that derivatives are compared on: fewer of 16 bits would be left to PyTorch.
COUNT = SMALL_BYTES // 2


@dataclass(frozen=True)
class Explanation(Report):
    """The report on an activation or a layer. ``str()`` is a table.

    Attributes:
        name: of the activation.
        kind: "monotone", the output determines the derivative; "folded", it does with a branch bit; "needs input", the
            pre-activation is kept; "fallback", plain PyTorch computes it.
        reason: why.
        saves: the values that a layer keeps, by dtype.
        saved_bytes: kept for each element between two layers, by dtype: (eager, here).
        accuracy: of the derivative, by dtype.
        layer: the layer's or block's own description; empty for an activation.
    """

    name: str
    kind: str
    reason: str
    saves: Mapping[str, str]
    saved_bytes: Mapping[str, tuple[float, float]]
    accuracy: Mapping[str, Accuracy]
    layer: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.layer:
            yield self.layer
        yield f"{self.name}: {self.kind}"
        yield f"  {self.reason}"
        if not self.saved_bytes:
            yield "  nothing is measured: it raises an error, or it returns no tensor of its argument's shape"
            return
        rows: list[tuple[str, ...]] = [_HEADER if self.accuracy else _HEADER[:4]]
        for dtype, sizes in self.saved_bytes.items():
            of = self.accuracy.get(dtype)
            errors = (of.eager_rms, of.rms, of.eager_largest, of.largest) if of else ()
            numbers = (*(f"{size:.3g}" for size in sizes), *(f"{error:.1e}" if error else "0" for error in errors))
            rows.append((dtype, self._kept(dtype), *numbers))
        yield ""
        yield from (f"  {line}" for line in counted_lines(rows, numbers=0))
        yield ""
        yield "  bytes: for each element, saved for backward between two layers that save nothing else"
        if self.accuracy:
            yield "  errors: of the derivative, for z ~ N(0, 1), against float64"
        for reason in dict.fromkeys(saves.partition(": ")[2] for saves in self.saves.values()):
            if reason and reason not in self.reason and self.reason not in reason:
                yield f"  {', '.join(d for d, saves in self.saves.items() if saves.endswith(f': {reason}'))}: {reason}"

    def _kept(self, dtype: str) -> str:
        if self.kind == "fallback" or self.saves[dtype].startswith("not fused"):
            return "what PyTorch does"
        return self.saves[dtype].partition(":")[0].partition(" (")[0].removeprefix("saves ")


@dataclass(frozen=True)
class ModelExplanation(Report):
    """The report on a model. ``str()`` is a table.

    Attributes:
        name: of the model's class.
        places: the paths of modules that keep less than PyTorch's, and what they keep, in a few words.
    """

    name: str
    places: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        if not self.places:
            return (
                f"{self.name}: nothing is fused. fusedlayers.fuse(model) saves every value once. (Functions of "
                "fusedlayers that its code calls are not listed.)"
            )
        alike: dict[str, list[str]] = {}
        for path, text in self.places:
            alike.setdefault(text, []).append(path)
        rows = [(path_text(paths), text) for text, paths in alike.items()]
        return "\n".join([f"{self.name}:", *(f"  {line}" for line in counted_lines(rows, numbers=0))])


def explain(activation: object) -> Explanation | ModelExplanation:
    """Say what a layer keeps of an activation, and why; measure what that costs.

    Args:
        activation: as for ``fusedlayers.dense_bias_act``: a name, a module, any callable. Or a fused layer or block,
            for what it keeps, and its own activation. Or a model, for a table of its fused places and of what each
            keeps.

    Raises:
        ValueError, TypeError: as ``fusedlayers.dense_bias_act``, for what is not an activation.

    >>> import torch, fusedlayers as fl
    >>> fl.explain(torch.tanh).kind
    'monotone'
    """
    if isinstance(activation, nn.Module) and _is_model(activation):
        return ModelExplanation(type(activation).__name__, tuple(_places(activation)))
    layer = activation if isinstance(activation, WithActivation) else None
    if layer is None and isinstance(activation, (*LINEAR_TYPES, *CONV_TYPES)):
        raise TypeError(
            f"explain: {type(activation).__name__} is a layer without an activation; pass an activation, a layer with "
            "one, or a model that fuse has changed"
        )
    subject = Subject(resolve(activation if layer is None else layer.activation, "explain"), layer)
    record, cpu = subject.record, torch.device("cpu")  # where all is measured
    kind, reason = _kind(subject)
    bytes_, accuracy = {}, {}
    for dtype in DTYPES:
        name = name_of(dtype)
        with contextlib.suppress(Exception):  # a user's function need not work in every dtype
            bytes_[name], accuracy[name] = subject.measure(dtype)
    return Explanation(
        repr(record),
        kind,
        reason,
        {name_of(d): describe(record, "auto", d, cpu) if layer is None else layer.keeps(record, d) for d in DTYPES},
        bytes_,
        accuracy if kind != "fallback" else {},
        "" if layer is None else _description_of(layer),
    )


def _kind(subject: Subject) -> tuple[str, str]:
    record = subject.record
    if record.fallback_reason is not None:
        return "fallback", record.fallback_reason.partition(" because ")[2]
    if record.is_identity:
        return "monotone", "the derivative is 1"
    refused = record.output_refusal(torch.float32)
    if refused is not None:
        return "needs input", refused
    kind, reason = "monotone", "the output determines the derivative"
    if record.fold is not None:
        turn = f"it turns once, at z = {record.fold.position:.6g}"
        kind, reason = "folded", f"{turn}; negative outputs carry the branch in their last bit"
    if subject.layer is not None and subject.keeps_input:
        verb = "computes its input again" if subject.layer.save == "recompute" else "keeps its input"
        reason = f"the layer {verb}, which determines the derivative"
    return kind, reason


def _is_model(module: nn.Module) -> bool:
    """Whether a module is more than an activation or a layer: something in it is fused, or it has layers in it."""
    if isinstance(module, WithActivation):
        return False
    has_weights = any(not is_lazy(p) and p.dim() > 1 for p in module.parameters())
    has_layers = has_weights and any(True for _ in module.children())
    return has_layers or bool(patches_of(module))


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    patched: list[str] = []
    for path, module in model.named_modules():
        patch = patch_of(module)
        if patch is not None and patch.recompute:
            yield path, "saves its input, and recomputes the rest"
        elif patch is not None and not any(not outer or path.startswith(f"{outer}.") for outer in patched):
            yield path, "saves every value once"
            patched.append(path)
        if isinstance(module, WithActivation):
            yield path, _description_of(module)


def _description_of(layer: WithActivation) -> str:
    """The description of a fused layer or block, with what it keeps."""
    return f"{type(layer).__name__}: {layer.extra_repr()}"


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """Errors of the derivative for z ~ N(0, 1), against float64: the norm of the error over that of the derivative, and
    the largest. ``eager`` is PyTorch's own in the same dtype."""

    rms: float
    largest: float
    eager_rms: float
    eager_largest: float


class Subject:
    """An activation, alone or as a layer has it.

    Attributes:
        record: the activation, as a layer in float32 uses it.
        layer: the layer, or None.
        keeps_input: whether the derivative is evaluated from the input, which is kept or computed again.
    """

    def __init__(self, activation: Activation, layer: WithActivation | None) -> None:
        self._activation, self.layer = activation, layer
        self._shape, self.record = self._taken()
        keeps_input = isinstance(layer, FusedGatedMLP) or (layer is not None and layer.save in ("input", "recompute"))
        self.keeps_input = keeps_input or self.record.output_refusal(torch.float32) is not None

    def _taken(self) -> tuple[tuple[int, ...], Activation]:
        """A shape that the function takes: with the channels that its tensors have as second dimension or as last one,
        or any."""
        from ..activations.tracing import muted  # whose import takes a second

        tensors = find_variables(self._activation.function).tensors
        # No fewer dimensions than a tensor has, which would add its own to the result.
        ones = [1] * max((tensor.dim() - 2 for tensor in tensors), default=0)
        for channels in sorted({size for tensor in tensors for size in tensor.shape if size > 1}, reverse=True):
            rest = -(-COUNT // channels)
            images = [(8, channels, *[4] * dims, -(-rest // (8 * 4**dims))) for dims in (2, 1, 0)]
            for shape in (*images, (*ones, rest, channels)):
                with muted(logging.getLogger("fusedlayers")):
                    record = self._specialised(shape)
                if record.is_fusible:
                    return shape, record
        shape = (*ones, COUNT // 64, 64)
        return shape, self._specialised(shape)

    def _specialised(self, shape: tuple[int, ...]) -> Activation:
        if not self._activation.needs_tracing:
            return self._activation
        return with_operands(resolve(self._in(torch.float32)[1]), shape, torch.float32).activation

    def _in(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], object]:
        """The function as PyTorch computes it, and the one to hand to a layer, with tensors of this dtype."""
        if not self._activation.needs_tracing or self._activation.definition is not None:
            return self._activation.plain, self._activation
        from ..activations.custom import own_tensors  # with it come parts of torch whose import takes a second

        variables = find_variables(self._activation.function)
        function = variables.rebind(own_tensors(variables, dtype))
        return function, function

    @in_clean_state
    def measure(self, dtype: torch.dtype) -> tuple[tuple[float, float], Accuracy]:
        """Bytes saved for each element between two layers, PyTorch's and here; and errors of the derivative. Errors of
        the function are raised."""
        z = torch.randn(self._shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        (function, activation), exact_function = self._in(dtype), self._in(torch.float64)[0]
        save = "auto" if self.layer is None else self.layer.save
        if save == "auto" and isinstance(self.layer, FusedGatedMLP):
            save = "input"  # as has the derivative of the block
        here = functools.partial(bias_act, bias=None, activation=activation, save=save)

        _, exact = value_and_slope(exact_function, z.double())
        errors = [(value_and_slope(f, z)[1].double() - exact).abs() for f in (here, function)]
        real = exact.isfinite()  # elsewhere there is nothing to compare with
        scale = float(exact[real].norm()) or 1.0
        ours, eager = ((float(error[real].norm()) / scale, float(error[real].max())) for error in errors)

        if isinstance(self.layer, FusedBlock):
            sizes = _bytes_of_block(self.layer, function, activation, z)
        else:
            sizes = [_bytes_between_layers(f, z) for f in (function, here)]
        return (sizes[0] / z.numel(), sizes[1] / z.numel()), Accuracy(*ours, *eager)


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def _bytes_between_layers(function: Callable[[Tensor], Tensor], z: Tensor) -> int:
    """Between an operation that keeps nothing, as a matmul does not keep its result, and one that keeps its input."""
    weight = torch.ones((), dtype=z.dtype, requires_grad=True)
    return saved_bytes(lambda z: function(z + 1) * weight, z.clone().requires_grad_(), exclude=[weight])


def _bytes_of_block(
    layer: FusedBlock, function: Callable[[Tensor], Tensor], activation: object, z: Tensor
) -> list[int]:
    """The bytes by the layers one after the other, and by the block, for hidden elements as many as z has."""
    block = type(layer)(8, z.shape[-1], 8, activation, save=layer.save, dtype=z.dtype)
    x = torch.randn(z.numel() // z.shape[-1], 8, dtype=z.dtype)
    by_calls = functools.partial(block.by_calls, function=function)
    return [saved_bytes(f, x, exclude=[block, x]) for f in (by_calls, block)]
