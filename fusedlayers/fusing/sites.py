"""Where a layer and the activation after it meet: for one call of the module that calls both.

The layer computes the activation too, and the activation passes that on. Each must know that the other plays its part,
in this very call. So the module that calls both opens a scope, for its own call and thread. Outside of one, the layer
is a plain layer and the activation a plain activation: whoever calls one of them alone, wraps it (as adapters do),
hooks it, or puts something else in its place, gets what it would get from the model as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Site:
    """A layer, the activation after it, and what the layer has computed that the activation is to pass on."""

    __slots__ = ("activation", "given", "grad", "hooks", "layer")

    def __init__(self, layer: nn.Module, activation: nn.Module, grad: bool, hooks: object) -> None:
        self.layer, self.activation = layer, activation
        self.grad, self.hooks = grad, hooks
        self.given: Tensor | None = None

    def is_open(self) -> bool:
        """Whether the layer is called as its parent was.

        Where the parent has something computed again in the backward pass, and this layer with it, the layer is called
        outside of the parent then. A checkpoint that stands between the two shows: it switches gradients off, or puts
        saved-tensor hooks in place.
        """
        return torch.is_grad_enabled() is self.grad and _top_hooks() == self.hooks


class _Scope(threading.local):
    """The sites of the modules that are running, by their layers and activations."""

    layers: dict[int, Site] = {}  # noqa: RUF012  # replaced, never written to
    activations: dict[int, list[Site]] = {}  # noqa: RUF012


_scope = _Scope()


@contextmanager
def opened(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """For the time of a call, let these layers compute these activations.

    Raises:
        RuntimeError: a layer's result has not come to the activation.
    """
    grad, hooks = torch.is_grad_enabled(), _top_hooks()
    sites = [Site(layer, activation, grad, hooks) for layer, activation in pairs]
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
        if site.given is not None:
            raise lost(site)


def site_of(layer: nn.Module) -> Site | None:
    """Where this call of a layer is one for its activation as well."""
    site = _scope.layers.get(id(layer))
    if site is None or not site.is_open():
        return None
    if site.given is not None:
        raise lost(site)
    return site


def passes_on(activation: nn.Module, input: Any) -> bool:
    """Whether the activation's input comes from a layer that has computed the activation already."""
    for site in _scope.activations.get(id(activation), ()):
        if site.given is input:
            site.given = None
            return True
    return False


def lost(site: Site) -> RuntimeError:
    return RuntimeError(
        f"fusedlayers.fuse: a {type(site.layer).__name__} computed the {type(site.activation).__name__} after it, but "
        "its result went somewhere else: this call takes another path through the model than the one it was fused "
        "for. Call fusedlayers.unfuse(model), and fusedlayers.fuse(model, example_inputs) with inputs, and in the mode "
        "(train or eval), of such a call"
    )


def _top_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
