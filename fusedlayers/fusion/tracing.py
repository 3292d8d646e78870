"""The calls of modules whose forward pass is the same for any input: ``torch.fx`` follows it without one.

Each module is followed by itself, its parts (but for ``nn.Sequential``, which is known) as they are called, with its
options as they are by default. What asks for the values or sizes of a tensor cannot be followed.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from .._torch import tree_leaves
from .calls import METADATA, OPERATORS, Call, Value
from .recording import name_of


class _Proxy(fx.Proxy):
    """Stands for a tensor. Torch's own knows nothing of ``x += 1``, and Python makes ``x = x + 1`` of it then."""

    def _written(self, operation: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})


for _name in OPERATORS:
    setattr(_Proxy, f"__{_name}__", functools.partialmethod(_Proxy._written, getattr(operator, _name)))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) not in (nn.Sequential, nn.Identity)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        function, given = super().create_args_for_root(*args, **kwargs)
        return function, [_default_or_itself(argument) for argument in given]


def _default_or_itself(argument: Any) -> Any:
    has_default = isinstance(argument, fx.Proxy) and argument.node.args
    return argument.node.args[0] if has_default else argument


def trace(model: nn.Module) -> Iterator[Call]:
    """The calls of the model and of the modules in it, as far as they can be followed."""
    for path, module in model.named_modules():
        if not any(True for _ in module.children()):
            continue
        with _attributes_kept(module) as stored:
            graph = _graph(module)
        if graph is not None:
            yield _read(graph, stored, module, path)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[list[fx.Node]]:
    """Put back what the code stores in modules: in their attributes, or in what these hold. Yield where the nodes that
    it has stored are listed then."""
    before = [(space, copy.copy(space)) for space in _spaces(module)]
    stored: list[fx.Node] = []
    try:
        yield stored
    finally:
        for space, content in before:
            known = [id(value) for value in _values(content)]
            if known == [id(value) for value in _values(space)]:
                continue
            new = [value for value in _values(space) if id(value) not in known]
            stored += [leaf.node for leaf in tree_leaves(new) if isinstance(leaf, fx.Proxy)]
            space.clear()
            (space.update if isinstance(space, dict | set) else space.extend)(content)


def _spaces(module: nn.Module) -> list[Any]:
    """The containers that code may write to: attributes, and what these hold, as deep as it goes."""
    spaces: list[Any] = [vars(inner) for inner in module.modules()]
    known = {id(space) for space in spaces}
    for space in spaces:
        for value in _values(space) if len(space) <= _LARGE else ():
            if isinstance(value, nn.Module | Tensor | type | types.ModuleType | types.FunctionType):
                continue
            inner = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
            if isinstance(inner, _CONTAINERS) and id(inner) not in known:
                known.add(id(inner))
                spaces.append(inner)
    return spaces


_CONTAINERS = (list, dict, set, deque)
#: What has more elements holds data, and no containers.
_LARGE = 4096


def _values(space: Any) -> Iterable[object]:
    return space.values() if isinstance(space, dict) else space


def _graph(module: nn.Module) -> fx.Graph | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer().trace(module)
    except Exception:  # whatever a forward pass does with what is not a tensor
        return None


def _read(graph: fx.Graph, stored: Sequence[fx.Node], module: nn.Module, path: str) -> Call:
    values: defaultdict[fx.Node, Value] = defaultdict(Value)
    for node in stored:
        values[node].is_kept = True
    outer = Call(module, path, None)
    for node in graph.nodes:
        if node.op == "placeholder":
            if not node.args:  # with a default it is an option
                outer.args += (values[node],)
                outer.reads += (values[node],)
        elif node.op == "output":
            outer.gives = tuple(values[result] for result in node.all_input_nodes)
            for value in outer.gives:
                value.is_kept = True
        elif node.op.startswith("call_"):
            call = call_of(node, values)
            if node.op == "call_module":
                call.target = module.get_submodule(call.name)
                call.name = f"{path}.{call.name}".lstrip(".")
            call.within = outer
            outer.calls.append(call)
            if call.reads and call.writes:
                call.reads[0].is_written = True
    _join_parts(outer)
    return outer


def call_of(node: fx.Node, values: defaultdict[fx.Node, Value]) -> Call:
    """The call that a node is; of a module by its name."""
    target: Any = node.target
    name = name_of(target) if node.op == "call_function" else str(target)
    if node.op == "call_method":
        target = getattr(Tensor, name)
    found: Any = values
    args: Any = fx.node.map_arg(node.args, found.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, found.__getitem__)
    reads = tuple(values[read] for read in node.all_input_nodes)
    name = str(node.args[1]) if target is getattr else name
    call = Call(target, name, None, args, dict(kwargs), reads, is_closed=True)
    call.gives = () if name in METADATA else (values[node],)
    return call


def _join_parts(outer: Call) -> None:
    """Let what gives several tensors (``chunk``) give them itself, and not the calls that take one of them."""
    taken: dict[Value, dict[int, Call]] = {}
    for call in outer.calls:
        if call.target is operator.getitem and isinstance(call.args[1], int):
            taken.setdefault(call.args[0], {})[call.args[1]] = call
    for call in outer.calls:
        parts = taken.get(call.gives[0]) if call.gives else None
        is_used_whole = any(
            set(call.gives) & set(other.reads) and other not in (parts or {}).values() for other in outer.calls
        )
        if parts is not None and not is_used_whole and min(parts) >= 0:
            outer.calls = [other for other in outer.calls if other not in parts.values()]
            call.gives = tuple(parts[i].gives[0] if i in parts else Value() for i in range(max(parts) + 1))
