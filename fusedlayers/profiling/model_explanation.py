"""``explain(model)``: what every fused place of a model keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from ..nn.base import WithActivation
from ..recipes.patch import patch_of
from ..utils.formatting import merged_path, pattern_of
from ..utils.reports import Report


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
                f"{self.name}: nothing is fused. fusedlayers.fuse(model) saves every value once. (Functions of "
                "fusedlayers that its code calls are not listed.)"
            )
        groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for path, text in self.places:
            groups.setdefault((pattern_of(path), text), []).append(path)
        rows = [(merged_path(paths) or "the model", text) for (_, text), paths in groups.items()]
        width = max(len(path) for path, _ in rows)
        return "\n".join([f"{self.name}:", *(f"  {path:<{width}}  {text}" for path, text in rows)])


def is_model(module: nn.Module) -> bool:
    """Whether a module is more than an activation or a layer: something in it is fused, or it has layers in it."""
    if isinstance(module, WithActivation):
        return False
    has_layers = any(True for _ in module.children()) and any(
        not is_lazy(p) and p.dim() > 1 for p in module.parameters()
    )
    return has_layers or any(patch_of(inner) is not None for inner in module.modules())


def said_of(layer: WithActivation) -> str:
    """What a fused layer or block says of itself, with what it keeps."""
    return f"{type(layer).__name__}: {layer.extra_repr()}"


def explain_model(model: nn.Module) -> ModelExplanation:
    """What the fused places of a model keep now."""
    return ModelExplanation(type(model).__name__, tuple(_places(model)))


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
            yield path, said_of(module)
