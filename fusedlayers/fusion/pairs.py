"""A layer and the activation after it, fused where they stand.

Three modules change: the layer computes the activation too, the activation passes that on, and the module that calls
both says when (``sites.py``).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import Activation, must_call_reason, resolve
from ..functional import bias_act, dense_bias_act
from ..nn.batch_norm import FusedBatchNormAct1d, FusedBatchNormAct2d, FusedBatchNormAct3d, norm_layer_act
from ..nn.conv import conv_act
from .chain import Chain
from .derived import Mixin
from .known import Known, activation_of, is_kept_by_torch, known_of
from .sites import Given, Site, opened, site_of
from .watched import is_watched


class Pair(NamedTuple):
    """A layer and its activation, as the module that calls both finds them.

    Attributes:
        layer: its path.
        activation: a module's path, or the function that the code calls.
        known: what that function computes, if that is in the table.
    """

    layer: str
    activation: str | Chain
    known: Known | None = None


class Calls(Mixin):
    """A module that calls layers and their activations."""

    OWN = ("fused_pairs",)
    fused_pairs: tuple[Pair, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The compiler fuses, and the activations save their outputs.
        if torch.compiler.is_compiling() or is_watched():
            return super().forward(*args, **kwargs)
        sites = [site for site in map(self._site, self.fused_pairs) if site is not None]
        if not sites:
            return super().forward(*args, **kwargs)
        with opened(sites):
            return super().forward(*args, **kwargs)

    def _site(self, pair: Pair) -> Site | None:
        """Where the two meet, if they are still there and nobody wants to see what passes between them."""
        layer = at(self, pair.layer, Layer)
        if layer is None:
            return None
        if isinstance(pair.activation, Chain):
            function = pair.activation
            return Site.of(layer, function, lambda: known_of(function, pair.known) or resolve(function))
        activation = at(self, pair.activation, Applies)
        return None if activation is None else Site.of(layer, activation, activation.activation)


def at(module: Any, path: str, mixin: type[Mixin]) -> Any:
    """The module at a path that has a mixin; None if there is none, or if it or one on the way to it has hooks."""
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None or must_call_reason(module) is not None:
            return None
    return module if isinstance(module, mixin) else None


class Applies(Mixin):
    """An activation that keeps its output, unless a layer has computed it already."""

    OWN = ("known_activation",)
    is_activation = True
    known_activation: Known | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        itself: Any = self
        is_usual = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not is_usual or must_call_reason(itself) is not None:
            return super().forward(*args, **kwargs)
        (input,) = args
        if isinstance(input, Given):
            if input.is_for(itself):
                return input.claim()
            input = input.value()
        activation = self.activation()
        if is_kept_by_torch(activation) or not input.is_floating_point():
            return super().forward(input)
        return bias_act(input, None, activation, inplace=bool(getattr(self, "inplace", False)))

    def activation(self) -> Activation:
        """What it computes now."""
        itself: Any = self
        return known_of(itself, self.known_activation) or activation_of(itself, self.original)


class Layer(Mixin):
    """A layer that computes the activation after it, where it is called for both."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        itself: Any = self
        site = site_of(itself) if len(args) == 1 and not kwargs else None
        if site is None:
            return super().forward(*args, **kwargs)
        activation = site.computes()
        return Given.of(site, args[0], activation, self.fused(args[0], activation))

    def fused(self, input: Tensor, activation: Activation) -> Tensor:
        """The layer and the activation."""
        raise NotImplementedError

    def plain(self, input: Tensor) -> Tensor:
        """The layer alone, where ``fused`` has been called before."""
        return super().forward(input)


class DenseLayer(Layer):
    weight: Any
    bias: Any

    def fused(self, input: Tensor, activation: Activation) -> Tensor:
        return dense_bias_act(input, self.weight, self.bias, activation)


class TransposedDenseLayer(DenseLayer):
    """Whose weight is (in, out)."""

    def fused(self, input: Tensor, activation: Activation) -> Tensor:
        return dense_bias_act(input, self.weight.t(), self.bias, activation)


class ConvLayer(Layer):
    def fused(self, input: Tensor, activation: Activation) -> Tensor:
        return conv_act(self, input, activation, "auto")


class NormLayer(Layer):
    def fused(self, input: Tensor, activation: Activation) -> Tensor:
        fused = _FUSED_NORMS[self.original]
        return norm_layer_act(self, fused.dims, input, None, activation, "auto")

    def plain(self, input: Tensor) -> Tensor:
        layer: Any = self
        if not layer.training:
            return super().plain(input)
        # Its statistics count the input already.
        return F.batch_norm(input, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)


_FUSED_NORMS: dict[type[nn.Module], Any] = {
    fused.torchs: fused for fused in (FusedBatchNormAct1d, FusedBatchNormAct2d, FusedBatchNormAct3d)
}


def layer_mixin(layer: nn.Module) -> type[Layer] | None:
    """What is to be given to a layer; None for what is not exactly one of the known classes."""
    kind = type(layer)
    if is_transposed(layer):
        return TransposedDenseLayer
    if kind is nn.Linear:
        return DenseLayer
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return ConvLayer
    return NormLayer if kind in _FUSED_NORMS else None


def is_transposed(layer: nn.Module) -> bool:
    """Whether it is transformers' ``Conv1D``: a dense layer whose weight is (in, out)."""
    transformers: Any = sys.modules.get("transformers.pytorch_utils")
    return transformers is not None and type(layer) is getattr(transformers, "Conv1D", None)
