"""Why a layer with an activation after it is left as it is."""

from __future__ import annotations

from torch import nn

from ..activations import must_call_reason
from ..activations.record import stand_ins
from .patterns import Flow

#: The names of functions that are activations.
_FUNCTIONS = {target.__name__ for target in stand_ins if not isinstance(target, type) and hasattr(target, "__name__")}


def left_because(flow: Flow, layer: nn.Module) -> str | None:
    """Of a layer whose activation could not be fused with it; None where there is none."""
    for value in (value for call in flow.calls.get(layer, ()) for value in call.gives):
        readers = flow.readers(value)
        called = [(reader, reader.module or (reader.within and reader.within.module)) for reader in readers]
        for reader, module in called:
            if reader.module is None and reader.name in _FUNCTIONS and type(module) not in stand_ins:
                code = f"{reader.name} is called by the code of {type(module).__name__}"
                return f'{code}; torch.compile(model, backend="fusedlayers") fuses it'
        activations = {module for _, module in called if type(module) in stand_ins}
        others = [reader.name for reader, module in called if module not in activations]
        if activations and (others or value.is_kept):
            who = f"{others[0]} as well" if others else "somebody who keeps it"
            return must_call_reason(layer) or f"its output is read by the activation and by {who}"
        for module in activations:
            reason = must_call_reason(module) if isinstance(module, nn.Module) else None
            if reason is not None:
                return f"of its activation, {reason}"
    return None
