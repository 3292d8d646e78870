"""Which module was running when a node of the graph was made.

Autograd numbers nodes in the order in which a thread makes them. The tracker records the number at which each module
starts and ends, so that every node can be assigned to a module afterwards. Saved-tensor hooks would not do: under them
this library's own layers, and others that reuse buffers, save copies.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._torch import sequence_number


class ModuleTracker:
    """The paths of a model's modules, and which of them ran when."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.class_names: dict[str, str] = {"": _name(model)}
        self.modules: list[nn.Module] = []  # held, so that ids stay unique
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._changes: list[str] = []
        for name, module in _modules(model):
            self._name(module, name)

    @property
    def current(self) -> str:
        """The innermost module that is running; empty outside of all, and for the model itself."""
        return self._stack[-1] if self._stack else ""

    def module_of_node(self, number: int) -> str:
        """The innermost module that was running when autograd gave a node this number."""
        at = bisect.bisect_right(self._numbers, number) - 1
        return self._changes[at] if at >= 0 else ""

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Record which module runs, by hooks for all modules of the process: the model's own hooks are not touched."""
        thread = threading.get_ident()

        def is_ours() -> bool:  # the compiler cannot trace the second question
            return not torch.compiler.is_compiling() and threading.get_ident() == thread

        def enter(module: nn.Module, *_: Any) -> None:
            if is_ours():
                if id(module) not in self._paths:  # created in the forward pass, or referenced by a function
                    self._name(module, ".".join(filter(None, (self.current, type(module).__name__))))
                self._change(self._stack.append, self._paths[id(module)])

        def leave(module: nn.Module, *_: Any) -> None:
            if is_ours() and self._stack:
                self._change(lambda _: self._stack.pop(), "")

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            with warnings.catch_warnings():
                # The hooks fire for the wrapper of a compiled module too, which is harmless here.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _change(self, apply: Callable[[str], Any], path: str) -> None:
        apply(path)
        self._numbers.append(sequence_number())
        self._changes.append(self.current)

    def _name(self, module: nn.Module, name: str) -> None:
        for path, inner in module.named_modules(prefix=name):
            if id(inner) not in self._paths:
                self._paths[id(inner)] = path
                self.class_names.setdefault(path, type(inner).__name__)
                self.modules.append(inner)


def _name(model: Any) -> str:
    while isinstance(model, functools.partial):
        model = model.func
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__qualname__", type(model).__name__)).rpartition("<locals>.")[2]


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a callable is, belongs to, or reads by name."""
    if isinstance(model, nn.Module):
        yield "", model
    elif isinstance(model, functools.partial):
        yield from _modules(model.func)
        for value in (*model.args, *model.keywords.values()):
            if isinstance(value, nn.Module):
                yield type(value).__name__, value
    elif isinstance(owner := getattr(model, "__self__", None), nn.Module):
        yield "", owner
    elif inspect.isfunction(model):
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            names = inspect.getclosurevars(model)
            for name, value in {**names.globals, **names.nonlocals}.items():
                if isinstance(value, nn.Module):
                    yield name, value
