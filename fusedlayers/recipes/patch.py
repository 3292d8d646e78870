"""Patches of modules: a module's own forward pass, in which every value is saved once.

A patch is the instance's ``forward``: an object that calls the class's forward, whatever that is at the time. No class
is changed, no hook is added, and copies and pickles of a module have patches of their own. The outermost one enters a
region (``save_once.py``); so does one that a checkpoint runs again. It steps aside where nothing is saved: without
gradients, and in programs that ``torch.compile``, ``torch.export`` or TorchScript read. By its role a module computes
something else, unless the model is ``exact`` (``roles.py``).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from .._torch import pop_saved_tensors_hooks, torchscript_state
from ..recompute.recompute import recomputed
from .region import Region
from .roles import role_of
from .save_once import can_enter, current_region, enter_region


class Patch:
    """Of one module.

    Attributes:
        module: whose forward pass this is.
        exact: whether PyTorch's own nodes compute everything.
        recompute: whether the whole forward pass is computed again in the backward pass.
        replaced: what the instance had in the place of its class's forward before, or None.
        role: what runs around its own forward pass, or None.
    """

    recompute = False

    def __init__(self, module: nn.Module, *, exact: bool) -> None:
        self._module, self.exact = weakref.ref(module), exact
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")
        self.role = role_of(module, exact)

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
        run = functools.partial(self._saving_once, module, forward)
        return recomputed(run, module, args, kwargs, "all") if self.recompute else run(*args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] | None = self.replaced
        if forward is None:  # no method: the compiler of torch 2.11 cannot bind one
            forward = functools.partial(type(self.module).forward, self.module)
        return recomputed(forward, self.module, args, kwargs, "all") if self.recompute else forward(*args, **kwargs)

    def _saving_once(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(forward, *args, **kwargs)
        region = current_region()
        if region is not None:
            if not region.knows_parameters:  # ``save_once`` is around it
                region.begin(module, (*args, *kwargs.values()))
            return self._by_role(region, module, run)
        region = enter_region(module, (*args, *kwargs.values()))
        try:
            return self._by_role(region, module, run)
        finally:
            pop_saved_tensors_hooks()

    def _by_role(self, region: Region, module: nn.Module, run: functools.partial[Any]) -> Any:
        return run() if self.role is None else self.role(region, module, run)


def patches_of(model: nn.Module) -> list[Patch]:
    """The patches of a model's modules."""
    return [patch for module in model.modules() if (patch := patch_of(module)) is not None]


def patch_of(module: nn.Module) -> Patch | None:
    """The module's patch, or None where it has none."""
    found = vars(module).get("forward")
    found = getattr(found, "__func__", found)  # accelerate's unwrap_model has made a method of it
    return found if isinstance(found, Patch) else None
