"""``memory_report``: where the memory of a model's training step goes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..memory import bytes_not_shown, device_of, peak_bytes
from ..utils.autograd_graph import hides_what_it_saves, is_leaf, leaves_of, nodes_of
from ..utils.example import arguments_from
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.refusals import check_instance, takes
from ..utils.storages import tensors_in
from .allocation_tracker import LEAVES, PARAMETERS, SAVED, AllocationTracker, Peak
from .memory_results import MemoryReport
from .module_tracker import ModuleTracker
from .saved_rows import Row, operation_of, preexisting_kinds, row_of, savers_of
from .step import Step, tensors_of


def memory_report(
    model: Callable[..., Any], /, *args: Any, loss: Callable[[Any], Tensor] | None = None, **kwargs: Any
) -> MemoryReport:
    """Say where the memory of ``model(*args, **kwargs)`` and its backward pass goes.

    Every tensor that is saved for backward is listed, storages once, by module and operation; the peak is measured, and
    explained by what is alive then. The step runs three times: once for everything that is made on first use, once
    followed tensor by tensor, once measured. What TorchScript, C++ extensions and writes over views in place save is
    not listed, but its bytes are counted, in one more forward pass.

    The model is left as it was, with its gradients, buffers (statistics of batch norms), mode, hooks and parameters,
    and so are the states of the random number generators; hooks of yours run. (Of tensors that are neither arguments,
    nor parameters or other attributes of modules, and that only the function of a reentrant checkpoint reads, gradients
    stay behind.)

    On a CPU some operators allocate a buffer for each thread, so that the peak depends on ``torch.get_num_threads()``.
    Not seen is memory that libraries take from the system behind torch's back. What saved-tensor hooks made is listed
    if it lies in tuples, lists and dicts. Compiled code is one operation, and its forward pass enters the estimate by
    what it saved alone.

    Args:
        model: a module, or any function of tensors. Functions are asked for the modules that they name.
        args, kwargs: its arguments. One tuple or mapping stands for them, as in ``fuse``, if the signature takes what
            is in it; else it is passed as it is, as a batch that is a mapping. The device is CUDA if a tensor of the
            model or of these is there, else the CPU.
        loss: of the model's result, a scalar. By default the sum of the means of all floating-point tensors in the
            result that require grad.

    Raises:
        TypeError: ``model`` cannot be called, or no inputs are given that it needs.
        ValueError: nothing in the result, or not the loss, requires grad.
        Exception: what the model raises; with a note where the arguments are no tensors.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> fl.memory_report(model, torch.randn(64, 8)).saved_bytes  # gelu's input and its output
    16384
    """
    try:
        return report_of(Step(model, args, kwargs, loss))
    except TypeError as error:
        if not (args or kwargs) and not takes(model):
            raise TypeError(
                "memory_report: no inputs were given; pass them behind the model: memory_report(model, x)"
            ) from error
        raise


def report_of(step: Step) -> MemoryReport:
    """``memory_report`` of this training step."""
    check_instance("memory_report", step.model)
    if not callable(step.model):
        raise TypeError(
            f"memory_report: model must be a module or a function, got {type(step.model).__name__}; "
            "pass the model itself, then its arguments"
        )
    step.check_loss()
    step = _given(step)
    tracker = ModuleTracker(step.model)
    inputs = list(tensors_of((step.args, step.kwargs)))
    device = _device([*tensors_in(tracker.modules), *inputs])
    with unchanged(tracker.modules, inputs) as restore_random_state:
        loss = step.forward()
        nodes = nodes_of([loss])
        compiled = any(str(node.name()).startswith("CompiledFunction") for node in nodes)
        leaves = leaves_of(nodes)
        touched = step.trained(loss, tracker.modules)
        with isolated_gradients(touched):
            loss.backward()
        del loss, nodes

        restore_random_state()
        torch.clear_autocast_cache()  # or its copies of weights, which each step makes, would count as there before
        with isolated_gradients(touched):
            rows, hidden, peak = _follow(step, tracker, device, inputs, leaves, compiled)

        unlisted_bytes: int | None = 0
        if hidden:
            restore_random_state()
            buffers = [buffer for module in tracker.modules for buffer in module.buffers(recurse=False)]
            kept = [vars(module) for module in tracker.modules]
            unlisted_bytes = bytes_not_shown(step.forward, kept, exclude=[buffers, inputs])

        restore_random_state()
        torch.clear_autocast_cache()
        with isolated_gradients(touched):
            measured = peak_bytes(step.run, device=device)
    name = tracker.class_names[""]
    unlisted = () if unlisted_bytes == 0 else hidden
    return MemoryReport(
        name, str(device), rows, measured, peak.bytes, peak.parts, peak.moment, unlisted, unlisted_bytes
    )


def _given(step: Step) -> Step:
    """The step, of which one tuple or mapping stands for the arguments where the model's signature takes these."""
    if step.kwargs or len(step.args) != 1 or not isinstance(step.args[0], Mapping | tuple | list):
        return step
    args, kwargs = arguments_from(step.args[0])
    return dataclasses.replace(step, args=args, kwargs=kwargs) if takes(step.model, *args, **kwargs) else step


def _device(tensors: list[Tensor]) -> torch.device:
    """The device to measure."""
    device = device_of(tensors)
    others = {tensor.device.type for tensor in tensors} - {"cpu", "cuda"}
    if others and device.type == "cpu":
        raise ValueError(
            f"memory_report: got tensors on {' and '.join(sorted(others))}, but can measure only on cpu and cuda; move "
            "the model and its inputs there"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _follow(
    step: Step, tracker: ModuleTracker, device: torch.device, inputs: list[Tensor], leaves: list[Tensor], compiled: bool
) -> tuple[tuple[Row, ...], tuple[str, ...], Peak]:
    """The rows of one step, the modules whose nodes hide theirs, and the peak as estimated from storages' lifetimes."""
    allocations = AllocationTracker(device, lambda: tracker.current, tracker.class_names[""])
    rows: list[Row] = []
    hidden: set[str] = set()

    def run() -> None:
        with tracker.tracking():
            with nullcontext() if compiled else allocations:
                loss = step.forward()
            # In functions of their own: no local variable may hold what the backward pass is to free.
            hidden.update(_hidden(nodes_of([loss]), tracker))
            rows.extend(
                _rows(nodes_of([loss]), tracker, allocations, preexisting_kinds(tracker, inputs, leaves), compiled)
            )
            allocations.phase = "backward"
            with _following_nodes(allocations, nodes_of([loss]), tracker), allocations:
                loss.backward()
        for kind, of_parameters in ((PARAMETERS, True), (LEAVES, False)):
            of_kind = (leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter) == of_parameters)
            allocations.set_kind(kind, (leaf.grad for leaf in of_kind if leaf.grad is not None))

    allocations.scratch.during(run)
    return tuple(sorted(rows, key=lambda row: -row.bytes)), tuple(sorted(hidden)), allocations.peak()


def _hidden(nodes: Sequence[Any], tracker: ModuleTracker) -> set[str]:
    """The modules of nodes that may save what they do not show."""
    return {tracker.module_of(node) for node in nodes if hides_what_it_saves(node)}


def _rows(
    nodes: list[Any], tracker: ModuleTracker, allocations: AllocationTracker, before: Mapping[int, str], compiled: bool
) -> list[Row]:
    """A row for each storage that the nodes save; the tracker of allocations marks it as saved."""
    savers = savers_of(nodes, allocations.device, tracker)
    if compiled:
        gradients = [leaf.grad for leaf in leaves_of(nodes) if leaf.grad is not None]
        allocations.set_preexisting([*before, *preexisting_kinds(tracker, (), gradients)])
        allocations.record("compiled code", [own[0].tensor for key, own in savers.items() if key not in before])
    allocations.set_kind(SAVED, (own[0].tensor for own in savers.values()))
    kinds = {
        key: "activation" if allocations.allocated(own[0].tensor.untyped_storage()) else before.get(key, "constant")
        for key, own in savers.items()
    }
    return [row_of(own, kinds[key], tracker) for key, own in savers.items()]


@contextmanager
def _following_nodes(allocations: AllocationTracker, nodes: Sequence[Any], tracker: ModuleTracker) -> Iterator[None]:
    """Tell the tracker of allocations which node of the backward pass is running, and for which module."""
    handles = []
    for node in nodes:
        name = operation_of(node)
        if not is_leaf(node):
            name += f" of {tracker.module_of(node) or tracker.class_names['']}"
        handles.append(node.register_prehook(functools.partial(allocations.enter_node, name)))
    del node, nodes
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
