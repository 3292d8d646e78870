"""A chain of invertible modules, which holds one output however deep it is (Gomez et al. 2017, "The Reversible Residual
Network").

The modules are called one by one, with their hooks; each lets go of an output that the next one's inverse can
compute (``inversion.py``). Rounding errors add up from the last module to the first (``check.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from .inversion import current_mode, in_mode
from .module import InvertibleModule, as_tuple, single_or_tuple


class InvertibleSequential(InvertibleModule, nn.Sequential):
    """Invertible modules one after the other, of which only the last one's output is held for the backward pass.

    So saved memory does not grow with depth, but by what single modules save besides (two numbers for each channel of a
    batch norm in training). The outputs of a module, one or several, are the next one's inputs.

    It is an ``nn.Sequential``, with its keys in the ``state_dict``, indexing, slicing and extending. With
    ``checkpoint=False`` the modules run plainly, whatever their own flags. Reversing it reverses each module and their
    order.

    Args:
        *modules: ``InvertibleModule``s, or one ``OrderedDict`` of them.

    Raises:
        TypeError: a module that is not invertible.

    Saved for the backward pass: the last output.

    Source: Gomez et al. 2017, "The Reversible Residual Network".

    >>> import torch, fusedlayers as fl
    >>> net = fl.InvertibleSequential(*(fl.InvertibleLinear(8, 8) for _ in range(4)))
    >>> net(torch.randn(2, 8)).sum().backward()
    """

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, _invertible(self, name, module))

    def __getitem__(self, index: Any) -> Any:
        found: Any = nn.Sequential.__getitem__(self, index)
        if isinstance(index, slice):
            found.checkpoint, found.invertible, found._reversed = self.checkpoint, self.invertible, self.reversed
        return found

    def _chain(self) -> list[InvertibleModule]:
        # Checked here too, because setting items and attributes bypasses add_module.
        return [_invertible(self, name, module) for name, module in self._modules.items()]

    def _in_order(self) -> list[InvertibleModule]:
        return self._chain()[::-1] if self.reversed else self._chain()

    def forward(self, *inputs: Any) -> Any:
        # In a checkpoint a single module saves more than it frees; a chain holds one output instead of all.
        with in_mode(current_mode() or "chain"):
            return super().forward(*inputs)

    def _run_inverted(self, inputs: tuple[Any, ...]) -> Any:
        # The modules, and not their functions, for there may be hooks on them: a user's, or those of FSDP.
        for module in self._in_order():
            inputs = as_tuple(module(*inputs))
        return single_or_tuple(inputs)

    def _run_plain(self, *inputs: Any) -> Any:
        with in_mode("plain"):
            return self._run_inverted(inputs)

    def function(self, *inputs: Any) -> Any:
        return self._run_backwards(inputs) if self.reversed else self._run_plain(*inputs)

    def inverse(self, *outputs: Any) -> Any:
        return self._run_plain(*outputs) if self.reversed else self._run_backwards(outputs)

    def _run_backwards(self, values: tuple[Any, ...]) -> Any:
        """From what ``forward`` returns to what it takes. Outputs that the caller does not see are missing."""
        for module in reversed(self._in_order()):
            values = as_tuple(module.call_inverse(*values))[: module._visible(of_inverse=True)]
        return single_or_tuple(values)

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # of others it is what the class says
        return all(module.reversible for module in self._chain())

    def reverse(self, mode: bool | None = None) -> Self:
        before = self.reversed
        super().reverse(mode)
        if self.reversed != before:
            for module in self._chain():
                module.reverse()
        return self

    def _leaf_modules(self) -> Iterator[tuple[str, InvertibleModule]]:
        names = {module: name for name, module in self._modules.items()}
        for module in self._in_order():
            for name, part in module._leaf_modules():
                yield f"{names[module]}.{name}".rstrip("."), part


def _invertible(container: nn.Module, name: str, module: nn.Module | None) -> InvertibleModule:
    if not isinstance(module, InvertibleModule):
        raise TypeError(
            f"{type(container).__name__}: {name} is a {type(module).__name__}, which is not invertible; use an "
            "InvertibleModule, or put it into a coupling"
        )
    return module
