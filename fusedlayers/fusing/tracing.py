"""The calls of modules whose forward pass is the same for any input: ``torch.fx`` follows it without one.

Each module is followed by itself, its parts (but for ``nn.Sequential``, which is known) as they are called. What asks
for the values or sizes of a tensor cannot be followed.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from .calls import METADATA, Call, Value
from .recording import name_of


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) not in (nn.Sequential, nn.Identity)


def trace(model: nn.Module) -> Iterator[Call]:
    """The calls of the model and of the modules in it, as far as they can be followed."""
    for path, module in model.named_modules():
        if not any(True for _ in module.children()):
            continue
        graph = _graph(module)
        if graph is not None:
            yield _read(graph, module, path)


def _graph(module: nn.Module) -> fx.Graph | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer().trace(module)
    except Exception:  # whatever a forward pass does with what is not a tensor
        return None


def _read(graph: fx.Graph, module: nn.Module, path: str) -> Call:
    values: defaultdict[fx.Node, Value] = defaultdict(Value)
    outer = Call(module, path, None)
    for node in graph.nodes:
        if node.op == "placeholder":
            outer.args += (values[node],)
            # With a default it is an option, which is left out.
            outer.reads += () if node.args else (values[node],)
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
