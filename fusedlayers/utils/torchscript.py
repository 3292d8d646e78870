"""What ``torch.jit.script`` is told of modules that it cannot compile.

Before it reads any code it asks every module of a model for what to compile in its place (``__prepare_scriptable__``).
Nobody else asks that: ``torch.jit.trace`` goes on to work.
"""

from __future__ import annotations

from typing import Any, NoReturn


def refuse_script(module: Any) -> NoReturn:
    """``__prepare_scriptable__`` of this package's modules."""
    raise RuntimeError(
        f"torch.jit.script: {type(module).__name__} runs Python code that TorchScript cannot compile; "
        "use torch.compile or torch.export, or torch.jit.trace"
    )
