"""Fuse what has been found in a model, place by place, and note what was done and what could not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .._torch import ConvBase
from ..activations import DTYPES, Activation, must_call_reason
from ..block_plan import describe_block
from ..nn.base import WithActivation
from ..ops.mlp_forward import BlockOptions
from ..plan import describe, describe_norm
from .agreement import disagreement
from .attributes import Attributes
from .blocks import Block, called_because
from .calls import Call
from .chain import Chain
from .code import depends_because
from .derived import Mixin, change, change_back, is_changed
from .known import LAYERS, Known, found_in, is_kept_by_torch
from .left import left_because
from .pairs import Applies, Calls, Layer, NormLayer, Pair, layer_mixin
from .patterns import Flow, followers, is_dense, parent_of, plan_of
from .recording import is_compiled
from .report import FuseReport, Replaced, Skipped

#: Modules that are fused as a whole.
_FUSED: tuple[Any, ...] = (Block, WithActivation)


class _After(NamedTuple):
    """What comes after a layer: the call, the module or the function that is called, and what it computes."""

    call: Call
    function: Any
    activation: Activation


class Rewriting:
    """Changes the modules of a model as ``fuse`` is to."""

    def __init__(self, model: nn.Module, flow: Flow, save: str) -> None:
        self._model, self._flow, self._save = model, flow, save
        self._paths = {module: name for name, module in model.named_modules()}
        self._replaced: list[Replaced] = []
        self._skipped: list[Skipped] = []
        self._changed: list[nn.Module] = []
        #: What is left as it is: what has been fused before, and what is compiled.
        self._taken: set[nn.Module] = set()
        modules: list[Any] = [*self._paths]
        for module in modules:
            if is_compiled(module):
                if module not in self._taken:
                    self._skip(module, "it is compiled; call fuse on the module itself, before torch.compile")
                self._taken.update(module.modules())
            elif isinstance(module, _FUSED):
                self._taken.update(module.modules())
            if is_changed(module) and issubclass(type(module), Block | Layer):
                self._skip(module, "it is fused already")

    def layers(self) -> None:
        """Fuse MLPs, and layers with the activations after them."""
        self._look(self._block)
        self._look(self._layer)

    def activations(self) -> list[nn.Module]:
        """Fuse activations that have no such layer; say which."""
        before = len(self._changed)
        self._look(self._activation)
        return self._changed[before:]

    def report(self) -> FuseReport:
        return FuseReport(type(self._model).__name__, tuple(self._replaced), tuple(self._skipped))

    def note(self, reason: str) -> None:
        """Something about the whole model."""
        self._skip(self._model, reason)

    @property
    def is_done(self) -> bool:
        """Whether anything is fused now."""
        return bool(self._replaced)

    def has_changed(self, module: nn.Module) -> bool:
        return module in self._changed

    def leave(self, module: nn.Module, reason: str) -> None:
        """Put back a layer, with the activation after it, or an activation alone."""
        for parent in self._changed:
            if isinstance(parent, Calls):
                pairs = (pair for pair in parent.fused_pairs if parent.get_submodule(pair.layer) is not module)
                parent.fused_pairs = tuple(pairs)
        gone = [place for place in self._replaced if place.modules[0] == self._paths[module]]
        self._replaced = [place for place in self._replaced if place not in gone]
        needed = {name for place in self._replaced for name in place.modules}
        for name in {name for place in gone for name in place.modules} - needed:
            put_back = self._model.get_submodule(name)
            change_back(put_back)
            self._changed.remove(put_back)
        self._skip(module, reason)

    def leave_all(self, reason: str) -> None:
        self.undo()
        self.note(reason)

    def undo(self) -> None:
        """Put back everything."""
        for module in self._changed:
            change_back(module)
        self._changed, self._replaced = [], []

    def _look(self, fuse: Callable[[Any], None]) -> None:
        for module in self._paths:
            if module not in self._taken and not is_changed(module):
                fuse(module)

    def _change(self, module: nn.Module, mixin: type[Mixin], **own: Any) -> None:
        change(module, mixin, **own)
        self._changed.append(module)

    def _skip(self, module: nn.Module, reason: str) -> None:
        self._skipped.append(Skipped(self._paths[module], reason))

    # --- MLPs ---

    def _block(self, module: Any) -> None:
        calls = [call for call in self._flow.calls.get(module, ()) if not call.is_closed]
        plans = [plan_of(self._flow, call, self._save) for call in calls]
        if not plans or plans[0] is None or any(plan != plans[0] for plan in plans) or not _may_change(module):
            return
        plan = plans[0]
        if isinstance(plan, str):
            self._skip(module, f"no MLP block: {plan}")
            return
        layers = [module.get_submodule(name) for name in (*plan.first, plan.last)]
        function = module.get_submodule(plan.activation) if isinstance(plan.activation, str) else plan.activation
        activation = found_in(function, (2, layers[-1].weight.shape[-1]), layers[-1].weight.dtype)
        if activation is None:
            return
        reason = called_because(module, plan) or activation.fallback_reason or depends_because(module)
        if reason is None:
            samples = [call.sample for call in calls if call.sample is not None]
            reason = disagreement(module, plan, samples[0] if samples else _sample(layers[0]))
        if reason is not None:
            self._skip(module, f"no MLP block: {reason}")
            return
        self._taken.update(inner for name in plan.inner for inner in module.get_submodule(name).modules())
        owners = {path: inner for path, inner in module.named_modules() if inner is module or inner._modules}
        state = {path: Attributes.of(inner) for path, inner in owners.items()}
        known = Known.of(function, activation)
        self._change(module, Block, fused_block=plan, fused_as=state, known_activation=known)
        if isinstance(function, nn.Module) and not is_changed(function):  # for where the layers must be called
            self._change(function, Applies, known_activation=known)
        options = BlockOptions("fuse", 0.0, plan.save, 1, plan.is_gated)
        saves = describe_block(options, activation, layers[0].weight.dtype)
        pattern = "gated mlp" if plan.is_gated else "mlp"
        self._replaced.append(Replaced((self._paths[module],), pattern, repr(activation), saves))

    # --- layers, and the activations after them ---

    def _layer(self, layer: Any) -> None:
        if not isinstance(layer, LAYERS) and not is_dense(layer):
            return
        found = {call: self._activation_after(call) for call in self._flow.calls.get(layer, ())}
        if not any(found.values()):
            reason = left_because(self._flow, layer)
            if reason is not None:
                self._skip(layer, reason)
            return
        places = self._places(found)
        reason = _kept_because(layer)
        if reason is None and any(after is not None and after.call.gives[0].is_written for after in found.values()):
            reason = "the output of its activation, which would be kept, is written over"
        if reason is None and not places:
            reason = (
                "where it is called, others read its output as well, or it is not among the modules of its caller, or "
                "that is a GraphModule (fuse before you trace)"
            )
        if reason is not None:
            self._skip(layer, reason)
            return
        mixin = layer_mixin(layer)
        assert mixin is not None
        self._change(layer, mixin)
        for parent, (pair, after) in places.items():
            if after.call.module is not None:
                self._apply(after.call.module, after.activation)
            if not is_changed(parent):
                self._change(parent, Calls, fused_pairs=())
            vars(parent)["fused_pairs"] += (pair,)
            self._note_pair(layer, after)

    def _activation_after(self, layer: Call) -> _After | None:
        """The call of a layer's activation, if the two can be fused."""
        module: Any = layer.module
        for call in followers(self._flow, layer):
            function: Any = call.module or Chain([call], layer.gives[0])
            if function in self._taken or (call.module is not None and must_call_reason(call.module) is not None):
                continue
            activation = found_in(function, _example_shape(module), _dtype(module))
            if activation is not None and activation.fallback_reason is None:
                return _After(call, function, activation)
        return None

    def _places(self, found: Mapping[Call, _After | None]) -> dict[Any, tuple[Pair, _After]]:
        """By the modules that call a layer and its activation, how these find them."""
        places: dict[Any, tuple[Pair, _After]] = {}
        for call, after in found.items():
            if after is None:
                continue
            parent: Any = parent_of(call, after.call).module
            inside = [other for called, other in found.items() if called.is_called_by(parent)]
            is_always = all(other is not None and other.function == after.function for other in inside)
            path, known = _path(parent, call.module), None
            function = after.function
            if isinstance(function, nn.Module):
                function = _path(parent, function)
            else:
                known = Known.of(function, after.activation)
            is_free = _may_change(parent) and parent not in self._taken
            if is_always and is_free and path is not None and function is not None:
                places[parent] = Pair(path, function, known), after
        # Where passes through several modules found the same, the innermost one does.
        return {
            parent: place
            for parent, place in places.items()
            if not any(other is not parent and other in set(parent.modules()) for other in places)
        }

    def _note_pair(self, layer: Any, after: _After) -> None:
        if isinstance(layer, NormLayer):
            pattern, saves = "norm", describe_norm(after.activation, "auto", _dtype(layer))
        else:
            pattern = "conv" if isinstance(layer, ConvBase) else "dense"
            saves = describe(after.activation, "auto", _dtype(layer))
        modules = [layer] if after.call.module is None else [layer, after.call.module]
        self._replaced.append(
            Replaced(tuple(map(self._paths.__getitem__, modules)), pattern, repr(after.activation), saves)
        )

    # --- activations alone ---

    def _activation(self, module: nn.Module) -> None:
        calls = self._flow.calls.get(module, ())
        for call in calls:
            alone = len(call.reads) == 1 and len(call.gives) == 1 and self._flow.only_reader(call.reads[0])
            if not alone or (not alone.is_in(call) and not call.is_in(alone)) or call.gives[0].is_written:
                return
        if not calls or must_call_reason(module) is not None or any(True for _ in module.parameters()):
            return
        dtype = next((p.dtype for p in self._model.parameters() if p.dtype in DTYPES), torch.get_default_dtype())
        activation = found_in(module, (2, 6), dtype)
        if activation is None or activation.fallback_reason is not None:
            return
        if is_kept_by_torch(activation):
            return
        self._apply(module, activation)
        self._replaced.append(
            Replaced((self._paths[module],), "activation", repr(activation), describe(activation, "auto", dtype))
        )

    def _apply(self, module: nn.Module, activation: Activation) -> None:
        if is_changed(module):
            return
        self._change(module, Applies, known_activation=Known.of(module, activation))


def _may_change(caller: nn.Module) -> bool:
    """Whether a module can be told to call what it consists of in another way. One whose forward has been replaced does
    not ask its class; and the class of a GraphModule is its own, and changes when the graph is compiled or copied."""
    return "forward" not in vars(caller) and not isinstance(caller, GraphModule)


def _kept_because(layer: nn.Module) -> str | None:
    """Why a layer must stay as it is, or None."""
    if layer_mixin(layer) is None:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if _dtype(layer) not in DTYPES:
        return f"its dtype is {_dtype(layer)}"
    return must_call_reason(layer)


def _example_shape(layer: Any) -> tuple[int, ...]:
    """A shape that the layer's results may have."""
    features = next(
        getattr(layer, name) for name in ("out_features", "out_channels", "num_features", "nf") if hasattr(layer, name)
    )
    norms = (dims for kind, dims in _DIMS.items() if isinstance(layer, kind))
    dims = len(layer.kernel_size) if hasattr(layer, "kernel_size") else next(norms, 0)
    return 2, features, *(5 + 2 * i for i in range(dims))


#: Of what batch norms have, besides the batch and the features.
_DIMS = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}


def _dtype(layer: Any) -> torch.dtype:
    weight = getattr(layer, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else torch.get_default_dtype()


def _path(parent: nn.Module, module: nn.Module | None) -> str | None:
    for name, inner in parent.named_modules(remove_duplicate=False):
        if inner is module:
            return str(name)
    return None


def _sample(layer: Any) -> Tensor:
    """An input for a layer that has been given none."""
    features = layer.nx if hasattr(layer, "nx") else layer.in_features
    return torch.randn(8, features, device=layer.weight.device, dtype=layer.weight.dtype)
