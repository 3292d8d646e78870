"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import random
from pathlib import Path

import pytest
import torch

from fusedlayers import sizes

PACKAGE = Path(__file__).parents[1] / "fusedlayers"
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.fixture(autouse=True)
def sizes_are_those_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``conftest.py`` has changed."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", 512 << 10)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 2 << 20)


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(module, optionflags=options)
    assert tried and not failed


def test_there_are_examples() -> None:
    assert {"fusedlayers.memory", "fusedlayers.recompute.sublinear"} <= set(MODULES)
