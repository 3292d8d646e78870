"""What ``save_once`` packs between entering and leaving, and the walk of the graph that finds recipes.

The pack hook is handed what a node saves, with the node that made it. If that result can be replayed from saved tensors
(``replays.py``), a recipe is packed in its place (``recipe.py``), and else the tensor. What a recipe reads went through
the same hooks, so recipes are made of recipes.

Cost: some microseconds for each saved tensor, and in backward each replay once, a pass over memory as a rule. Limits:
at most ``DEPTH`` replays one behind the other; a recipe reads what its own region has packed, and so nothing across a
checkpoint's border.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .._torch import AccumulateGrad, Node, sequence_number
from ..ops.saved_buffers import is_under_checkpoint
from ..utils.module_state import modules_in
from .recipe import Hooks, Recipe, Saved, Value, View
from .replays import RESULTS, TABLE, is_sharded

#: Smaller tensors are saved as they are: a replay would take longer than it is worth.
LEAST_BYTES = 1 << 14
#: Replays one behind the other, at most.
DEPTH = 4
#: Where a node's metadata has what its first result is packed as, weakly.
_RESULT = "fusedlayers.result"
_PLAIN = (Tensor, nn.Parameter)


def result_of(node: Any) -> Value | None:
    """What a node's first result was packed as, or made of."""
    ref = node.metadata.get(_RESULT)
    value: Value | None = None if ref is None else ref()
    return value


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is worth a replay, and sizes and strides say all of it."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.nbytes >= LEAST_BYTES and not tensor.is_conj() and not tensor.is_neg()


def _is_no_more(node: Any, operand: Saved) -> bool:
    """Whether the one operand has at most as many bytes as the node's result."""
    given = node._input_metadata[0]
    nbytes = operand.packed.nbytes if operand.unpack is None else operand.nbytes
    operands = sum(maker is not None for maker, _ in node.next_functions)
    return operands == 1 and nbytes <= math.prod(given.shape) * given.dtype.itemsize


def _writes_to_result(node: Any, operand: Value) -> int:
    """How often a node has written to its result itself: a Function of this package says so. An operation in place has
    once: it saves a clone of its input, which does not stand behind it."""
    if hasattr(node, "version"):
        return int(node.version)
    behind = node.next_functions[0][0]
    return int(operand.cloned >= 0 and (behind is None or operand.cloned != behind._sequence_nr()))


class Region:
    """What is packed between entering and leaving, and the walk of the graph that finds recipes (``replays.Graph``)."""

    def __init__(self, hooks: Hooks | None) -> None:
        self.hooks = hooks
        self._is_checkpointed = hooks is not None and is_under_checkpoint()
        self._made = sequence_number()
        self._packed: dict[Any, tuple[weakref.ref[Tensor], weakref.ref[Saved]]] = {}
        self._nesting = 0
        self._began = 0
        self._versions: dict[int, int] = {}

    def begin(self, model: nn.Module | None) -> None:
        """What is made from now on, and of which parameters it may be made."""
        self._began = sequence_number()
        self._versions = {}
        if model is None:
            return
        for module in modules_in(model):  # a third of the time of model.parameters()
            for p in module._parameters.values():
                if p is not None and not p.is_inference():
                    self._versions[id(p)] = p._version

    def replays(self, tensor: Tensor) -> bool:
        """Whether a tensor need not be saved, because a recipe makes it again."""
        whole = tensor if tensor._base is None else tensor._base
        node: Any = whole.grad_fn
        if node is None or not _is_plain(tensor) or whole.output_nr:
            return False
        known = self._known(node)
        value = self._recipe(node, whole) if known is None else known.source
        return isinstance(value, Recipe)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Value:
        """What a node keeps of this tensor."""
        if tensor.grad_fn is None and (self.hooks is None or self._is_checkpointed):  # a parameter, or a node's own
            value: Value = Saved(tensor, self.hooks, self)
            value.readers = 1
        else:
            value = self._value_of(tensor)
            value.claim()
        return value

    def _value_of(self, tensor: Tensor) -> Value:
        base = tensor._base
        whole = tensor if base is None or base.dtype is not tensor.dtype else base
        node: Any = whole.grad_fn  # torch takes its metadata for a method
        if node is None or not _is_plain(tensor) or whole.output_nr or whole.storage_offset():
            return self._as_it_is(tensor, whole)
        if self._is_checkpointed and node._sequence_nr() < self._made:
            return Saved(tensor, self.hooks, self)  # an argument may be a view, and is none in the second run
        name = node.name()
        value = self._known(node)
        if value is not None and value.version != whole._version:  # written to since
            return Saved(tensor, self.hooks, self)
        if value is None or (value.source is value and name in RESULTS):  # which its node has saved, so far
            value = self._recipe(node, whole) or value
        if self._is_checkpointed and value is not None and isinstance(value.source, Saved):
            return Saved(tensor, self.hooks, self)  # both runs of a checkpoint pack as many
        if value is None:
            if self.hooks is not None and whole is not tensor:
                return self._as_it_is(tensor, whole)
            value = self._as_it_is(whole, whole)
            if name == "CloneBackward0":
                value.cloned = node._sequence_nr()
            node.metadata[_RESULT] = weakref.ref(value)
        if isinstance(value, Recipe):
            value.stands_for(whole)
        return value if whole is tensor else View(tensor, value)

    def _as_it_is(self, tensor: Tensor, whole: Tensor) -> Saved:
        """A tensor that is saved. Hooks that were there before get it once, but for a checkpoint's, which count."""
        if (
            self.hooks is None
            or self._is_checkpointed
            or type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
        ):
            return Saved(tensor, self.hooks, self)
        key = id(whole), tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        ref, known = self._packed.get(key, (None, None))
        value = None if ref is None or known is None or ref() is not whole else known()
        if value is None or value.version != tensor._version:
            value = Saved(tensor, self.hooks, self)
            self._packed[key] = weakref.ref(whole), weakref.ref(value)
        return value

    # --- the walk -----------------------------------------------------------------------------------------------------

    def saved(self, node: Any, name: str) -> Value | None:
        try:
            raw = getattr(node, f"_raw_saved_{name}")
            packed = raw.data
        except (AttributeError, RuntimeError):  # there is none of this name, or backward has freed it
            return None
        if isinstance(packed, Value):
            return self._usable(packed)
        if not isinstance(packed, Tensor) or packed.dim() or raw.unpack_hook is not None:
            return None
        return Saved(packed, None, self)  # a number: hooks do not get it

    def saved_tensors(self, node: Any) -> list[Value] | None:
        """What a Function of this package has saved, in its order."""
        try:
            found = [self._usable(raw.data) for raw in node._raw_saved_tensors]
        except RuntimeError:  # backward has freed it
            return None
        values = [value for value in found if value is not None]
        return values if len(values) == len(found) else None

    def behind(self, node: Any, edge: int) -> Value | None:
        maker, output_nr = node.next_functions[edge]
        if maker is None:
            return None
        if type(maker) is AccumulateGrad:  # in a checkpoint's second run autocast copies anew
            return None if self._is_checkpointed else self.parameter(node, edge)
        if output_nr or self._nesting >= DEPTH:
            return None
        known = self._known(maker)
        value = self._recipe(maker, None) if known is None else self._usable(known)
        if isinstance(value, Saved) and maker.name() not in RESULTS and not _is_no_more(node, value):
            return None  # another branch saves it, which may be dropped before
        return value

    def parameter(self, node: Any, edge: int) -> Value | None:
        maker, _ = node.next_functions[edge]
        if type(maker) is not AccumulateGrad:
            return None
        leaf: Any = maker.variable  # as it was when the region began, and so when the node read it
        is_same = leaf._version == self._versions.get(id(leaf)) and node._sequence_nr() >= self._began
        return Saved(leaf, None, self) if is_same else None

    def read(self, node: Any, name: str, edge: int) -> Value | None:
        value = self.saved(node, name)
        return self.behind(node, edge) if value is None else value

    def _usable(self, packed: Any) -> Value | None:
        """A value that recipes may read: of this region, and not written to since."""
        if not isinstance(packed, Value) or packed.region is not self or packed.is_edited:
            return None
        source = packed.source
        if type(source) is not Saved or type(source.packed) is not nn.Parameter or not is_sharded():
            return source
        parameter = source.packed  # it may be freed before a replay reads it, or has been
        is_there = parameter.untyped_storage().nbytes() > 0
        return Saved(parameter.detach().clone(), None, self) if is_there and parameter.dim() < 2 else None

    def _known(self, node: Any) -> Value | None:
        """What the node's result was packed as, or made of, before."""
        value = result_of(node)
        return value if value is not None and value.region is self else None

    def _recipe(self, node: Any, result: Tensor | None) -> Value | None:
        """What replays a node's first result, which may be there; or what it saves itself."""
        name = node.name()
        row, of_result = TABLE.get(name), RESULTS.get(name)
        if row is None and of_result is None:
            function: Any = vars(type(node)).get("_forward_cls") if isinstance(node, BackwardCFunction) else None
            if function is None or not issubclass(function, Node):
                return None
            row = getattr(function, "replay", None)  # of a Function of this package
        self._nesting += 1
        try:
            if of_result is not None:
                return self._of_saved_result(node, result, of_result(node))
            parts = None if row is None else row(self, node, result)
        finally:
            self._nesting -= 1
        if parts is None or not parts[1] or max([value.depth for value in parts[1]]) >= DEPTH:
            return None
        version = _writes_to_result(node, parts[1][0])
        if result is not None and result._version != version:
            return None
        recipe = self._registered(node, Recipe(node, parts[0], parts[1], self), version)
        if name == "CloneBackward0":
            recipe.cloned = node._sequence_nr()
        return recipe

    def _registered(self, node: Any, recipe: Recipe, version: int) -> Recipe:
        """Whoever reads the node's result from now on has this recipe."""
        recipe.version = version
        node.metadata[_RESULT] = weakref.ref(recipe)
        return recipe

    def _of_saved_result(self, node: Any, result: Tensor | None, function: Callable[..., Tensor]) -> Value | None:
        """A node's own saved result. It becomes a recipe where what stands behind the node can be had."""
        try:
            own = node._raw_saved_result.data
        except RuntimeError:
            return None
        if (
            not isinstance(own, Saved)
            or self._usable(own) is None
            or (result is not None and result._version != own.version)
        ):
            return None
        z = self.behind(node, 0) if own.source is own else None
        if z is not None and z.depth < DEPTH:
            own.become(self._registered(node, Recipe(node, function, (z,), self), own.version))
        return own.source
