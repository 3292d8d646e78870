"""Where a layer and the activation after it meet: for one call of the module that calls both.

The layer computes the activation too, and the activation passes that on. Each must know that the other plays its part,
in this very call. So the module that calls both opens a scope, for its own call and thread. Outside of one, the layer
is a plain layer and the activation a plain activation: whoever calls one of them alone, wraps it (as adapters do),
hooks it, or puts something else in its place, gets what it would get from the model as it was.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import make_subclass, saved_tensors_hooks_on_top, tree_leaves, tree_map
from ..activations import Activation
from ..validation import is_autocast
from .calls import METADATA
from .chain import Chain
from .recording import name_of


class Site(NamedTuple):
    """A layer, and the activation that comes after it in a call.

    Attributes:
        layer: the layer.
        activation: a module, or the function that their caller's code calls.
        computes: tells what that is now.
        state: of autograd, when their caller was called.
        given: what stands for the layer's results.
    """

    layer: nn.Module
    activation: nn.Module | Chain
    computes: Callable[[], Activation]
    state: tuple[bool, object]
    given: list[weakref.ref[Given]]

    @classmethod
    def of(cls, layer: nn.Module, activation: nn.Module | Chain, computes: Callable[[], Activation]) -> Site:
        return cls(layer, activation, computes, _state(), [])

    def is_open(self) -> bool:
        """Whether the layer, or the activation, is called as its caller was.

        Where the caller has something computed again in the backward pass, and this layer with it, the layer is called
        outside of the caller then. A checkpoint that stands between the two shows: it switches gradients off, or puts
        saved-tensor hooks in place.
        """
        return _state() == self.state

    def check_ended(self) -> None:
        """Raise if somebody still holds a result for which neither the activation nor another function was called."""
        for given in (ref() for ref in self.given):
            if given is not None and not given.is_claimed and given.z is None:
                raise self.lost()

    @property
    def is_in_place(self) -> bool:
        activation = self.activation
        return activation.is_in_place if isinstance(activation, Chain) else bool(getattr(activation, "inplace", False))

    @property
    def name(self) -> str:
        activation = getattr(self.activation, "__name__", type(self.activation).__name__)
        return f"a {type(self.layer).__name__} computed the {activation} after it"

    def lost(self) -> Lost:
        return Lost(self.layer, f"fusedlayers.fuse: {self.name}, but its result went somewhere else: {_AGAIN}")


#: These are about a tensor's place in the graph of what has been computed with it.
_OF_THE_GRAPH = frozenset({"register_hook", "retain_grad", "__set__", "requires_grad_", "detach_", "backward"})
_AGAIN = (
    "this call takes another path through the model than the one it was fused for. Call fusedlayers.unfuse(model), and "
    "fusedlayers.fuse(model, example_inputs) with inputs, and in the mode (train or eval), of such a call"
)


class Lost(RuntimeError):
    """What a layer has computed for an activation went somewhere else."""

    def __init__(self, layer: nn.Module, message: str) -> None:
        super().__init__(message)
        self.layer = layer


class Given(Tensor):
    """Stands for a layer's result on its way to the activation, which then returns what the layer has computed.

    By no means may what is activated already be taken for what is not. Whoever else calls a function of torch's with it
    gets what the layer alone computes, which it does then. What is no such function gets an error: an autograd Function
    or C++ code does not see that this is no tensor.
    """

    site: Site
    input: Tensor
    moment: tuple[object, ...]
    computed: Activation
    y: Tensor
    is_claimed: bool
    z: Tensor | None

    @staticmethod
    def of(site: Site, input: Tensor, computed: Activation, y: Tensor) -> Given:
        given = make_subclass(Given, _NOTHING)
        given.site, given.input, given.moment = site, input, _moment(site.layer, input)
        given.computed, given.y = computed, y
        given.is_claimed, given.z = False, None
        site.given.append(weakref.ref(given))
        return given

    def is_for(self, activation: nn.Module) -> bool:
        if self.site.activation is not activation or not self._may_be_claimed():
            return False
        # A function of the table may have got other numbers between the two.
        return self.computed.needs_tracing or self.site.computes() == self.computed

    def _may_be_claimed(self) -> bool:
        return not self.is_claimed and self.z is None and self.site.is_open()

    def claim(self) -> Tensor:
        """What the layer has computed, for the activation to return."""
        self.is_claimed = True
        return self.y

    def value(self) -> Tensor:
        """What the layer alone computes."""
        site = self.site
        if self.z is None:
            is_known = not self.input.is_inference() and _moment(site.layer, self.input) == self.moment
            is_written = self.is_claimed and site.is_in_place
            if _scope.is_strict or is_written or not (is_known and site.is_open()):
                raise site.lost()
            if site.layer not in _told:
                _told.add(site.layer)
                _log.warning("%s, but others read its result; it is computed twice: %s", site.name, _AGAIN)
            layer: Any = site.layer
            self.z = layer.plain(self.input)
        return self.z

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Given))
        chain = given.site.activation
        is_chain = isinstance(chain, Chain) and chain.begins_with(func, args, kwargs, given)
        if is_chain and given._may_be_claimed():
            return given.claim()
        name = name_of(func)
        if name in METADATA and args[0] is given:
            return func(given.y, *args[1:], **kwargs)
        if given.is_claimed and name in _OF_THE_GRAPH:
            raise given.site.lost()
        values: Any = tree_map(lambda leaf: leaf.value() if isinstance(leaf, Given) else leaf, (args, kwargs))
        return func(*values[0], **values[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what it disables
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Given))
        raise given.site.lost()


def _moment(layer: nn.Module, input: Tensor) -> tuple[object, ...]:
    """What decides what a layer computes of the input; what happens to tensors of inference mode does not show."""
    device = input.device.type
    read = (input, *layer._parameters.values())
    versions = [None if tensor is None or tensor.is_inference() else tensor._version for tensor in read]
    return *versions, torch.get_autocast_dtype(device) if is_autocast(device) else None


#: Made now: what is made while a model runs may be something else, under a ``FakeTensorMode`` for one.
_NOTHING = torch.empty(0, device="cpu")
_log = logging.getLogger("fusedlayers")
#: The layers of which it has been said that they are computed twice.
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Scope(threading.local):
    """The sites of the modules that are running, by the layers; and whether what is read by others is an error."""

    sites: dict[int, Site] = {}  # noqa: RUF012  # replaced, never written to
    is_strict = False


_scope = _Scope()


@contextmanager
def opened(sites: Sequence[Site]) -> Iterator[None]:
    """For the time of a call, let layers compute activations.

    Raises:
        Lost: somebody holds what stands for a layer's result.
    """
    before = _scope.sites
    _scope.sites = {**before, **{id(site.layer): site for site in sites}}
    try:
        yield
    finally:
        _scope.sites = before
    for site in sites:
        site.check_ended()


@contextmanager
def strict() -> Iterator[None]:
    """Let no layer be computed twice.

    Raises:
        Lost: a layer's result goes elsewhere than to the activation.
    """
    _scope.is_strict = True
    try:
        yield
    finally:
        _scope.is_strict = False


def site_of(layer: nn.Module) -> Site | None:
    """Where this call of a layer is one for its activation as well."""
    site = _scope.sites.get(id(layer))
    return site if site is not None and site.is_open() else None


def _state() -> tuple[bool, object]:
    return torch.is_grad_enabled(), saved_tensors_hooks_on_top(True)
