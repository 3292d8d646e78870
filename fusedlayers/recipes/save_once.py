"""``save_once``: a pair of saved-tensor hooks by which every value is saved once (``region.py``)."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import (
    dynamo_is_loaded,
    functorch_is_active,
    lacks,
    never_compile,
    own_hook,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_are_enabled,
    saved_tensors_hooks_on_top,
    warn_if_untested,
)
from ..utils.caching import in_clean_state
from .recipe import Hooks
from .region import LEAST_BYTES, Region
from .second_run import is_running_again

#: Calls ``value.get()`` without a Python frame of its own.
_UNPACK = operator.methodcaller("get")
#: The last region of a thread, weakly.
_inside = threading.local()


@contextmanager
def save_once() -> Iterator[None]:
    """Save every value once: what backward can replay from other saved tensors, by one operation, is not saved.

    Gradients are those of PyTorch, to the last bit: its own nodes compute them, from the same values. Within it, a
    block of code or a function that is decorated with ``@save_once()``, activations, products of gates, and the 16-bit
    copies that autocast makes of results need no memory of their own.

    Norms and the 16-bit copies of weights need none either in a model that ``fuse(model)`` has changed,
    whose modules tell what nodes do not: ``eps``, biases, and whether a weight was written to. Elsewhere they are saved
    as PyTorch saves them. The code of such a model needs no ``save_once`` around it.

    Errors: as in PyTorch, backward raises a ``RuntimeError`` where a tensor that it needs has been written to in place;
    what it needs are the tensors that a replay reads, which need not be those that PyTorch saves. Weights that
    autocast has copied, and the biases of batch and group norms, may not be written to between forward and backward.

    Nested uses in one thread, hooks that were there before (they get each tensor once), checkpoints inside and around,
    higher derivatives and several threads work. It does nothing while ``torch.compile``, ``torch.export`` or a
    transform of ``torch.func`` traces, and where saved-tensor hooks are disabled; a transform of ``torch.func`` within
    it raises PyTorch's error.

    Not seen: what is written to a result past the version counter (``.data``, NumPy); with gradients switched off,
    before an operation that does not save it (a sum, relu, dropout, a cast, a copy) reads it; and what backward of a
    user's ``Function`` writes to its saved tensors.

    Saved: for each value that is read in backward the tensors that determine it. Never more than PyTorch.

    >>> import torch, fusedlayers as fl
    >>> layer, last = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    >>> with fl.save_once():
    ...     loss = last(torch.nn.functional.gelu(layer(torch.randn(128, 64)))).square().sum()
    >>> loss.backward()
    """
    if torch.compiler.is_compiling() or not can_enter() or current_region() is not None:
        yield
        return
    enter_region(None)
    try:
        yield
    finally:
        pop_saved_tensors_hooks()


def can_enter() -> bool:
    """Whether anything is saved here, by hooks that may be pushed."""
    is_saved = torch.is_grad_enabled() and saved_tensors_hooks_are_enabled() and not functorch_is_active()
    return is_saved and not is_running_again() and works_here()


def current_region() -> Region | None:
    """The region whose hooks get what is saved now."""
    hooks = saved_tensors_hooks_on_top(True)
    return hooks[0].args[0] if hooks and getattr(hooks[0], "func", None) is Region.pack else None


def enter_region(model: nn.Module | None, given: Iterable[Any] = ()) -> Region:
    """Push the hooks of a region for this model: a new one; or the last one, where hooks that were there before still
    are, so that the modules of a checkpointed block read one another's values."""
    hooks: Hooks | None = saved_tensors_hooks_on_top(True)
    last = getattr(_inside, "last", None)
    region: Region | None = None if last is None else last()
    if region is None or region.hooks is None or hooks is None or region.hooks[0] is not hooks[0]:
        region = Region(hooks)
        _inside.last = weakref.ref(region)
    region.begin(model, given)
    if dynamo_is_loaded():  # where a compiled function breaks its graph, the hooks would be compiled too
        _never_compile_hooks()
    push_saved_tensors_hooks(own_hook(hooks, Region.pack, region), _UNPACK)
    return region


@functools.cache
def works_here() -> bool:
    """Whether recipes do on this torch what they do on those that are tested: a small step gives PyTorch's gradients.
    It takes a millisecond, once a process."""
    warn_if_untested()
    try:
        is_same = _gradients_are_the_same()
    except Exception as error:  # of whatever has changed
        lacks("torch's saved tensors", "fuse and save_once change nothing", error)
        return False
    if not is_same:
        lacks("torch's saved tensors", "fuse and save_once change nothing", ArithmeticError("gradients differ"))
    return is_same


@in_clean_state
def _gradients_are_the_same() -> bool:
    found: list[Tensor] = []
    for enter, leave in ((enter_region, pop_saved_tensors_hooks), (lambda _: None, lambda: None)):
        x = torch.linspace(-2, 2, LEAST_BYTES).requires_grad_()
        enter(None)
        try:
            y = F.gelu(x)
            z = torch.tanh(y)
            loss = (y * z + y.square() * z).sum()
        finally:
            leave()
        found += torch.autograd.grad(loss, x)
    return torch.equal(*found)


@functools.cache
def _never_compile_hooks() -> None:
    """``torch.compiler.disable`` would add 2 us to each call of theirs."""
    for module in ("region", "recipe", "replays", "norms", "leaves", "second_run", "masks"):
        never_compile(f"{__package__}.{module}")
