"""``fuse`` and ``unfuse``: the operations of a model keep less, and its code runs as it is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from .._torch import OpOverload, is_optimized, saved_tensors_hooks_on_top
from ..memory import OF_GRAPH, count_saved
from ..profiling.step import Step, no_gradient_because, tensors_of
from ..profiling.timing import step_times, telling
from ..utils.example import arguments_from, check_model, check_module, does_not_run, eagerly, evaluation_notes
from ..utils.formatting import first_line, size_text
from ..utils.module_state import unchanged
from ..utils.progress import CallbackError, OnStage, asked, past_handlers, silent, within
from ..utils.refusals import check_flag
from ..utils.storages import has_data, tensors_in
from .classes import places_of_classes, slow_because
from .groups import Group, grouped, saves_of, without_the_useless
from .mlps import find_mlps
from .operations import BATCH_NORM, GATE, PRODUCT, Given
from .place import KEPT_BY_GATE, Place
from .recording import record
from .region import Region, region_of
from .report import FuseReport, Replaced

_UNMEASURED = "What the places free was not measured: {}."
#: Why a place stays fused that frees nothing on the example.
_IDLE = "it runs without gradients, or under a checkpoint, where less is saved while that computes it again"


def fuse(
    model: nn.Module,
    inputs: Any = None,
    *,
    save: str = "auto",
    dry_run: bool = False,
    progress: bool | OnStage = False,
) -> FuseReport:
    """Let the operations of a model keep less for the backward pass, in place; say where, and how much that frees.

    The model's code runs as it is. While a module runs that was seen to call such operations, this package computes
    them: activations, dropouts, and both together; layer, RMS and group norms; batch norms with the activation
    after them; matrix products of a product, as gated MLPs and experts have. Activations and RMS norms that a module
    spells out in plain operations are recognised too. Classes, parameters, hooks, names and ``state_dict`` keys stay;
    random numbers are drawn as before; ``unfuse`` undoes it.

    PyTorch computes what code spells out beside other operations, activations that write over a view in place, and what
    runs under a checkpoint that begins inside the module, or under a selective one. Under ``torch.compile`` it computes
    norms, gates, dropouts, and activations before a dropout or behind a batch norm.

    An output that code writes over in place, on a path that the example did not take or within TorchScript, makes
    backward raise, and so does an edit of a norm's weights. A write that autograd does not see (through ``.data``,
    NumPy or DLPack) must be on the path of the example and through a tensor, or gradients are wrong. Where an
    activation and the dropout or product behind it are one operation, the result between them is no part of the graph
    any more, unless a hook is on it or its gradient is retained by then.

    Args:
        model: any module; it is run, hooks included, a few times, and one to three times for each line of the report
            (in a dry run more often), but its buffers and the random generators are put back. What its code counts in
            attributes has advanced.
        inputs: an example of what the model is called with: a tensor, a tuple of positional arguments, or a mapping of
            keywords. Places that free nothing on them are left as they are (on CPUs also norms that free their
            statistics alone, which PyTorch computes faster), but for those that free something in other
            calls: that PyTorch computes for their size, or that run under a checkpoint or without gradients. The report
            lists these apart. Without, only modules are found whose class says what they compute, and nothing is
            measured.
        save: "auto"; "recompute" for MLPs that keep their input alone, and run forward once more in the backward pass.
        dry_run: whether to change nothing, and only report; how long a step would take as well, which takes some
            steps for each line of the report.
        progress: True shows how far it has come and the time left: a bar on stderr in a terminal (with ``rich``
            installed), elsewhere a line every 10 seconds. A function is told each stage, and which part of all is done.

    Returns:
        a report: the places, what each frees, what was skipped and why, and the bytes saved for backward in all, but
        for inputs and parameters.

    Raises:
        TypeError: ``model`` is no module, ``dry_run`` neither True nor False, or ``progress`` neither
            of these nor a function.
        ValueError: an unknown ``save``; a lazy module that has not been called; inputs that the model does not run on;
            inference mode.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> print(fl.fuse(model, torch.randn(4096, 8)))
    Sequential: 1 operation fused
    <BLANKLINE>
    calls  operation  module  frees     for the backward pass it
        1  gelu       1       1.00 MiB  saves the output (last bit = side of minimum)
    <BLANKLINE>
    saved for backward beside inputs and parameters: 2.00 MiB before, 1.00 MiB now (-50.0 %); details: memory_report
    """
    check_model("fuse", model)
    if save not in ("auto", "recompute"):
        raise ValueError(f"fuse: save must be 'auto' or 'recompute', got {save!r}")
    check_flag("fuse", "dry_run", dry_run)
    with asked("fuse", progress) as on_stage:
        fusing = Fusing(model, save, dry_run, on_stage=on_stage)
        return fusing.by_classes() if inputs is None else fusing.on(*arguments_from(inputs))


def unfuse(model: nn.Module) -> None:
    """Undo ``fuse``: every module is again what it was. A model that was not fused stays as it is.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_module("unfuse", model)
    for module in model.modules():
        region = region_of(module)
        if region is not None:
            region.remove()


class Fusing:
    """One call of ``fuse``, or of the function with this name.

    Attributes:
        mlps: those of the model, once it has been run.
    """

    def __init__(
        self,
        model: nn.Module,
        save: str = "auto",
        dry_run: bool = False,
        function: str = "fuse",
        on_stage: OnStage = silent,
    ) -> None:
        self._model, self._save, self._dry_run, self._function = model, save, dry_run, function
        self._on_stage = past_handlers(on_stage)
        self.mlps: list[Place] = []
        self._skipped: list[Group] = []
        self._notes: list[str] = []
        if any(region_of(module) for module in model.modules()):
            self._notes.append("The model was fused before; its places were decided anew.")
        #: What to put back if nothing is to be changed, or an error ends it.
        self._before = [region for module in model.modules() if (region := region_of(module)) is not None]

    def by_classes(self) -> FuseReport:
        """By the classes of modules alone."""
        return self._or_put_back(self._by_classes)

    def on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FuseReport:
        """By what these arguments let the model call."""
        return self._or_put_back(functools.partial(self._on, args, kwargs))

    def _or_put_back(self, run: Callable[[], FuseReport]) -> FuseReport:
        """After an error the model is what it was."""
        try:
            return run()
        except CallbackError as error:
            self._put_back()
            of_callback = error.error
        except BaseException:
            self._put_back()
            raise
        raise of_callback  # here, where its context stays what it was

    def _by_classes(self) -> FuseReport:
        self._on_stage("looking at the classes of modules", 0.0)
        unfuse(self._model)
        self._notes.append(
            "Without example inputs, modules whose class says what they compute are found, and small calls of them are "
            "counted too, which PyTorch computes. Pass example inputs to find what the code of other modules calls "
            "(F.gelu, for example), and to see what each place frees."
        )
        with unchanged([*self._model.modules()], ()):  # code that is tried out may draw random numbers
            places = [*places_of_classes(self._model)]
        for place in places:
            because = slow_because(place, self._model)
            if because is not None:  # it stays fused, for the model may be moved to a GPU before it is trained
                place.left_because = because
                place.saves = f"is left to PyTorch here: {because}"
        groups = grouped(places)
        self._skipped += [group for group in groups if group.first.left_because is not None]
        self._on_stage("done", 1.0)
        return self._finish(groups, None)

    def _on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FuseReport:
        model = self._model
        if torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self._function}: nothing is saved for a backward pass in inference mode; call it outside "
                "torch.inference_mode()"
            )
        unfuse(model)
        # What is looked for is saved with gradients, whoever calls.
        kept = unchanged([*model.modules()], [*tensors_in((args, kwargs))])
        with torch.enable_grad(), kept as restore_random_state, eagerly():

            def measured() -> _Saved:
                restore_random_state()
                return _saved(model, args, kwargs)

            try:
                self._on_stage("measuring the model", 0.0)
                saved = measured()
                before = saved.bytes
                restore_random_state()
                self._on_stage("finding operations", 0.05)
                recording = record(model, args, kwargs)
            except Exception as error:
                raise does_not_run(self._function, error, args) from error
            self._notes += evaluation_notes(model)
            if saved_tensors_hooks_on_top(True) is not None:
                self._notes.append(
                    "Saved-tensor hooks are on here. Under them other bytes are saved than these, and products of "
                    "products are not seen: call fuse outside of them."
                )
            if is_optimized(model):
                self._notes.append(
                    "These are the bytes of eager steps. In compiled ones norms, gates, dropouts, and activations "
                    "before a dropout or behind a batch norm are the compiler's."
                )
            if saved.note:
                self._notes.append(saved.note)
            if before == 0:
                note = "Only inputs and parameters are kept for the backward pass."
                if not saved.needs_gradient:
                    note = f"Nothing is saved for a backward pass: {no_gradient_because(model)}."
                self._notes.append(note)
            self.mlps = [*find_mlps(model, recording)]
            if before != 0:  # else a note says why nothing is saved
                self._skipped += grouped(recording.without_gradient)
            blocks = self.mlps if self._save == "recompute" else []
            groups = self._chosen(grouped(recording.places, blocks), before, lambda: measured().bytes)
            after = measured().bytes
            known = (before, after) if before is not None and after is not None and (before or after) else None
            is_timed = self._dry_run and known is not None and groups
            step_ms = self._step_ms(groups, args, kwargs, restore_random_state) if is_timed else None
        self._on_stage("done", 1.0)
        return self._finish(groups, known, step_ms)

    def _chosen(self, groups: list[Group], before: int | None, measured: Callable[[], int | None]) -> list[Group]:
        """Switch on what frees something."""
        chosen: list[Group] = []
        on_stage, numbers = within(self._on_stage, 0.1, 0.4 if self._dry_run else 0.95), itertools.count()

        def told() -> int | None:
            done = next(numbers)
            # As a rule each is measured once; some again, once others have been left.
            on_stage(f"measuring what operations free, run {done + 1}", min(done / (1 + 1.5 * len(chosen)), 1))
            return measured()

        for group in groups:
            useless = group.first.useless_because
            if useless is not None and group.first.kind in (GATE, PRODUCT):
                continue
            if group.first.left_because is not None or useless is not None:
                group.first.left_because = group.first.left_because or useless
                self._skipped.append(group)
                for place in group.places:
                    Region.of(place.module)  # an empty one, which keeps the operations out of an outer region
            else:
                group.switch(True)
                chosen.append(group)
        try:
            total = told()
        except Exception as error:  # whatever a model's code does with what it is not used to
            raised = f"{type(error).__name__}: {first_line(error)}"
            return self._leave(chosen, f"a run with it fused raised {raised}; the model's own code may raise that too")
        if before is None or total is None:
            return chosen
        total, chosen, left = without_the_useless(chosen, total, told)
        gated = [place for group in chosen for gate in group.places for place in gate.gated if place.calls == 1]
        self._skipped = [  # the rows of the gates speak of them
            group
            for group in self._skipped
            if group.first.left_because != KEPT_BY_GATE or not {*group.places} <= {*gated}
        ]
        for group in left:
            self._leave_useless(group, before, [place for group in chosen for place in group.places])
        if total > before:
            return self._leave(chosen, f"fused, the model would keep {size_text(total - before)} more")
        waiting = [group for group in chosen if group.is_too_small or group.is_idle]
        if total == before > 0 and len(waiting) < len(chosen):
            self._leave([group for group in chosen if group not in waiting], "all together, they free nothing")
            return waiting
        return chosen

    def _leave_useless(self, group: Group, before: int, fused: Sequence[Place]) -> None:
        first = group.first
        if first.kind in (GATE, PRODUCT) or not before:  # else a note says why nothing is kept
            return
        because = "it freed nothing when it was tried: another operation saves its input too, or none saves its output"
        keepers = [
            place for place in first.follows if place in fused and place.keeps_output and not place.is_recomputed
        ]
        if group.freed and group.freed > 0:
            because = f"it would free {size_text(group.freed)}, and PyTorch's takes less time on CPUs"
        elif first.kind == BATCH_NORM:
            because = (
                "it frees nothing: another operation saves its input too, or a dropout behind its activation drops "
                "some of what would tell it"
            )
        elif group.freed:
            because = f"it would keep {size_text(-group.freed)} more: nobody else keeps its output"
        elif keepers:
            because = f"it frees nothing: its input is the output that the {keepers[-1].name} before it saves"
        first.left_because = because if first.keeps_less else group.saves
        self._skipped.append(group)

    def _step_ms(
        self, groups: list[Group], args: tuple[Any, ...], kwargs: dict[str, Any], restore_random_state: Any
    ) -> tuple[float, float] | None:
        """The time of a step before and after; each group gets to know what is its own."""

        def only(chosen: list[Group]) -> Callable[[], None]:
            def switch() -> None:
                for group in groups:
                    group.switch(group in chosen)

            return switch

        step = Step(self._model, args, kwargs, function=self._function)
        without_all = telling(only([]), within(self._on_stage, 0.4, 0.95))
        without_one = [only([group for group in groups if group is not out]) for out in groups]
        variants = [without_all, *without_one, only(groups)]
        try:
            before, *without, after = step_times(step, variants, restore_random_state)
        except Exception as error:  # a backward pass that cannot be run from here, or memory for the gradients
            self._notes.append(f"No step could be timed: {type(error).__name__}: {first_line(error)}")
            only(groups)()
            return None
        for group, time_ms in zip(groups, without, strict=True):
            group.time_ms = after - time_ms
        return before, after

    def _leave(self, groups: list[Group], reason: str) -> list[Group]:
        """Switch groups off again."""
        for group in groups:
            group.switch(False)
            group.first.left_because = reason
        self._skipped += groups
        return []

    def _finish(
        self, groups: list[Group], known: tuple[int, int] | None, step_ms: tuple[float, float] | None = None
    ) -> FuseReport:
        given: dict[Region, set[Given | None]] = {}
        for group in groups:
            for place in group.places:
                region = Region.of(place.module)
                region.switch(place.kind, place.stand_in, on=True)
                until = ", when it runs again with gradients" if group.is_idle else ""
                region.places[place.kind], region.called = f"{place.name} {saves_of(place)}{until}", place.paths
                given.setdefault(region, set()).add(place.given)
                if place.is_small:
                    region.waiting_kinds |= {place.kind}
                if place.is_normalised:
                    # The compiler keeps what the norm reads, and computes the rest again: it would keep both.
                    region.compiled_without |= {place.kind}
        for region, (first, *others) in given.items():
            region.small_example = first if not others and region.kinds <= region.waiting_kinds else None
        self._remove_needless()
        if self._dry_run:
            self._put_back()
        if not (groups or self._skipped or self._notes):
            self._notes.append(_nothing_found(self._model))
        groups = [part for group in groups for part in group.by_size()]
        return FuseReport(
            type(self._model).__name__,
            tuple(
                Replaced(group.paths, *group.first.names, group.saves, group.freed, group.time_ms, group.calls)
                for group in groups
                if not (group.is_too_small or group.is_idle) and group.first.left_because is None
            ),
            tuple(group.skipped(group.first.left_because) for group in self._skipped),
            tuple(
                place
                for group in groups
                for place in (
                    [group.skipped(group.small_because)] if group.is_too_small else group.small_beside_others()
                )
            ),
            known,
            tuple(self._notes),
            self._dry_run,
            step_ms,
            tuple(group.skipped(_IDLE) for group in groups if group.is_idle),
        )

    def _remove_needless(self) -> None:
        """Regions of no kinds, but those within others, whose operations they keep out."""
        regions = [region for module in self._model.modules() if (region := region_of(module)) is not None]
        outer = [region for region in regions if region.kinds]
        within = {id(inner) for region in outer for inner in region.module.modules() if inner is not region.module}
        for region in regions:
            if region.is_empty and id(region.module) not in within:
                region.remove()

    def _put_back(self) -> None:
        unfuse(self._model)
        for region in self._before:
            region.attach()


def _nothing_found(model: nn.Module) -> str:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "Nothing was found: TorchScript hides what it calls. Fuse the model before you trace or script it."
    if any(type(module).__module__.startswith("fusedlayers.") for module in model.modules()):
        return "Nothing else was found that would keep less: the layers of fusedlayers keep their outputs already."
    if any(
        isinstance(node.target, OpOverload)
        for module in model.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
    ):
        return "Nothing was found: an exported graph has lost its modules. Fuse the model before you export it."
    own = "Activations of your own must be modules of torch operations, not TorchScript."
    return f"Nothing was found that would keep less; memory_report lists what the model keeps. ({own})"


class _Saved(NamedTuple):
    """What a call saves.

    ``needs_gradient``: whether a result of it does. ``note``: what to know of the bytes.
    """

    bytes: int | None
    needs_gradient: bool
    note: str = ""


def _saved(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Saved:
    """Measured; but who fuses a model may have too little memory for it as it is, and on shapes without data fused
    operations compute what PyTorch's do."""
    needs_gradient = True

    def run() -> Any:
        nonlocal needs_gradient
        result = model(*args, **kwargs)
        needs_gradient = any(t.requires_grad for t in tensors_of(result))
        return result

    try:
        kept = count_saved(run, exclude=[*model.buffers(), args, kwargs])
    except torch.OutOfMemoryError:
        return _Saved(None, needs_gradient, _UNMEASURED.format("there is not enough memory"))
    if not all(map(has_data, tensors_in((model, args, kwargs)))):
        return _Saved(None, needs_gradient, _UNMEASURED.format("tensors of the meta device hold no data"))
    return _Saved(kept.bytes, needs_gradient, OF_GRAPH if kept.refused_hooks else "")
