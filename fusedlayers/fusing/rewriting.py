"""Fuse what has been found in a model, place by place, and note what was done and what could not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import DTYPES, Activation, must_be_called_because
from ..activations.spec import stand_ins
from ..modules.fused import WithActivation
from ..modules.mlp import kept
from ..normalised import describe
from .agreement import disagreement
from .blocks import Block, called_because
from .calls import Call
from .derived import Mixin, change, change_back, is_changed
from .known import KEPT_BY_TORCH, LAYERS, Known, found_in
from .pairs import Applies, Calls, Layer, NormLayer, Pair, layer_mixin
from .patterns import Flow, Found, is_dense, parent_of, plan_of
from .recording import is_compiled
from .report import FuseReport, Replaced, Skipped

#: Modules that are fused as a whole.
_FUSED: tuple[Any, ...] = (Block, WithActivation)
#: The names of functions that are activations.
_FUNCTIONS = {target.__name__ for target in stand_ins if not isinstance(target, type) and hasattr(target, "__name__")}


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

    def report(self) -> FuseReport:
        """Do it. Where anything fails, nothing is changed."""
        try:
            for look in (self._block, self._layer, self._activation):
                for module in self._paths:
                    if module not in self._taken and not is_changed(module):
                        look(module)
        except BaseException:
            for module in self._changed:
                change_back(module)
            raise
        return FuseReport(type(self._model).__name__, tuple(self._replaced), tuple(self._skipped))

    def _change(self, module: nn.Module, mixin: type[Mixin], **own: Any) -> None:
        change(module, mixin, **own)
        self._changed.append(module)

    def _skip(self, module: nn.Module, reason: str) -> None:
        self._skipped.append(Skipped(self._paths[module], reason))

    # --- MLPs ---

    def _block(self, module: Any) -> None:
        calls = [call for call in self._flow.calls.get(module, ()) if not call.is_closed]
        plans = [plan_of(self._flow, call, self._save) for call in calls]
        if not plans or plans[0] is None or any(plan != plans[0] for plan in plans) or "forward" in vars(module):
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
        reason = called_because(module, plan) or activation.unfused_because
        if reason is None:
            samples = [call.sample for call in calls if call.sample is not None]
            reason = disagreement(module, plan, samples[0] if samples else _sample(layers[0]))
        if reason is not None:
            self._skip(module, f"no MLP block: {reason}")
            return
        self._taken.update(inner for name in plan.inner for inner in module.get_submodule(name).modules())
        self._change(module, Block, fused_block=plan, known_activation=Known.of(function, activation))
        dtype, is_frozen = layers[0].weight.dtype, not layers[0].weight.requires_grad
        saves = kept(activation, plan.save, dtype, is_gated=plan.is_gated, is_frozen=is_frozen)
        pattern = "gated mlp" if plan.is_gated else "mlp"
        self._replaced.append(Replaced((self._paths[module],), pattern, repr(activation), saves))

    # --- layers, and the activations after them ---

    def _layer(self, layer: Any) -> None:
        if not isinstance(layer, LAYERS) and not is_dense(layer):
            return
        calls = self._flow.calls.get(layer, [])
        readers = {call: self._flow.only_reader(call.gives[0]) if len(call.gives) == 1 else None for call in calls}
        found = [Found(call, reader) for call, reader in readers.items() if reader is not None]
        activations = {one.activation.module: self._activation_after(layer, one.activation.module) for one in found}
        found = [one for one in found if activations[one.activation.module] is not None]
        if not found:
            self._explain(layer)
            return
        pairs = self._pairs(found, readers)
        reason = _layermust_be_called_because(layer)
        if reason is None and not pairs:
            reason = "where it is called, others read its output as well, or it is not among the modules of its caller"
        if reason is not None:
            self._skip(layer, reason)
            return
        for parent, (pair, module) in pairs.items():
            activation = activations[module]
            assert activation is not None
            if not isinstance(layer, Layer):
                mixin = layer_mixin(layer)
                assert mixin is not None
                self._change(layer, mixin)
            self._apply(module, activation)
            if not is_changed(parent):
                self._change(parent, Calls, fused_pairs=())
            vars(parent)["fused_pairs"] += (pair,)
            self._note_pair(layer, module, activation)

    def _activation_after(self, layer: nn.Module, module: Any) -> Activation | None:
        """What a module behind a layer computes, if that can be fused with it."""
        activation = found_in(module, _example_shape(layer), _dtype(layer))
        is_refused = (
            activation is None or activation.unfused_because is not None or must_be_called_because(module) is not None
        )
        return None if is_refused or module in self._taken else activation

    def _pairs(self, found: Sequence[Found], readers: Mapping[Call, Call | None]) -> dict[Any, tuple[Pair, nn.Module]]:
        """By the modules that call a layer and its activation: their paths from there, and the activation."""
        parents: dict[Any, tuple[Pair, nn.Module]] = {}
        for call, reader in found:
            outer = parent_of(call, reader)
            parent: Any = outer.module
            inside = [other for other in readers if other.is_called_by(parent)]
            followed = {None if follower is None else follower.module for follower in map(readers.get, inside)}
            paths = _path(parent, call.module), _path(parent, reader.module)
            is_free = "forward" not in vars(parent) and parent not in self._taken
            if followed == {reader.module} and None not in paths and is_free:
                parents[parent] = Pair(*paths), reader.target  # type: ignore[arg-type, assignment]
        # Where passes through several modules found the same, the innermost one does.
        return {
            parent: pair
            for parent, pair in parents.items()
            if not any(other is not parent and other in set(parent.modules()) for other in parents)
        }

    def _note_pair(self, layer: Any, module: nn.Module, activation: Activation) -> None:
        weight, bias = layer.weight, layer.bias
        if isinstance(layer, NormLayer):
            pattern, saves = "norm", describe(activation, "auto", _dtype(layer), weight, bias)
        else:
            pattern = "conv" if isinstance(layer, nn.modules.conv._ConvNd) else "dense"
            saves = activation.describe("auto", _dtype(layer))
        modules = self._paths[layer], self._paths[module]
        self._replaced.append(Replaced(modules, pattern, repr(activation), saves))

    def _parents(self, found: list[Found]) -> dict[nn.Module, Pair]:
        """The modules that call a layer and its activation, each with their paths from there."""
        parents: dict[nn.Module, Pair] = {}
        for one in found:
            parent: Any = parent_of(one.layer, one.activation).module
            paths = [_path(parent, call.module) for call in one]
            if None not in paths and must_be_called_because(parent) is None and parent not in self._taken:
                parents[parent] = Pair(*paths)  # type: ignore[arg-type]  # none of them is None
        # Where passes through several modules found the same, the innermost one does.
        return {
            parent: pair
            for parent, pair in parents.items()
            if not any(other is not parent and other in set(parent.modules()) for other in parents)
        }

    def _explain(self, layer: nn.Module) -> None:
        """Why a layer with an activation after it is left as it is."""
        for value in (value for call in self._flow.calls.get(layer, ()) for value in call.gives):
            readers = self._flow.readers(value)
            called = [(reader, reader.module or (reader.within and reader.within.module)) for reader in readers]
            for reader, module in called:
                if reader.module is None and reader.name in _FUNCTIONS and type(module) not in stand_ins:
                    self._skip(
                        layer,
                        f"{reader.name} is called by the code of {type(module).__name__}; "
                        'torch.compile(model, backend="fusedlayers") fuses it',
                    )
                    return
            activations = {module for _, module in called if type(module) in stand_ins}
            others = [reader.name for reader, module in called if module not in activations]
            if activations and (others or value.is_kept):
                who = f"{others[0]} as well" if others else "somebody who keeps it"
                reason = must_be_called_because(layer)
                self._skip(layer, reason or f"its output is read by the activation and by {who}")
                return
            for module in activations:
                reason = must_be_called_because(module) if isinstance(module, nn.Module) else None
                if reason is not None:
                    self._skip(layer, f"of its activation, {reason}")
                    return

    # --- activations alone ---

    def _activation(self, module: nn.Module) -> None:
        calls = self._flow.calls.get(module, ())
        for call in calls:
            alone = len(call.reads) == 1 and len(call.gives) == 1 and self._flow.only_reader(call.reads[0])
            if not alone or (not alone.is_in(call) and not call.is_in(alone)):
                return
        if not calls or must_be_called_because(module) is not None or any(True for _ in module.parameters()):
            return
        dtype = next((p.dtype for p in self._model.parameters() if p.dtype in DTYPES), torch.get_default_dtype())
        activation = found_in(module, (2, 6), dtype)
        if activation is None or activation.unfused_because is not None:
            return
        if activation.row is not None and activation.row.name in KEPT_BY_TORCH:
            return
        self._apply(module, activation)
        self._replaced.append(
            Replaced((self._paths[module],), "activation", repr(activation), activation.describe("auto", dtype))
        )

    def _apply(self, module: nn.Module, activation: Activation) -> None:
        if is_changed(module):
            return
        self._change(module, Applies, known_activation=Known.of(module, activation))


def _layermust_be_called_because(layer: nn.Module) -> str | None:
    """Why a layer must stay as it is, or None."""
    if layer_mixin(layer) is None:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if _dtype(layer) not in DTYPES:
        return f"its dtype is {_dtype(layer)}"
    return must_be_called_because(layer)


def _example_shape(layer: Any) -> tuple[int, ...]:
    """A shape that the layer's results may have."""
    features = next(
        getattr(layer, name) for name in ("out_features", "out_channels", "num_features", "nf") if hasattr(layer, name)
    )
    kind = type(layer).__name__
    dims = next((int(kind[i]) for i in range(len(kind) - 1) if kind[i : i + 2] in ("1d", "2d", "3d")), 0)
    return 2, features, *(5 + 2 * i for i in range(dims))


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
