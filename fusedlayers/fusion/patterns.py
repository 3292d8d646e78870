"""Find what can be fused in the calls of a model: layers and activations, MLPs, and activations alone.

Nothing here knows a model. What counts is which values are passed on, and that nobody else reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .blocks import Plan
from .calls import SIZES, Call, Value
from .chain import Chain
from .pairs import is_transposed

_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply"})
_PARTS = frozenset({"chunk", "split", "tensor_split"})


class Flow:
    """The calls of one or several passes through a model, and who reads what."""

    def __init__(self, passes: Iterable[Call]) -> None:
        self.calls: dict[nn.Module, list[Call]] = {}
        self._readers: defaultdict[Value, list[Call]] = defaultdict(list)
        for outermost in passes:
            for call in outermost:
                if call.module is not None:
                    self.calls.setdefault(call.module, []).append(call)
                for value in call.reads if call.may_read else ():
                    self._readers[value].append(call)

    def readers(self, value: Value) -> Sequence[Call]:
        return self._readers.get(value, ())

    def only_reader(self, value: Value) -> Call | None:
        """The innermost call of a module that alone reads a value, and reads nothing else; or None."""
        readers = self.readers(value)
        if not readers or value.is_kept:
            return None
        call: Call | None = readers[0]
        while call is not None:
            if call.module is not None and call.reads == (value,):
                return call if all(reader.is_in(call) for reader in readers) and len(call.gives) == 1 else None
            call = call.within
        return None


def followers(flow: Flow, layer: Call) -> list[Call]:
    """What alone reads a layer's output: a module, a function, or a function that a module calls."""
    if len(layer.gives) != 1:
        return []
    (z,) = layer.gives
    module, readers = flow.only_reader(z), flow.readers(z)
    calls = [module] if module is not None and not layer.is_in(module) else []
    if len(readers) == 1 and not z.is_kept:
        (reader,) = readers
        # By the code of the module that calls the layer, or has it called.
        is_direct = reader.within is not None and layer.is_in(reader.within)
        if reader.module is None and reader.reads == (z,) and len(reader.gives) == 1 and is_direct:
            calls.append(reader)
    return calls


def parent_of(one: Call, other: Call) -> Call:
    """The innermost call that led to both."""
    call = one
    while not other.is_in(call):
        assert call.within is not None
        call = call.within
    return call


def is_dense(module: nn.Module | None) -> bool:
    return module is not None and (type(module) is nn.Linear or is_transposed(module))


def plan_of(flow: Flow, block: Call, save: str) -> Plan | str | None:
    """What a module consists of if it is an MLP block; a str says why one that is nearly one is none."""
    layers = [call for call in block.calls if is_dense(call.module)]
    if len(layers) not in (2, 3) or len(block.gives) != 1 or len(set(block.reads)) != 1:
        return None
    return _Match(flow, block, layers).plan(save)


class _No(Exception):
    """It is no block."""


class _Match:
    """An attempt to read a call as that of a block, from its end to its begin."""

    def __init__(self, flow: Flow, block: Call, layers: Sequence[Call]) -> None:
        self.flow, self.block = flow, block
        *self.first, self.last = layers
        (self.x,) = set(block.reads)
        self.makers = {value: call for call in block.calls for value in call.gives if value not in call.reads}
        self.used: list[Call] = []

    def plan(self, save: str) -> Plan | str | None:
        try:
            if any(call.reads != (self.x,) for call in self.first) or len(self.last.reads) != 1:
                return None
            if any(value.is_kept for call in self.first for value in call.gives):
                return None
            after = self._after()
            hidden, dropout = self._dropout(self.last.reads[0])
            activation = self._activation(hidden)
        except _No as reason:
            return str(reason) or None
        others = [call for call in self.block.calls if not call.is_metadata and call not in self.used]
        if set(others) != {*self.first, self.last}:
            return None
        if any(call.is_metadata and call.name in SIZES for call in self.block.calls):
            return "its code asks for sizes, and may do something else for others"
        first = tuple(map(self._name, self.first))
        asks = any(call.is_metadata and call.name == "dtype" for call in self.block.calls)
        layer: Any = self.last.module
        dtype = layer.weight.dtype if asks else None
        return Plan(first, activation, dropout, self._name(self.last), after, self.is_gated, save, dtype)

    @property
    def is_gated(self) -> bool:
        (z,) = self.first[0].gives
        return len(self.first) == 2 or any(call.name in _PARTS for call in self.flow.readers(z))

    def _name(self, call: Call) -> str:
        assert call.module is not None
        for name, module in self.block.target.named_modules(remove_duplicate=False):  # type: ignore[union-attr]
            if module is call.module:
                return str(name)
        raise _No(f"{type(call.module).__name__} is not among its modules")

    def _use(self, value: Value) -> Call:
        """The call that made a value, which must be nobody else's."""
        call = self.makers.get(value)
        if call is None or call in self.first or value.is_kept:
            raise _No
        self.used.append(call)
        return call

    def _after(self) -> tuple[str, ...]:
        """The modules after the last layer."""
        names: list[str] = []
        value = self.block.gives[0]
        while self.makers.get(value) is not self.last:
            call = self.makers.get(value)
            if call is None or call.module is None or len(call.reads) != 1 or len(call.gives) != 1:
                raise _No
            self.used.append(call)
            names.insert(0, self._name(call))
            value = call.reads[0]
        # Those that return what they are given, as dropouts do in evaluation.
        idle = [call for call in self.block.calls if call.module is not None and call.reads == call.gives == (value,)]
        self.used += idle
        return (*map(self._name, idle), *names)

    def _dropout(self, hidden: Value) -> tuple[Value, str | None]:
        """What the last layer reads, before a dropout, and that."""
        calls = [call for call in self.block.calls if type(call.module) is nn.Dropout and call.gives == (hidden,)]
        calls = [call for call in calls if call is not self.last]
        if not calls:
            return hidden, None
        if len(calls) > 1:
            raise _No("the hidden layer has two dropouts")
        self.used += calls
        return calls[0].reads[0], self._name(calls[0])

    def _activation(self, hidden: Value) -> str | Chain:
        (z,) = self.first[0].gives
        if not self.is_gated:
            return self._function(z, hidden)
        product = self._use(hidden)
        if product.name not in _PRODUCTS or product.module is not None or len(product.reads) != 2:
            raise _No
        values = [call.gives[0] for call in self.first] if len(self.first) == 2 else self._parts(z)
        up = next((value for value in values if value in product.reads), None)
        if up is None:
            raise _No
        (gate,) = (value for value in values if value is not up)
        if gate is not values[0]:
            if len(self.first) == 1:
                raise _No("one layer makes both, and the gate's rows come second")
            self.first.reverse()
        (activated,) = (value for value in product.reads if value is not up)
        return self._function(gate, activated)

    def _parts(self, z: Value) -> list[Value]:
        """The two halves of the features; whether they are that shows when the block is tried."""
        calls = [call for call in self.flow.readers(z) if call.within is self.block]
        if len(calls) != 1 or len(calls[0].gives) != 2:
            raise _No
        self.used += calls
        return [*calls[0].gives]

    def _function(self, z: Value, y: Value) -> str | Chain:
        """What makes y of z: a module's name, or a chain of functions."""
        calls: set[Call] = set()
        pending = [y]
        while pending:
            value = pending.pop()
            if value is not z:
                call = self._use(value)
                pending += () if call in calls else call.reads
                calls.add(call)
        ordered = [call for call in self.block.calls if call in calls]
        if len(ordered) == 1 and ordered[0].module is not None and ordered[0].reads == (z,):
            return self._name(ordered[0])
        if not ordered or any(call.module is not None or len(call.gives) != 1 for call in ordered):
            raise _No
        return Chain(ordered, z)
