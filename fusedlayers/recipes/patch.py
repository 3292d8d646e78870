"""What a fused module has in the place of ``forward``: its own forward pass, in which every value is saved once.

A patch is the instance's ``forward``: an object that calls the class's forward, whatever that is at the time. No class
is changed, no hook is added, and copies and pickles of a module have patches of their own. The outermost one enters a
region (``save_once.py``); so does one that a checkpoint runs again. It steps aside where nothing is saved: without
gradients, and in programs that ``torch.compile``, ``torch.export`` or TorchScript read.

By its role a module computes something else, unless the model is ``exact``: an activation that saves its output; an RMS
norm that is spelled out, as one node (``spelled_norms.py``); the product of a gate (``gates.py``). A norm says what its
node does not (``norm_facts.py``).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from .._torch import torchscript_state
from ..recompute.recompute import recomputed
from .gates import Gates, current_gates, is_gated
from .leaves import activated, is_activation, is_leaf, may_be_activation, may_save_output
from .norm_facts import is_norm, note_facts
from .region import Region
from .save_once import can_enter, current_region, enter_region, leave_region
from .spelled_norms import spelled_norm

Role = Literal["norm", "spelled norm", "activation", "perhaps activation", "gate", ""]


class Patch:
    """Of one module.

    Attributes:
        module: whose forward pass this is.
        exact: whether PyTorch's own nodes compute everything.
        recompute: whether the whole forward pass is computed again in the backward pass.
        replaced: what the instance had in the place of its class's forward before, or None.
    """

    recompute = False

    def __init__(self, module: nn.Module, *, exact: bool) -> None:
        self._module, self.exact = weakref.ref(module), exact
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")
        self._role = _role_of(module)

    @property
    def module(self) -> nn.Module:
        """It is held weakly, so that a model is freed as soon as nobody has it."""
        module = self._module()
        assert module is not None
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))

    def attach(self) -> None:
        """Take the place of the module's forward."""
        vars(self.module)["forward"] = self
        vars(self.module)["__prepare_scriptable__"] = self.refuse_script

    def remove(self) -> None:
        """Let the module be what it was."""
        own = vars(self.module)
        del own["forward"]
        own.pop("__prepare_scriptable__", None)
        if self.replaced is not None:
            own["forward"] = self.replaced

    def refuse_script(self) -> NoReturn:
        """``__prepare_scriptable__`` of the module, which ``torch.jit.script`` calls before it reads code."""
        raise RuntimeError(
            f"torch.jit.script: {type(self.module).__name__} was changed by fusedlayers.fuse or fusedlayers.fit, and "
            "TorchScript cannot compile it; call fusedlayers.unfuse(model) first"
        )

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward pass without this, for ``inspect.signature``."""
        return self.replaced if self.replaced is not None else type(self.module).forward.__get__(self.module)

    @property
    def __code__(self) -> Any:
        """The code of that, for ``torch.export``."""
        return self.__wrapped__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate's unwrap_model has made a method of it
            args = args[1:]
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        module: Any = sys._getframe(1).f_locals.get("self")
        # ``copy.copy`` of a module, and the replicas of ``nn.DataParallel``, share its attributes, this one too.
        if module is not self.module and not (isinstance(module, nn.Module) and vars(module).get("forward") is self):
            module = self.module
        forward = self.replaced or type(module).forward.__get__(module)
        if not can_enter() or torchscript_state() is not None:
            return forward(*args, **kwargs)
        if self.recompute:
            run = functools.partial(self._saving_once, module, forward)
            return recomputed(run, module, args, kwargs, "all")
        return self._saving_once(module, forward, *args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] | None = self.replaced
        if forward is None:  # no method: the compiler of torch 2.11 cannot bind one
            forward = functools.partial(type(self.module).forward, self.module)
        return recomputed(forward, self.module, args, kwargs, "all") if self.recompute else forward(*args, **kwargs)

    def _saving_once(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        region = current_region()
        if region is not None:
            return self._by_role(region, module, forward, args, kwargs) if self._role else forward(*args, **kwargs)
        region = enter_region()
        try:
            region.begin(module)
            return self._by_role(region, module, forward, args, kwargs)
        finally:
            leave_region()

    def _by_role(self, region: Region, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        role = self._role
        if role == "norm":
            y = forward(*args, **kwargs)
            note_facts(module, y)
            return y
        if self.exact or not role:
            return forward(*args, **kwargs)
        if role == "gate":
            with Gates(region):
                return forward(*args, **kwargs)
        y = None
        if role == "spelled norm":
            norm = spelled_norm(module, args[0]) if len(args) == 1 and not kwargs else None
            y = None if norm is None else norm(args[0])
        elif may_save_output(region, args, kwargs):
            y = self._activated(region, module, args[0])
        return forward(*args, **kwargs) if y is None else y

    def _activated(self, region: Region, module: nn.Module, x: Tensor) -> Tensor | None:
        if self._role == "perhaps activation":
            self._role = "activation" if is_activation(module, x) else ""
        found = activated(module, x) if self._role == "activation" else None
        if found is None:
            return None
        y, activation = found
        gates = current_gates()
        if gates is not None and not module._forward_hooks:  # which may hold y
            gates.remember(x, y, activation, region)
        return y


def _role_of(module: nn.Module) -> Role:
    if is_norm(module):
        return "norm"
    if is_gated(module):
        return "gate"
    if may_be_activation(module):
        return "perhaps activation"
    return "spelled norm" if is_leaf(module) else ""


def is_worth_a_patch(module: nn.Module) -> bool:
    """Whether a module of a fused model gets one. PyTorch's own leaf layers, as ``nn.Linear``, do not: a patch would
    change nothing, and they are called often."""
    is_layer = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return bool(_role_of(module)) or not is_layer


def patch_of(module: nn.Module) -> Patch | None:
    """The module's patch, or None where it has none."""
    found = vars(module).get("forward")
    found = getattr(found, "__func__", found)  # accelerate's unwrap_model has made a method of it
    return found if isinstance(found, Patch) else None
