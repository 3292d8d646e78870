"""Private names of torch: ``fusedlayers/_torch.py`` alone uses them, and names each. What they do shows where they are
used."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from settings import ROOT

from fusedlayers import _torch

PACKAGE = Path(_torch.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
SOURCE = (PACKAGE / "_torch.py").read_text()

#: Of torch's objects; ``_torch``'s docstring lists them, and why they are there in each torch.
ATTRIBUTES = {
    *("_version", "_base", "_is_view", "_indices", "_values", "_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"),
    *("_prepare_input_fn", "_prepare_output_fn"),
}
#: Of Python's own library; argparse tells of its options, which suggestions are made from, by no other names.
ELSEWHERE = {*("_replace", "_SubParsersAction", "_lru_cache_wrapper", "_getframe")}


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
    assert list(_private_names(FILES[file], allowed)) == []


def test_attributes_of_torchs_objects_are_listed_and_used() -> None:
    listed = set(re.findall(r"``(_\w+)``", (ast.get_docstring(ast.parse(SOURCE)) or "")))
    assert listed == ATTRIBUTES
    code = "\n".join(ast.unparse(tree) for file, tree in FILES.items() if file != "_torch.py")
    assert [name for name in listed if not re.search(rf"\b{name}", code)] == []


def test_each_name_is_used_and_has_a_line_of_its_own() -> None:
    used = set()
    for tree in (tree for file, tree in FILES.items() if file != "_torch.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and node.module == "_torch":
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_torch":
                used.add(node.attr)
    assigned = r"^#: .+\n(?:#: .+\n)*(\w+)\b.* = "  # a comment before the assignment
    imported = r"^from .+ import (\w+) as \1  # .+"
    documented = [name for kind in (assigned, imported) for name in re.findall(kind, SOURCE, re.MULTILINE)]
    defined = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    documented += [node.name for node in defined if ast.get_docstring(node)]
    documented = [name for name in documented if not _is_private(name)]
    assert {*documented} == used and len(documented) == len(used)


@pytest.mark.parametrize("kind", ["gone", "other"])
def test_a_fault_of_any_name_raises_nowhere_and_changes_no_gradient(kind: str) -> None:
    """Each name in turn is not there, or takes other arguments: its mechanism is left to PyTorch, and says so."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "support" / "faults.py"), kind]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    *faults, last = found.stdout.splitlines() or [""]
    assert faults == [] and found.returncode == 0, found.stdout + found.stderr
    assert int(last.split()[0]) > 25


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20261129+cpu"])
def test_versions_that_no_test_runs_on(version: str) -> None:
    """An older one is refused at the import, and a newer one works, with one warning."""
    code = f"""import torch, warnings
torch.__version__ = torch.torch_version.TorchVersion({version!r})
import fusedlayers as fl
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 128))
        fl.fuse(model)
        model(torch.randn(128, 128)).sum().backward()
print(*(warning.message for warning in caught), sep="\\n")
"""
    command = [sys.executable, "-W", "error", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    if version.startswith("2.10"):
        said = (
            "ImportError: fusedlayers needs torch 2.11 or newer, and this is torch 2.10.1: pip install --upgrade torch"
        )
        assert found.stderr.splitlines()[-1] == said
    else:
        assert found.returncode == 0, found.stderr
        (warning,) = found.stdout.splitlines()
        assert warning.startswith(f"fusedlayers is tested on torch 2.11 to 2.15, and this is torch {version}:")
