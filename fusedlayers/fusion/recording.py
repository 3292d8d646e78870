"""The calls of one forward pass, recorded while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .._torch import (
    DisableTorchFunction,
    TorchDispatchMode,
    disable_current_modes,
    loaded_dynamo,
    tree_leaves,
    tree_map,
)
from ..utils.storages import strided_parts, tensors_in
from .calls import Call, Value

#: Of the argument of what may be a block this much is kept, of the first two dimensions.
SAMPLE = (2, 64)


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call of the model. What it returns is let go of, and nothing is kept for a backward pass."""
    recorder = _Recorder(model)
    with torch.no_grad(), _uncompiled(), recorder.hooked(), recorder:
        result = model(*args, **kwargs)
    recorder.values.mark_kept()
    del result
    assert recorder.first is not None
    return recorder.first


def is_compiled(module: nn.Module) -> bool:
    dynamo = loaded_dynamo()
    is_wrapper = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_wrapper or module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)


def _uncompiled() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if loaded_dynamo() is not None else nullcontext()


class _Values:
    """The values that tensors are."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Value]] = {}
        self._in_storage: dict[StorageWeakRef, list[Value]] = {}

    def of(self, tensor: Tensor) -> Value:
        ref, version, value = self._known.get(id(tensor), (None, 0, None))
        if value is not None and ref is not None and ref() is tensor:
            if not self.is_outdated(tensor):
                return value
            value.is_kept = True
        value, version = Value(), 0 if tensor.is_inference() else tensor._version
        self._known[id(tensor)] = weakref.ref(tensor), version, value
        for part in strided_parts(tensor):
            self._in_storage.setdefault(StorageWeakRef(part.untyped_storage()), []).append(value)
        return value

    def is_outdated(self, tensor: Tensor) -> bool:
        """Whether it has been written to since it was passed on the last time."""
        ref, version, _ = self._known.get(id(tensor), (None, 0, None))
        return ref is not None and ref() is tensor and not tensor.is_inference() and tensor._version != version

    def mark_written(self, tree: Any) -> None:
        for part in (part for tensor in tensors_in(tree) for part in strided_parts(tensor)):
            for value in self._in_storage.get(StorageWeakRef(part.untyped_storage()), ()):
                value.is_written = True

    def mark_kept(self) -> None:
        """Those that are still there."""
        for ref, *_ in list(self._known.values()):
            tensor = ref()
            if tensor is not None:
                self.of(tensor).is_kept = True

    def in_(self, tree: Any) -> tuple[Value, ...]:
        with DisableTorchFunction():
            return tuple(dict.fromkeys(self.of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)))


class _Recorder(TorchFunctionMode):
    """Sees torch's functions, and by hooks the modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first: Call | None = None
        self._model = model
        self.values = _Values()
        self._running: list[Call] = []
        self._is_in_function = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if is_compiled(module):
                    continue
                before = self._enter_as(name)
                handles = (
                    module.register_forward_pre_hook(before, prepend=False, with_kwargs=True),
                    module.register_forward_hook(self._leave, prepend=True, with_kwargs=True, always_call=True),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(_Unseen(self))
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._begun(func, name_of(func), args, kwargs)
        self._is_in_function = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_in_function = False
        if type(result) is Tensor and self.values.is_outdated(result):
            # The function has written over what it returns. By another object it shows whether the code goes on with
            # what it gets, as in ``z = z.relu_()``, or with what it had, as after a statement ``z.relu_()``.
            result = _alias(result)
        call.gives = self.values.in_(result)
        return result

    def unseen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of ATen's: one that no function of torch's led to is noted itself."""
        call = None if self._is_in_function else self._begun(func, str(func), args, kwargs)
        stated = func._schema.arguments
        given = {**dict(zip((argument.name for argument in stated), args, strict=False)), **kwargs}
        for argument in stated:
            if argument.is_write:
                self.values.mark_written(given.get(argument.name))
        result = func(*args, **kwargs)
        if call is not None:
            call.gives = self.values.in_(result)
        return result

    def _begun(self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        within = self._running[-1] if self._running else None
        call = Call(target, name, within)
        with DisableTorchFunction():
            call.args, call.kwargs = (
                tree_map(lambda leaf: self.values.of(leaf) if isinstance(leaf, Tensor) else leaf, part)
                for part in (args, kwargs)
            )
            call.reads = self.values.in_((args, kwargs))
        if within is not None:
            within.calls.append(call)
        if call.reads and call.writes:  # be it only in another mode
            call.reads[0].is_written = True
        return call

    def _enter_as(self, path: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = self._begun(module, path, args, kwargs)
            if self.first is None:
                self.first = call
            if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and _may_be_block(module):
                call.sample = _begin_of(args[0])
            self._running.append(call)

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        while self._running:  # those that an exception has ended come off with it
            call = self._running.pop()
            if call.target is module:
                call.gives = self.values.in_(result)
                return


class _Unseen(TorchDispatchMode):
    """Sees ATen's operations, those too that are called from an autograd Function or from C++."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.unseen(func, args, kwargs or {})


def name_of(function: Any) -> str:
    """What people call a function: ``gelu``; of a property what it is of: ``shape``."""
    name = getattr(function, "__name__", None) or type(function).__name__
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


def _may_be_block(module: nn.Module) -> bool:
    return sum(1 for _ in module.children()) >= 2


def _alias(tensor: Tensor) -> Tensor:
    with DisableTorchFunction(), disable_current_modes():
        return torch.ops.aten.alias.default(tensor)


def _begin_of(tensor: Tensor) -> Tensor:
    with DisableTorchFunction(), disable_current_modes():
        for dim, size in enumerate(SAMPLE[: max(0, tensor.dim() - 1)]):
            tensor = tensor.narrow(dim, 0, min(size, tensor.shape[dim]))
        return tensor.clone()
