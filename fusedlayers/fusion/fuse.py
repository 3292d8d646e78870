"""``fuse`` and ``unfuse``: whole models, rewritten in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..memory import saved_bytes
from ..utils.formatting import first_line, size_text
from ..utils.module_state import unchanged
from ..utils.storages import has_data, tensors_in
from .derived import Mixin, change_back, is_changed
from .patterns import Flow
from .recording import record
from .report import FuseReport
from .rewriting import Rewriting
from .sites import Lost, strict
from .tracing import trace


def fuse(model: nn.Module, example_inputs: Any = None, *, save: str = "auto") -> FuseReport:
    """Fuse, in place, the layers of a model with the activations after them, and its MLPs; say what was done.

    What is found: a dense layer (``nn.Linear``, transformers' ``Conv1D``), a convolution or a batch norm whose output
    one activation (a module or a function) reads, and nobody else; modules that are MLPs of two layers, or gated ones;
    and activations alone, which then keep their output instead of their input. The modules stay where they are, with
    their parameters, hooks, names and ``state_dict`` keys; ``unfuse`` puts their classes back. Whoever calls a fused
    layer from somewhere else, wraps it, hooks it or exchanges the activation gets the plain layer.

    Args:
        model: any module; it is run, or followed by ``torch.fx``, but its buffers and the random generators are put
            back.
        example_inputs: what the model is called with: a tensor, a tuple of positional arguments, or a mapping of
            keywords. One pass decides which values go where; MLPs are taken if outputs and gradients agree on what they
            were given in it. Without, ``nn.Sequential`` and modules that ``torch.fx`` can follow are fused.
        save: what MLPs keep of their hidden layers, as for ``fusedlayers.mlp`` ("auto", "input" or "recompute").

    Returns:
        a report: what was replaced, what was skipped and why, and with example inputs the bytes saved for backward.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: an unknown ``save``; a lazy module that has not been called.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))
    >>> print(fl.fuse(model, torch.randn(64, 8)))
    Sequential: 1 place fused
    <BLANKLINE>
       pattern       modules  for the backward pass it
    1  dense + gelu  0 + 1    saves the output (branch in its last bit)
    <BLANKLINE>
    saved for backward: 16.5 KiB before, 8.50 KiB now (-48.5 %)
    """
    _check_model(model)
    if save not in ("auto", "input", "recompute"):
        raise ValueError(f"fuse: save must be 'auto', 'input' or 'recompute', got {save!r}")
    if example_inputs is None:
        with unchanged([*model.modules()], ()):
            rewriting = Rewriting(model, Flow(trace(model)), save)
            with _undone_if_raised(rewriting):
                rewriting.layers()
                rewriting.activations()
            return rewriting.report()
    return fuse_on(model, *_arguments(example_inputs), save)


def fuse_on(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], save: str = "auto") -> FuseReport:
    """``fuse`` with ``model(*args, **kwargs)`` for the example."""
    _check_model(model)
    inputs = [*tensors_in((args, kwargs))]
    with unchanged([*model.modules()], inputs) as restore_random_state:

        def measured() -> int | None:
            restore_random_state()
            return _saved_bytes(model, args, kwargs)

        before = measured()
        restore_random_state()
        try:
            passes, unseen = [record(model, args, kwargs)], None
        except Exception as error:  # without gradients not all that runs with them does
            passes, unseen = [*trace(model)], f"{type(error).__name__}: {first_line(error)}"
        rewriting = Rewriting(model, Flow(passes), save)
        if unseen is not None:
            rewriting.note(f"it could not be followed with these inputs, as it is without any: {unseen}")
        with _undone_if_raised(rewriting):
            after = _tried(rewriting, measured)
            if before is not None and after is not None and after > before:
                rewriting.leave_all(f"fused, it would keep {size_text(after - before)} more for the backward pass")
                after = before
    is_known = before is not None and after is not None and (before or after)
    return replace(rewriting.report(), saved_bytes=(before, after) if is_known else None)  # type: ignore[arg-type]


def _tried(rewriting: Rewriting, measured: Callable[[], int | None]) -> int | None:
    """Fuse what then works; return what a pass keeps."""
    rewriting.layers()
    after = _trial(rewriting, measured)
    alone = rewriting.activations()
    if not alone:
        return after
    with_them = _trial(rewriting, measured)
    # As much is as good: a checkpoint, of which nothing shows here, may spare it when it computes again.
    if after is None or with_them is None or with_them <= after:
        return with_them
    for activation in alone:
        rewriting.leave(activation, "its input is kept anyway")
    return after


def _trial(rewriting: Rewriting, measured: Callable[[], int | None]) -> int | None:
    """Run the fused model; what does not run is put back."""
    while True:
        try:
            with strict():
                return measured()
        except Lost as lost:
            if not rewriting.has_changed(lost.layer):
                return measured()  # one that was fused before
            rewriting.leave(lost.layer, "what it computes reaches its activation in a way that torch does not show")
        except Exception as error:  # whatever a model's code does with what it is not used to
            if not rewriting.is_done:
                raise
            rewriting.leave_all(f"fused, it raised {type(error).__name__}: {first_line(error)}")


@contextmanager
def _undone_if_raised(rewriting: Rewriting) -> Iterator[None]:
    try:
        yield
    except BaseException:
        rewriting.undo()
        raise


def unfuse(model: nn.Module) -> None:
    """Put back what ``fuse`` has changed: every module is again what it was, parameters and all.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: modules have been given other classes since (by ``fully_shard``, a parametrization); nothing is
            changed then.
    """
    _check_module("unfuse", model)
    modules: Any = model.named_modules()
    changed = {name: module for name, module in modules if isinstance(module, Mixin)}
    others = [name or "the model" for name, module in changed.items() if not is_changed(module)]
    if others:
        raise ValueError(
            f"unfuse: {', '.join(others)}: the class has been changed once more after fuse, by a parametrization or "
            "fully_shard; undo that first"
        )
    for module in changed.values():
        change_back(module)  # type: ignore[arg-type]  # a module with a mixin


def _check_model(model: nn.Module) -> None:
    _check_module("fuse", model)
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"fuse: {lazy[0]} has no shape yet; call the model once, and then fuse")


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be an nn.Module, got {type(model).__name__}: {model!r}")


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)), {}


def _saved_bytes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """None where there is not enough memory, for who fuses a model may have too little; and of shapes without data,
    with which fused layers compute what plain ones do."""
    try:
        kept = saved_bytes(lambda: model(*args, **kwargs), exclude=[*model.buffers(), args, kwargs])
    except torch.OutOfMemoryError:
        return None
    return kept if all(map(has_data, tensors_in((model, args, kwargs)))) else None
