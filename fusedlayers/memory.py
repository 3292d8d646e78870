"""The bytes that a computation saves for its backward pass, and those that it needs at its peak.

``saved_bytes`` uses saved-tensor hooks: every tensor that a node saves passes through them, and its storage counts
until the node releases it. ``peak_bytes`` uses the allocators' events, because only these include operators' own
temporaries and the buffers of compiled code. Neither changes a result.

Not counted: memory that a library takes from the system without torch's allocator (oneDNN's scratch space), what other
Python threads allocate on the CPU, and saved tensors of a compressed sparse or opaque layout.
"""

import gc
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._torch import backward_pass, dynamo_is_loaded, own_hook, storage_id
from .ops.saved_buffers import unedited
from .utils.autograd_graph import attributes_of, checkpoints_of, leaves_of, nodes_of
from .utils.storages import sizes_of, strided_parts, tensors_in

__all__ = ["peak_bytes", "saved_bytes"]


def saved_bytes(function: Callable[..., Any], *args: Any, exclude: Any = ()) -> int:
    """Return the bytes of the activations that ``function(*args)`` saves for the backward pass.

    Each storage counts once, in full, however many views of it are saved: a view keeps all of it alive. Of a storage
    that came in with an argument only the argument's own extent counts, so that a slice of a large data set does not
    count as the data set. Left out are parameters (every ``nn.Parameter`` and every leaf that requires grad, their
    views included) and the storages of the tensors in ``exclude``.

    What counts is what the graph holds when the call returns, or when a backward pass in it begins: a node may have
    been abandoned for a later one, and freed with what it saved. Where the call builds several graphs one after the
    other (a training loop), the result is the largest of these numbers. Compiled functions can be measured; compile
    them by one call beforehand, or the copies made while compiling may count.

    Args:
        function: any callable of tensors; the graph is found through the tensors it returns.
        args: its arguments, passed on as they are.
        exclude: what does not count: a tensor, a module, or any nesting of lists, tuples and dicts of them; also an
            iterator such as ``model.buffers()``.

    Example:
        >>> import torch, fusedlayers.memory
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> fusedlayers.memory.saved_bytes(lambda x: (2 * x).relu(), x)  # relu keeps its output: 4 * 8 * 4 bytes
        128
    """
    # Held in a list until the end: an address identifies a storage only while that storage is alive.
    excluded = list(tensors_in(list(exclude) if isinstance(exclude, Iterator | Set) else exclude))
    given = list(tensors_in((function, args)))
    ledger = _Ledger(given, excluded)
    pack = own_hook(None, _not_compiled(ledger.pack))
    with torch.autograd.graph.saved_tensors_hooks(pack, _not_compiled(ledger.unpack)):
        return ledger.total_bytes(function(*args))


def _not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Where a compiled function breaks its graph, the compiler would trace the hooks that run between the parts."""
    return torch.compiler.disable(hook) if dynamo_is_loaded() else hook


def peak_bytes(function: Callable[..., Any], *args: Any, device: torch.device | str | None = None) -> int:
    """Return the largest number of bytes that ``function(*args)`` has allocated at once, over what was live before.

    Usually ``function`` runs a forward and a backward pass. What it allocates and still holds when it returns counts,
    what existed before does not. Call it once before measuring, so that compilation and the libraries' lazily made
    workspaces are not part of the figure. Python's garbage collector waits until it returns.

    Args:
        function: any callable.
        args: its arguments, passed on as they are.
        device: where to measure. By default the device of the first CUDA tensor among the arguments, the CPU if they
            hold tensors but none on CUDA, and without any tensor CUDA once it has been used in this process.
    """
    where = device_of((function, args)) if device is None else torch.device(device)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        with _garbage_stays():
            function(*args)
        return torch.cuda.max_memory_allocated(where) - before
    if where.type == "cpu":
        # The profiler's allocation events, not torch.distributed._tools.mem_tracker.MemTracker: both report the same
        # eager peaks (a Linear-GELU-Linear step: 3.4375 hidden buffers). But under a dispatch mode torch.compile
        # silently falls back to eager (3.4375, where the compiled step takes 2.4375), and operators' scratch memory is
        # not seen; and MemTracker counts views of untracked tensors as new memory and refuses a second root call.
        return peak_of(profile_events(function, *args), torch.device("cpu"))[0]
    raise ValueError(f"peak_bytes: got device {str(where)!r}, but can measure only 'cpu' and 'cuda'; pass one of them.")


class _Ledger:
    """The tensors that graphs have saved, and the most bytes that these held where a backward pass began."""

    def __init__(self, given: Sequence[Tensor], excluded: Sequence[Tensor]) -> None:
        self._saved: list[weakref.ref[_Saved]] = []
        self._pass, self._most_bytes = -1, 0
        self._left_out = set(sizes_of([*excluded, *filter(_is_parameter, given)]))
        #: A storage that came in with arguments counts for no more than their own extents.
        self._limits: dict[int, int] = defaultdict(int)
        for part in (part for tensor in given for part in strided_parts(tensor)):
            extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            self._limits[storage_id(part.untyped_storage())] += extent * part.element_size() if part.numel() else 0

    def pack(self, tensor: Tensor) -> "_Saved":
        saved = _Saved(tensor)
        if not _is_of_parameter(tensor):
            self._saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: "_Saved") -> Tensor:
        if (current := backward_pass()) not in (-1, self._pass):
            self._pass = current
            self._most_bytes = max(self._most_bytes, self._bytes())
        return unedited((saved.tensor, saved.version))

    def total_bytes(self, result: Any) -> int:
        """Return the largest number, corrected by what only the finished graph of ``result`` shows: leaves, and what
        each node holds past hooks: attributes of contexts, and what checkpoints recompute from."""
        nodes = nodes_of(tensors_in(result))
        # Compiled code saves detached views, whose base is not known to be a parameter.
        self._left_out |= sizes_of(leaves_of(nodes)).keys()
        held = [tensor for node in nodes for tensor in attributes_of(node)]
        held += [tensor for _, tensors in checkpoints_of(nodes) for tensor in tensors]
        return max(self._most_bytes, self._bytes([tensor for tensor in held if not _is_of_parameter(tensor)]))

    def _bytes(self, others: Sequence[Tensor] = ()) -> int:
        """The bytes of the storages that graphs, which free what they have saved, and other tensors hold now."""
        alive = [saved.tensor for ref in self._saved if (saved := ref()) is not None]
        sizes = sizes_of([*alive, *others])
        return sum(min(size, self._limits.get(key, size)) for key, size in sizes.items() if key not in self._left_out)


class _Saved:
    """The object that a graph holds in place of a saved tensor. It lives exactly as long as the node holds it."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a saved output would otherwise reference the node that holds it, a cycle and a leak.
        self.tensor = tensor.detach()
        self.version = tensor._version


def _is_parameter(tensor: Tensor) -> bool:
    if isinstance(tensor, torch.nn.Parameter):
        return True
    # A view that a Function's forward has made of an input that needs a gradient says that it is a leaf.
    base = tensor._base
    return tensor.is_leaf and tensor.requires_grad and (base is None or base.is_leaf)


def _is_of_parameter(tensor: Tensor) -> bool:
    # A weight is often saved as a view (`weight.t()`): whether it is a parameter is asked of the base.
    return _is_parameter(tensor) or (tensor._base is not None and _is_parameter(tensor._base))


def device_of(tree: Any) -> torch.device:
    devices = [tensor.device for tensor in tensors_in(tree)]
    for device in devices:
        if device.type == "cuda":
            return device
    return torch.device("cuda" if not devices and torch.cuda.is_initialized() else "cpu")


def profile_events(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` and return the profiler's events, in order of time: operators, nodes of a backward pass,
    and allocations on every device."""
    activities: Any = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with _garbage_stays(), _quiet_kineto(), profile as profiler:
        function(*args)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None
    return sorted(results.events(), key=lambda event: event.start_ns())


def peak_of(events: Iterable[Any], device: torch.device) -> tuple[int, int]:
    """The most bytes that were allocated on this device at once while a profile was made, and when, in nanoseconds."""
    live = most = time = 0
    allocations = (e for e in events if e.name() == "[memory]" and e.device_type().name == device.type.upper())
    for event in allocations:
        if device.index in (None, event.device_index()):
            live += event.nbytes()  # of a release it is negative
            if live > most:
                most, time = live, event.start_ns()
    return most, time


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """Collect no garbage: what it held before would be subtracted from what is allocated."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep torch 2.13's profiler from printing four lines on stderr for each measurement."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"  # read once, when the profiler starts for the first time; 6 is above its loudest level
    try:
        yield
    finally:
        del os.environ[name]
