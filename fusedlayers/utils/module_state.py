"""Leave a model as it was: its buffers, its gradients, and the state of the random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .storages import has_data, strided_parts


@contextmanager
def unchanged(
    modules: Sequence[nn.Module], inputs: Iterable[Tensor], device: torch.device
) -> Iterator[Callable[[], None]]:
    """Put back what forward and backward passes change; yield what puts the random number generators back at once.

    That is buffers (of batch norms, say), inputs edited in place, and, where a hook that runs after a gradient is
    accumulated may step an optimizer, parameters. What modules keep besides, as Python objects, is their own affair.
    """
    # TorchScript's module has no dict of buffers that could be changed.
    pythons = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module, dict(module._buffers)) for module in pythons]
    kept = [buffer for module in modules for buffer in module.buffers(recurse=False)] + list(inputs)
    kept += [p for module in modules for p in module.parameters(recurse=False) if p._post_accumulate_grad_hooks]
    parts = (part.detach() for tensor in dict.fromkeys(kept) for part in strided_parts(tensor))
    copies = [(part, part.clone()) for part in parts if has_data(part)]
    restore_random_state = _random_state(device)
    try:
        yield restore_random_state
    finally:
        restore_random_state()
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for part, copy in copies:
                if not torch.equal(part, copy):  # batch norms do not count a version up
                    part.copy_(copy)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """The module, and all in it, in training or in evaluation."""
    before = [(inner, inner.training) for inner in module.modules()]
    try:
        for inner, _ in before:
            inner.training = training
        yield
    finally:
        for inner, mode in before:
            inner.training = mode


@contextmanager
def isolated_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let gradients be accumulated into copies, or from nothing where there are none, and put the old ones back."""
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = None if grad is None else grad.clone()
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def _random_state(device: torch.device) -> Callable[[], None]:
    """Remember the state of Python's, NumPy's and torch's generators; return what puts it back."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpys is not None:
            numpy.random.set_state(numpys)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore
