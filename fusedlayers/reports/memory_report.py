"""``memory_report``: where the memory of a model's training step goes.

The step runs twice: once for all that is made on first use, and once in a profile, between whose forward and backward
pass the graph is read. The profile has allocations, operators, and the nodes of the backward pass
with the numbers that autograd gave them: they say what the peak is, and what ran then.
"""

from __future__ import annotations

import base64
import io
import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._torch import FORWARD_CLASS, storage_id, tree_leaves
from ..activations import Activation
from ..memory import device_of, peak_of, profile_events
from ..utils.autograd_graph import checkpoints_of, hides_what_it_saves, nodes_of, saved_by
from ..utils.example import arguments_from, check_instance
from ..utils.formatting import counted_lines, path_text, pattern_of, shortened, size_text, unit_for
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.module_tracker import ModuleTracker
from ..utils.report import Report
from ..utils.step import Step, tensors_of
from ..utils.storages import sizes_of, strided_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How many lines a table has at most, before the rest is summed up; and a picture bars.
LINES, BARS = 16, 12
#: The profiler's scope of nodes of a backward pass (``at::RecordScope``).
BACKWARD = 1
#: Events inside of the operator that a reader knows.
_INNER = ("aten::empty", "aten::resize", "autograd::")


@dataclass(frozen=True)
class MemoryReport(Report):
    """The report of ``memory_report``. ``str()`` is a table, ``plot(path)`` a picture. A notebook shows both; without
    matplotlib, the table.

    Attributes:
        name: of the model's class, or of the function.
        device: where it was measured.
        rows: every saved storage once, the largest first. What existed before the call, such as inputs, parameters and
            buffers, is not among them.
        peak_bytes: the most that the device's allocator has handed out at once in a forward and a backward pass.
        moment: when that was.
        unlisted: paths of the modules whose nodes do not show what they save, so that the rows lack it: TorchScript's,
            other C++ extensions', and those of writes over views in place.
    """

    name: str
    device: str
    rows: tuple[Row, ...]
    peak_bytes: int
    moment: str
    unlisted: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """The sum of the rows."""
        return sum(row.bytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return super().to_dict() | {"saved_bytes": self.saved_bytes}

    def figure(self) -> Figure:
        """A bar for each of the largest lines of the table, as a matplotlib figure that belongs to no window.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing is saved.
        """
        if not self.saved_bytes:
            raise ValueError(f"memory_report: {self.name} saves nothing for backward, so that there is nothing to draw")
        try:
            from matplotlib.figure import Figure  # not pyplot, which would choose a window system
        except ModuleNotFoundError as error:
            raise ImportError(
                "memory_report: a plot needs matplotlib, which is not installed: pip install 'fusedlayers[demo]'"
            ) from error
        entries = entries_of(self.rows, self.name)[:BARS]
        saved = f"{size_text(self.saved_bytes)} saved for backward, by module and operation"
        figure = Figure((9, 1 + 0.25 * len(entries)), dpi=150, facecolor="white", layout="constrained")
        figure.suptitle(f"{self.name} on {self.device}: {saved}\n{self._peak()}", x=0.01, ha="left", fontsize=10)
        axes = figure.subplots()
        bars = axes.barh(range(len(entries)), [entry.bytes for entry in entries], color="#2166ac")
        axes.bar_label(bars, [size_text(entry.bytes) for entry in entries], padding=3, fontsize=8)
        labels = [shortened(f"{entry.modules}: {entry.operation}", 60) for entry in entries]
        axes.set_yticks(range(len(entries)), labels, fontsize=8)
        axes.set_xticks([])  # each bar states its value
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        return figure

    def plot(self, path: str | PathLike[str]) -> None:
        """Write ``figure()`` into a file, whose suffix says the format. Raises what ``figure`` raises."""
        self.figure().savefig(path)

    def _repr_html_(self) -> str:
        table, image = super()._repr_html_(), io.BytesIO()
        try:
            self.figure().savefig(image, format="png")
        except (ImportError, ValueError):
            return table
        source = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
        return f'{table}<img src="{source}" style="max-width: 100%; width: 900px">'

    def _peak(self) -> str:
        share = 100 * self.saved_bytes / max(self.peak_bytes, 1)  # what backward had freed by then counts too
        return f"Peak: {size_text(self.peak_bytes)}, of which these are at most {share:.0f} %\nin the {self.moment}"

    def __str__(self) -> str:
        entries, saved = entries_of(self.rows, self.name), self.saved_bytes
        unit, scale = unit_for(saved)

        def line(size: int, *texts: str) -> tuple[str, ...]:
            return f"{size / scale:.2f}", f"{100 * size / max(saved, 1):.1f}", *texts

        rows: list[tuple[str, ...]] = [(f"{unit:>9}", f"{'%':>6}", "module", "saved by", "tensors")]
        rows += [line(entry.bytes, entry.modules, entry.operation, entry.tensors) for entry in entries[:LINES]]
        if others := entries[LINES:]:
            rows.append(line(sum(entry.bytes for entry in others), f"{len(others)} more", "", ""))
        rows.append(line(saved, "saved for backward", "", ""))
        notes = []
        if any("+" in entry.operation for entry in entries[:LINES]):
            notes.append("+n: n more operations save the same memory")
        if self.unlisted:
            savers = f"TorchScript, C++ extensions or writes over views in place: {path_text(self.unlisted)}"
            notes.append(f"not listed (fusedlayers.memory.saved_bytes counts it): what is saved by {savers}")
        head = [f"{self.name} on {self.device}", ""]
        return "\n".join([*head, *counted_lines(rows, numbers=2), *(f"{'':<19}{n}" for n in notes), "", self._peak()])


def memory_report(
    model: Callable[..., Any], inputs: Any = (), /, *more: Any, loss: Callable[[Any], Tensor] | None = None
) -> MemoryReport:
    """Say where the memory of a model's forward and backward pass goes.

    Every tensor that is made and saved for backward is listed, storages once, by module and operation. The peak is
    measured, with what ran then, and compared with the sum of the list. What TorchScript, C++ extensions and writes
    over views in place save is not listed; the report names the modules.

    Saved bytes grow by the same number with each sample of a batch. Where a large batch does not fit, the reports of
    two small ones say its bytes: ``small + (batch - 2) * (double - small) / 2``, of batches of 2 and 4.

    The step runs twice. The model is left as it was, with its gradients, buffers (statistics of batch norms), mode,
    hooks and parameters, and so are the states of the random number generators; hooks of yours run. (Of tensors that
    are neither arguments, nor parameters or other attributes of modules, and that only the function of a reentrant
    checkpoint reads, gradients stay behind.)

    On a CPU some operators allocate a buffer for each thread, so that the peak depends on ``torch.get_num_threads()``.
    Not seen is memory that libraries take from the system behind torch's back. What saved-tensor hooks made is listed
    if it lies in tuples, lists and dicts. Compiled code is one operation, of the innermost module that is not compiled.

    Args:
        model: a module, or any function of tensors. Functions are asked for the modules that they name.
        inputs: as for ``fuse``: a tensor, a tuple of positional arguments, or a mapping of keywords. The device is CUDA
            if a tensor of the model or of these is there, else the CPU.
        loss: of the model's result, a scalar. By default the sum of the means of all floating-point tensors in the
            result that require grad.

    Raises:
        TypeError: ``model`` cannot be called; several inputs that are no tuple.
        ValueError: inputs that the model does not run on; nothing in the result, or not the loss, requires grad;
            tensors on other devices.

    >>> import torch, fusedlayers as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> fl.memory_report(model, torch.randn(64, 8)).saved_bytes  # gelu's input and its output
    16384
    """
    check_instance("memory_report", model)
    if not callable(model):
        raise TypeError(
            f"memory_report: model must be a module or a function, got {type(model).__name__}; "
            "pass the model itself, then its inputs"
        )
    if more:
        raise TypeError("memory_report: inputs must be one tuple or dict: memory_report(model, (x, y))")
    step = Step(model, *arguments_from(inputs), loss)
    step.check_loss()
    tracker = ModuleTracker(model)
    inputs = [*tensors_of((step.args, step.kwargs))]
    device = _device([*inputs, *tracker.tensors()])
    with unchanged(tracker.modules, inputs) as reset_random:
        with step.readable():
            loss_value = step.forward()
        leaves = step.trained(loss_value, tracker.modules)
        saved = [weakref.ref(saver.tensor.untyped_storage()) for saver in savers_of(nodes_of([loss_value]), device)]
        with isolated_gradients(leaves):
            loss_value.backward()
        del loss_value
        reset_random()
        torch.clear_autocast_cache()  # its copies of weights would be freed, and not allocated, in the profile
        with isolated_gradients(leaves):
            return _measured(step, tracker, device, [*inputs, *leaves], saved)


def _measured(
    step: Step,
    tracker: ModuleTracker,
    device: torch.device,
    existing: Sequence[Tensor],
    saved_before: Sequence[weakref.ref[torch.UntypedStorage]],
) -> MemoryReport:
    """The report of a step. ``saved_before``: the storages that an earlier step has saved. Those that are still there
    when this one saves them were there before both."""
    rows: list[Row] = []
    hidden: set[str] = set()

    def read(nodes: Sequence[Any]) -> None:
        storages = [storage for ref in saved_before if (storage := ref()) is not None]
        addresses = {*sizes_of([*existing, *tracker.tensors()]), *map(storage_id, storages)}
        rows.extend(rows_of(savers_of(nodes, device), tracker, addresses))
        hidden.update(tracker.module_of(node) for node in nodes if hides_what_it_saves(node))

    def run() -> None:
        with tracker.tracking():
            loss = step.forward()
            read(nodes_of([loss]))  # no variable of this function may hold what the backward pass is to free
            loss.backward()

    peak_bytes, moment = _peak_in(profile_events(run), device, tracker)
    rows.sort(key=lambda row: -row.bytes)
    return MemoryReport(tracker.name, str(device), tuple(rows), peak_bytes, moment, tuple(sorted(hidden)))


def _peak_in(events: Sequence[Any], device: torch.device, tracker: ModuleTracker) -> tuple[int, str]:
    """The most that was allocated at once, and when: the pass, and the operator, for which node or module."""
    most, time = peak_of(events, device)
    begun = [event for event in events if event.name() != "[memory]" and event.start_ns() <= time]
    running = [event for event in begun if event.end_ns() >= time]
    operator = next((e.name() for e in reversed(running) if not e.name().startswith(_INNER)), "")
    # Each thread numbers its own nodes: those that a reentrant checkpoint makes in a GPU's backward thread are apart.
    nodes = [event for event in begun if event.scope() == BACKWARD]
    nodes = [event for event in nodes if event.fwd_thread_id() == nodes[0].fwd_thread_id()]
    if nodes:
        # The last one: the engine sums gradients and frees what a node has saved after the node's own event.
        number = nodes[-1].sequence_nr()  # of a leaf's it is negative
        place = nodes[-1].name() + (f" of {tracker.module_at(number)}" if number >= 0 else "")
        return most, f"backward pass, {' in '.join(dict.fromkeys(filter(None, (operator, place))))}"
    numbers = [event.sequence_nr() for event in running if event.sequence_nr() >= 0]
    made = numbers[0] if numbers else 1 + max((event.sequence_nr() for event in begun), default=-1)
    return most, f"forward pass, {operator} in {tracker.module_at(made)}"


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """The device to measure."""
    device = device_of(tensors)
    others = {tensor.device.type for tensor in tensors} - {"cpu", "cuda"}
    if others and device.type == "cpu":
        raise ValueError(
            f"memory_report: got tensors on {' and '.join(sorted(others))}, but can measure only on cpu and cuda; move "
            "the model and its inputs there, with a small batch: saved bytes grow by the same number with each sample"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


# --- the tensors that a graph saves -----------------------------------------------------------------------------------

#: The dtypes of scalars in which autograd saves Python's numbers. These are not listed.
NUMBERS = (torch.float64, torch.int64, torch.complex128, torch.bool)


@dataclass(frozen=True)
class Row:
    """A storage that is saved for the backward pass, and that the forward pass has made.

    Attributes:
        module: path of the innermost module that was running when it was first saved; for a checkpoint, of the
            innermost one that was running throughout. Empty for the model itself.
        operation: what saved it first: a node of autograd, such as GeluBackward0, or an operation of this library.
        shape, dtype: of the tensor that was saved first; others can be views of the same storage.
        bytes: of the whole storage, which a view keeps alive.
        shared_with: the other (module, operation) pairs that saved it.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    shared_with: tuple[tuple[str, str], ...]


class Saver(NamedTuple):
    """The nodes that save a tensor: one, or those of a checkpoint."""

    nodes: Sequence[Any]
    operation: str
    tensor: Tensor


def savers_of(nodes: Sequence[Any], device: torch.device) -> Iterator[Saver]:
    """The savers of all tensors on a device, in the order of the nodes; of tensors that wrap others, for each of
    these."""
    saved = (([node], operation_of(node), saved_by(node)) for node in nodes)
    recomputed = ((own, "checkpoint", tensors) for own, tensors in checkpoints_of(nodes))
    for own, operation, tensors in chain(saved, recomputed):
        for tensor in tensors:
            for part in strided_parts(tensor):
                is_number = part.dim() == 0 and part.dtype in NUMBERS
                if part.device == device and part.untyped_storage().nbytes() and not is_number:
                    yield Saver(own, operation, part)


def rows_of(savers: Iterable[Saver], tracker: ModuleTracker, existing: Container[int]) -> Iterator[Row]:
    """A row for each storage whose address is not among the ``existing``."""
    by_storage: dict[int, list[Saver]] = {}
    for saver in savers:
        if (address := storage_id(saver.tensor.untyped_storage())) not in existing:
            by_storage.setdefault(address, []).append(saver)
    for own in by_storage.values():
        (module, operation), *others = dict.fromkeys((tracker.module_of(*s.nodes), s.operation) for s in own)
        first = own[0].tensor
        dtype, size = str(first.dtype).removeprefix("torch."), first.untyped_storage().nbytes()
        yield Row(module, operation, tuple(first.shape), dtype, size, tuple(others))


def operation_of(node: Any) -> str:
    """The name of a node, such as GeluBackward0; of this library's nodes the Function's name and the activation."""
    function = getattr(type(node), FORWARD_CLASS, None)
    if function is None or not function.__module__.startswith("fusedlayers."):
        return str(node.name())
    found = [leaf for leaf in tree_leaves(vars(node)) if isinstance(leaf, Activation)]
    return f"fusedlayers.{function.__name__}" + (f"({found[0]!r})" if found else "")


class Entry(NamedTuple):
    """A line of a table: the storages of one shape that one operation saves in the same modules of repeated blocks."""

    modules: str
    operation: str
    tensors: str
    bytes: int


def entries_of(rows: Iterable[Row], model: str) -> list[Entry]:
    """The entries, the most bytes first. The model itself is called ``model``."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        operation = row.operation + (f" +{len(row.shared_with)}" if row.shared_with else "")
        alike.setdefault((pattern_of(row.module), operation, _tensor_text(row)), []).append(row)
    entries = []
    for (_, operation, tensor), own in alike.items():
        modules = path_text(dict.fromkeys(row.module for row in own), model)
        tensors = f"{len(own)} of {tensor}" if len(own) > 1 else tensor
        entries.append(Entry(modules, operation, tensors, sum(row.bytes for row in own)))
    return sorted(entries, key=lambda entry: -entry.bytes)


def _tensor_text(row: Row) -> str:
    is_part = row.bytes > math.prod(row.shape) * getattr(torch, row.dtype).itemsize
    return f"{' x '.join(map(str, row.shape)) or 'scalar'} {row.dtype}{', a view' if is_part else ''}"
