"""Where a layer and the activation after it meet: for one call of the module that calls both.

The layer computes the activation too, and the activation passes that on. Each must know that the other plays its part,
in this very call. So the module that calls both opens a scope, for its own call and thread. Outside of one, the layer
is a plain layer and the activation a plain activation: whoever calls one of them alone, wraps it (as adapters do),
hooks it, or puts something else in its place, gets what it would get from the model as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import Activation
from .calls import METADATA
from .chain import Chain
from .recording import name_of


class Site:
    """A layer, the activation after it, and what the layer has computed that the activation is to pass on.

    Attributes:
        layer: the layer.
        activation: a module, or the function that their caller's code calls.
        computes: what that is now.
    """

    __slots__ = ("_given", "_grad", "_hooks", "activation", "computes", "layer")

    def __init__(self, layer: nn.Module, activation: nn.Module | Chain, computes: Activation) -> None:
        self.layer, self.activation, self.computes = layer, activation, computes
        self._grad, self._hooks = torch.is_grad_enabled(), _top_hooks()
        self._given: Tensor | None = None

    def is_open(self) -> bool:
        """Whether the layer, or the activation, is called as its caller was.

        Where the caller has something computed again in the backward pass, and this layer with it, the layer is called
        outside of the caller then. A checkpoint that stands between the two shows: it switches gradients off, or puts
        saved-tensor hooks in place.
        """
        return torch.is_grad_enabled() is self._grad and _top_hooks() == self._hooks

    def give(self, y: Tensor) -> Tensor:
        """What the layer is to return."""
        self._given = y
        return y if isinstance(self.activation, nn.Module) else Given.at(self)

    def holds(self, input: object) -> bool:
        return self._given is not None and self._given is input

    def take(self) -> Tensor:
        """What the layer has computed, for the activation to return."""
        given, self._given = self._given, None
        if given is None or not self.is_open():
            raise self.lost()
        return given

    def look(self) -> Tensor:
        if self._given is None:
            raise self.lost()
        return self._given

    def check_taken(self) -> None:
        if self._given is not None:
            raise self.lost()

    def lost(self) -> RuntimeError:
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        return RuntimeError(
            f"fusedlayers.fuse: a {type(self.layer).__name__} computed the {name} after it, but its result went "
            "somewhere else: this call takes another path through the model than the one it was fused for. Call "
            "fusedlayers.unfuse(model), and fusedlayers.fuse(model, example_inputs) with inputs, and in the mode "
            "(train or eval), of such a call"
        )


class Given(Tensor):
    """Stands for a layer's result on its way to a function that its caller's code calls, which then returns that.

    Whoever asks for more than its shape or dtype is told that this is not what the model was fused for.
    """

    _site: Site

    @staticmethod
    def at(site: Site) -> Tensor:
        given = Tensor._make_subclass(Given, torch.empty(0))
        given._site = site
        return given

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        itself = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, Given))
        site = itself.__dict__["_site"]
        if site.activation.begins_with(func, args, kwargs or {}, itself):
            return site.take()
        if name_of(func) in METADATA:
            return func(site.look(), *args[1:], **(kwargs or {}))
        raise site.lost()


class _Scope(threading.local):
    """The sites of the modules that are running, by their layers and activations."""

    layers: dict[int, Site] = {}  # noqa: RUF012  # replaced, never written to
    activations: dict[int, list[Site]] = {}  # noqa: RUF012


_scope = _Scope()


@contextmanager
def opened(sites: Iterable[Site]) -> Iterator[None]:
    """For the time of a call, let layers compute activations.

    Raises:
        RuntimeError: a layer's result has not come to the activation.
    """
    sites = [*sites]
    before = _scope.layers, _scope.activations
    _scope.layers = {**before[0], **{id(site.layer): site for site in sites}}
    _scope.activations = {**before[1]}
    for site in sites:
        key = id(site.activation)
        _scope.activations[key] = [*_scope.activations.get(key, ()), site]
    try:
        yield
    finally:
        _scope.layers, _scope.activations = before
    for site in sites:
        site.check_taken()


def site_of(layer: nn.Module) -> Site | None:
    """Where this call of a layer is one for its activation as well."""
    site = _scope.layers.get(id(layer))
    if site is None or not site.is_open():
        return None
    site.check_taken()
    return site


def site_before(activation: nn.Module, input: object) -> Site | None:
    """Where this call of an activation is one that a layer has computed already."""
    return next((site for site in _scope.activations.get(id(activation), ()) if site.holds(input)), None)


def _top_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
