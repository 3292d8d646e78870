"""Put a model back as it was: its buffers, attributes and gradients, and the state of random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bounded_cache import BoundedCache
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


#: What every module has (parameters, buffers, hooks), but for the mode, which users set.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = frozenset({list, dict, set})
#: Nobody writes to the list of a convolution, which would be copied for each of a block.
_NOT_COPIED = frozenset({"_reversed_padding_repeated_twice"})


class _Own(NamedTuple):
    """Which attributes of some modules are their own, and not what every module has."""

    #: For each the number of its module, and its name.
    numbers: Sequence[int]
    names: Sequence[str]

    @classmethod
    def of(cls, dicts: Sequence[dict[str, Any]]) -> _Own:
        found = [(i, name) for i, own in enumerate(dicts) for name in own if name not in _OF_EVERY_MODULE]
        return cls([i for i, _ in found], [name for _, name in found])


#: By how many attributes each module has, and the names of all. Layers of a model are alike, and few kinds are.
_own: BoundedCache[_Own] = BoundedCache(64)


class Attributes:
    """The attributes of modules, without what every module has, and the contents of their own lists, dicts and sets.

    A recomputed layer has dozens of modules, whose objects are in no cache of the processor: those that are not asked
    for are not touched, and as much as can be is done in C.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._dicts = [*map(vars, modules)]
        self._all_names = self._find_names()
        own = _own.get(self._all_names) or _own.put(self._all_names, _Own.of(self._dicts))
        #: For each attribute the dict that it is in, its name and its value.
        self._owners = [*map(self._dicts.__getitem__, own.numbers)]
        self._names = own.names
        self._values = [*map(getitem, self._owners, self._names)]
        self._contents: list[tuple[dict[str, Any], str, Any]] = []
        if not _CONTAINERS.isdisjoint(map(type, self._values)):
            self._contents = [
                (owner, name, value.copy())
                for owner, name, value in zip(self._owners, self._names, self._values, strict=True)
                if type(value) in _CONTAINERS and name not in _NOT_COPIED
            ]

    def _find_names(self) -> tuple[Any, ...]:
        return tuple(map(len, self._dicts)), tuple(chain.from_iterable(self._dicts))

    def of_type(self, kind: type) -> list[Any]:
        """The attributes of this very type."""
        return [value for value in self._values if type(value) is kind]

    def are_current(self) -> bool:
        """Whether the modules have them now, and no others. An order that has changed counts as other attributes."""
        return self._find_names() == self._all_names and all(
            map(is_, map(getitem, self._owners, self._names), self._values)
        )

    def set(self) -> None:
        """Give them to the modules, and take all others from these."""
        wanted = {(id(owner), name) for owner, name in zip(self._owners, self._names, strict=True)}
        for own in self._dicts:
            for name in [*own]:
                if name not in _OF_EVERY_MODULE and (id(own), name) not in wanted:
                    del own[name]
        for owner, name, value in zip(self._owners, self._names, self._values, strict=True):
            owner[name] = value

    def put_back(self) -> None:
        """Set the attributes for good, and give the containers their old contents."""
        self.set()
        for own, name, contents in self._contents:
            held = own[name]
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
        for own, name, contents in self._contents:
            own[name] = contents.copy()
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
