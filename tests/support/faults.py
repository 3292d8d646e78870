"""Run by test_private_names.py: private names of torch that are not there, or that work in another way.

Each fault has a process of its own, forked from this one, in which the package is imported and trains small models.
Printed are the faults that raise, change a gradient, or go unnoticed. The argument is "gone" or "other".
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

torch.set_num_threads(1)
resolve = pkgutil.resolve_name


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    return [*torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])]


def check() -> None:
    """Fused models give the same bits, and layers by hand PyTorch's gradients."""
    import fusedlayers as fl
    from fusedlayers.calls import sizes

    sizes.SMALL_BYTES = sizes.MEDIUM_BYTES = 1 << 10
    x = torch.randn(64, 128)
    linear, last = nn.Linear(128, 256), nn.Linear(256, 128)
    plain = nn.Sequential(nn.LayerNorm(128), linear, nn.GELU(), nn.Dropout(0.1), last)
    expected = gradients(plain, x)
    fl.fuse(plain)
    assert all(map(torch.equal, gradients(plain, x), expected)), "fuse"
    fl.unfuse(plain)
    image, conv = torch.randn(8, 4, 8, 8), nn.Conv2d(4, 8, 3, padding="same", padding_mode="circular")
    layer = fl.FusedConvAct2d(4, 8, 3, "tanh", padding="same", padding_mode="circular")
    layer.load_state_dict(conv.state_dict())
    block = fl.FusedMLP(128, 256, activation="tanh")
    block.fc1, block.fc2 = linear, last

    class Theirs(nn.Module):
        """What reads a trained number is traced, and nothing is fitted, which takes seconds."""

        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    class Own(Theirs):
        def forward(self, x: Tensor) -> Tensor:
            return fl.bias_act(x, None, super().forward)

    pairs: list[tuple[nn.Module, nn.Module, Tensor]] = [
        (layer, nn.Sequential(conv, nn.Tanh()), image),
        (block, nn.Sequential(linear, nn.Tanh(), last), x),
        (Own(), Theirs(), x),
        (fl.SublinearSequential(linear, nn.GELU(), last), nn.Sequential(linear, nn.GELU(), last), x),
        (fl.InvertibleSequential(fl.InvertibleBatchNorm1d(128)), nn.BatchNorm1d(128), x),
    ]
    for ours, theirs, given in pairs:
        for a, b in zip(gradients(ours, given), gradients(theirs, given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
    x.requires_grad_()
    (once,) = torch.autograd.grad(Own()(x).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), x)
    (expected_once,) = torch.autograd.grad(Theirs()(x).sum(), x, create_graph=True)
    torch.testing.assert_close(twice, torch.autograd.grad(expected_once.sum(), x)[0], rtol=1e-3, atol=1e-3)
    fl.memory_report(plain, x)


def with_fault(path: str, kind: str) -> str:
    """What went wrong, or nothing."""

    def other(*_: Any, **__: Any) -> Any:
        raise TypeError(f"{path} takes other arguments")

    def look_up(name: str) -> Any:
        if name != path:
            return resolve(name)
        if kind == "gone":
            raise AttributeError(name)
        return other

    pkgutil.resolve_name = look_up
    try:
        check()
        from fusedlayers import _torch
    except BaseException:
        return traceback.format_exc()
    is_late = path in ("torch.fx.experimental.proxy_tensor:make_fx", "torch:_prims_common")  # a trace is refused then
    return "" if _torch.LACKING or is_late else "unnoticed"


def in_process(function: Callable[[], str]) -> str:
    """What a function returns in a process of its own."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, function().encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    return text or ("" if os.waitpid(child, 0)[1] == 0 else "the process died")


def paths() -> list[str]:
    """Those that are looked up while the package is imported, or trains."""
    found: list[str] = []

    def look_up(name: str) -> Any:
        found.append(name)
        return resolve(name)

    pkgutil.resolve_name = look_up
    check()  # what it compiles and what it imports, each process then has
    pkgutil.resolve_name = resolve
    for name in [name for name in sys.modules if name.split(".")[0] == "fusedlayers"]:
        del sys.modules[name]
    return [*dict.fromkeys(found)]


if __name__ == "__main__":
    kind = sys.argv[1]
    names = [path for path in paths() if kind == "gone" or callable(resolve(path))]
    assert in_process(lambda: (check(), "")[1]) == ""
    for path in names:
        if said := in_process(lambda path=path: with_fault(path, kind)):  # type: ignore[misc]
            print(f"{path}: {said}")
    print(f"{len(names)} names")
