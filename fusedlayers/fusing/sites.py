"""Where a layer and the activation after it meet: for one call of the module that calls both.

The layer computes the activation too, and the activation passes that on. Each must know that the other plays its part,
in this very call. So the module that calls both opens a scope, for its own call and thread. Outside of one, the layer
is a plain layer and the activation a plain activation: whoever calls one of them alone, wraps it (as adapters do),
hooks it, or puts something else in its place, gets what it would get from the model as it was.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as _hooks_of_modules
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..activations import Activation
from .calls import METADATA
from .chain import Chain
from .recording import name_of


class Site(NamedTuple):
    """A layer, and the activation that comes after it in a call.

    Attributes:
        layer: the layer.
        activation: a module, or the function that their caller's code calls.
        computes: what that is now.
        state: of autograd, when their caller was called.
        given: what stands for the layer's results.
    """

    layer: nn.Module
    activation: nn.Module | Chain
    computes: Activation
    state: tuple[bool, object]
    given: list[weakref.ref[Given]]

    @classmethod
    def of(cls, layer: nn.Module, activation: nn.Module | Chain, computes: Activation) -> Site:
        return cls(layer, activation, computes, _state(), [])

    def is_open(self) -> bool:
        """Whether the layer, or the activation, is called as its caller was.

        Where the caller has something computed again in the backward pass, and this layer with it, the layer is called
        outside of the caller then. A checkpoint that stands between the two shows: it switches gradients off, or puts
        saved-tensor hooks in place.
        """
        return _state() == self.state

    def check_claimed(self) -> None:
        """Raise if somebody holds a result for which the activation has not been called."""
        for ref in self.given:
            given = ref()
            if given is not None and not given.is_claimed:
                raise self.lost()

    def lost(self) -> Lost:
        return Lost(self.layer, getattr(self.activation, "__name__", type(self.activation).__name__))


class Lost(RuntimeError):
    """What a layer has computed for an activation went somewhere else."""

    def __init__(self, layer: nn.Module, activation: str) -> None:
        super().__init__(
            f"fusedlayers.fuse: a {type(layer).__name__} computed the {activation} after it, but its result went "
            "somewhere else: this call takes another path through the model than the one it was fused for. Call "
            "fusedlayers.unfuse(model), and fusedlayers.fuse(model, example_inputs) with inputs, and in the mode "
            "(train or eval), of such a call"
        )
        self.layer = layer


class Given(Tensor):
    """Stands for a layer's result on its way to the activation, which then returns what the layer has computed.

    Whoever asks for more than its shape or dtype is told that this is not what the model was fused for: by no means may
    what is activated already be taken for what is not.
    """

    #: Where it is to go, what the layer has computed, and whether the activation has got that.
    site: Site
    y: Tensor
    is_claimed: bool

    @staticmethod
    def of(site: Site, y: Tensor) -> Given:
        given = Tensor._make_subclass(Given, torch.empty(0))
        given.site, given.y, given.is_claimed = site, y, False
        site.given.append(weakref.ref(given))
        return given

    def claim(self) -> Tensor:
        """What the layer has computed, for the activation to return."""
        if self.is_claimed or not self.site.is_open():
            raise self.site.lost()
        self.is_claimed = True
        return self.y

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Given)), None)
        if given is None:  # it is somewhere in a list
            given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Given))
            raise given.site.lost()
        activation = given.site.activation
        if isinstance(activation, Chain) and activation.begins_with(func, args, kwargs, given):
            return given.claim()
        if name_of(func) in METADATA and args[0] is given:
            return func(given.y, *args[1:], **kwargs)
        raise given.site.lost()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what it disables
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Of what calls no function of torch's, C++ code and the forward passes of autograd Functions, say."""
        given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Given))
        raise given.site.lost()


class _Scope(threading.local):
    """The sites of the modules that are running, by the layers."""

    sites: dict[int, Site] = {}  # noqa: RUF012  # replaced, never written to


_scope = _Scope()


@contextmanager
def opened(sites: Sequence[Site]) -> Iterator[None]:
    """For the time of a call, let layers compute activations.

    Raises:
        Lost: a layer's result has not come to the activation.
    """
    before = _scope.sites
    _scope.sites = {**before, **{id(site.layer): site for site in sites}}
    try:
        yield
    finally:
        _scope.sites = before
    for site in sites:
        site.check_claimed()


def site_of(layer: nn.Module) -> Site | None:
    """Where this call of a layer is one for its activation as well."""
    site = _scope.sites.get(id(layer))
    return site if site is not None and site.is_open() else None


def is_watched() -> bool:
    """Whether somebody has hooks for all modules, and so sees what passes between them.

    This library's own (``memory_report`` has some) only note which module runs.
    """
    return any(
        not hook.__module__.startswith(__package__.partition(".")[0] + ".")
        for hooks in _GLOBAL_HOOKS
        for hook in hooks.values()
    )


_GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    *(_hooks_of_modules._global_forward_hooks, _hooks_of_modules._global_forward_pre_hooks),
    *(_hooks_of_modules._global_backward_hooks, _hooks_of_modules._global_backward_pre_hooks),
)


def _state() -> tuple[bool, object]:
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)
