"""A region: a module in whose forward pass operations keep less. The module's own code runs; its calls of PyTorch's
functions are met one at a time (``TorchFunctionMode``), and those that were chosen are computed by this package. Of
PyTorch's own modules that make one call the region makes that itself (``one_call.py``).

A region is the instance's ``forward``: an object that calls the class's forward, whatever that is at the time. No class
is changed, no hook is added, and copies and pickles of a module have regions of their own. It steps aside where nothing
is saved: without gradients, and in programs that ``torch.export`` or TorchScript trace.

An operation under saved-tensor hooks that were pushed after the region began is left alone. A checkpoint in the
module's code pushes such hooks, and computes again outside the region: there PyTorch's operations would save their
input where ours had saved their output, with the same shape, and gradients would be silently wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Set
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._torch import (
    current_function_mode,
    function_mode_count,
    is_exporting,
    saved_tensors_hooks_on_top,
    torchscript_state,
)
from ..checkpoint.recompute import Recompute, recomputed
from ..sizes import is_small
from ..utils.compiled_checkpoint import is_in_checkpoint
from .one_call import ONE_CALLS
from .operations import CHECKPOINT, OPERATIONS, Given, Operation, in_order
from .stand_in import StandIn


class Region:
    """What a fused module has in the place of ``forward``.

    It holds for the modules that this one calls too, but for those that have regions of their own: one of no kinds
    leaves a module to PyTorch.

    Attributes:
        module: whose forward pass this is.
        kinds: of operations that keep less (``Operation.kind``).
        stand_in: what a module made of plain operations was recognised as, or None.
        recompute: what of the whole forward pass is computed again in the backward pass.
        keeps_outputs: whether operations keep less; else it only recomputes.
        places: for people, what is kept, by kind.
        waiting_kinds: those of which the example was too small.
        small_example: what the module was given in the example, if that was too small for all kinds: of no more PyTorch
            computes everything.
        compiled_without: those that are left to the compiler in a compiled model.
        called: the paths by which the model that was fused calls the module.
        replaced: what the instance had in the place of its class's forward before, or None.
    """

    keeps_outputs = True
    called: tuple[str, ...] = ()
    waiting_kinds: Set[str] = frozenset()
    small_example: Given | None = None
    compiled_without: Set[str] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kinds: set[str] = set()
        self.stand_in: StandIn | None = None
        self.recompute: Recompute = "nothing"
        self.places: dict[str, str] = {}
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")

    @classmethod
    def of(cls, module: nn.Module) -> Region:
        """The module's region; a new one, of no kinds, where it has none."""
        found = region_of(module)
        if found is None:
            found = cls(module)
            found.attach()
        return found

    @property
    def is_empty(self) -> bool:
        return not self.kinds and self.stand_in is None and self.recompute == "nothing"

    @property
    def active_kinds(self) -> Set[str]:
        """The kinds of operations that keep less now."""
        return self.kinds if self.keeps_outputs else frozenset()

    @property
    def is_attached(self) -> bool:
        return region_of(self.module) is self

    def switch(self, kind: str, stand_in: StandIn | None, *, on: bool) -> None:
        """Let operations of this kind keep less, or the module that was recognised; or no more."""
        if stand_in is not None:
            self.stand_in = stand_in if on else None
        elif kind == CHECKPOINT:
            self.recompute = "all" if on else "nothing"
        elif on:
            self.kinds.add(kind)
        else:
            self.kinds.discard(kind)

    def attach(self) -> None:
        vars(self.module)["forward"] = self
        vars(self.module).setdefault("extra_repr", Remark(self.module))
        vars(self.module)["__prepare_scriptable__"] = self.refuse_script

    def remove(self) -> None:
        """Let the module be what it was."""
        own = vars(self.module)
        del own["forward"]
        own.pop("__prepare_scriptable__", None)  # which pickles of earlier versions do not have
        if self.replaced is not None:
            own["forward"] = self.replaced
        if isinstance(own.get("extra_repr"), Remark):
            del own["extra_repr"]

    def refuse_script(self) -> NoReturn:
        """``__prepare_scriptable__`` of the module (``utils/torchscript.py``)."""
        raise RuntimeError(
            f"torch.jit.script: {type(self.module).__name__} was changed by fusedlayers.fuse or fusedlayers.fit, and "
            "TorchScript cannot compile it; call fusedlayers.unfuse(model) first"
        )

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward pass without this, for ``inspect.signature``."""
        return self._forward_of(self.module)

    @property
    def __code__(self) -> Any:
        """The code of that, for ``torch.export``."""
        return self.__wrapped__.__code__

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        return self.replaced if self.replaced is not None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        module = self._called_module(sys._getframe(1))
        forward = self._forward_of(module)
        if not torch.is_grad_enabled() or torchscript_state() is not None:
            return forward(*args, **kwargs)
        if self.stand_in is not None and self.keeps_outputs and not (args and is_small(args[0])):
            y = self.stand_in(module, args, kwargs)
            if y is not None:
                return y
        if self.recompute != "nothing":
            run = functools.partial(self._intercepted, module, forward)
            return recomputed(run, module, args, kwargs, self.recompute)
        return self._intercepted(module, forward, *args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """For the compiler, which lets no mode begin within a checkpoint: there everything is PyTorch's."""
        forward: Callable[..., Any] | None = self.replaced
        if forward is None:  # no method: the compiler of torch 2.11 cannot bind one
            forward = functools.partial(type(self.module).forward, self.module)
        if is_exporting() or is_in_checkpoint():
            return forward(*args, **kwargs)
        if self.recompute == "nothing":
            with Interception(self.active_kinds - self.compiled_without, None):
                return forward(*args, **kwargs)
        return recomputed(forward, self.module, args, kwargs, self.recompute)

    def _intercepted(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        kinds, hooks = self.active_kinds, saved_tensors_hooks_on_top(True)
        mode = current_function_mode() if function_mode_count() else None
        if type(mode) is not Interception:
            # A mode takes time at each of torch's functions.
            if not kinds or (self.small_example is not None and self.small_example.is_as_small(args, kwargs)):
                return forward(*args, **kwargs)
            one_call = ONE_CALLS.get(type(module)) if self.replaced is None else None
            if one_call is not None and one_call.operation.kind in kinds and one_call.is_made(module, args, kwargs):
                return one_call.run(module, forward, args)
            with Interception(kinds, hooks):
                return forward(*args, **kwargs)
        # In another region: a second mode would see each of its operations twice.
        before = mode.kinds, mode.hooks
        mode.kinds, mode.hooks = kinds, hooks
        try:
            return forward(*args, **kwargs)
        finally:
            mode.kinds, mode.hooks = before

    def _called_module(self, frame: Any) -> nn.Module:
        """The module that is called. ``copy.copy`` of a module, and the replicas of ``nn.DataParallel``, share its
        attributes, this one too."""
        caller = frame.f_locals.get("self")
        is_copy = caller is not self.module and isinstance(caller, nn.Module) and vars(caller).get("forward") is self
        return caller if is_copy else self.module


class Interception(TorchFunctionMode):
    """Meets the calls of PyTorch's functions in a region."""

    def __init__(self, kinds: Set[str], hooks: Any) -> None:
        self.kinds = kinds
        #: The saved-tensor hooks that the region began under.
        self.hooks = hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = OPERATIONS.get(func)
        if operation is None or operation.kind not in self.kinds:
            return func(*args, **(kwargs or {}))
        args, kwargs = in_order(args, kwargs or {})
        if not torch.is_grad_enabled() or not (torch.compiler.is_compiling() or self._is_ours(operation, args)):
            return func(*args, **kwargs)
        return operation.run(func, args, kwargs)

    def _is_ours(self, operation: Operation, args: Any) -> bool:
        return saved_tensors_hooks_on_top(True) == self.hooks and not operation.is_small(args)


class Remark:
    """``extra_repr`` of a fused module: its own, and what is kept."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        region, own = region_of(self.module), type(self.module).extra_repr(self.module)
        if region is None:
            return own
        kinds = sorted(region.active_kinds)
        kept = [kind for kind in kinds if kind not in region.waiting_kinds]
        if region.stand_in is not None and region.keeps_outputs:
            kept.append(str(region.stand_in))
        kept += {"all": ["recomputed"], "cheap": ["recomputed but for products"], "nothing": []}[region.recompute]
        waiting = [kind for kind in kinds if kind in region.waiting_kinds]
        parts = [("fused", kept), ("fused for larger inputs", waiting)]
        remark = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts if names)
        if not remark:
            return own
        return f"{own}, {remark}" if own else remark


def region_of(module: nn.Module) -> Region | None:
    """The module's region, or None where it has none."""
    found = vars(module).get("forward")
    return found if isinstance(found, Region) else None
