"""Which module was running when a node of the graph was made.

Autograd numbers nodes in the order in which a thread makes them. The tracker records the number at which each module
starts and ends, so that every node can be assigned to a module afterwards. Saved-tensor hooks would not do: under them
this library's own layers, and others that reuse buffers, save copies.
"""

import bisect
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._torch import number_of, sequence_number
from .formatting import callable_name
from .reading import named_modules_of


class ModuleTracker:
    """The paths of a model's modules, and which of them ran when. Code that ``torch.compile`` has compiled is of the
    module around it."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.name = callable_name(model)
        self.modules: list[nn.Module] = []  # held, so that ids stay unique
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._stacks: list[tuple[str, ...]] = []
        for name, module in named_modules_of(model):
            self._add(module, name)

    def tensors(self) -> Iterator[Tensor]:
        """The parameters and buffers of all modules."""
        for module in self.modules:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)

    def module_of(self, *nodes: Any) -> str:
        """The innermost module that was running when each of these nodes was made; empty for the model itself."""
        module = ""
        for paths in zip(*(self._running_at(number_of(node)) for node in nodes), strict=False):
            if len({*paths}) > 1:
                break
            module = paths[0]
        return module

    def module_at(self, number: int) -> str:
        """The innermost module that was running when autograd gave a node this number; the model by its own name."""
        return next(reversed(self._running_at(number)), "") or self.name

    def _running_at(self, number: int) -> tuple[str, ...]:
        """The modules that were running then, the innermost last."""
        at = bisect.bisect_right(self._numbers, number) - 1
        return self._stacks[at] if at >= 0 else ()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Record which module runs, by hooks for all modules of the process: the model's own hooks are not touched."""
        thread = threading.get_ident()

        def is_ours() -> bool:  # the compiler, which traces hooks, cannot trace the second question
            return not torch.compiler.is_compiling() and threading.get_ident() == thread

        def enter(module: nn.Module, *_: Any) -> None:
            if is_ours():
                if id(module) not in self._paths:  # created in the forward pass, or referenced by a function
                    self._add(module, ".".join((*self._stack[-1:], type(module).__name__)).lstrip("."))
                self._stack.append(self._paths[id(module)])
                self._record()

        def leave(module: nn.Module, *_: Any) -> None:
            if is_ours() and self._stack:
                self._stack.pop()
                self._record()

        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            # The hooks fire for the wrapper of a compiled module too, which is harmless here.
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            stack.callback(self._stack.clear)
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    def _record(self) -> None:
        self._numbers.append(sequence_number())
        self._stacks.append(tuple(self._stack))

    def _add(self, module: nn.Module, name: str) -> None:
        for path, inner in module.named_modules(prefix=name):
            if id(inner) not in self._paths:
                self._paths[id(inner)] = path
                self.modules.append(inner)
