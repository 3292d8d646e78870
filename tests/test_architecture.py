"""Which module may import which, and what importing the package does to a process: next to nothing."""

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import slow
from settings import ROOT

PACKAGE = ROOT / "fusedlayers"

#: From the ground up: a module imports those of earlier lines only. Entries that end in "." are packages, whose modules
#: may import one another.
LAYERS = [
    ["_torch"],
    ["utils."],
    ["derivative."],
    ["activations."],
    ["kernels."],
    ["ops."],
    ["calls."],
    ["functional", "memory"],
    ["nn."],
    ["recompute."],
    ["invertible."],
    ["recipes."],
    ["fit."],
    ["reports."],
    [""],
    ["demo.", "doctor", "integrations."],
    ["__main__"],
]


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_modules())


def _rank(module: str) -> int:
    for rank, names in enumerate(LAYERS):
        for name in names:
            if module == name or (name.endswith(".") and f"{module}.".startswith(name)):
                return rank
    raise AssertionError(f"fusedlayers/{module} has no layer: give it a line in LAYERS")


def _imports(module: str, path: Path) -> Iterator[str]:
    """The modules of this package that ``module`` imports anywhere, in functions too, but not for type checking."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]
    tree = ast.parse(path.read_text())
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            elif node.module and node.module.split(".")[0] == "fusedlayers":
                base = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in MODULES else ".".join(base)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fusedlayers":
                    yield ".".join(alias.name.split(".")[1:])


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m or "fusedlayers")
def test_imports_go_down(module: str) -> None:
    rank = _rank(module)
    siblings = LAYERS[rank]
    for imported in _imports(module, MODULES[module]):
        allowed = _rank(imported) < rank or any(f"{imported}.".startswith(name) for name in siblings)
        assert allowed, f"{module or 'fusedlayers'} imports {imported or 'fusedlayers'}, which is not below it"


def test_the_check_sees_imports() -> None:
    seen = set(_imports("calls.plan", MODULES["calls.plan"]))
    assert {"calls.decide", "activations", "ops.pointwise", "ops.compiled_act"} <= seen
    assert "kernels.triton" in set(_imports("kernels", MODULES["kernels"]))  # inside a function
    assert "activations" in set(_imports("kernels.reference.elementwise", MODULES["kernels.reference.elementwise"]))


def test_lists_of_layers_name_what_exists_or_is_planned() -> None:
    for name in (name for names in LAYERS for name in names):
        assert name in MODULES or name.rstrip(".") in MODULES


def test_only_the_triton_backend_knows_triton() -> None:
    for module, path in MODULES.items():
        if module.startswith("kernels.triton"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not any(name.split(".")[0] == "triton" for name in names), module


# --- sizes ------------------------------------------------------------------------------------------------------------

MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 500, 60, 8
#: Functions with more parameters, and why.
MANY_PARAMETERS = {
    **dict.fromkeys(("functional.conv_bias_act", "nn.layer.__init__"), "those of torch's convolutions"),
    **dict.fromkeys(("functional.mlp", "functional.gated_mlp", "nn.mlp.__init__"), "two layers, each with its options"),
    "kernels.cpu.loops.__init__": "what a compiled loop may be given, most of it by name",
}


def _functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of a module, but for Triton's kernels, which have a parameter for each pointer, size and stride."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield f"{module}.{node.name}", node


def _lines(node: ast.FunctionDef) -> int:
    """Without the docstring."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    without = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return (node.end_lineno or 0) - node.lineno + 1 - without


def _parameters(node: ast.FunctionDef) -> int:
    named = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls", "ctx")])


def test_files_and_functions_are_short() -> None:
    long = [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > MOST_LINES_OF_A_FILE]
    functions = [found for module in MODULES for found in _functions(module)]
    long += [name for name, node in functions if _lines(node) > MOST_LINES_OF_A_FUNCTION]
    assert not long
    many = {name for name, node in functions if _parameters(node) > MOST_PARAMETERS}
    assert many == MANY_PARAMETERS.keys()


# --- importing --------------------------------------------------------------------------------------------------------


def _python(code: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
"""

TRAIN = """
import torch, fusedlayers as fl
model = torch.nn.Sequential(fl.FusedDenseAct(20, 40, "gelu"), fl.FusedDenseAct(40, 20, torch.nn.SiLU()), fl.Mish())
x = torch.randn(50, 20, requires_grad=True)
for dtype in (torch.float32, torch.bfloat16):
    model(x.to(dtype) if model.to(dtype) else x).sum().backward()
assert all(p.grad is not None for p in model.parameters())
assert "gelu" in fl.activations() and "triton" not in sys.modules
"""


def test_it_works_without_triton() -> None:
    _python(BLOCK_TRITON + TRAIN, "-W", "error")


#: What is not needed to define layers, and what torch itself loads late.
HEAVY = (
    "triton",
    "matplotlib",
    "numpy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.onnx",
    "torch.distributed.tensor",
    "torch._functorch.aot_autograd",
    "torch.fx.experimental.proxy_tensor",
)


STATE = """
import json, sys, warnings, random, os, logging, threading
import torch

def state():
    return [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype()),
        str(torch.get_default_device()), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.backends.cuda.matmul.allow_tf32,
        torch.initial_seed(), torch.get_rng_state().sum().item(), hash(random.getstate()),
        sorted(os.environ.items()), len(warnings.filters), logging.root.level, len(logging.root.handlers),
        threading.active_count(), torch.is_autocast_enabled("cpu"), sys.getrecursionlimit(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        id(torch.nn.functional.gelu), id(torch.nn.GELU.forward), id(torch.nn.Linear.forward), id(torch.relu),
        sorted(torch.nn.modules.activation.__all__), torch.cuda.is_initialized(),
        len(torch.nn.modules.module._global_forward_hooks), sys.excepthook is sys.__excepthook__,
    ]

modules, before = set(sys.modules), state()
import fusedlayers
print(json.dumps([sorted(modules), sorted(set(sys.modules) - modules)]))
import fusedlayers as fl, fusedlayers.memory

assert before == state(), [pair for pair in zip(before, state()) if pair[0] != pair[1]]
x = torch.linspace(-3, 3, 1000).requires_grad_()
for dtype in (torch.float32, torch.bfloat16):
    fl.bias_act(x.to(dtype), None, "gelu").sum().backward()
assert before == state(), [pair for pair in zip(before, state()) if pair[0] != pair[1]]
"""


def test_importing_and_first_use_change_no_global_state() -> None:
    """Nor does importing load more than torch does, or training on a CPU load Triton."""
    before, added = json.loads(_python(STATE + TRAIN, "-W", "error"))
    assert "fusedlayers.functional" in added and "torch" in before
    heavy = [name for name in added if any(name == h or name.startswith(h + ".") for h in HEAVY)]
    assert heavy == []
    assert {name.split(".")[0] for name in added} <= {"fusedlayers", "torch", *sys.stdlib_module_names}
    apart = ("fusedlayers.__main__", "fusedlayers.demo", "fusedlayers.integrations")
    assert [name for name in added if name.startswith(apart)] == []


def test_everything_public_is_documented_and_named_once() -> None:
    import fusedlayers as fl

    assert len(set(fl.__all__)) == len(fl.__all__)
    for name in fl.__all__:
        documentation = getattr(fl, name).__doc__
        assert documentation and documentation.strip()
    assert (PACKAGE / "py.typed").exists()


def test_methods_of_public_classes_are_documented() -> None:
    import fusedlayers as fl

    public = [getattr(fl, name) for name in fl.__all__]
    ours = {
        base for kind in public if isinstance(kind, type) for base in kind.__mro__ if "fusedlayers" in base.__module__
    }
    members = [(kind, name) for kind in ours for name in vars(kind) if not name.startswith("_")]
    methods = [(kind, name) for kind, name in members if isinstance(vars(kind)[name], FunctionType | property)]
    assert len(methods) > 50
    # What PyTorch, or the class that a method begins with, says of it is inherited.
    assert {f"{kind.__name__}.{name}" for kind, name in methods if not inspect.getdoc(getattr(kind, name))} == set()


def test_what_is_called_slow_exists() -> None:
    for module, names in slow.SLOW.items():
        (path,) = (ROOT / "tests").rglob(f"{module}.py")
        tree = ast.parse(path.read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert names.keys() <= functions, module
