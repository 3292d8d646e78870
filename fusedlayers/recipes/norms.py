"""Norms: the facts that their modules note in the graph, and how their results are replayed.

A node has saved most of what its norm has read. Not in it are eps of layer and RMS norms, and biases that are not
trained. A module of a fused model notes these in the metadata of the node that made its result; where parameters may be
freed after the forward pass of their part of the model (FSDP), it notes copies of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._torch import RAW_SAVED, SAVED, results_of, saved_number
from .recipe import Stored, Value

if TYPE_CHECKING:
    from .region import Region
    from .replays import Replay, Rule

#: Where a node's metadata has the facts, by name: "eps", a number; "weight" and "bias", values, or None where the norm
#: has none. The facts themselves are None where copies of parameters would be as large as the result.
_FACTS = "fusedlayers.norm"
#: The forward passes that call one function of torch's. Subclasses that run something else are left alone.
_FORWARDS = frozenset(
    cls.forward for cls in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm2d, nn.InstanceNorm2d)
)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_sharded() -> bool:
    """Whether ``fully_shard`` has been used, which frees parameters after the forward pass: it makes subclasses."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())


# --- modules ----------------------------------------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Whether a module runs torch's function, or calls it by ``super()``, and has no forward pass of its own."""
    if "forward" in vars(module):
        return False
    forward: Any = type(module).forward
    names = {*getattr(getattr(forward, "__code__", None), "co_names", ())}
    changes = {"layer_norm", "eps", "weight", "bias"} & names
    is_passed_on = isinstance(module, nn.LayerNorm) and {"super", "forward"} <= names and not changes
    return forward in _FORWARDS or is_passed_on


def run_norm(region: Region, owner: Any, module: nn.Module, run: partial[Any]) -> Any:
    """The result of a norm's forward pass; the node that made it gets the facts."""
    y = run()
    if isinstance(y, Tensor):
        _note_facts(region, module, y)
    return y


def _note_facts(region: Region, module: nn.Module, result: Tensor) -> None:
    """Note the facts in the node that made ``result``, unless a norm within this one has."""
    whole = result if result._base is None else result._base
    node: Any = whole.grad_fn
    if node is not None and type(node).__name__ == "ToCopyBackward0":
        node = node.next_functions[0][0]
    if node is None or not region.is_worth_a_replay(whole) or _FACTS in node.metadata:
        return
    # Parametrizations are in neither. FSDP's first version has views in the first while a checkpoint recomputes.
    facts: dict[str, Any] = {"eps": getattr(module, "eps", None)}
    copied, is_instance_norm = 0, isinstance(module, _INSTANCE_NORMS)
    for name in ("weight", "bias"):
        held: Any = module._parameters if name in module._parameters else vars(module)
        parameter = held.get(name, region)
        if parameter is region:
            continue
        if parameter is None:
            facts[name] = None
        elif is_instance_norm:  # its node reads repeated ones
            continue
        elif region.may_free(parameter):
            facts[name] = Stored(parameter.detach().clone(), None, region)
            copied += parameter.numel()
        elif name == "bias" and not parameter.requires_grad:  # else the node has it as an operand
            facts[name] = Stored(parameter, None, region)
    node.metadata[_FACTS] = None if 2 * copied > whole.numel() else facts


# --- replays ----------------------------------------------------------------------------------------------------------

#: From a node and eps to the function of x and of what is called "weight", "bias" and as statistics; None where it is
#: not known.
Make = Callable[[Any, Any], Callable[..., Tensor] | None]
_UNKNOWN = object()


def _norm(make: Make, statistics: Sequence[str] = ()) -> Rule:
    """A norm whose node saves its input; and perhaps eps, as those of group norms did until torch 2.13."""

    def rule(region: Region, node: Any, result: Tensor | None) -> Replay | None:
        facts = node.metadata.get(_FACTS, _NO_FACTS)
        if facts is None:
            return None
        kind = type(node)
        if kind not in _EPS:
            _EPS[kind] = next((name for name in ("eps", "epsilon") if hasattr(node, SAVED + name)), None)
        name = _EPS[kind]
        if name is None and "eps" not in facts:
            return None
        function = make(node, facts["eps"] if name is None else saved_number(node, name))
        x = region.saved(node, "input")
        if function is None or x is None:
            return None
        names, operands = [], [x]
        for name in ("weight", "bias", *statistics):
            value = region.saved(node, name) if name in statistics else _parameter(region, node, name, facts)
            if value is _UNKNOWN:
                return None
            if value is not None:
                names.append(name)
                operands.append(value)
        if statistics and "weight" not in names and results_of(node)[0].dtype.itemsize == 2:
            return None  # its bits depend on the dtype of the running statistics
        return partial(_replayed, function, names), operands

    return rule


#: By the class of a norm's node, the name under which it saves eps.
_EPS: dict[type, str | None] = {}
_NO_FACTS: dict[str, Any] = {}


def _replayed(function: Callable[..., Tensor], names: Sequence[str], x: Tensor, *given: Tensor) -> Tensor:
    named = dict(zip(names, given, strict=True))
    for name, tensor in named.items():
        if tensor.dtype is not x.dtype:  # autocast may have cast to float32 what the module holds in 16 bits
            named[name] = tensor.to(torch.promote_types(tensor.dtype, x.dtype))
    return function(x, **named)


def _parameter(region: Region, node: Any, name: str, facts: dict[str, Any]) -> Any:
    """The weight or bias that a norm has read; None where it has none."""
    if name in facts:
        value: Value | None = facts[name]
        return _UNKNOWN if value is not None and value.is_edited else value
    if region.is_sharded:
        return _UNKNOWN
    value = region.saved(node, name)
    if value is not None:
        return value
    raw = getattr(node, RAW_SAVED + name, None)
    if raw is not None:
        return None if raw.data is None else _UNKNOWN  # which was written to
    if len(node.next_functions) < 3:  # an RMS norm, which has no bias
        return None
    return region.parameter(node, 2) or region.operand(node, 2) or _UNKNOWN


def _batch_norm(node: Any, eps: float) -> Callable[..., Tensor] | None:
    return partial(_of_batch, eps) if getattr(node, SAVED + "training", True) else None


def _of_batch(eps: float, x: Tensor, weight: Any = None, bias: Any = None, **statistics: Tensor) -> Tensor:
    """A batch norm by the statistics that the node has saved, or by those of the batch, which are not counted again."""
    layouts = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    is_dense = any(
        x.is_contiguous(memory_format=layout) for layout in layouts
    )  # else the kernel computes another thing
    if statistics and x.is_cuda:  # in training it ends in this kernel
        mean, inverse_std = statistics.values()
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse_std, eps)
    if statistics and x.is_cpu and is_dense and all(t is None or t.is_contiguous() for t in (weight, bias)):
        return _by_statistics(x, weight, bias, *statistics.values())
    return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, torch.backends.cudnn.enabled)


def _by_statistics(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, inverse_std: Tensor) -> Tensor:
    """One pass, an eighth of the time of training mode's two or three.

    In training as in evaluation one kernel computes ``x * scale + (b - mean * scale)``, where ``scale`` is ``w /
    sqrt(variance + eps)``. Here it gets ``scale`` as its weight, and a root of 1."""
    if mean.dtype.itemsize == 2:  # with 16-bit parameters the kernel rounds the product, without them it need not
        inverse_std = inverse_std.float()
    scale = inverse_std if w is None else inverse_std * w
    if mean.dtype.itemsize == 2:
        b = -(mean * scale) if b is None else b - mean * scale
        mean = torch.zeros_like(scale)
    return torch.native_batch_norm(x, scale, b, mean, torch.ones_like(scale), False, 0.0, 0.0)[0]


def _of_rows(function: Callable[..., Tensor]) -> Make:
    return lambda node, eps: partial(function, normalized_shape=saved_number(node, "normalized_shape"), eps=eps)


def _group_norm(node: Any, eps: float) -> Callable[..., Tensor]:
    is_cudnn = torch.backends.cudnn.enabled
    return partial(torch.group_norm, num_groups=saved_number(node, "group"), eps=eps, cudnn_enabled=is_cudnn)


#: By the node's name.
NORM_REPLAYS: dict[str, Rule] = {
    "NativeLayerNormBackward0": _norm(_of_rows(torch.layer_norm)),
    "FusedRmsNormBackward0": _norm(_of_rows(torch.rms_norm)),
    "NativeGroupNormBackward0": _norm(_group_norm),
    "NativeBatchNormBackward0": _norm(_batch_norm, statistics=("result1", "result2")),
    "CudnnBatchNormBackward0": _norm(_batch_norm),
    "MiopenBatchNormBackward0": _norm(_batch_norm),
}
