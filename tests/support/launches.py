"""What calls launch on a GPU, counted without one: Triton's kernels, torch's operators around them, and the bytes that
a launch is given beside the arguments.

    python tests/support/launches.py [NAME ...]

prints a JSON object of forward and backward for each call of ``test_launches.py``. The process must be one in which
Triton is not interpreted.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[2]))

from subjects import Swish

import fusedlayers as fl
from bench.gpu import fake as fake_gpu


class Operators(TorchDispatchMode):
    """Counts the operators that compute something: on a GPU each launches a kernel, some of them several."""

    #: These make views, or memory that nobody writes, or compute nothing on a device.
    FREE = re.compile(
        "(_unsafe_)?view(_as)?|t|transpose|permute|expand|slice|select|(un)?squeeze|as_strided|alias|detach|split|unbind"
        "|chunk|reshape|lift_fresh|(new_)?empty(_like|_strided)?|promote_types"
    )

    def __init__(self) -> None:
        super().__init__()
        self.counted: collections.Counter[str] = collections.Counter()

    @staticmethod
    def _product(name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Memory in the place of a matmul's result: a CPU would take minutes for numbers that nobody reads."""
        if name not in ("mm", "addmm"):
            return None
        a, b = args[-2:]
        out: Tensor | None = kwargs.get("out")
        return a.new_empty(a.shape[0], b.shape[1]) if out is None else out

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not self.FREE.fullmatch(name):
            self.counted[name] += 1
        product = self._product(name, args, kwargs or {})
        return function(*args, **(kwargs or {})) if product is None else product


def counted(fake: fake_gpu.FakeDriver, call: Callable[[], Any], known: list[Tensor]) -> dict[str, Any]:
    """What a call launches: kernels of Triton, operators of torch, and the most bytes that a launch is given beside
    ``known`` tensors and the results."""
    fake.launches.clear()
    with Operators() as operators:
        results = call()
    results = [results] if isinstance(results, Tensor) else [t for t in results if t is not None]
    theirs = {t.untyped_storage().data_ptr() for t in (*known, *results)}
    scratch = [sum(size for at, size in launch.storages.items() if at not in theirs) for launch in fake.launches]
    return {
        "kernels": dict(collections.Counter(launch.kernel for launch in fake.launches)),
        "operators": dict(operators.counted),
        "scratch_bytes": max(scratch, default=0),
    }


ROWS, WIDTH = 4096, 3072


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _dense(**options: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    return (lambda x, w, b: fl.dense_bias_act(x, w, b, **options), _tensors((ROWS, 256), (WIDTH, 256), (WIDTH,)))


#: Name -> a call and its tensors.
CALLS: dict[str, Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]] = {
    "dense gelu": lambda: _dense(activation="gelu"),
    "dense relu": lambda: _dense(activation="relu"),
    "bias_act": lambda: (lambda x, b: fl.bias_act(x, b, "gelu"), _tensors((ROWS, WIDTH), (WIDTH,))),
    "gelu": lambda: (fl.gelu, _tensors((ROWS, WIDTH))),
    "scalar parameter": lambda: (
        partial(fl.bias_act, bias=None, activation=Swish().bfloat16()),
        _tensors((ROWS, WIDTH)),
    ),
    "mlp": lambda: (
        lambda x, w1, b1, w2, b2: fl.mlp(x, w1, b1, w2, b2, "gelu"),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH,), (256, WIDTH), (256,)),
    ),
    "mlp, recomputing": lambda: (
        lambda x, w1, b1, w2, b2: fl.mlp(x, w1, b1, w2, b2, "gelu", save="recompute"),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH,), (256, WIDTH), (256,)),
    ),
    "gated mlp": lambda: (
        lambda x, g, u, d: fl.gated_mlp(x, g, None, u, None, d, None, "silu"),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH, 256), (256, WIDTH)),
    ),
}


def measure(names: Collection[str]) -> dict[str, Any]:
    fake = fake_gpu.install()
    found: dict[str, Any] = {}
    for name in names:
        call, tensors = CALLS[name]()
        fake.launches.clear()
        with Operators():
            y = call(*tensors)  # compiles; these launches are Triton's own, the others are those that are kept
            dy = torch.zeros_like(y)
            torch.autograd.grad(y, tensors, dy)
        first = [(launch.kernel, launch.grid, launch.numbers) for launch in fake.launches]
        made: list[Tensor] = []
        forward = counted(fake, lambda: made.append(call(*tensors)) or made[0], tensors)  # noqa: B023  # called at once
        y = made.pop()
        kept = [(launch.kernel, launch.grid, launch.numbers) for launch in fake.launches]
        backward = counted(fake, lambda: torch.autograd.grad(y, tensors, dy), [*tensors, y, dy])  # noqa: B023  # called at once
        kept += [(launch.kernel, launch.grid, launch.numbers) for launch in fake.launches]
        found[name] = {
            "forward": forward,
            "backward": backward,
            "is_launched_as_at_first": first == kept and len(first) > 0,
        }
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:] or CALLS)))
