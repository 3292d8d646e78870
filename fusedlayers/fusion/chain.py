"""Functions that a model's code calls, made into one function of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..utils.bounded_cache import BoundedCache
from .calls import Call, Value


class Slot(NamedTuple):
    """In the arguments of a step of a chain: the chain's input, which is number 0, or the result of a step."""

    number: int


Steps = list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


class Chain:
    """A function of one tensor that consists of calls of functions, one after the other.

    Equal ones are one object, as long as they are remembered: what is found out about it is found out once, however
    many places of a model, or graphs of the compiler, call the same functions.
    """

    steps: Steps
    __name__: str

    def __new__(cls, calls: Sequence[Call], input: Value) -> Chain:
        slots = {input: Slot(0)}
        steps: Steps = []
        for number, call in enumerate(calls, 1):
            function: Any = call.target
            steps.append((function, _replaced(call.args, slots), _replaced(call.kwargs, slots)))
            slots[call.gives[0]] = Slot(number)
        return _chain(steps, ", ".join(call.name for call in calls))

    def __reduce__(self) -> Any:
        return _chain, (self.steps, self.__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __call__(self, z: Tensor) -> Tensor:
        values = {Slot(0): z}
        for number, (function, args, kwargs) in enumerate(self.steps, 1):
            # Whether it writes over its argument is for others to decide.
            options = {name: value for name, value in kwargs.items() if name != "inplace"}
            values[Slot(number)] = function(*_replaced(args, values), **_replaced(options, values))
        return values[Slot(len(self.steps))]

    @property
    def is_in_place(self) -> bool:
        """Whether it may write over its input."""
        _, _, options = self.steps[0]
        return self.__name__.partition(",")[0].endswith("_") or bool(options.get("inplace"))

    def begins_with(self, function: Any, args: Any, kwargs: Any, input: object) -> bool:
        """Whether it begins with this call, of ``input``."""
        wanted, wanted_args, wanted_kwargs = self.steps[0]
        if function != wanted or len(args) != len(wanted_args) or kwargs.keys() != wanted_kwargs.keys():
            return False
        pairs = [*zip(args, wanted_args, strict=True), *((kwargs[name], wanted_kwargs[name]) for name in kwargs)]
        return all(found is input if isinstance(stated, Slot) else _are_equal(found, stated) for found, stated in pairs)


def _are_equal(found: object, stated: object) -> bool:
    """A tensor of one number equals that number, but may be a parameter."""
    return found is stated or (type(found) is type(stated) and not isinstance(found, Tensor) and found == stated)


_chains: BoundedCache[Chain] = BoundedCache()


def _chain(steps: Steps, name: str) -> Chain:
    chain = object.__new__(Chain)
    chain.steps, chain.__name__ = steps, name
    return _chains.get(chain) or _chains.put(chain, chain)


def _replaced(tree: Any, values: Mapping[Any, Any]) -> Any:
    """Arguments with what stands for tensors replaced."""
    if isinstance(tree, Value | Slot):
        return values[tree]
    if isinstance(tree, tuple | list):
        return type(tree)(_replaced(part, values) for part in tree)
    return {key: _replaced(part, values) for key, part in tree.items()} if isinstance(tree, dict) else tree
