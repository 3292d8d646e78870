"""Whether somebody sees all that modules pass on."""

from .._torch import GLOBAL_MODULE_HOOKS

_OURS = __package__.partition(".")[0] + "."


def is_watched() -> bool:
    """Whether there are hooks for all modules. This library's own (``memory_report`` has some) only note which runs."""
    return any(
        not str(getattr(hook, "__module__", None)).startswith(_OURS)
        for hooks in GLOBAL_MODULE_HOOKS
        for hook in hooks.values()
    )
