"""``explain(model)``: what every fused place of a model keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from ..fusion.operations import CHECKPOINT
from ..fusion.region import region_of
from ..nn.base import WithActivation
from ..utils.formatting import merged_path, pattern_of
from ..utils.reports import Report

#: What a table says in which norms are.
NORMS = "(norms: of weights that are 0, extreme, or less than a quarter of the bias, the normalised input is saved too)"


@dataclass(frozen=True)
class ModelExplanation(Report):
    """What ``explain`` found in a model; ``str()`` is a table.

    Attributes:
        name: of the model's class.
        places: the paths of modules that keep less than PyTorch's, and what they keep, in a few words.
    """

    name: str
    places: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return {"name": self.name, "places": [list(place) for place in self.places]}

    def __str__(self) -> str:
        if not self.places:
            return (
                f"{self.name}: nothing is fused. fusedlayers.fuse(model, inputs) fuses what keeps less, and says why "
                "the rest is left to PyTorch. (Functions of fusedlayers that its code calls are not listed.)"
            )
        groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for path, text in self.places:
            groups.setdefault((pattern_of(path), text), []).append(path)
        rows = [(merged_path(paths) or "the model", text) for (_, text), paths in groups.items()]
        width = max(len(path) for path, _ in rows)
        lines = [f"{self.name}:", *(f"  {path:<{width}}  {text}" for path, text in rows)]
        return "\n".join([*lines, *([NORMS] if any("_norm saves the output" in text for _, text in rows) else ())])


def is_model(module: nn.Module) -> bool:
    """Whether a module is more than an activation or a layer: something in it is fused, or it has layers in it."""
    if isinstance(module, WithActivation):
        return False
    has_layers = any(True for _ in module.children()) and any(
        not is_lazy(p) and p.dim() > 1 for p in module.parameters()
    )
    return has_layers or any(region_of(inner) is not None for inner in module.modules())


def said_of(layer: WithActivation) -> str:
    """What a fused layer or block says of itself, with what it keeps."""
    return f"{type(layer).__name__}: {layer.extra_repr()}"


def explain_model(model: nn.Module) -> ModelExplanation:
    """What the fused places of a model keep now."""
    return ModelExplanation(type(model).__name__, tuple(_places(model)))


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        region = region_of(module)
        if region is not None:
            called = region.called if path in region.called else (path,)  # else the model is a part of another one now
            for text in region.places.values() if region.keeps_outputs else ():
                yield from ((each, text) for each in called)
            if region.recompute == "cheap":
                yield path, "saves its input and the results of products and attention, and recomputes the rest"
            elif region.recompute == "all" and CHECKPOINT not in region.places:
                yield path, "saves its input, and recomputes the rest"
        if isinstance(module, WithActivation):
            yield path, said_of(module)
