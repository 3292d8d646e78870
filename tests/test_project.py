"""What the project says of itself: the workflow, the hooks, the metadata, CONTRIBUTING and the changelog name only what
exists, and agree with one another."""

import ast
import os
import random
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import settings
import torch
from settings import ROOT

import fusedlayers as fl
from bench.__main__ import COMMANDS
from fusedlayers import _torch

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, MYPY = PYPROJECT["project"], PYPROJECT["tool"]["mypy"]
RUN = ROOT / ".ci" / "run"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PARTS = {"lint", "types", "tests", "slow", "package"}


def loaded(*parts: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(ROOT.joinpath(*parts).read_text(encoding="utf-8"))


# --- installation -----------------------------------------------------------------------------------------------------


def test_the_folder_above_a_checkout_does_not_hide_the_package(tmp_path: Path) -> None:
    if not list(Path(sysconfig.get_path("purelib")).glob("__editable__*fusedlayers*")):
        pytest.skip("the tree is not installed")
    (tmp_path / "fusedlayers").mkdir()  # as `git clone` makes it
    code = "import importlib.util; print(importlib.util.find_spec('fusedlayers').origin)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == ROOT / "fusedlayers" / "__init__.py"


# --- continuous integration -------------------------------------------------------------------------------------------


def rows_of(job: dict[str, Any]) -> list[dict[str, str]]:
    """What ``matrix`` is in each run of a job."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    rows = matrix.pop("include", None) or [{}]
    for name, values in matrix.items():
        rows = [{**row, name: value} for row in rows for value in values]
    return rows


def test_the_workflow_runs_every_part_and_nothing_else() -> None:
    jobs = loaded(".github", "workflows", "ci.yml")["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert sorted(commands) == sorted(f".ci/run {part}" for part in PARTS)


def test_the_workflow_reads_what_its_matrices_have() -> None:
    for name, job in loaded(".github", "workflows", "ci.yml")["jobs"].items():
        read = set(re.findall(r"\bmatrix\.(\w+)", str(job)))
        assert all(read == row.keys() for row in rows_of(job)), name


def test_versions_are_those_of_the_metadata() -> None:
    jobs = loaded(".github", "workflows", "ci.yml")["jobs"]
    rows = rows_of(jobs["tests"])
    pythons = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert sorted({row["python"] for row in rows}) == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    (least,) = (d.partition(">=")[2] for d in PROJECT["dependencies"] if d.startswith("torch>="))
    (tested,) = re.findall(r"^\| torch \| (.*?) \|", README, re.MULTILINE)
    versions = tested.split(", ")
    assert {row["torch"] for row in rows} <= {*(f"torch=={version}" for version in versions), "torch"}
    assert versions[0] == f"{least}.0" and f"for version in {versions[0]} {versions[-1]};" in RUN.read_text(
        encoding="utf-8"
    )
    assert [tuple(map(int, v.split(".")[:2])) for v in (versions[0], versions[-1])] == [_torch._OLDEST, _torch._NEWEST]
    assert {row["python"] for row in rows_of(jobs["package"])} == {pythons[0], pythons[-1]}


def test_ci_run_says_which_parts_there_are() -> None:
    assert os.access(RUN, os.X_OK)
    done = subprocess.run([RUN, "lint", "docs"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "no part 'docs'" in done.stderr
    assert set(re.findall(r"\w+", done.stderr.partition("there are")[2])) - {"and"} == PARTS


def test_hooks_run_the_tools_that_the_tests_install() -> None:
    installed = {re.split(r"\W", requirement)[0] for requirement in PROJECT["optional-dependencies"]["test"]}
    hooks = [hook for repository in loaded(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    assert {hook["entry"].split()[0] for hook in hooks} == {"ruff", "mypy"} <= installed


# --- tests ------------------------------------------------------------------------------------------------------------


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


WHILE_IMPORTED = drawn()


def test_random_numbers_follow_from_the_names_of_tests_and_modules(request: pytest.FixtureRequest) -> None:
    found = [drawn(), WHILE_IMPORTED]
    for node, numbers in zip((request.node, request.node.parent), found, strict=True):
        settings.seed(node.nodeid)
        assert numbers == drawn()


def returns_before_checks(path: Path) -> Iterator[str]:
    """Tests of a module that may return before their first assertion; cases without one are no parameters."""
    for test in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
            continue
        inner = [node for node in ast.walk(test) if isinstance(node, ast.FunctionDef) and node is not test]
        within = {id(node) for function in inner for node in ast.walk(function)}
        nodes = [node for node in ast.walk(test) if id(node) not in within]
        checks = [
            node.lineno
            for node in nodes
            if isinstance(node, ast.Assert)
            or (isinstance(node, ast.Call) and re.search("assert|check|raises|warns", ast.unparse(node.func)))
        ]
        if any(isinstance(node, ast.Return) and node.lineno < min(checks, default=node.lineno + 1) for node in nodes):
            yield f"{path.name}: {test.name}"


def test_no_test_returns_before_it_asserts() -> None:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [name for path in paths for name in returns_before_checks(path)] == []


def test_tests_lie_in_the_folders_of_what_they_test() -> None:
    """What several use is in ``support``: no module of tests imports another."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert all((ROOT / "fusedlayers" / path.parent.relative_to(ROOT / "tests")).is_dir() for path in paths)
    assert not any(re.search(r"^(from|import) test_", path.read_text(encoding="utf-8"), re.MULTILINE) for path in paths)


# --- types ------------------------------------------------------------------------------------------------------------


def unannotated(path: Path) -> Iterator[str]:
    """Functions of a module without annotations, but for those that Triton compiles or calls while it does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = [node for node in functions if any(ast.unparse(d).startswith("triton.") for d in node.decorator_list)]
    assert kernels, path
    within = {id(inner) for kernel in kernels for inner in ast.walk(kernel)}
    for node in functions:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        bare = [a for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        if id(node) not in within and (bare or node.returns is None):
            yield f"{path.name}: {node.name}"


def test_functions_beside_kernels_are_annotated() -> None:
    (override,) = (o for o in MYPY["overrides"] if "disallow_untyped_defs" in o)
    paths = [ROOT / f"{module.replace('.', '/')}.py" for module in override["module"]]
    assert len(paths) > 5
    assert [name for path in paths for name in unannotated(path)] == []


# --- documents --------------------------------------------------------------------------------------------------------

CODE = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", CONTRIBUTING)
PATH = re.compile(r"\.?\w[\w.-]*/[\w./*-]*|\w[\w-]*\.(?:py|md|toml|yml)")
#: What commands write.
WRITTEN = {"build/docs", "summary.md"}


def test_paths_in_contributing_exist() -> None:
    paths = {word for code in CODE for word in code.split() if PATH.fullmatch(word)} - WRITTEN
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_names_in_contributing_exist() -> None:
    pairs = re.findall(r"`(\w+)` (?:in|of)\s+`([\w./]+\.(?:py|c))`", CONTRIBUTING)
    assert len(pairs) > 10
    for name, path in pairs:
        assert re.search(
            rf"^(?:def |class |    def )?{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
        )
    sources = [RUN, *(path for folder in ("fusedlayers", "bench", "tests") for path in (ROOT / folder).rglob("*.py"))]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    names = {code for code in CODE if re.fullmatch(r"\w+", code)}
    assert len(names) > 20 and names <= words


def test_commands_in_contributing_exist() -> None:
    commands = [code.split() for code in CODE]
    measurements = {words[3] for words in commands if words[:3] == ["python", "-m", "bench"]}
    assert len(measurements) > 3 and measurements <= {*COMMANDS, "NAME"}
    parts = {part for words in commands if ".ci/run" in words for part in words[words.index(".ci/run") + 1 :]}
    assert len(parts) > 2 and parts <= PARTS


def test_the_documentation_has_all_names(tmp_path: Path) -> None:
    """By the command that CONTRIBUTING has."""
    pytest.importorskip("pdoc")
    (command,) = (code.split() for code in CODE if code.startswith("python -m pdoc "))
    command[0], command[command.index("build/docs")] = sys.executable, str(tmp_path)
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    page = (tmp_path / "fusedlayers.html").read_text(encoding="utf-8")
    assert [name for name in fl.__all__ if f'id="{name}"' not in page] == []
    assert 'id="saved_bytes"' in (tmp_path / "fusedlayers" / "memory.html").read_text(encoding="utf-8")


def test_code_in_contributing_runs() -> None:
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for number, (indent, block) in enumerate(blocks):
        code = re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
        exec(compile(code, f"CONTRIBUTING.md, block {number}", "exec"), namespace)


def test_the_changelog_names_what_is_exported() -> None:
    names = set(re.findall(r"`fl\.(\w+)", CHANGELOG))
    assert len(names) > 30 and names <= set(fl.__all__)
    headings = re.findall(r"^## \[(.*?)\]", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:] == [] or headings[1] == fl.__version__
