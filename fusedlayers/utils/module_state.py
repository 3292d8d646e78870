"""Put a model back as it was: its buffers, attributes and gradients, and the state of random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .storages import has_data, strided_parts


@contextmanager
def unchanged(
    modules: Sequence[nn.Module], inputs: Iterable[Tensor], *, attributes: bool = False
) -> Iterator[Callable[[], None]]:
    """Put back what forward and backward passes change; yield a function that resets the random number generators.

    Put back are buffers (statistics of batch norms, say), inputs that were edited in place, parameters with a hook that
    runs after gradient accumulation (it may step an optimizer), and, if asked for, the modules' attributes.
    """
    # A TorchScript module has no dict of buffers that could be changed.
    pythons = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module, dict(module._buffers)) for module in pythons]
    kept = [buffer for module in modules for buffer in module.buffers(recurse=False)] + list(inputs)
    kept += [p for module in modules for p in module.parameters(recurse=False) if p._post_accumulate_grad_hooks]
    parts = (part.detach() for tensor in dict.fromkeys(kept) for part in strided_parts(tensor))
    copies = [(part, part.clone()) for part in parts if has_data(part)]
    own = Attributes(pythons if attributes else ())
    reset_random = random_state()
    try:
        yield reset_random
    finally:
        reset_random()
        own.put_back()
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)
        with torch.no_grad():
            for part, copy in copies:
                if not torch.equal(part, copy):  # batch norms do not increment the version counter
                    part.copy_(copy)


#: The attributes that every module has (parameters, buffers, hooks), without the one that users set.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = frozenset({list, dict, set})
#: Nobody writes to the list of a convolution, which would be copied for each of a block.
_NOT_COPIED = _OF_EVERY_MODULE | {"_reversed_padding_repeated_twice"}
_chained = chain.from_iterable


class Attributes:
    """The attributes of modules, and the contents of their own lists, dicts and sets. What every module has is
    compared, and never set. A recomputed layer may have dozens of modules: as much as can be is done in C."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._dicts = [*map(vars, modules)]
        self._before = [*map(dict.copy, self._dicts)]
        self._names, self._values = [*_chained(self._before)], [*_chained(map(dict.values, self._before))]
        self._types, self._lengths = [*map(type, self._values)], [*map(len, self._before)]
        #: Copies of containers, by module and name.
        self._contents: list[tuple[int, str, Any]] = []
        for at in compress(range(len(self._values)), map(_CONTAINERS.__contains__, self._types)):
            if (name := self._names[at]) not in _NOT_COPIED:
                self._contents.append((self._module_of(at), name, self._values[at].copy()))

    def _module_of(self, at: int) -> int:
        """The module of the attribute at this place among those of all."""
        for i, length in enumerate(self._lengths):
            if at < length:
                return i
            at -= length
        raise IndexError

    def of_type(self, kind: type) -> list[Any]:
        """The attributes of this very type."""
        return [*compress(self._values, map(partial(is_, kind), self._types))] if kind in self._types else []

    def are_current(self) -> bool:
        """Whether the modules have them now, and no others. An order that has changed counts as other attributes."""
        is_alike = [*map(len, self._dicts)] == self._lengths and all(map(is_, _chained(self._dicts), self._names))
        return is_alike and all(map(is_, _chained(map(dict.values, self._dicts)), self._values))

    def set(self) -> None:
        """Give them to the modules, and take all others from these."""
        for own, before in zip(self._dicts, self._before, strict=True):
            for name in own.keys() - _OF_EVERY_MODULE - before.keys():
                del own[name]
            own.update({name: value for name, value in before.items() if name not in _OF_EVERY_MODULE})

    def put_back(self) -> None:
        """Set the attributes for good, and give the containers their old contents."""
        self.set()
        for i, name, contents in self._contents:
            held = self._dicts[i][name]
            held.clear()
            held.extend(contents) if isinstance(held, list) else held.update(contents)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The modules have these attributes, with copies of the containers; on exit they get back those that they had.
        Most have them already, and nothing is set."""
        now = self
        if not self.are_current():
            now = Attributes(self._modules)
            self.set()
        for i, name, contents in self._contents:
            self._dicts[i][name] = contents.copy()
        try:
            yield
        finally:
            if not now.are_current():
                now.set()


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
