"""Invertible modules one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Self

from torch import Tensor, nn

from .calls import Values
from .module import InvertibleModule, can_be_spared, packed, sparing_nothing, unpacked


class InvertibleSequential(InvertibleModule):
    """Invertible modules one after the other, of which only the last one's output is held for the backward pass.

    So what is kept does not grow with depth, but by what single modules keep besides (two numbers for each channel of a
    batch norm in training). The outputs of a module, one or several, are the next one's inputs.

    Keys of the ``state_dict`` are as in ``nn.Sequential``; it is indexed, sliced and extended like that. With
    ``checkpoint=False`` the modules run plainly, whatever their own flags; with ``invertible=False`` the inputs of the
    whole are kept. Reversing it reverses each module and their order.

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

    _modules: dict[str, InvertibleModule]  # type: ignore[assignment]  # of torch's modules, only these

    def __init__(self, *modules: InvertibleModule | OrderedDict[str, InvertibleModule]) -> None:
        super().__init__()
        named: Iterable[tuple[str, Any]] = ((str(i), module) for i, module in enumerate(modules))
        if len(modules) == 1 and isinstance(modules[0], OrderedDict):
            named = modules[0].items()
        for name, module in named:
            self.add_module(name, module)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if not isinstance(module, InvertibleModule):
            raise TypeError(
                f"{type(self).__name__}: {name} is a {type(module).__name__}, which is not invertible; use an "
                "InvertibleModule, or put it into a coupling"
            )
        super().add_module(name, module)

    def append(self, module: InvertibleModule) -> Self:
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[InvertibleModule]) -> Self:
        for module in modules:
            self.append(module)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[InvertibleModule]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | slice) -> InvertibleModule:
        if isinstance(index, slice):
            return type(self)(OrderedDict(list(self._modules.items())[index]))
        return list(self)[index]

    def _in_order(self) -> list[InvertibleModule]:
        return list(self)[::-1] if self.reversed else list(self)

    def forward(self, *inputs: Any, keep: Iterable[Tensor] = (), **unknown: Any) -> Any:
        if unknown or not self.invertible or not can_be_spared():
            return super().forward(*inputs, keep=keep, **unknown)
        self.checked_keep(inputs, keep)
        return self._called(inputs, keep)

    def plainly(self, *inputs: Any) -> Any:
        with sparing_nothing():
            return self._called(inputs)

    def _called(self, inputs: Values, keep: Iterable[Tensor] = ()) -> Any:
        # The modules, and not their functions, for there may be hooks on them: a user's, or an engine's that shards.
        values: Any = inputs
        for module in self._in_order():
            values = module(*packed(values), keep=keep)
            keep = ()
        return unpacked(packed(values))

    # What is hidden from the caller by single modules stays between them.

    def function(self, *inputs: Any) -> Any:
        return self._through(list(self), inputs)

    def inverse(self, *outputs: Any) -> Any:
        return self._through(list(self)[::-1], outputs, inverted=True)

    def _through(self, modules: list[InvertibleModule], values: Values, inverted: bool = False) -> Any:
        for module in modules:
            # A reversed container's modules are reversed too, and its function is to be what it is otherwise.
            step = module.inverse if inverted != (module.reversed != self.reversed) else module.function
            count = module.num_inputs if step == module.inverse else module.num_outputs
            values = module.process(packed(step(*values)), count)
        return values[0] if len(values) == 1 else values

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # of others it is what the class says
        return all(module.reversible for module in self)

    def reverse(self, mode: bool | None = None) -> Self:
        before = self.reversed
        super().reverse(mode)
        if self.reversed != before:
            for module in self:
                module.reverse()
        return self

    def parts(self) -> Iterator[tuple[str, InvertibleModule]]:
        names = {id(module): name for name, module in self._modules.items()}
        for module in self._in_order():
            own = names[id(module)]
            for name, part in module.parts():
                yield (f"{own}.{name}" if name else own), part
