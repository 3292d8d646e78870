"""What a call costs, counted in what does not depend on the machine: Python functions of the package entered."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

import fusedlayers as fl

PACKAGE = str(Path(fl.__file__).parent) + os.sep


def entered(call: Callable[[], object]) -> list[str]:
    """The functions of the package that a call enters, in order; comprehensions and generators are functions too, and
    a generator is entered as often as it is asked for a value."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            names.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names


def _bias_act() -> Callable[[Tensor], Tensor]:
    b = torch.zeros(256, requires_grad=True)
    return lambda z: fl.bias_act(z, b, "gelu")


#: Name -> the layer, the shape of its input, and how many functions a forward call may enter.
CALLS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], tuple[int, ...], int]] = {
    "dense gelu": (lambda: fl.FusedDenseAct(64, 256, "gelu"), (64, 64), 15),
    "dense relu": (lambda: fl.FusedDenseAct(64, 256, "relu"), (64, 64), 15),
    "dense tanh": (lambda: fl.FusedDenseAct(64, 256, "tanh"), (64, 64), 15),
    "conv gelu": (lambda: fl.FusedConvAct2d(8, 16, 3, padding=1, activation="gelu"), (4, 8, 16, 16), 19),
    "conv relu": (lambda: fl.FusedConvAct2d(8, 16, 3, padding=1, activation="relu"), (4, 8, 16, 16), 19),
    "bias_act": (_bias_act, (64, 256), 16),  # two places in the graph: those of z and of the bias
    "GELU": (fl.GELU, (64, 256), 14),
    "mlp": (lambda: fl.FusedMLP(64, 256, 64, "gelu", chunks=1), (64, 64), 26),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_enters_few_functions(name: str) -> None:
    make, shape, limit = CALLS[name]
    layer, x = make(), torch.randn(shape, requires_grad=True)
    for _ in range(3):  # the first calls fill caches
        layer(x).sum().backward()
    names = entered(lambda: layer(x))
    count = len(names)
    assert 0 < count <= limit, f"{count} functions entered, {limit} allowed:\n" + "\n".join(names)


def test_the_counter_counts() -> None:
    assert entered(lambda: None) == entered(lambda: torch.ones(2).sum()) == []
    names = entered(lambda: fl.gelu(torch.ones(2)))
    assert names[0].startswith("nn/activations.py:") and any(" bias_act" in name for name in names)
    comprehension = compile("[x for x in range(3)], list(x for x in range(3))", f"{PACKAGE}none.py", "eval")
    names = [name.split()[1] for name in entered(lambda: eval(comprehension))]
    assert names == ["<module>", *["<listcomp>"] * (sys.version_info < (3, 12)), *["<genexpr>"] * 4]
