"""``memory_report``: where the memory of a model's training step goes.

The step runs twice: once for all that is made on first use, and once in a profile (``peak.py``), between whose forward
and backward pass the graph is read (``saved_rows.py``).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..memory import device_of, profile_events
from ..utils.autograd_graph import hides_what_it_saves, is_leaf, nodes_of
from ..utils.example import arguments_from
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.refusals import check_instance, takes
from ..utils.storages import sizes_of
from .memory_results import MemoryReport
from .module_tracker import ModuleTracker
from .peak import peak_in
from .saved_rows import Row, rows_of, savers_of
from .step import Step, tensors_of

#: The parts of a peak.
SAVED = "saved for backward, still held"
GRADIENTS = "gradients of parameters and inputs, complete"
REST = "the rest: gradients of activations, outputs, temporaries, what checkpoints recompute"


def memory_report(
    model: Callable[..., Any], /, *args: Any, loss: Callable[[Any], Tensor] | None = None, **kwargs: Any
) -> MemoryReport:
    """Say where the memory of ``model(*args, **kwargs)`` and its backward pass goes.

    Every tensor that is made and saved for backward is listed, storages once, by module and operation. The peak is
    measured, with what ran then, and how much of it the listed tensors are. What TorchScript, C++ extensions and
    writes over views in place save is not listed; the report names the modules.

    The step runs twice. The model is left as it was, with its gradients, buffers (statistics of batch norms), mode,
    hooks and parameters, and so are the states of the random number generators; hooks of yours run. (Of tensors that
    are neither arguments, nor parameters or other attributes of modules, and that only the function of a reentrant
    checkpoint reads, gradients stay behind.)

    On a CPU some operators allocate a buffer for each thread, so that the peak depends on ``torch.get_num_threads()``.
    Not seen is memory that libraries take from the system behind torch's back. What saved-tensor hooks made is listed
    if it lies in tuples, lists and dicts. Compiled code is one operation, of the innermost module that is not compiled.

    Args:
        model: a module, or any function of tensors. Functions are asked for the modules that they name.
        args, kwargs: its arguments. One tuple or mapping stands for them, as in ``fuse``, if the signature takes what
            is in it; else it is passed as it is, as a batch that is a mapping. The device is CUDA if a tensor of the
            model or of these is there, else the CPU.
        loss: of the model's result, a scalar. By default the sum of the means of all floating-point tensors in the
            result that require grad.

    Raises:
        TypeError: ``model`` cannot be called, or no inputs are given that it needs.
        ValueError: nothing in the result, or not the loss, requires grad; tensors on other devices.
        Exception: what the model raises; with a note where the arguments are no tensors.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> fl.memory_report(model, torch.randn(64, 8)).saved_bytes  # gelu's input and its output
    16384
    """
    try:
        return _report_of(Step(model, args, kwargs, loss))
    except TypeError as error:
        if not (args or kwargs) and not takes(model):
            raise TypeError(
                "memory_report: no inputs were given; pass them behind the model: memory_report(model, x)"
            ) from error
        raise


def _report_of(step: Step) -> MemoryReport:
    check_instance("memory_report", step.model)
    if not callable(step.model):
        raise TypeError(
            f"memory_report: model must be a module or a function, got {type(step.model).__name__}; "
            "pass the model itself, then its arguments"
        )
    step.check_loss()
    step = _with_arguments(step)
    tracker = ModuleTracker(step.model)
    inputs = [*tensors_of((step.args, step.kwargs))]
    tensors = [*inputs, *tracker.tensors()]
    device = _device(tensors)
    with unchanged(tracker.modules, inputs) as restore_random_state:
        loss = step.forward()
        leaves = step.trained(loss, tracker.modules)
        saved = [weakref.ref(saver.tensor.untyped_storage()) for saver in savers_of(nodes_of([loss]), device)]
        with isolated_gradients(leaves):
            loss.backward()
        del loss

        restore_random_state()
        torch.clear_autocast_cache()  # or its copies of weights, which each step makes, would count as there before
        with isolated_gradients(leaves):
            return _measured(step, tracker, device, [*tensors, *leaves], leaves, saved)


def _measured(
    step: Step,
    tracker: ModuleTracker,
    device: torch.device,
    existing: Sequence[Tensor],
    leaves: Sequence[Tensor],
    saved_before: Sequence[weakref.ref[torch.UntypedStorage]],
) -> MemoryReport:
    """The report of a step. ``saved_before``: the storages that an earlier step has saved. Those that are still there
    when this one saves them were there before both."""
    found: list[tuple[Row, tuple[int, ...]]] = []
    hidden: set[str] = set()
    #: By the leaf that it belongs to, the numbers of the nodes that make a gradient.
    makers: dict[Tensor, list[int]] = {leaf: [] for leaf in leaves if leaf.grad is None}

    def read(nodes: Sequence[Any]) -> None:
        storages = [storage for ref in saved_before if (storage := ref()) is not None]
        addresses = {*sizes_of([*existing, *tracker.tensors()]), *(storage._cdata for storage in storages)}
        found.extend(rows_of(savers_of(nodes, device), tracker, addresses))
        hidden.update(tracker.module_of(node) for node in nodes if hides_what_it_saves(node))
        for node in nodes:
            for leaf in (following.variable for following, _ in node.next_functions if is_leaf(following)):
                if leaf in makers:
                    makers[leaf].append(node._sequence_nr())

    def run() -> None:
        with tracker.tracking():
            loss = step.forward()
            read(nodes_of([loss]))  # no variable of this function may hold what the backward pass is to free
            loss.backward()

    peak = peak_in(profile_events(run), device, lambda number: tracker.module_at(number) or tracker.name)
    saved = sum(row.bytes for row, nodes in found if peak.holds(nodes))
    made = (leaf.grad for leaf, nodes in makers.items() if not peak.finished.isdisjoint(nodes))
    gradients = sum(sizes_of(grad for grad in made if grad is not None).values())
    parts = {SAVED: saved, GRADIENTS: gradients, REST: peak.bytes - saved - gradients}
    rows = sorted((row for row, _ in found), key=lambda row: -row.bytes)
    return MemoryReport(tracker.name, str(device), tuple(rows), peak.bytes, parts, peak.moment, tuple(sorted(hidden)))


def _with_arguments(step: Step) -> Step:
    """The step, of which one tuple or mapping stands for the arguments where the model's signature takes these."""
    if step.kwargs or len(step.args) != 1 or not isinstance(step.args[0], Mapping | tuple | list):
        return step
    args, kwargs = arguments_from(step.args[0])
    return dataclasses.replace(step, args=args, kwargs=kwargs) if takes(step.model, *args, **kwargs) else step


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """The device to measure."""
    device = device_of(tensors)
    others = {tensor.device.type for tensor in tensors} - {"cpu", "cuda"}
    if others and device.type == "cpu":
        raise ValueError(
            f"memory_report: got tensors on {' and '.join(sorted(others))}, but can measure only on cpu and cuda; move "
            "the model and its inputs there"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
