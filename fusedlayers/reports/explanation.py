"""``explain``: what an activation, a layer or a model saves for backward, why, and how exact the derivative is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..activations import resolve
from ..derivative.features import Fold
from ..nn.layer import CONV_TYPES, LINEAR_TYPES, WithActivation
from ..plan import describe
from ..recipes.patch import patch_of
from ..utils.formatting import counted_lines, path_text
from ..utils.reports import DrawnReport, NothingToDrawError, Report
from . import explanation_plot
from .explanation_measurement import Accuracy, Samples, Subject, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Explanation(DrawnReport):
    """What ``explain`` found. ``str()`` is a table, ``plot(path)`` a picture.

    Attributes:
        name: of the activation.
        kind: "monotone", the output determines the derivative; "folded", it does with a branch bit; "needs input", the
            pre-activation is kept; "fallback", plain PyTorch computes it.
        reason: why.
        saves: what a layer keeps, by dtype.
        saved_bytes: kept for each element between two layers, by dtype: (eager, here).
        accuracy: of the derivative, by dtype.
        layer: what a layer or a block says of itself; empty for an activation.
        fold: where the function turns, if the saved output carries the branch.
        samples: what the picture shows, by dtype.
    """

    name: str
    kind: str
    reason: str
    saves: Mapping[str, str]
    saved_bytes: Mapping[str, tuple[float, float]]
    accuracy: Mapping[str, Accuracy]
    layer: str = ""
    fold: Fold | None = field(repr=False, default=None)
    samples: Mapping[str, Samples] = field(repr=False, default_factory=dict)

    def figure(self) -> Figure:
        """The function, its derivative over the output, and the derivative's errors.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: PyTorch computes the function, or it raises an error.
        """
        if self.kind == "fallback" or "float32" not in self.samples:
            why = "is left to PyTorch" if self.kind == "fallback" else "or its derivative raises an error"
            raise NothingToDrawError(f"explain: {self.name} {why}, so that there is nothing to draw")
        return explanation_plot.draw(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class ModelExplanation(Report):
    """What ``explain`` found in a model; ``str()`` is a table.

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
    bytes_, accuracy, samples = {}, {}, {}
    for dtype in DTYPES:
        name = name_of(dtype)
        with contextlib.suppress(Exception):  # a user's function need not work in every dtype
            bytes_[name], accuracy[name], samples[name] = subject.measure(dtype)
    return Explanation(
        repr(record),
        kind,
        reason,
        {name_of(d): describe(record, "auto", d, cpu) if layer is None else layer.keeps(record, d) for d in DTYPES},
        bytes_,
        accuracy if kind != "fallback" else {},
        "" if layer is None else _said_of(layer),
        None if subject.keeps_input else record.fold,
        {name: found for name, found in samples.items() if found is not None},
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


# --- models -----------------------------------------------------------------------------------------------------------


def _is_model(module: nn.Module) -> bool:
    """Whether a module is more than an activation or a layer: something in it is fused, or it has layers in it."""
    if isinstance(module, WithActivation):
        return False
    has_weights = any(not is_lazy(p) and p.dim() > 1 for p in module.parameters())
    has_layers = has_weights and any(True for _ in module.children())
    return has_layers or any(patch_of(inner) is not None for inner in module.modules())


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    patched: list[str] = []
    for path, module in model.named_modules():
        patch = patch_of(module)
        if patch is not None and patch.recompute:
            yield path, "saves its input, and recomputes the rest"
        elif patch is not None and not any(not outer or path.startswith(f"{outer}.") for outer in patched):
            yield path, f"saves every value once{', exactly' if patch.exact else ''}"
            patched.append(path)
        if isinstance(module, WithActivation):
            yield path, _said_of(module)


def _said_of(layer: WithActivation) -> str:
    """What a fused layer or block says of itself, with what it keeps."""
    return f"{type(layer).__name__}: {layer.extra_repr()}"


# --- printing ---------------------------------------------------------------------------------------------------------

_BYTES = ("", "a layer keeps", "bytes: eager", "here")
_ERRORS = ("rms error: eager", "here", "rounding", "largest error: eager", "here")


def _lines(found: Explanation) -> Iterator[str]:
    if found.layer:
        yield found.layer
    yield f"{found.name}: {found.kind}"
    yield f"  {found.reason}"
    if not found.saved_bytes:
        yield "  nothing is measured: PyTorch raises an error for it, or it returns no tensor of its argument's shape"
        return
    rows: list[tuple[str, ...]] = [(*_BYTES, *_ERRORS) if found.accuracy else _BYTES]
    for dtype, (eager, here) in found.saved_bytes.items():
        rms = found.accuracy.get(dtype)
        numbers = (rms.eager_rms, rms.rms, rms.floor_rms, rms.eager_largest, rms.largest) if rms else ()
        errors = (f"{number:.1e}" if number else "0" for number in numbers)
        rows.append((dtype, _kept(found, dtype), f"{eager:.3g}", f"{here:.3g}", *errors))
    yield ""
    yield from (f"  {line}" for line in counted_lines(rows, numbers=0))
    yield ""
    yield "  bytes: for each element, saved for backward between two layers that save nothing else"
    if found.accuracy:
        yield "  errors: of the derivative, for z ~ N(0, 1), against float64; rounding: of the exact one to the dtype"
    for reason in dict.fromkeys(map(_reason, found.saves.values())):
        if reason and reason not in found.reason and found.reason not in reason:
            dtypes = [dtype for dtype, saves in found.saves.items() if _reason(saves) == reason]
            yield f"  {', '.join(dtypes)}: {reason}"


def _kept(found: Explanation, dtype: str) -> str:
    if found.kind == "fallback" or found.saves[dtype].startswith("not fused"):
        return "what PyTorch does"
    return found.saves[dtype].partition(":")[0].removeprefix("saves ")


def _reason(saves: str) -> str:
    return saves.partition(": ")[2]
