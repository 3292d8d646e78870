"""MLPs: modules that multiply by two or three weights, with an activation in between, and do nothing else of note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ..utils.formatting import is_within
from .operations import CHECKPOINT
from .place import Place
from .recording import Recording

_LINEAR = frozenset({"linear", "addmm"})
#: What else an MLP calls: gates, dropouts, and views.
_BESIDE = frozenset(
    """
    mul multiply __mul__ __rmul__ dropout chunk split unbind view reshape flatten unflatten contiguous transpose
    permute squeeze unsqueeze __getitem__ to float type_as
    """.split()  # noqa: SIM905  # shorter than a list
)


def find_mlps(model: nn.Module, recording: Recording) -> Iterator[Place]:
    """The MLPs of a model as places to be recomputed, the outermost module of each."""
    modules = dict(model.named_modules())
    found: list[str] = []
    for path, functions in sorted(recording.functions.items(), key=lambda item: len(item[0].split("."))):
        module = modules.get(path)  # None of one that the forward pass has exchanged
        if module is None or any(is_within(path, outer) for outer in found):
            continue
        inside = {*module.modules()}  # and not by paths: that of a shared activation may be in another module
        activations = [place for place in recording.places if place.is_activation and place.module in inside]
        if _is_mlp(functions, activations, recording):
            found.append(path)
            calls = max(place.calls for place in activations)
            yield Place(path, module, CHECKPOINT, CHECKPOINT, paths=recording.paths[path], calls=calls)


def _is_mlp(functions: list[str], activations: list[Place], recording: Recording) -> bool:
    rest = Counter(functions)
    for place in activations:  # one that is spelled out calls anything
        rest -= Counter(recording.functions.get(place.path, ())) if place.stand_in is not None else Counter()
    linears = sum(rest.pop(name, 0) for name in _LINEAR)
    kinds = {place.kind for place in activations}
    return bool(activations) and linears in (2, 3) and set(rest) <= _BESIDE | kinds
