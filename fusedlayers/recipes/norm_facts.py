"""What norms know and their nodes do not: eps of layer and RMS norms, and biases.

A module notes it in the metadata of the node that made its result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._torch import NormBase
from . import region
from .replays import NORM_FACTS, NormFacts, is_sharded

#: What modules run whose nodes lack a number that the replay needs. Subclasses that run something else are left alone.
_FORWARDS = frozenset(
    cls.forward for cls in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm2d, nn.InstanceNorm2d)
)
#: Their node saves eps.
_SAVE_EPS = (NormBase, nn.GroupNorm)
#: Their node reads repeated parameters.
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_norm(module: nn.Module) -> bool:
    """Whether a module can say what its node does not: it runs torch's function, or calls it by ``super()``, and has no
    forward pass of its own."""
    if "forward" in vars(module):
        return False
    forward: Any = type(module).forward
    names = {*getattr(getattr(forward, "__code__", None), "co_names", ())}
    is_passed_on = isinstance(module, nn.LayerNorm) and {"super", "forward"} <= names and "layer_norm" not in names
    return forward in _FORWARDS or is_passed_on


def is_frozen(module: nn.Module) -> bool:
    """Whether a norm is in evaluation and trains nothing: a forward hook would end PyTorch's fast paths for it."""
    return not module.training and not any(parameter.requires_grad for parameter in module.parameters())


def note_facts(module: Any, result: Any) -> None:
    """Note in the node that made ``result`` what the norm knows, unless another norm has within this one."""
    bias = module._parameters.get("bias")
    if isinstance(module, _SAVE_EPS) and bias is not None and bias.requires_grad and not is_sharded():
        return  # the node behind its node's edge is the bias's
    if not isinstance(result, Tensor):
        return
    # Parametrizations are attributes of a class, and replicas' of the module.
    kind, own = type(module), vars(module)
    if "weight" in own or "bias" in own or hasattr(kind, "weight") or hasattr(kind, "bias"):
        return
    whole = result if result._base is None else result._base
    node: Any = whole.grad_fn
    if node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    weight = module._parameters.get("weight")
    repeats = isinstance(module, _INSTANCE_NORMS) and (weight, bias) != (None, None)
    if node is None or repeats or whole.nbytes < region.LEAST_BYTES or NORM_FACTS in node.metadata:
        return
    copies = (0 if weight is None else weight.numel()) + (0 if bias is None else bias.numel())
    if 2 * copies > whole.numel():
        node.metadata[NORM_FACTS] = None
        return
    bias = None if bias is None else bias.detach().clone()
    weight = weight.detach().clone() if weight is not None and is_sharded() else weight
    version = 0 if weight is None else weight._version
    node.metadata[NORM_FACTS] = NormFacts(getattr(module, "eps", None), weight, bias, version)
