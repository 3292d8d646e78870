"""A place in a model where an operation may save less: what its calls compute, save, and are read by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import backends, plan, sizes
from .._torch import autocast_is_active
from ..activations import KEPT_BY_TORCH, Activation
from ..asking import plan_of
from .operations import BATCH_NORM, CHECKPOINT, GATE, PRODUCT, Given, Operation
from .stand_in import StandIn

#: Operations besides activations: those that have a plan, those of which no result is saved, and all.
PLANNED = frozenset({"layer_norm", "rms_norm", "group_norm"})
RESULT_IS_FREE = frozenset({BATCH_NORM, GATE, PRODUCT})
OTHERS = PLANNED | RESULT_IS_FREE | {"dropout", CHECKPOINT}
#: Why nothing is freed of an activation in a gate.
KEPT_BY_GATE = "it is part of a gate, which keeps its input"


@dataclass(eq=False)
class Place:
    """Calls of one kind of operation by one module.

    Attributes:
        path: of the module, the first one if it has several.
        paths: those by which it was called.
        module: which calls them by its own code.
        kind: of the operations; of a module that was recognised as a whole, what it is.
        name: what is computed, for people: an activation's name, or the kind.
        stand_in: what the module was recognised as, or None.
        saves: what the first call keeps that keeps less, for people, or else the last; None where only the call itself
            decides.
        is_small: whether PyTorch computes all calls for their size alone, and this package would larger ones.
        left_because: why the calls are left to PyTorch, or None.
        is_recomputed: whether all calls were under a checkpoint around the module, or without gradients: what is freed
            shows when they run again.
        readers: what reads the result: "activation" (one whose output determines its input), "dropout", "gate" or
            "product".
        calls: how many there were.
        small_calls: of these, those that PyTorch computes for their size alone.
        small_because: why, for people.
        least_bytes: how many it must free to be worth more time than PyTorch's calls take.
        gated: of a gate, the activations in it.
        activation: of PyTorch's activation functions, the record; else None.
        follows: what has made its input.
        is_normalised: of an activation, whether a batch norm made its input, in all calls.
        is_kept_in_place: of an activation, whether all calls write over their input, which no batch norm made, so that
            PyTorch saves the output too.
        keeps_output: whether what ``saves`` says is its output.
        dtype: of the input.
        given: what the module was given in the first call, if that says the sizes of what it computes.
        unread_because: of a batch norm, why no reader's output is kept in place of its input.
    """

    path: str
    module: nn.Module
    kind: str
    name: str
    stand_in: StandIn | None = None
    saves: str | None = None
    is_small: bool = False
    left_because: str | None = None
    is_recomputed: bool = False
    readers: set[str] = field(default_factory=set)
    gated: list[Place] = field(default_factory=list)
    activation: Activation | None = None
    follows: list[Place] = field(default_factory=list)
    is_normalised: bool = False
    is_kept_in_place: bool = False
    keeps_output: bool = False
    dtype: torch.dtype = torch.float32
    given: Given | None = None
    unread_because: str = "no activation reads it whose output determines its input"
    paths: tuple[str, ...] = ()
    calls: int = 0
    small_calls: int = 0
    small_because: str = ""
    least_bytes: int = 0

    def __post_init__(self) -> None:
        self.paths = self.paths or (self.path,)

    @property
    def is_activation(self) -> bool:
        return self.kind not in OTHERS

    @property
    def names(self) -> tuple[str, str | None]:
        """The pattern and the activation, for reports."""
        return ("activation", self.name) if self.is_activation else (self.name, None)

    def note_plan(self, x: Tensor, function: Any, *args: Any) -> None:
        """Note what a call on x keeps; of a device without data its plan would say that it has no backend."""
        if x.is_meta:
            return
        try:
            (found,) = plan_of(function, *args)
        except Exception:  # it refuses what PyTorch is about to refuse
            return
        self.saves, self.is_small = str(found).removeprefix("not fused: "), found.is_too_small
        self.keeps_output = found.saved == "output"
        refused = self.activation.output_refusal(x.dtype) if self.is_small and self.activation is not None else None
        if refused is not None:  # a larger input would be kept as well
            self.saves, self.is_small = f"saves the input: {refused}", False

    def note_call(self, operation: Operation, function: Any, args: Any, kwargs: Any) -> None:
        """Note what a call keeps, and whether PyTorch computes it for its size."""
        x = args[0]
        self.saves, self.is_small, self.keeps_output = None, False, False
        if not torch.is_grad_enabled():
            # As a reentrant checkpoint calls it, before it calls it with gradients.
            with torch.inference_mode(False), torch.enable_grad():
                x = torch.empty_like(x) if x.is_inference() else x.detach()
                self.note_call(operation, function, (x.requires_grad_(), *args[1:]), kwargs)
            return
        if self.is_activation or self.kind in PLANNED:
            self.note_plan(x, operation.run, function, args, kwargs)
            if self.keeps_less and operation.is_small(args):  # in place: its plan has no least size, a region has
                self._note_size(x, sizes.small_bytes(x))
        elif self.kind != BATCH_NORM:
            self._note_size(x, sizes.small_bytes(x))
        elif not autocast_is_active():  # under which an activation behind it is computed by itself
            self._note_size(x, sizes.batch_norm_limits(x).large)

    def count(self, note: Callable[[Place], None], calls: int = 1) -> None:
        """Count calls that are alike. ``note`` notes what they keep, here as long as no others keep less."""
        may_keep_less = not self.calls or self.is_small or not self.keeps_less  # than those before
        noted = self if may_keep_less else replace(self)
        if self.left_because is None:
            note(noted)
        self.calls += calls
        if noted.is_small:
            self.small_calls += calls
            self.small_because = noted.saves or ""

    def note_whole(self, given: tuple[torch.Size, torch.dtype, torch.device]) -> None:
        """Note what a call of the module keeps that computes all of it, on such an input."""
        shape, dtype, device = given
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        self.note_plan(x, self.stand_in, self.module, (x,), {})

    def _note_size(self, x: Tensor, least_bytes: int) -> None:
        """Note that PyTorch computes the call, if x has fewer bytes."""
        if x.numel() * x.itemsize < least_bytes:
            self.saves, self.is_small = plan.too_small_because(least_bytes), True

    def note_form(self, *, is_kept: bool, is_normalised: bool) -> None:
        """Note how a call computes an activation, before it is counted.

        Args:
            is_kept: whether it writes over its input, so that PyTorch saves the output.
            is_normalised: whether a batch norm made its input.
        """
        is_first = not self.calls
        self.is_normalised = is_normalised and (is_first or self.is_normalised)
        self.is_kept_in_place = is_kept and not is_normalised and (is_first or self.is_kept_in_place)

    def note_activation(self, z: Tensor, activation: Activation) -> None:
        """Note that an activation reads the result, z, of a batch norm."""
        if plan.tells_input(activation, "auto", z.dtype, on_gpu=z.is_cuda):
            self.readers.add("activation")
        elif plan.tells_input(activation, "auto", z.dtype, on_gpu=False):
            self.unread_because = plan.WAITS
        elif plan.tells_input(activation, "auto", torch.float32, on_gpu=False):
            dtype = str(z.dtype).removeprefix("torch.")
            self.unread_because = f"outputs of {dtype} do not determine the input of {activation}, those of float32 do"
        if backends.slow_on(z.device, z.dtype, activation) is not None:  # then the norm waits for no larger input
            self.saves, self.is_small = None, False

    @property
    def small_norm(self) -> Place | None:
        """Of an activation, the batch norm before it that waits for larger inputs: with it the activation may free
        something, and not before."""
        norms = (maker for maker in self.follows if maker.kind == BATCH_NORM and "activation" in maker.readers)
        return next((norm for norm in norms if norm.is_small and self.is_activation and self.keeps_less), None)

    @property
    def keeps_less(self) -> bool:
        """Whether its calls keep less than PyTorch's, as far as the first one tells."""
        is_planned = self.is_activation or self.kind in PLANNED
        return self.saves is None or not is_planned or self.keeps_output

    @property
    def useless_because(self) -> str | None:
        """Why there is nothing to free, as the calls before and after tell; or None."""
        if self.kind == BATCH_NORM:
            return None if "activation" in self.readers else self.unread_because
        if self.kind == GATE:
            return None if "product" in self.readers else "no matrix product reads it"
        if self.is_activation and "gate" in self.readers:
            return KEPT_BY_GATE
        # Less can be kept only where a dropout follows.
        is_kept = (self.name in KEPT_BY_TORCH or self.is_kept_in_place) and "dropout" not in self.readers
        return "PyTorch saves no more than the output" if is_kept else None
