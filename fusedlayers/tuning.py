"""``tune``: measure on this GPU which kernels are the fastest for a model, and keep that for all later runs."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .backends import gpu_settings
from .fusion.example import arguments_from, check_module
from .kernels import use_kernels
from .profiling.step import Step
from .utils.module_state import isolated_gradients, unchanged
from .utils.progress import OnStage, asked, silent
from .utils.reports import Report
from .utils.storages import tensors_in, trained_in


@dataclass(frozen=True)
class TuneReport(Report):
    """What ``tune`` has measured; ``str()`` is a line for each.

    Attributes:
        choices: by the matmul, in words, what is taken from now on and why.
        skipped: what could not be measured, and why.
        files: where it is written down.
    """

    choices: Mapping[str, str]
    skipped: Mapping[str, str]
    files: tuple[Path, ...]

    def __str__(self) -> str:
        lines = [f"{question}: {choice}" for question, choice in self.choices.items()]
        lines += [f"{question}: not measured, {reason}" for question, reason in self.skipped.items()]
        lines += [f"written to {path}" for path in self.files]
        return "\n".join(lines or ["There is nothing to choose: no matmul of this model may have an epilogue."])


def tune(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    progress: bool | OnStage = False,
) -> TuneReport:
    """Run a training step of ``model(inputs)``, and measure the candidates for each matmul with an activation in it.

    A candidate is taken if its results are the vendor's within rounding, and it takes at most 0.97 of its time. What is
    found is written to a file for this device and these versions of torch, Triton and this package, in the user's cache
    or where the environment variable ``FUSEDLAYERS_TUNED`` says. All processes that read the same file choose alike.
    The model, its gradients and the random numbers stay as they are.

    Args:
        model: on a GPU, with layers of this package in it.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keywords.
        loss: from the model's result to what is differentiated; by default the sum of the means of all
            tensors that require grad.
        progress: True shows how far it has come and the time left: a bar on stderr in a terminal (with ``rich``
            installed), elsewhere a line every 10 seconds. A function is told each stage, and which part of all is done.

    Returns:
        a report of what was chosen.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: there is no GPU, or no Triton; the kernels are switched off; there is nothing to differentiate.
        OSError: the file cannot be written.

    >>> import torch, fusedlayers as fl
    >>> fl.tune(torch.nn.Linear(2, 2), torch.ones(2))
    Traceback (most recent call last):
      ...
    ValueError: tune: the model is on cpu, expected a GPU; there is nothing to tune elsewhere
    """
    with asked("tune", progress) as on_stage:
        return tune_step(Step(model, *arguments_from(inputs), loss), on_stage)


def tune_step(step: Step, on_stage: OnStage) -> TuneReport:
    """``tune`` with this training step for the example."""
    step = replace(step, function="tune")
    model = step.model
    check_module("tune", model)
    assert isinstance(model, nn.Module)
    tensors = [*tensors_in((model, step.args, step.kwargs))]
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"} or {torch.device("cpu")}
    if not _have_kernels(devices):
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"tune: the model is on {found}, expected a GPU; there is nothing to tune elsewhere")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("tune: Triton is not installed; without it there are no kernels to tune")
    if gpu_settings.allowed() == "off":
        raise ValueError(f"tune: {gpu_settings.VARIABLE} or use_kernels has switched the kernels off; switch them on")
    from .backends.triton import dispatch, tuning

    leaves = trained_in(tensors)

    def run(ask: Callable[..., None]) -> None:
        with (
            use_kernels("rule"),
            unchanged([*model.modules()], tensors_in((step.args, step.kwargs))),
            isolated_gradients(leaves),
            dispatch.asking(ask),
        ):
            step.run()

    def say(question: dispatch.Question) -> None:
        on_stage(f"measuring {question}", min(1.0, next(numbers) / max(1, len(counted))))

    session = tuning.Session(say)
    for device in devices:
        tuning.check_target(device)
    counted: set[tuple[dispatch.Question, torch.device]] = set()
    numbers = itertools.count()
    if on_stage is not silent:  # it takes a run
        on_stage("counting matmuls", 0.0)
        run(lambda question, device, job: counted.add((question, device)))
    run(session.ask)
    files = session.save()
    answers = {question: choice for known in session.choices.values() for question, choice in known.items()}
    return TuneReport(
        {str(question): str(choice) for question, choice in answers.items()},
        {str(question): reason for question, reason in session.skipped.items()},
        tuple(files),
    )


def _have_kernels(devices: set[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)
