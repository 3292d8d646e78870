"""Regions: the values that ``save_once`` packs, and the walk of the graph that finds recipes.

The pack hook is handed what a node saves, with the node that made it. If that result can be replayed from saved tensors
(``replays.py``), a recipe is packed in its place (``recipe.py``), and else the tensor. What a recipe reads went through
the same hooks, so recipes are made of recipes.

Cost: some microseconds for each saved tensor, and in backward each replay once, a pass over memory as a rule. Limits:
at most ``DEPTH`` replays in a row; a recipe reads what its own region has packed, and so nothing across a
checkpoint's border. Autocast: replays run without it (``Recipe``), a leaf again as it ran (``LeafCall``); what is cast
up is stored narrowly (``replays._cast``), and facts of norms are noted below that (``norms``); a parameter's cast is no
operand under a checkpoint, which casts anew (``Region.operand``).
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .._torch import FLAT_PARAMETER, RAW_SAVED, AccumulateGrad, lacks, number_of, results_of, sequence_number
from ..calls.validation import PLAIN_TYPES
from ..ops.saved_buffers import is_under_checkpoint
from ..utils.module_state import modules_in
from . import masks
from .leaves import result_of_leaf
from .masks import Mask, mask_of, may_be_mask
from .norms import NORM_REPLAYS, is_sharded
from .recipe import VIEWS, Hooks, Recipe, Stored, Value, View
from .replays import REPLAYS, RESULTS, with_options
from .second_run import Log

#: Smaller tensors are saved as they are: a replay would take longer than it is worth. On GPUs each is a launch, for
#: which a GPU that has little to do waits.
LEAST_BYTES, GPU_LEAST_BYTES = 1 << 14, 1 << 18
#: Replays in a row, at most.
DEPTH = 4
_VERSION = operator.attrgetter("_version")
#: Where a node's metadata has what its first result is packed as, weakly.
_RESULT = "fusedlayers.result"


def result_of(node: Any) -> Value | None:
    """The value that a node's first result was packed as, or made of."""
    ref = node.metadata.get(_RESULT)
    return None if ref is None else ref()


class Region:
    """The values that are packed between entering and leaving. Rules ask it for the operands of a replay.

    Attributes:
        hooks: those that were there before; they get what is saved.
        is_checkpointed: whether those are a checkpoint's. Both of its runs have to pack as many tensors.
        knows_parameters: whether recipes may be made of a model's parameters.
        is_sharded: whether ``fully_shard`` has been used when the region began.
        log: what is packed while a leaf runs (``leaves.py``); None while none does.
        has_leaves: whether one has run.
        number: of the next node of its thread, when it was made.
        phase: how many parameters are trained, and whether the model is in training mode.
    """

    def __init__(self, hooks: Hooks | None) -> None:
        self.hooks, self.knows_parameters, self.is_sharded = hooks, False, is_sharded()
        self.is_checkpointed = hooks is not None and is_under_checkpoint()
        self.number = sequence_number()
        self._packed: dict[Any, tuple[weakref.ref[Tensor], weakref.ref[Stored]]] = {}
        self._nesting = 0
        self._began = 0
        self._versions: dict[int, int] = {}
        self._masks: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Mask]]] = {}
        self._model: weakref.ref[nn.Module] | None = None
        self._given: Sequence[Any] = ()
        self._kept: set[int] | None = None
        self.log: Log | None = None
        self.has_leaves = False
        self.phase = 0, False

    def begin(self, model: nn.Module | None, given: Iterable[Any] = ()) -> None:
        """Let recipes be made of this model's parameters, by nodes that are made from now on. The masks among its
        buffers, and among what it is given, stay in memory whoever saves them."""
        self._began, self.knows_parameters = sequence_number(), model is not None
        self._versions, self._given, self._kept = {}, (*map(id, given),), None
        if model is not None:
            self._model = weakref.ref(model)
            found = None if self.is_checkpointed else _HOLDERS.get(model)  # both runs of a checkpoint find the same
            if found is None:
                found = _HOLDERS[model] = [weakref.ref(module) for module in modules_in(model) if module._parameters]
            held = [p for ref in found if (module := ref()) is not None for p in module._parameters.values()]
            self.phase = sum([p is not None and p.requires_grad for p in held]), model.training
            try:
                self._versions = dict(zip(map(id, held), map(_VERSION, held), strict=True))
            except (AttributeError, RuntimeError):  # some are None, or inference tensors, which have no version
                self._versions = {id(p): p._version for p in held if p is not None and not p.is_inference()}
        self.is_sharded = is_sharded()

    def may_free(self, parameter: Tensor) -> bool:
        """Whether a parameter may be freed after the forward pass of its part of the model: by ``fully_shard``, by
        FSDP's first version, whose parameters are views of another one, or by DeepSpeed's ZeRO-3, which numbers them.
        """
        return type(parameter) is not nn.Parameter or self.is_sharded or hasattr(parameter, "ds_id")

    @staticmethod
    def is_worth_a_replay(tensor: Tensor) -> bool:
        """Whether a tensor is worth a replay, and sizes and strides say all of it."""
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        is_itself = tensor._base is None or not (tensor.is_conj() or tensor.is_neg())
        return is_itself and tensor.nbytes >= (GPU_LEAST_BYTES if tensor.is_cuda else LEAST_BYTES)

    def known(self, tensor: Tensor) -> Value | None:
        """The value that a whole tensor was packed as, or made of, before."""
        node: Any = tensor.grad_fn
        value = None if node is None or tensor._base is not None or tensor.output_nr else self._known(node)
        return value if value is not None and value.version == tensor._version else None

    # --- hooks --------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Value:
        """The value that a node keeps in the place of a tensor."""
        if tensor.grad_fn is not None:
            value = self.value_of(tensor)
        elif tensor.numel() >= masks.LEAST_BYTES >> 2 and may_be_mask(tensor) and (mask := self._mask_of(tensor)):
            value = mask
        elif self.hooks is None or self.is_checkpointed:  # a parameter, or a node's own
            value = Stored(tensor, self.hooks, self)
        else:
            value = self.value_of(tensor)
        if value.operands:
            value.claim()
        else:
            value.readers += 1
        if self.log is not None:
            if self.is_checkpointed and not self.log:  # here, so that the second run ends where PyTorch's ends
                self.log.arguments = [self.value_of(t) for t in self.log.tensors]
            self.log.append((value, tensor))
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor is packed as."""
        base = tensor._base
        whole = tensor if base is None or base.dtype is not tensor.dtype else base
        node: Any = whole.grad_fn
        if node is None or not self.is_worth_a_replay(tensor) or whole.output_nr or whole.storage_offset():
            return self._as_it_is(tensor, whole)
        if self.is_checkpointed and number_of(node) < self.number:
            return Stored(tensor, self.hooks, self)  # an argument may be a view, and is none in the second run
        value = self._known(node)
        if value is None:
            value = self._recipe(node, whole)
        elif value.version != whole._version or value.strides not in (None, whole.stride()):
            return Stored(tensor, self.hooks, self)  # it was written to since, or is laid out otherwise
        elif isinstance(value, Stored) and not value.operands and type(node).__name__ in RESULTS:
            value = self._recipe(node, whole) or value  # its node has saved it, so far
        if self.is_checkpointed and value is not None and self.hooks is not None:
            if isinstance(value.source, Stored):
                return Stored(tensor, self.hooks, self)
            self.hooks[0](tensor)  # both runs pack as many: a leaf may find in one what it does not find in the other
        if value is None:
            if self.hooks is not None and whole is not tensor:
                return self._as_it_is(tensor, whole)
            value = self._as_it_is(whole, whole)
            self._set_result(node, value, whole._version)
        elif isinstance(value, Recipe):
            value.stands_for(whole)
        return value if whole is tensor else View(tensor, value)

    def _mask_of(self, tensor: Tensor) -> Value | None:
        """The bits of a mask, which all who save it share; None where it belongs to the caller or to the model."""
        whole = tensor if tensor._base is None else tensor._base
        if not self.knows_parameters or whole.dtype is not tensor.dtype or whole.storage_offset():
            return None
        if self._kept is None or self.is_checkpointed:
            model = None if self._model is None else self._model()
            buffers = [] if model is None else [b for m in modules_in(model) for b in m._buffers.values()]
            self._kept = {*self._given, *map(id, buffers)}
        if id(whole) in self._kept:
            return None
        ref, known = self._masks.get(id(whole), (None, None))
        mask = None if ref is None or known is None or ref() is not whole else known()
        if mask is None or mask.version != whole._version:
            mask = mask_of(whole, self.hooks, self)
            if mask is None:
                return None
            self._masks[id(whole)] = weakref.ref(whole), weakref.ref(mask)
        return mask if whole is tensor else View(tensor, mask)

    def _as_it_is(self, tensor: Tensor, whole: Tensor) -> Stored:
        """A tensor that is saved. Hooks that were there before get it once, but for a checkpoint's, which count."""
        # Recipes leave views of a flat parameter alone, which FSDP's first version frees.
        region = None if whole is not tensor and hasattr(whole, FLAT_PARAMETER) else self
        if self.hooks is None or self.is_checkpointed:
            return Stored(tensor, self.hooks, region)
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            return Stored(tensor, self.hooks, region)
        key = id(whole), tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        ref, known = self._packed.get(key, (None, None))
        value = None if ref is None or known is None or ref() is not whole else known()
        if value is None or value.version != tensor._version:
            value = Stored(tensor, self.hooks, region)
            self._packed[key] = weakref.ref(whole), weakref.ref(value)
        return value

    # --- operands: a value that is not there is None ------------------------------------------------------------------

    def saved_list(self, node: Any, name: str) -> list[Value] | None:
        """The values of a list of tensors that a node has saved under this name."""
        try:
            found = [self.usable(raw.data) for raw in getattr(node, RAW_SAVED + name)]
        except RuntimeError:  # backward has freed them
            return None
        values = [value for value in found if value is not None]
        return values if len(values) == len(found) else None

    def saved(self, node: Any, name: Any) -> Value | None:
        """The value that a node has saved under this name."""
        try:
            raw = getattr(node, RAW_SAVED + name)
            packed = raw.data
        except (AttributeError, RuntimeError):  # there is none of this name, or backward has freed it
            return None
        if isinstance(packed, Value):
            return self.usable(packed)
        if not isinstance(packed, Tensor) or packed.dim() or raw.unpack_hook is not None:
            return None
        return Stored(packed, None, self)  # a number: hooks do not get it

    def operand(self, node: Any, edge: int) -> Value | None:
        """The value that the node has read through an edge: one that is saved somewhere, or a recipe."""
        maker, output_nr = node.next_functions[edge]
        if maker is None:
            return None
        if type(maker) is AccumulateGrad:  # in a checkpoint's second run autocast copies anew
            return None if self.is_checkpointed else self.parameter(node, edge)
        if output_nr or self._nesting >= DEPTH:
            return None
        known = self._known(maker)
        value = self._recipe(maker, None) if known is None else self.usable(known)
        if isinstance(value, Stored) and (name := type(maker).__name__) not in RESULTS and _OWN.get(name) is None:
            return value if _is_no_more(node, value) else None  # another branch saves it, which may be dropped before
        return value

    def parameter(self, node: Any, edge: int) -> Value | None:
        """The parameter that the node has read through an edge."""
        maker, _ = node.next_functions[edge]
        if type(maker) is not AccumulateGrad:
            return None
        leaf: Any = maker.variable  # as it was when the region began, and so when the node read it
        version = self._versions.get(id(leaf))
        if version is None and type(leaf) is nn.Parameter and self._model is not None:
            _HOLDERS.pop(self._model(), None)  # type: ignore[arg-type]  # it has come since: the next region looks again
        is_same = leaf._version == version and number_of(node) >= self._began
        return Stored(leaf, None, self) if is_same and not self.may_free(leaf) else None

    def read(self, node: Any, name: str, edge: int) -> Value | None:
        """The value that a node has read: it has saved it, or else its producer is known."""
        value = self.saved(node, name)
        return self.operand(node, edge) if value is None else value

    def usable(self, packed: Any) -> Value | None:
        """A value that recipes may read: of this region, and not written to since."""
        if not isinstance(packed, Value) or packed.region is not self or packed.is_edited:
            return None
        source = packed.source
        if type(source) is not Stored or type(source.packed) is not nn.Parameter or not self.may_free(source.packed):
            return source
        parameter = source.packed  # it may be freed before a replay reads it, or has been
        is_there = parameter.untyped_storage().nbytes() > 0
        return Stored(parameter.detach().clone(), None, self) if is_there and parameter.dim() < 2 else None

    # --- the results of nodes -----------------------------------------------------------------------------------------

    def _known(self, node: Any) -> Value | None:
        """The value that the node's first result was packed as, or made of, before."""
        ref = node.metadata.get(_RESULT)  # as ``result_of``, with one function less: it is asked for each saved tensor
        value: Value | None = None if ref is None else ref()
        return value if value is not None and value.region is self else None

    def _set_result(self, node: Any, value: Value, version: int) -> None:
        """Give this value to all that read the node's first result from now on."""
        value.version = version
        if type(node).__name__ == "CloneBackward0":
            value.cloned = number_of(node)
        node.metadata[_RESULT] = weakref.ref(value)

    def take_for_result(self, node: Any, output_nr: int, copy: Stored, strides: tuple[int, ...]) -> None:
        """Let a copy be packed for a node's result too, where that has these strides and was never written to."""
        if output_nr == 0 and node.metadata.get(_RESULT) is None:
            copy.strides = strides
            self._set_result(node, copy, 0)

    def _recipe(self, node: Any, result: Tensor | None) -> Value | None:
        """The replay of a node's first result, which may be there; or the result that it saves itself."""
        name = type(node).__name__  # as node.name(), which makes a string of a C++ type's name
        if name in RESULTS:
            return self._of_saved_result(node, result)
        rule: Any = REPLAYS.get(name)
        recipe: Recipe | None = None
        if rule is not None:
            recipe = self._by_rule(rule, name, node, result)
        elif _OWN.get(name, name) is not None and (own := self._own_result(name, node, result)) is not None:
            return own
        if recipe is None:
            recipe = result_of_leaf(self, node, result) if self.has_leaves else None
            if recipe is None or recipe.depth > DEPTH:
                return None
            recipe.version = 0 if result is None else result._version
        self._set_result(node, recipe, recipe.version)
        return recipe

    def _by_rule(self, rule: Any, name: str, node: Any, result: Tensor | None) -> Recipe | None:
        """The replay of a node's first result by a rule."""
        self._nesting += 1
        try:
            replay = rule(self, node, result)
        except (AttributeError, TypeError) as error:  # this torch's node has other names
            _switch_off(name, error)
            return None
        finally:
            self._nesting -= 1
        if replay is None or not replay[1]:
            return None
        function, operands = replay
        dtype = results_of(node)[0].dtype if result is None else result.dtype
        recipe = Recipe(name, dtype, function, operands, self)
        recipe.is_fresh = name in NORM_REPLAYS
        if operands[0].cloned >= 0 or isinstance(node, BackwardCFunction):
            recipe.version = _writes_to_result(node, operands[0])
        is_deep = recipe.depth - (name not in VIEWS) >= DEPTH
        return None if is_deep or (result is not None and result._version != recipe.version) else recipe

    def _own_result(self, name: str, node: Any, result: Tensor | None) -> Value | None:
        """The result that a node without a rule has saved itself, as softmax and attention do."""
        if name not in _OWN:
            own_name = "output" if name.startswith("ScaledDotProduct") else "result"  # elsewhere "output" is an input
            _OWN[name] = own_name if hasattr(node, RAW_SAVED + own_name) else None
        own = None if _OWN[name] is None else self.saved(node, _OWN[name])
        if own is None or (result is not None and result._version != own.version):
            return None
        self._set_result(node, own, own.version)
        return own

    def _of_saved_result(self, node: Any, result: Tensor | None) -> Value | None:
        """A node's own saved result. It becomes a recipe where the node's operand can be had."""
        own = self.saved(node, "result")
        if own is None or (result is not None and result._version != own.version):
            return None
        self._nesting += 1
        z = self.operand(node, 0) if isinstance(own, Stored) else None
        self._nesting -= 1
        if not isinstance(own, Stored) or z is None or z.depth >= DEPTH:
            return own
        name = type(node).__name__
        function, *options = RESULTS[name]
        try:
            function = with_options(function, node, options)
        except (AttributeError, TypeError) as error:  # this torch's node has other names
            _switch_off(name, error)
            return own
        recipe = Recipe(name, results_of(node)[0].dtype, function, (z,), self)
        self._set_result(node, recipe, own.version)
        own.become(recipe)
        return recipe


#: By a model, those of its modules that have parameters, which a walk takes long to find.
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()

#: By a node's name, the name under which it saves its own result.
_OWN: dict[str, str | None] = {}


def _switch_off(name: str, error: Exception) -> None:
    """Leave the results of nodes of this name to PyTorch from now on."""
    lacks(name, "its results are saved", error)
    REPLAYS.pop(name, None)
    RESULTS.pop(name, None)


def _is_no_more(node: Any, operand: Stored) -> bool:
    """Whether the node reads this operand alone, which has at most as many bytes as the node's result."""
    if sum([maker is not None for maker, _ in node.next_functions]) > 1:
        return False
    given = results_of(node)[0]
    nbytes = operand.packed.nbytes if operand.unpack is None else operand.nbytes
    return bool(nbytes <= math.prod(given.shape) * given.dtype.itemsize)


def _writes_to_result(node: Any, operand: Value) -> int:
    """How often a node has written to its result itself: a Function of this package says so. An operation in place has
    once: it saves a clone of its input, which is not its operand."""
    if hasattr(node, "version"):
        return int(node.version)
    producer = node.next_functions[0][0]
    return int(operand.cloned >= 0 and (producer is None or operand.cloned != number_of(producer)))
