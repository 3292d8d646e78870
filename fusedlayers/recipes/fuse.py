"""``fuse`` and ``unfuse``: every value of a model is saved once, and its code runs as it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._torch import is_compiled
from ..memory import device_of, peak_bytes, saved_bytes
from ..utils.example import (
    arguments_from,
    check_flag,
    check_model,
    check_module,
    check_uncompiled,
    eagerly,
    evaluation_notes,
)
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.module_tracker import ModuleTracker
from ..utils.progress import OnStage, asked
from ..utils.step import Step, no_gradient_because, step_times, tensors_of
from ..utils.storages import tensors_in, trained_in
from .fuse_report import FuseReport, count, grouped, largest
from .patch import Patch, patches_of
from .save_once import works_here


def fuse(
    model: nn.Module, inputs: Any = None, *more: Any, time: bool = False, progress: bool | OnStage = False
) -> FuseReport:
    """Save every value of a model once, in place: backward replays from other saved tensors what one operation makes.

    The model's code runs as it is; ``save_once`` is around its forward pass, and around those of its modules, so that
    it holds within checkpoints too. Call it before or after the optimizer, DDP, FSDP2, LoRA, ``load_state_dict`` and
    ``.to``: classes, parameters, hooks, names and ``state_dict`` keys stay; ``unfuse`` undoes it. A module whose
    ``forward`` others replace (the hub's kernels, Liger) is left to them, and fused by the next call. Without inputs
    nothing is run. Under ``torch.compile``, ``torch.export``, ``torch.func`` and without gradients the model is what it
    was.

    Gradients are PyTorch's, to the last bit: its own nodes compute them, from the same values. A module of yours
    without children and matrices, as an activation or a norm that is spelled out, is run again in backward where that
    frees memory: it has to compute the same again from its arguments and attributes (``recipes/leaves.py``), and
    backward raises an error where its parameters were written to. A model that calls ``torch.func.grad`` in its own
    forward pass gets PyTorch's error, that saved-tensor hooks are not supported there: leave it as it is.

    Args:
        model: any module; a fused one gets these options instead of those that it had.
        inputs: an example of what the model is called with, for a report: a tensor, a tuple of positional arguments, or
            a mapping of keywords. The model is run forward and backward a few times; its buffers, gradients and the
            random generators are put back.
        time: whether steps are timed too, with and without.
        progress: True writes how far it has come and the time left on stderr, every 10 seconds. A function is told each
            stage, and which part of all is done.

    Returns:
        a report; with inputs, of the bytes that are saved for backward and of the peak, before and after.

    Raises:
        TypeError: ``model`` is no module, or is compiled or TorchScript; ``time`` is neither True nor False.
        ValueError: lazy parameters without a shape; inputs that the model does not run on; ``time`` without inputs.
        torch.OutOfMemoryError: the example does not fit; ``fuse(model)`` needs none. The model is what it was then.

    Saved: as for ``save_once``; of a module that is run again its arguments.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU())
    >>> report = fl.fuse(model)
    """
    check_model("fuse", model)
    if more:
        raise TypeError("fuse: inputs must be one tuple or dict: fuse(model, (x, y))")
    check_uncompiled("fuse", model)
    check_flag("fuse", "time", time)
    if time and inputs is None:
        raise ValueError("fuse: time=True runs the model; pass inputs too")
    works_here()  # which warns of an untested torch
    on_stage, before = asked("fuse", progress), patches_of(model)
    notes = list[str]()
    if compiled := sum(map(is_compiled, model.modules())):
        notes.append(
            f"Compiled modules: {compiled}. torch.compile decides what they save, and nothing is spared there."
        )
    if inputs is None:
        _attach(model)
        return FuseReport(type(model).__name__, notes=tuple(notes))
    try:
        return _measured(model, inputs, time, notes, on_stage)
    except BaseException as error:
        restore(model, before)
        if isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(
                f"fuse: the model does not fit into memory with these inputs; fuse(model) needs none. {error}"
            ) from error
        raise


def _measured(model: nn.Module, inputs: Any, is_timed: bool, notes: list[str], on_stage: OnStage) -> FuseReport:
    """Fuse a model, and measure it before and after."""
    args, kwargs = arguments_from(inputs)
    step, tracker = Step(model, args, kwargs, function="fuse"), ModuleTracker(model)
    notes = notes + evaluation_notes(model)
    with unchanged([*model.modules()], [*tensors_in((args, kwargs))]) as reset_random, torch.enable_grad(), eagerly():
        unfuse(model)
        with step.readable():
            result = model(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_of(result)):
            notes.append(f"Nothing is saved for a backward pass: {no_gradient_because(model)}.")
            _attach(model)
            return FuseReport(type(model).__name__, saved_bytes=(0, 0), notes=tuple(notes))
        del result
        leaves = trained_in((model, args, kwargs))

        def bytes_and_peak() -> tuple[int, int]:
            reset_random()
            saved = saved_bytes(step.forward, exclude=[*model.buffers(), args, kwargs])
            reset_random()
            with isolated_gradients(leaves, zeros=True):
                return saved, peak_bytes(step.run, device=device_of((model, args, kwargs)))

        on_stage("measuring the model", 0.0)
        before = bytes_and_peak()
        on_stage("measuring the fused model", 0.3)
        _attach(model)
        now = bytes_and_peak()
        on_stage("listing what is saved", 0.6)
        reset_random()
        with tracker.tracking():
            found = count(step.forward(), [*model.buffers(), model, args, kwargs], tracker.module_of)
        on_stage("timing steps", 0.7)
        switches = [lambda: unfuse(model), lambda: _attach(model)]
        times = step_times(step, switches, reset_random) if is_timed else None
    on_stage("done", 1.0)
    return FuseReport(
        type(model).__name__,
        grouped(found.spared),
        largest(grouped(found.kept)),
        (before[0], now[0]),
        (before[1], now[1]),
        None if times is None else (times[0], times[1]),
        tuple(notes),
    )


def unfuse(model: nn.Module) -> None:
    """Undo ``fuse`` and ``fit``: every module is again what it was. A model that was not fused stays as it is. What
    other libraries have put around a module's ``forward``, or in its place, stays too.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_module("unfuse", model)
    for patch in patches_of(model):
        patch.remove()


def restore(model: nn.Module, patches: Iterable[Patch]) -> None:
    """Undo what was done since the model had these patches."""
    unfuse(model)
    for patch in patches:
        patch.attach()


def _attach(model: nn.Module) -> None:
    unfuse(model)
    for module in model.modules():
        is_static = isinstance(inspect.getattr_static(module, "forward", None), staticmethod)
        if is_static or isinstance(module, torch.jit.ScriptModule):
            continue
        patch = Patch(module)
        # PyTorch's own leaf layers, as nn.Linear, are called often, and a patch without a role would change nothing.
        is_layer = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
        if module is model or patch.role is not None or not is_layer:
            patch.attach()
