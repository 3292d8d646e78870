"""``explain``: the values that an activation, a layer or a model saves, why, and the errors of the derivative."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..activations import resolve
from ..calls.decide import describe
from ..derivative.features import Fold
from ..nn.layer import CONV_TYPES, LINEAR_TYPES, WithActivation
from ..recipes.patch import patch_of, patches_of
from ..utils.formatting import counted_lines, path_text
from ..utils.report import (
    EAGER,
    HERE,
    INK,
    ORANGE,
    WINE,
    DrawnReport,
    NothingToDrawError,
    Report,
    legend,
    new_figure,
    style,
)
from .explanation_measurement import Accuracy, Samples, Subject, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEADER = ("", "a layer keeps", "bytes: eager", "here", "rms error: eager", "here", "largest: eager", "here")
#: Of the picture: inches, characters of a title's line, and parts of the inputs, each with its largest error.
HEIGHT, CHARACTERS, PARTS = 6.6, 118, 64


@dataclass(frozen=True)
class Explanation(DrawnReport):
    """The report on an activation or a layer. ``str()`` is a table, ``plot(path)`` a picture.

    Attributes:
        name: of the activation.
        kind: "monotone", the output determines the derivative; "folded", it does with a branch bit; "needs input", the
            pre-activation is kept; "fallback", plain PyTorch computes it.
        reason: why.
        saves: the values that a layer keeps, by dtype.
        saved_bytes: kept for each element between two layers, by dtype: (eager, here).
        accuracy: of the derivative, by dtype.
        layer: the layer's or block's own description; empty for an activation.
        fold: where the function turns, if the saved output carries the branch.
        samples: the values that the picture shows, by dtype.
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

    def figure(self) -> Figure:
        """The function, its derivative over the output, and the derivative's errors.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: PyTorch computes the function, or it raises an error.
        """
        if self.kind == "fallback" or "float32" not in self.samples:
            why = "is left to PyTorch" if self.kind == "fallback" else "or its derivative raises an error"
            raise NothingToDrawError(f"explain: {self.name} {why}, so that there is nothing to draw")
        kept = {dtype: saves.partition(":")[0] for dtype, saves in self.saves.items()}
        most, *others = dict.fromkeys(kept.values())
        title = f"{self.name} {most}"
        for other in others:
            title += f", in {' and '.join(dtype for dtype in kept if kept[dtype] == other)} {other}"
        lines = [line for text in (title, self.reason) for line in textwrap.wrap(text, CHARACTERS)]
        figure = new_figure("explain", HEIGHT, "\n".join(lines))
        (function, output), errors = figure.subplots(2, 2)
        self._draw_function(function, output)
        for axes, dtype in zip(errors, ("float32", "bfloat16"), strict=True):
            if dtype in self.samples:
                self._draw_errors(axes, dtype)
            else:
                axes.set_axis_off()
        return figure

    def _draw_function(self, axes: Axes, over_output: Axes) -> None:
        """The function and its derivative over the input, and the derivative over the output. Branches have colours."""
        z, y, slope, *_ = self.samples["float32"]
        is_saved = self.saves["float32"].startswith("saves the output")
        title = f"f' over the output{': one value for each' if is_saved else ' (not saved)'}"
        branches = [(torch.ones_like(z, dtype=torch.bool), WINE, "")]
        if self.fold is not None:
            title, marked = "f' over the output: the last bit is the branch", self.fold.marks(z)
            branches = [(marked, ORANGE, ", last bit 1"), (~marked, WINE, ", last bit 0")]
            over_output.axvline(self.fold.extremum, color=INK, lw=0.8, ls=":")
        for where, color, branch in branches:
            axes.plot(z[where], y[where], color=color, label=f"f{branch}")
            axes.plot(z[where], slope[where], "--", color=color, label=f"f'{branch}")
            over_output.plot(y[where], slope[where], "--", color=color)
        style(axes, title="Function f and derivative f'", xlabel="input z")
        legend(axes)
        style(over_output, title=title, xlabel="output y = f(z)", ylabel="f'")

    def _draw_errors(self, axes: Axes, dtype: str) -> None:
        samples, rms = self.samples[dtype], self.accuracy[dtype]
        z = [float(part.mean()) for part in samples.z.chunk(PARTS)]
        axes.set(yscale="log", ylim=(1e-11, 1e3), xlim=(z[0], z[-1]))  # first: zeros have no logarithm
        for error, name, of_normal, color in (
            (samples.eager_error, "PyTorch", rms.eager_rms, EAGER),
            (samples.error, "here", rms.rms, HERE),
        ):
            text = f"{name}: {of_normal:.1e}" if of_normal else f"{name}: exact"
            axes.plot(z, [float(part.max()) for part in error.chunk(PARTS)], color=color, label=text)
        style(axes, title=f"Error of f' in {dtype}", xlabel="input z", ylabel="largest |f' - float64's| nearby")
        legend(axes, "relative rms, z ~ N(0, 1)", loc="upper left")


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
        "" if layer is None else _description_of(layer),
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
