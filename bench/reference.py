"""The eager baselines, which live with the tests: what is timed is what the tests compare with.

Loaded by path, because ``tests`` is a name that other installed packages also use.
"""

import importlib.util
import sys
from types import ModuleType

from . import ROOT


def _load() -> ModuleType:
    name = "fusedlayers_tests_reference"
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_reference = _load()
bias_act, dense_bias_act, mlp = _reference.bias_act, _reference.dense_bias_act, _reference.mlp
