"""Private names of torch: ``fusedlayers/_torch.py`` alone uses them, names each, and each is what it says."""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fusedlayers import _torch
from fusedlayers.memory import saved_bytes

PACKAGE = Path(_torch.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
SOURCE = (PACKAGE / "_torch.py").read_text()

#: Of torch's objects (and named tuples); ``_torch``'s docstring lists them.
ATTRIBUTES = {
    *("_version", "_base", "_is_view", "_indices", "_values", "_post_accumulate_grad_hooks", "_cdata"),
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
    *("_backward_pre_hooks", "_reversed_padding_repeated_twice", "_check_input_dim"),
    "_compiled_call_impl",
    *("_prepare_input_fn", "_prepare_output_fn"),
    *(
        "_sequence_nr",
        "_input_metadata",
        "_raw_saved_result",
        "_raw_saved_tensors",
        "_saved_self",
        "_saved_approximate",
        "_saved_dim",
        "_forward_cls",
        "_schema",
        "_overloadpacket",
    ),
}
#: Of Python's own library; argparse tells of its options, which suggestions are made from, by no other names.
ELSEWHERE = {
    *("_replace", "_SubParsersAction", "_lru_cache_wrapper", "_getframe"),
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(trees: Iterator[ast.AST]) -> set[str]:
    """Private names that this package gives to functions, classes and attributes."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if _is_private(name)}


OURS = _defined(iter(FILES.values())) - ATTRIBUTES


def _private_names(tree: ast.AST, allowed: set[str]) -> Iterator[str]:
    """The private names of torch that some code uses, in imports, as attributes and in strings."""
    roots = {"torch"}  # names of torch's modules and of what is imported from them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            roots |= {alias.asname or "torch" for alias in found}
            yield from (alias.name for alias in found if any(map(_is_private, alias.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(map(_is_private, name.split("."))))
        elif isinstance(node, ast.Assign) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node.value)):  # torch.ops.aten
            roots |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            of_torch = owner.split(".")[0] in roots
            if (of_torch and node.attr not in ELSEWHERE) or node.attr not in allowed:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in allowed:
                yield ast.unparse(node)
    yield from (text for text in _strings(tree) if re.search(r"\btorch(\.\w+)*\._[a-z]", text))


def _strings(tree: ast.AST) -> Iterator[str]:
    """Strings that are no docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@pytest.mark.parametrize("file", [file for file in FILES if file != "_torch.py"])
def test_no_other_file_uses_one(file: str) -> None:
    allowed = ATTRIBUTES | ELSEWHERE | OURS
    if file == "recipes/replays.py":  # what nodes have saved, which test_save_once.py looks at node by node
        allowed |= {*re.findall(r"\b_saved_\w+", (PACKAGE / file).read_text())}
    assert list(_private_names(FILES[file], allowed)) == []


@pytest.mark.parametrize(
    "code",
    [
        *("import torch._dynamo", "import torch._decomp as d", "from torch._C import x", "from torch import _decomp"),
        *("from torch.nn.modules.batchnorm import _NormBase", "torch._C.f()", "torch.cuda._sleep(1)"),
        *("from torch import nn\nnn.modules.conv._ConvNd", "aten = torch.ops.aten\naten._to_copy.default"),
        *("node._secret", "getattr(node, '_secret')", "logging.getLogger('torch._dynamo')"),
    ],
)
def test_the_walk_finds_them(code: str) -> None:
    assert len(list(_private_names(ast.parse(code), ATTRIBUTES | ELSEWHERE | OURS))) >= 1


def test_attributes_of_torchs_objects_are_listed_and_used() -> None:
    listed = set(re.findall(r"``(_\w+)\*?``", (ast.get_docstring(ast.parse(SOURCE)) or "")))
    assert listed == ATTRIBUTES | {"_raw_saved_"}
    code = "\n".join(ast.unparse(tree) for file, tree in FILES.items() if file != "_torch.py")
    assert [name for name in listed if not re.search(rf"\b{name}", code)] == []


def test_every_name_is_used() -> None:
    used = set()
    for tree in (tree for file, tree in FILES.items() if file != "_torch.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and node.module == "_torch":
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_torch":
                used.add(node.attr)
    assert used == set(_torch.__all__)


# --- what each name is ------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[], None]] = {}


def check(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def test_the_table_names_all_of_them() -> None:
    assert set(CHECKS) == set(_torch.__all__) and len(set(_torch.__all__)) == len(_torch.__all__)


@pytest.mark.parametrize("name", _torch.__all__)
def test_each_has_a_line_of_its_own(name: str) -> None:
    assigned = rf"^#: .+\n(?:#: .+\n)*{name}\b.* = "  # a comment before the assignment
    imported = rf"^# {name}: .+"  # a comment that names what is imported
    defined = rf"^(?:def|class) {name}\((?:.|\n)*?:\n    \"\"\".+"  # a docstring
    assert len(re.findall(f"{assigned}|{imported}|{defined}", SOURCE, re.MULTILINE)) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", _torch.__all__)
def test_each_does_what_it_says(name: str) -> None:
    CHECKS[name]()


def _seen(ask: Callable[[], Any], run: Callable[[Callable[[Tensor], Tensor]], object]) -> Any:
    """What ``ask`` returns inside a function that ``run`` runs."""
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(ask())
        return x * 2

    run(function)
    return answers[0]


@check("autocast_is_active")
def _() -> None:
    assert _torch.autocast_is_active() is False
    with torch.autocast("cpu"):
        assert _torch.autocast_is_active() is True


@check("functorch_is_active")
def _() -> None:
    assert _seen(_torch.functorch_is_active, lambda f: torch.func.vmap(f)(torch.ones(2))) is True
    assert _torch.functorch_is_active() is False


@check("is_legacy_batched")
def _() -> None:
    answers = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            answers.append(_torch.is_legacy_batched(grads[0]))
            return grads[0]

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Asking.apply(x), x, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(Asking.apply(x), x, torch.ones(2))
    assert answers == [True, False]


@check("is_of_transform")
def _() -> None:
    wrapped = []
    torch.func.grad(lambda x: (wrapped.append(x * 2), x.sum())[1])(torch.ones(2))
    assert _torch.is_of_transform(wrapped[0]) is True  # type: ignore[func-returns-value]
    assert _torch.is_of_transform(torch.ones(2)) is False


@check("function_mode_count")
def _() -> None:
    assert _torch.function_mode_count() == 0
    with TorchFunctionMode(), TorchFunctionMode():
        assert _torch.function_mode_count() == 2


@check("refuses_hooks")
def _() -> None:
    def raised(function: Callable[[], object]) -> BaseException:
        with pytest.raises(RuntimeError) as caught, saved_tensors_hooks(lambda t: t, lambda t: t):
            function()
        return caught.value

    off = disable_saved_tensors_hooks
    transform = torch.func.grad(lambda x: (x * x).sum())
    assert _torch.refuses_hooks(raised(lambda: transform(torch.ones(2))))
    assert _torch.refuses_hooks(raised(lambda: off("mine")(lambda: None)()))
    with (
        pytest.raises(RuntimeError, match="mine") as caught,
        off("mine"),
        saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        pass
    assert _torch.refuses_hooks(caught.value)
    # Where no hooks are on, what is raised is the function's own error.
    with pytest.raises(RuntimeError, match="must match") as caught, off("mine"):
        torch.ones(2) + torch.ones(3)
    assert not _torch.refuses_hooks(caught.value)


@check("push_saved_tensors_hooks", "pop_saved_tensors_hooks", "saved_tensors_hooks_are_enabled")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    _torch.push_saved_tensors_hooks(lambda t: "packed", lambda packed: torch.full((2,), 7.0))
    y = x * x
    _torch.pop_saved_tensors_hooks()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((2,), 14.0))
    assert torch.equal(torch.autograd.grad((x * x).sum(), x)[0], torch.full((2,), 2.0))
    assert _torch.saved_tensors_hooks_are_enabled() is True
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert _torch.saved_tensors_hooks_are_enabled() is False


@check("Node")
def _() -> None:
    class Double(_torch.Node):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x)
    assert torch.equal(y, torch.full((2,), 2.0))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((2,), 2.0))


@check("forward_ad_level")
def _() -> None:
    assert _torch.forward_ad_level() == -1
    with forward_ad.dual_level():
        assert _torch.forward_ad_level() == 0


@check("torchscript_state")
def _() -> None:
    assert _torch.torchscript_state() is None
    state = _torch.torchscript_state
    assert _seen(lambda: state() is not None, lambda f: torch.jit.trace(f, torch.ones(2), check_trace=False))


class _Mode(_torch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


@check("TorchDispatchMode", "dispatch_mode_at", "dispatch_mode_count", "OpOverload")
def _() -> None:
    assert _torch.dispatch_mode_count() == 0
    with _Mode() as outer, _Mode() as inner:
        assert _torch.dispatch_mode_count() == 2
        assert [_torch.dispatch_mode_at(0), _torch.dispatch_mode_at(1)] == [outer, inner]
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in outer.called and all(isinstance(f, _torch.OpOverload) for f in outer.called)
    assert not isinstance(torch.ops.aten.add, _torch.OpOverload)


@check("PROXY_MODE", "infrastructure_mode", "make_fx")
def _() -> None:
    def ask() -> bool:
        return _torch.infrastructure_mode(_torch.PROXY_MODE) is not None

    assert _seen(ask, lambda f: _torch.make_fx(f)(torch.ones(2))) and not ask()
    graph = _torch.make_fx(lambda x: torch.sin(x), tracing_mode="fake")(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.sin.default]


@check("SELECTIVE_CHECKPOINT_MODES")
def _() -> None:
    modes: list[type] = []

    def function(x: Tensor) -> Tensor:
        modes.extend(type(_torch.dispatch_mode_at(i)) for i in range(_torch.dispatch_mode_count()))
        return torch.sin(x)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_args, **_kwargs: CheckpointPolicy.PREFER_RECOMPUTE)

    y = checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False, context_fn=contexts)
    y.sum().backward()
    assert tuple(modes) == _torch.SELECTIVE_CHECKPOINT_MODES


@check("parametrizations_are_cached")
def _() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    assert not _torch.parametrizations_are_cached() and layer.weight is not layer.weight
    with parametrize.cached():
        assert _torch.parametrizations_are_cached() and layer.weight is layer.weight


@check("is_exporting")
def _() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if _torch.is_exporting() else x

    x = torch.ones(2)
    assert not _torch.is_exporting()
    for strict in (False, True):
        assert torch.equal(torch.export.export(Asking(), (x,), strict=strict).module()(x), x + 1)
    assert torch.equal(torch.compile(Asking(), backend="eager", fullgraph=True)(x), x)  # in torch 2.11 too


@check("saved_tensors_hooks_on_top")
def _() -> None:
    assert _torch.saved_tensors_hooks_on_top(True) is None

    def pack(x: Tensor) -> Tensor:
        return x

    with saved_tensors_hooks(pack, abs):
        assert _torch.saved_tensors_hooks_on_top(True) == (pack, abs)


@check("current_function_mode")
def _() -> None:
    assert _torch.current_function_mode() is None
    with TorchFunctionMode(), TorchFunctionMode() as inner:
        assert _torch.current_function_mode() is inner


@check("unsafe_view")
def _() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = _torch.unsafe_view(x, (3, 2))
    assert not y._is_view() and y.data_ptr() == x.data_ptr() and y.grad_fn is not None


@check("backward_pass")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[int] = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(_torch.backward_pass()))
    y.sum().backward()
    assert seen[0] >= 0 and _torch.backward_pass() == -1


@check("graph_is_kept")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    kept: list[bool] = []
    y = x * 2
    y.register_hook(lambda _: kept.append(bool(_torch.graph_is_kept())))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert kept == [True, False]


@check("storage_use_count")
def _() -> None:
    x = torch.ones(2)
    key = x.untyped_storage()._cdata
    before = _torch.storage_use_count(key)
    view = x[:1]
    assert _torch.storage_use_count(key) == before + 1
    del view
    assert _torch.storage_use_count(key) == before


@check("sequence_number")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    following = _torch.sequence_number()
    node: Any = (x * 2).grad_fn
    assert node._sequence_nr() == following and _torch.sequence_number() == following + 1


@check("SavedTensor")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = torch.sin(x).grad_fn
    assert isinstance(node._raw_saved_self, _torch.SavedTensor) and node._raw_saved_self.data is x


class _Subclass(Tensor):
    called = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Subclass.called += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@check("FakeTensor", "FAKE_MODE")
def _() -> None:
    from torch._subclasses import FakeTensorMode

    ask = lambda: _torch.infrastructure_mode(_torch.FAKE_MODE) is not None
    with FakeTensorMode():
        assert ask()
        assert isinstance(torch.ones(2), _torch.FakeTensor)
    assert not ask()


@check("FAKE_TENSOR_LOGGER")
def _() -> None:
    assert sys.modules[_torch.FakeTensor.__module__].log.name == _torch.FAKE_TENSOR_LOGGER


@check("is_traceable_wrapper_subclass")
def _() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert _torch.is_traceable_wrapper_subclass(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not _torch.is_traceable_wrapper_subclass(torch.ones(2))


@check("tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten")
def _() -> None:
    tree = {"a": [1, "two"], "b": (3,)}
    leaves, spec = _torch.tree_flatten(tree)
    assert leaves == _torch.tree_leaves(tree) == [1, "two", 3]
    assert _torch.tree_unflatten(leaves, spec) == tree
    assert _torch.tree_map_only(int, float, tree) == {"a": [1.0, "two"], "b": (3.0,)}


@check("NormBase")
def _() -> None:
    batch, instance = (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d), (nn.InstanceNorm2d,)
    assert all(issubclass(kind, _torch.NormBase) for kind in batch + instance)
    assert not issubclass(nn.LayerNorm, _torch.NormBase)


@check("AccumulateGrad")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert type(node) is _torch.AccumulateGrad and node.variable is x


@check("never_compile")
def _() -> None:
    rules = importlib.import_module("torch._dynamo.trace_rules")
    assert not rules.check_file(__file__).skipped
    _torch.never_compile("fusedlayers.recipes.region")
    assert rules.check_file(str(PACKAGE / "recipes" / "region.py")).skipped
    assert not rules.check_file(str(PACKAGE / "recipes" / "patch.py")).skipped


@check("queue_callback")
def _() -> None:
    called: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: _torch.queue_callback(lambda: called.append(_torch.backward_pass())))
    y.sum().backward()
    assert len(called) == 1


@check("batch_norm_with_statistics")
def _() -> None:
    x, w, b = torch.randn(6, 3), torch.rand(3), torch.rand(3)
    z, mean, inverse_std, *_ = _torch.batch_norm_with_statistics(x, w, b, None, None, True, 0.1, 1e-5, False)
    assert torch.equal(z, F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5))
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(inverse_std, (x.var(0, correction=0) + 1e-5).rsqrt())


@check(
    "TO_COPY", "LOCAL_SCALAR", "PRELU", "PRELU_BACKWARD", "EFFICIENT_ZEROS", "FLASH_ATTENTION", "CPU_FLASH_ATTENTION"
)
def _() -> None:
    def run() -> None:
        x = torch.ones(2, 3)
        x.to(torch.float64)
        x.sum().item()
        F.prelu(x.requires_grad_(), torch.ones(1, requires_grad=True)).sum().backward()
        q = torch.ones(1, 1, 2, 4)
        F.scaled_dot_product_attention(q, q, q)

    with _Mode() as mode:
        run()
    called = {func.overloadpacket for func in mode.called}
    operators = (_torch.TO_COPY, _torch.LOCAL_SCALAR, _torch.PRELU, _torch.PRELU_BACKWARD, _torch.CPU_FLASH_ATTENTION)
    assert called >= set(operators)
    assert torch.equal(_torch.EFFICIENT_ZEROS.default([2]).clone(), torch.zeros(2))
    from torch.utils.flop_counter import flop_registry

    assert _torch.FLASH_ATTENTION in flop_registry and _torch.CPU_FLASH_ATTENTION not in flop_registry


@check("ensure_cuda_guard")
def _() -> None:
    _torch.ensure_cuda_guard()
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@check("RecordFunction", "profiler_is_active")
def _() -> None:
    assert not _torch.profiler_is_active()
    with torch.profiler.profile(acc_events=True) as profile, _torch.RecordFunction("marked"):
        assert _torch.profiler_is_active()
        torch.ones(2)
    assert not _torch.profiler_is_active()
    assert "marked" in {event.name for event in profile.events()}


@check("inductor")
def _() -> None:
    def saved(memory_budget: float) -> int:
        backend = partial(_torch.inductor, mode=None, options=None, memory_budget=memory_budget, is_compiled=False)
        compiled, x = torch.compile(lambda x: x.sin().cos().exp(), backend=backend), torch.randn(8, requires_grad=True)
        compiled(x)
        return saved_bytes(compiled, x)

    assert saved(0.0) < saved(1.0)


@check("is_optimized")
def _() -> None:
    module = nn.Linear(2, 2)
    assert _torch.is_optimized(torch.compile(module)) and not _torch.is_optimized(module)


@check("dynamo_is_in_checkpoint")
def _() -> None:
    function = lambda x: x + 1 if _torch.dynamo_is_in_checkpoint() else x + 2
    around = lambda x: checkpoint(lambda y: function(y) * 10, x, use_reentrant=False) + function(x)
    compiled = torch.compile(around, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2, requires_grad=True)), torch.full((2,), 12.0))


@check("disable_dynamo", "dynamo_is_loaded")
def _() -> None:
    compiling: list[bool] = []

    @_torch.disable_dynamo
    def function(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    assert torch.equal(torch.compile(lambda x: function(x) * 2, backend="eager")(torch.ones(2)), torch.full((2,), 4.0))
    assert compiling == [False] and _torch.dynamo_is_loaded()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo")
        assert not _torch.dynamo_is_loaded()


@check("core_decompositions", "decompositions_of")
def _() -> None:
    silu = torch.ops.aten.silu.default
    x = torch.randn(5)
    assert silu in _torch.core_decompositions()
    torch.testing.assert_close(_torch.decompositions_of([torch.ops.aten.silu])[silu](x), F.silu(x))


@check("elementwise_dtypes")
def _() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert _torch.elementwise_dtypes(x, 1.0, promotion="DEFAULT") == (torch.float32, torch.bfloat16)
    assert _torch.elementwise_dtypes(2, promotion="INT_TO_FLOAT") == (torch.float32, torch.float32)
