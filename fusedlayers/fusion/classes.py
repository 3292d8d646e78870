"""What the classes of a model's modules say of the places in it, where no example inputs do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .. import backends
from ..activations import DTYPES, resolve, table
from ..utils.storages import tensors_in
from .operations import BATCH_NORM, OPERATIONS
from .place import Place
from .stand_in import recognise


def slow_because(place: Place, model: nn.Module) -> str | None:
    """Why PyTorch would compute a place of which the class alone is known, where the module or the model is now."""
    is_norm = place.kind in ("layer_norm", "rms_norm", "group_norm")
    if place.stand_in is not None or not (is_norm or place.is_activation):
        return None
    tensors = (t for t in (*tensors_in(place.module), *tensors_in(model)) if t.dtype in DTYPES)
    example = next(tensors, torch.empty(0))
    return backends.slow_on(example.device, example.dtype, None if is_norm else resolve(place.module))


def places_of_classes(model: nn.Module) -> Iterator[Place]:
    """The modules of PyTorch's classes, and those that spell an activation or a norm out."""
    kinds: dict[Any, str] = {
        nn.Dropout: "dropout",
        nn.LayerNorm: "layer_norm",
        nn.RMSNorm: "rms_norm",
        nn.GroupNorm: "group_norm",
        nn.BatchNorm1d: BATCH_NORM,
        nn.BatchNorm2d: BATCH_NORM,
        nn.BatchNorm3d: BATCH_NORM,
    }
    for kind, entries in table.stand_ins.items():
        function = next((f for f, _ in entries[0][0].stands_for if f in OPERATIONS), None)
        if isinstance(kind, type) and function is not None:
            kinds[kind] = OPERATIONS[function].kind
    has_dropout = any(isinstance(module, nn.Dropout) for module in model.modules())
    for path, module in model.named_modules():
        kind = kinds.get(type(module))
        if kind is not None:
            place = Place(path, module, kind, kind)
            if has_dropout:
                place.readers.add("dropout")
            is_useless = place.is_activation and place.useless_because is not None
            if not is_useless and not (kind == "dropout" and module.inplace):
                yield place
            continue
        stand_in = recognise(module, torch.float32)
        if stand_in is not None:
            yield Place(path, module, stand_in.kind, stand_in.name, stand_in)
