"""What is measured is what others define: the eager layers of the tests, and examples' activations and networks.

Loaded by path, because ``tests`` is a name that other installed packages also use, and ``examples`` is no package.
"""

import importlib.util
import sys
from types import ModuleType

from . import ROOT


def _load(folder: str, file: str) -> ModuleType:
    name = f"fusedlayers_{folder}_{file}".replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_reference = _load("tests/support", "reference")
bias_act, dense_bias_act = _reference.bias_act, _reference.dense_bias_act
conv_bias_act = _reference.conv_bias_act
mlp, gated_mlp = _reference.mlp, _reference.gated_mlp

#: Activations with trainable parameters, and ReLU: name -> what makes one for a number of channels.
CUSTOM_ACTIVATIONS = _load("examples", "custom_activation").ACTIVATIONS

resnet = _load("examples", "deep_resnet").resnet
