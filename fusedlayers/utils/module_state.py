"""Put a model back as it was: its buffers and gradients, and the state of random number generators."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import FakeTensor
from .storages import strided_parts


@contextmanager
def unchanged(modules: Sequence[nn.Module], inputs: Iterable[Tensor]) -> Iterator[Callable[[], None]]:
    """Put back what forward and backward passes change; yield a function that resets the random number generators.

    Put back are buffers (statistics of batch norms, say), inputs that were edited in place, and parameters with a hook
    that runs after gradient accumulation (it may step an optimizer). What code writes to attributes stays.
    """
    # A TorchScript module has no dict of buffers that could be changed.
    pythons = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module, dict(module._buffers)) for module in pythons]
    kept = [buffer for module in modules for buffer in module.buffers(recurse=False)] + list(inputs)
    kept += [p for module in modules for p in module.parameters(recurse=False) if p._post_accumulate_grad_hooks]
    parts = (part.detach() for tensor in dict.fromkeys(kept) for part in strided_parts(tensor))
    copies = [(part, part.clone()) for part in parts if not (part.is_meta or isinstance(part, FakeTensor))]
    reset_random = random_state()
    try:
        yield reset_random
    finally:
        reset_random()
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)
        for part, copy in copies:
            if not torch.equal(part, copy):
                # ``.data`` counts no version up: graphs that wait for their backward pass have saved statistics of
                # batch norms, which get the values back that they had then.
                part.data.copy_(copy)


def modules_in(root: nn.Module) -> list[nn.Module]:
    """``root.modules()``, in another order, and without a generator for each of them."""
    found = {root: None}
    pending = [root]
    for module in pending:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                pending.append(child)
    return pending


@contextmanager
def isolated_gradients(leaves: Sequence[Tensor], *, zeros: bool = False) -> Iterator[None]:
    """Let gradients be accumulated into copies, or where there are none into nothing, or zeros; put the old ones
    back."""
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf, grad in zip(leaves, before, strict=True):
            empty = torch.zeros_like(leaf) if zeros else None
            leaf.grad = empty if grad is None else grad.clone()
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def random_state() -> Callable[[], None]:
    """Record the state of Python's, NumPy's and torch's generators; return a function that resets them to it."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def reset() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpys is not None:
            numpy.random.set_state(numpys)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return reset
