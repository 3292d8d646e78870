"""The examples in docstrings run, and print what they say."""

import ast
import doctest
import importlib

import pytest
from settings import ROOT

PACKAGE = ROOT / "fusedlayers"
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.usefixtures("sizes_that_ship")
@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(module, optionflags=options)
    assert tried and not failed


def test_there_are_examples() -> None:
    assert {"fusedlayers.memory", "fusedlayers.recompute.sublinear"} <= set(MODULES)


#: Words with which a docstring begins that has no subject.
PREPOSITIONS = ("Of", "Those", "For", "By", "With", "In", "On", "As", "From", "At", "To", "After", "Around", "Behind")


def test_docstrings_have_a_subject() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                found += [f"{path.name} {node.name}: {text}"] * text.startswith(tuple(f"{w} " for w in PREPOSITIONS))
    assert found == []
