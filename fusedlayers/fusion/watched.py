"""Whether somebody sees all that modules pass on."""

from collections.abc import Mapping
from typing import Any

import torch.nn.modules.module as modules

_HOOKS: tuple[Mapping[int, Any], ...] = (
    *(modules._global_forward_hooks, modules._global_forward_pre_hooks),
    *(modules._global_backward_hooks, modules._global_backward_pre_hooks),
)
_OURS = __package__.partition(".")[0] + "."


def is_watched() -> bool:
    """Whether there are hooks for all modules. This library's own (``memory_report`` has some) only note which runs."""
    return any(
        not str(getattr(hook, "__module__", None)).startswith(_OURS) for hooks in _HOOKS for hook in hooks.values()
    )
