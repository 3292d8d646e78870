"""How many bytes a computation saves for its backward pass, and how many it needs at its peak.

``saved_bytes`` uses saved-tensor hooks: every tensor that a node saves passes through them, and its storage counts
until the node releases it. ``peak_bytes`` uses the allocators' events, because only these include operators' own
temporaries and the buffers of compiled code. Neither changes a result.

Not counted: memory that a library takes from the system without torch's allocator (oneDNN's scratch space), what other
Python threads allocate on the CPU, and saved tensors of a compressed sparse or opaque layout.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch import backward_pass, dynamo_is_loaded, refuses_hooks
from .ops.edits import unedited
from .utils.autograd_graph import attributes_of, checkpoints_of, leaves_of, nodes_of, saved_by
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
    them by one call beforehand, or the copies made while compiling may count. A function that refuses saved-tensor
    hooks, as one that calls ``torch.func`` within does, is called again without. Then what counts is what the graph of
    its result shows, which lacks what TorchScript, C++ extensions and writes over views in place save.

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
    return count_saved(function, *args, exclude=exclude).bytes


class Count(NamedTuple):
    """What ``saved_bytes`` returns, and whether the function refused hooks, so that the graph alone was read."""

    bytes: int
    refused_hooks: bool


#: What to know of the bytes then.
OF_GRAPH = (
    "The model refuses saved-tensor hooks, as torch.func does. Its bytes are those that its graph shows, which lack "
    "what TorchScript, C++ extensions and writes over views in place save."
)


def count_saved(function: Callable[..., Any], *args: Any, exclude: Any = ()) -> Count:
    """``saved_bytes``, and how it was counted."""
    # Held in a list until the end: an address identifies a storage only while that storage is alive.
    excluded = list(tensors_in(list(exclude) if isinstance(exclude, Iterator | Set) else exclude))
    given = list(tensors_in((function, args)))
    ledger = _Ledger(given, excluded)
    try:
        with torch.autograd.graph.saved_tensors_hooks(*map(_not_compiled, (ledger.pack, ledger.unpack))):
            result = function(*args)
        return Count(ledger.total_bytes(result), refused_hooks=False)
    except RuntimeError as error:
        if not refuses_hooks(error):
            raise
    # Here, where no traceback holds what the first call has made.
    return Count(_Ledger(given, excluded).total_bytes(function(*args), saved_by), refused_hooks=True)


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
        return _cpu_peak_bytes(function, *args)
    raise ValueError(f"peak_bytes: got device {str(where)!r}, but can measure only 'cpu' and 'cuda'; pass one of them.")


class _Ledger:
    """The storages that graphs hold right now, and the most bytes they held where a backward pass read them."""

    def __init__(self, given: Iterable[Tensor], excluded: Iterable[Tensor]) -> None:
        self._holders: dict[int, int] = {}  # storage address -> how many saved tensors keep it alive
        self._bytes: dict[int, int] = {}  # the same keys -> what the storage counts for
        self._limits: dict[int, int] = {}
        self._left_out = set(sizes_of(excluded))
        self._live_bytes = 0
        self._most_bytes = 0
        for tensor in given:
            self._limit(tensor)

    def _limit(self, tensor: Tensor) -> None:
        """Count the storage of this argument for no more than the arguments' own extent."""
        if _is_parameter(tensor):
            self._left_out |= sizes_of([tensor]).keys()
        for part in strided_parts(tensor):
            extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            key = part.untyped_storage()._cdata
            self._limits[key] = self._limits.get(key, 0) + (extent * part.element_size() if part.numel() else 0)

    def pack(self, tensor: Tensor) -> "_Saved":
        keys = () if _is_of_parameter(tensor) else tuple(self._hold(part) for part in strided_parts(tensor))
        return _Saved(tensor, keys, self)

    def unpack(self, saved: "_Saved") -> Tensor:
        if backward_pass() != -1:
            self._note()
        return unedited((saved.tensor, saved.version))

    def release(self, saved: "_Saved") -> None:
        for key in saved.keys:
            self._holders[key] -= 1
            if self._holders[key] == 0:  # the address may be reused
                del self._holders[key]
                self._live_bytes -= self._bytes.pop(key)

    def total_bytes(self, result: Any, held_by: Callable[[Any], Iterable[Tensor]] = attributes_of) -> int:
        """Return the largest number, corrected by what only the finished graph of ``result`` shows: leaves, and what
        each node holds without hooks."""
        nodes = nodes_of(tensors_in(result))
        # Compiled code saves detached views, whose base is not known to be a parameter.
        leaf_keys = sizes_of(leaves_of(nodes)).keys()
        parameter_bytes = sum(self._bytes.get(key, 0) for key in leaf_keys)
        self._left_out |= leaf_keys
        for tensor in _past_hooks(nodes, held_by):
            if not _is_of_parameter(tensor):
                for part in strided_parts(tensor):
                    self._hold(part)
        self._note()
        return self._most_bytes - parameter_bytes

    def _note(self) -> None:
        self._most_bytes = max(self._most_bytes, self._live_bytes)

    def _hold(self, part: Tensor) -> int:
        storage = part.untyped_storage()
        key: int = storage._cdata
        self._holders[key] = self._holders.get(key, 0) + 1
        if key not in self._bytes:
            nbytes = 0 if key in self._left_out else storage.nbytes()
            self._bytes[key] = min(nbytes, self._limits.get(key, nbytes))
            self._live_bytes += self._bytes[key]
        return key


def _past_hooks(nodes: Sequence[Any], held_by: Callable[[Any], Iterable[Tensor]]) -> list[Tensor]:
    """What nodes hold that hooks do not get: attributes of contexts, and what checkpoints recompute from."""
    held = [tensor for node in nodes for tensor in held_by(node)]
    return held + [tensor for _, tensors in checkpoints_of(nodes) for tensor in tensors]


class _Saved:
    """What the graph holds in place of a saved tensor; it lives exactly as long as the node holds it."""

    __slots__ = ("keys", "ledger", "tensor", "version")

    def __init__(self, tensor: Tensor, keys: tuple[int, ...], ledger: _Ledger) -> None:
        # Detached: a saved output would otherwise reference the node that holds it, a cycle and a leak.
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.keys, self.ledger = keys, ledger

    def __del__(self) -> None:
        self.ledger.release(self)


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


def _cpu_peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    # The profiler's allocation events, not torch.distributed._tools.mem_tracker.MemTracker: both report the same eager
    # peaks (a Linear-GELU-Linear step: 3.4375 hidden buffers). But under a dispatch mode torch.compile silently falls
    # back to eager (3.4375, where the compiled step takes 2.4375), and operators' scratch memory is not seen; and
    # MemTracker counts views of untracked tensors as new memory and refuses a second root call.
    live = peak = 0
    for event in profile_events(function, *args):
        if is_allocation(event, torch.device("cpu")):
            live += event.nbytes()
            peak = max(peak, live)
    return peak


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


def is_allocation(event: Any, device: torch.device) -> bool:
    """Whether the event is an allocation on this device, or a release, of which ``event.nbytes()`` is negative."""
    return bool(
        event.name() == "[memory]"
        and event.device_type().name == device.type.upper()
        and device.index in (None, event.device_index())
    )


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
