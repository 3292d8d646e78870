"""``python -m bench contexts``: what ``fl.fuse`` frees of whole models where they are trained in other ways: under
autocast, under saved-tensor hooks, and compiled.

The models are those of ``bench models`` that have narrow layers. Nothing is timed: bytes are the same on a busy
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fusedlayers.memory import saved_bytes
from fusedlayers.utils.storages import sizes_of, tensors_in

from . import RESULTS, grid, machine, models

DEFINITIONS = {
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "plain": "as the model is",
    "autocast": "under autocast to bfloat16; copies of parameters that autocast makes count",
    "hooks": "what saved-tensor hooks are handed, each storage once",
    "copies": "the same, each tensor by itself, as hooks that copy it hold it (save_on_cpu on GPUs)",
    "compile": "after torch.compile(dynamic=False)",
}
_LAYERS = ("BERT with dropouts, narrow", "Qwen 3, narrow", "EfficientNet-B0")
BUDGET_SECONDS = 900.0


def cases() -> list[models.Case]:
    """In the order of ``bench models``."""
    return [case for case in models.cases("cpu") if case.model in _LAYERS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'qwen'")
    parser.add_argument("--quick", action="store_true", help="tiny models: to see that it works")
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=BUDGET_SECONDS, help="start no case after")
    parser.add_argument("--out", type=Path, help="folder for contexts.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    todo = [case for case in cases() if re.search(options.only or "", case.id)]
    if not todo:
        print(f"bench contexts: no case matches --only {options.only!r}; there are {[case.id for case in cases()]}")
        return 2
    out = options.out
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = grid.begin("contexts", device, DEFINITIONS, quick=options.quick, not_run=[case.id for case in todo])
    for case, _, _ in grid.until(time.monotonic() + options.budget, todo):
        row = measure_case(case, device, quick=options.quick)
        grid.add(result, row, out)
        print(f"{row['id']}: {row['contexts']}", flush=True)
    if out is not None:
        print(f"\nwrote {out / 'contexts.json'}")
    return 0


def measure_case(case: models.Case, device: torch.device, *, quick: bool = False) -> dict[str, Any]:
    """The JSON row of a case: by context, the bytes of PyTorch's model and of the fused one."""
    eager, layers = models.build(case, device, quick)
    fused, _ = eager.variant(models.OURS)
    assert fused is not None
    found = {name: {"eager": count(eager), "fusedlayers": count(fused)} for name, count in CONTEXTS.items()}
    return {**models.described(case, eager, layers), "contexts": found}


def _plain(subject: models.Subject) -> int:
    return saved_bytes(subject.forward, exclude=[subject.model, subject.inputs])


def _under_autocast(subject: models.Subject) -> int:
    kind = next(iter(subject.inputs.values())).device.type
    with torch.autocast(kind, torch.bfloat16):
        return _plain(subject)


def _under_hooks(subject: models.Subject) -> int:
    return sum(sizes_of(_handed(subject)).values())


def _under_copying_hooks(subject: models.Subject) -> int:
    return sum(tensor.nbytes for tensor in _handed(subject))


def _handed(subject: models.Subject) -> list[Tensor]:
    """What saved-tensor hooks are handed, but for the model's own tensors and its inputs."""
    own = sizes_of(tensors_in((subject.model, subject.inputs)))
    held: list[Tensor] = []  # held: an address stands for a storage only while that is alive

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = subject.forward()
    del y
    return [tensor for tensor in held if not sizes_of([tensor]).keys() <= own.keys()]


def _compiled(subject: models.Subject) -> int:
    with _fresh_compiler():
        compiled = torch.compile(subject.model, dynamic=False)
        other = dataclasses.replace(subject, model=cast(nn.Module, compiled))
        other.forward_backward()  # compiles
        return _plain(other)


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


CONTEXTS: dict[str, Callable[[models.Subject], int]] = {
    "plain": _plain,
    "autocast": _under_autocast,
    "hooks": _under_hooks,
    "copies": _under_copying_hooks,
    "compile": _compiled,
}
