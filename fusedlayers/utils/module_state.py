"""Put a model back as it was: its buffers, attributes and gradients, and the state of random number generators."""

from __future__ import annotations

import functools
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    own_attributes = [Attributes.of(module) for module in pythons] if attributes else []
    reset_random = random_state()
    try:
        yield reset_random
    finally:
        reset_random()
        for own in own_attributes:
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
_NO_CONTENTS: dict[str, Any] = {}
_CONTAINERS = (list, dict, set)
#: Nobody writes to the list of a convolution, which would be copied for each of a block.
_NOT_COPIED = frozenset({"_reversed_padding_repeated_twice"})


class Attributes(NamedTuple):
    """The attributes of a module; of its own ones the contents of lists, dicts and sets, and the generators. What every
    module has is compared, and never set. A recomputed layer may have dozens of modules, so that as much as can be is
    done in C."""

    module: nn.Module
    values: dict[str, Any]
    contents: dict[str, Any]
    generators: list[torch.Generator]

    @classmethod
    def of(cls, module: nn.Module) -> Attributes:
        values = vars(module).copy()
        containers, generators = _own(tuple(values), tuple(map(type, values.values())))
        contents = {name: values[name].copy() for name in containers} if containers else _NO_CONTENTS
        return cls(module, values, contents, [values[name] for name in generators])

    def are_current(self) -> bool:
        """Whether the module has them now, and no others. An order that has changed counts as other attributes."""
        now, values = vars(self.module), self.values
        is_alike = len(now) == len(values) and all(map(operator.is_, now, values))
        return is_alike and all(map(operator.is_, now.values(), values.values()))

    def set(self) -> None:
        """Give them to the module, and take all others from it."""
        own = vars(self.module)
        for name in own.keys() - _OF_EVERY_MODULE - self.values.keys():
            del own[name]
        own.update({name: value for name, value in self.values.items() if name not in _OF_EVERY_MODULE})

    def put_back(self) -> None:
        """Set the attributes for good, and give the containers their old contents."""
        self.set()
        for name, contents in self.contents.items():
            held = vars(self.module)[name]
            held.clear()
            held.extend(contents) if isinstance(held, list) else held.update(contents)


@functools.lru_cache(4096)
def _own(names: tuple[str, ...], types: tuple[type, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a module's attributes its own containers and generators. Modules of a class have the same, as a rule."""
    own = [(n, kind) for n, kind in zip(names, types, strict=True) if n not in _OF_EVERY_MODULE | _NOT_COPIED]
    containers = tuple(name for name, kind in own if kind in _CONTAINERS)
    return containers, tuple(name for name, kind in own if kind is torch.Generator)


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
def with_attributes(recorded: Sequence[Attributes]) -> Iterator[None]:
    """The modules have these attributes, with copies of the containers; on exit they get back those that they had.
    Most have them already, and nothing is set."""
    before = [own if own.are_current() else Attributes.of(own.module) for own in recorded]
    for own, now in zip(recorded, before, strict=True):
        if now is not own:
            own.set()
        if own.contents:
            vars(own.module).update({name: value.copy() for name, value in own.contents.items()})
    try:
        yield
    finally:
        for now in before:
            if not now.are_current():
                now.set()


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
