"""Patches of modules: a module's own forward pass, in which every value is saved once.

A patch is the instance's ``forward``: an object that calls the class's forward, whatever that is at the time. No class
is changed, no hook is added, and copies and pickles of a module have patches of their own. The outermost one enters a
region (``save_once.py``); so does one that a checkpoint runs again. It steps aside where nothing is saved: without
gradients, and in programs that ``torch.compile``, ``torch.export`` or TorchScript read. A norm notes what its node does
not tell (``norms.py``), and a leaf may be run again (``leaves.py``).

Other libraries replace or wrap an instance's ``forward`` too, and put back what they found there. So a patch is found
by another attribute, and one that has been removed calls what it replaced, wherever it is called.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from .._torch import pop_saved_tensors_hooks, torchscript_state
from ..recompute.recompute import recomputed
from .leaves import Leaf, is_leaf, run_leaf
from .norms import is_norm, run_norm
from .region import Region
from .save_once import can_enter, current_region, enter_region

Role = Callable[[Region, "Patch", nn.Module, partial[Any]], Any]
"""From the region, the patch, its module, and that one's own forward pass with its arguments, to the result. It is a
function of a module, for pickles of patches name it."""


class Patch:
    """The forward pass of a module, with what goes around it.

    Attributes:
        module: whose forward pass this is.
        recompute: whether the whole forward pass is computed again in the backward pass.
        saves_once: whether values are saved once, or as eager PyTorch saves them.
        replaced: what the instance had in the place of its class's forward before, or None.
        role: what runs around its own forward pass, or None; ``leaf``: what that remembers of the module.
        is_attached: whether it does anything.
    """

    recompute = is_attached = False
    saves_once = True

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        _take_patch_away(module)
        # The hub's kernels, and accelerate's hooks when they are removed, leave the class's own.
        if vars(module).get("forward") == type(module).forward.__get__(module):
            del vars(module)["forward"]
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")
        self.leaf: Leaf | None = None
        self.role: Role | None = run_norm if is_norm(module) else run_leaf if is_leaf(module) else None

    @property
    def module(self) -> nn.Module:
        """It is held weakly, so that a model is freed as soon as nobody has it."""
        module = self._module()
        assert module is not None
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self.module, "leaf": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))

    def attach(self) -> None:
        """Take the place of the module's forward, unless somebody has wrapped or replaced it in the meantime."""
        own = vars(self.module)
        if own.get("forward") is self.replaced:
            own["forward"] = self
        own["__prepare_scriptable__"] = self.refuse_script
        self.is_attached = True

    def remove(self) -> None:
        """Let the module be what it was. A wrapper of somebody else's that calls this stays."""
        _take_patch_away(self.module)
        vars(self.module).pop("__prepare_scriptable__", None)
        self.is_attached = False

    def refuse_script(self) -> NoReturn:
        """The module's ``__prepare_scriptable__``: ``torch.jit.script`` calls it, and ``patch_of`` finds its owner."""
        raise RuntimeError(
            f"torch.jit.script: {type(self.module).__name__} was changed by fusedlayers.fuse or fusedlayers.fit, and "
            "TorchScript cannot compile it; call fusedlayers.unfuse(model) first"
        )

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward pass without this, for ``inspect.signature``."""
        return self.without(self.module)

    @property
    def __code__(self) -> Any:
        """The code of that, for ``torch.export``."""
        return self.__wrapped__.__code__

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of the module. accelerate makes a method of it, which copies of the module get, and run without a
        patch."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (self if module is self._module() else self.without(module))(*args, **kwargs)

        plain = self.__wrapped__
        vars(forward).update(patch=self, __signature__=inspect.signature(getattr(plain, "__func__", plain)))
        return forward

    def without(self, module: nn.Module) -> Callable[..., Any]:
        """The forward pass without this of its module, or of a copy of that."""
        forward = self.replaced or type(module).forward.__get__(module)
        function = getattr(forward, "__func__", None)
        return forward if function is None or module is self._module() else function.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        module: Any = sys._getframe(1).f_locals.get("self")
        # ``copy.copy`` of a module, and the replicas of ``nn.DataParallel``, share its attributes, this one too.
        own = self._module()
        if module is not own and not (isinstance(module, nn.Module) and vars(module).get("forward") is self):
            module = self.module
        forward = self.replaced or type(module).forward.__get__(module)
        region = current_region()
        if region is not None and region.knows_parameters and not self.recompute and self.is_attached:
            role = self.role if self.saves_once else None
            if role is None:
                return forward(*args, **kwargs)
            return role(region, self, module, partial(forward, *args, **kwargs))
        is_on = self.is_attached and (self.saves_once or self.recompute)
        if not is_on or not can_enter() or torchscript_state() is not None:
            return forward(*args, **kwargs)
        run = partial(self._saving_once, module, forward) if self.saves_once else forward
        return recomputed(run, module, args, kwargs, "all") if self.recompute else run(*args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] | None = self.replaced
        if forward is None:  # no method: the compiler of torch 2.11 cannot bind one
            forward = partial(type(self.module).forward, self.module)
        is_kept = not self.is_attached or not self.recompute
        return forward(*args, **kwargs) if is_kept else recomputed(forward, self.module, args, kwargs, "all")

    def _saving_once(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        run = partial(forward, *args, **kwargs)
        region = current_region()
        is_new = region is None
        if region is None:
            region = enter_region(module, (*args, *kwargs.values()))
        elif not region.knows_parameters:  # ``save_once`` is around it
            region.begin(module, (*args, *kwargs.values()))
        try:
            return run() if self.role is None else self.role(region, self, module, run)
        finally:
            if is_new:
                pop_saved_tensors_hooks()


def patches_of(model: nn.Module) -> list[Patch]:
    """The patches of a model's modules."""
    return [patch for module in model.modules() if (patch := patch_of(module)) is not None]


def patch_of(module: nn.Module) -> Patch | None:
    """The module's patch, or None where it has none."""
    found = getattr(vars(module).get("__prepare_scriptable__"), "__self__", None)
    return found if isinstance(found, Patch) else None


def _take_patch_away(module: nn.Module) -> None:
    """Put back what a patch has replaced, where that, or accelerate's method of it, is the module's forward."""
    found = vars(module).get("forward")
    patch = found if isinstance(found, Patch) else getattr(getattr(found, "__func__", None), "patch", None)
    if isinstance(patch, Patch):
        del vars(module)["forward"]
        if patch.replaced is not None:
            vars(module)["forward"] = patch.without(module)
