"""`fusedlayers doctor`: the versions that are installed here, and the parts of this package that work or are broken.

Each question goes to the function that layers ask: what that raises, or warns of, is what is broken.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from . import __version__, _torch, kernels
from .activations import resolve
from .kernels import GradientRequest
from .kernels.cpu import build
from .recipes.fuse import fuse
from .recipes.save_once import works_here

#: What works without them too.
OPTIONAL = ("triton", "matplotlib", "scikit-learn", "transformers", "accelerate", "lightning")
#: How far gelu's derivative may be off. By the loops it is 2e-5, where the function is flattest.
TOLERANCE = 1e-3


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor` to the commands."""
    text = "say what is installed, what works here, and what does not (then the exit code is 1)"
    commands.add_parser("doctor", help=text, description=text).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found."""
    broken = 0
    for name, question in _questions():
        try:
            with warnings.catch_warnings():
                for category in (RuntimeWarning, UserWarning):
                    warnings.simplefilter("error", category)
                text = question()
        except Exception as error:  # of drivers, compilers, file systems
            broken += 1
            text = f"BROKEN: {type(error).__name__}: {error}"
        print(f"{name:<24}  {text}")
    print(f"\nBroken: {broken}" if broken else "\nNothing is broken.")
    return int(broken > 0)


def _questions() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "fusedlayers", lambda: f"{__version__} in {Path(__file__).parent}"
    yield "python", lambda: f"{platform.python_version()}, {sys.executable}"
    yield "torch", lambda: torch.__version__
    for name in OPTIONAL:
        yield name, partial(_version, name)
    yield "CPU", lambda: f"{torch.cpu.get_capabilities().get('cpu_name', 'unknown')}, {platform.machine()}"
    yield "threads", lambda: f"{torch.get_num_threads()} for torch, {os.cpu_count()} of the machine"
    yield "C compiler", lambda: shlex.join(build.find_compiler() or ["none"])
    yield "compiled loops", _loops
    yield "fuse", _fuse
    yield "private names of torch", _private_names
    yield "self-test on cpu", partial(_self_test, torch.device("cpu"))
    yield "GPUs", _gpus
    yield "Triton's kernels", _kernels
    for number in range(torch.cuda.device_count()):
        yield f"cuda:{number}", partial(torch.cuda.get_device_name, number)
        yield f"self-test on cuda:{number}", partial(_self_test, torch.device("cuda", number))
    for name in sorted(name for name in os.environ if name.startswith("FUSEDLAYERS_")):
        yield name, partial(repr, os.environ[name])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name) is not None:  # under another name, as triton in torch's nightly builds
            return str(importlib.import_module(name).__version__)
        return "not installed"


def _loops() -> str:
    library = build.shared_object()  # which warns of what the compiler said
    if library is not None:
        return f"loaded from {library._name}"
    return f"none: {build.missing_because()}; GELU, SiLU, Mish and others are PyTorch's on CPUs"


def _fuse() -> str:
    if not works_here():
        raise RuntimeError("models are left to PyTorch, because this torch's saved tensors are not as expected")
    model = torch.nn.Sequential(*(torch.nn.GroupNorm(4, 16), torch.nn.Conv2d(16, 16, 1), torch.nn.GELU()) * 2)
    before, now = fuse(model, torch.zeros(4, 16, 32, 32)).saved_bytes or (0, 0)
    return f"group norms, convolutions and GELUs save {now / before:.0%} of PyTorch's bytes"


def _private_names() -> str:
    lines = [f"{name}: {instead}" for name, instead in _torch.LACKING.items()]
    return "; ".join(lines) or "all are there"


def _gpus() -> str:
    torch.cuda.is_available()  # warns where a driver is too old
    return f"{torch.cuda.device_count()} found by torch, for CUDA {torch.version.cuda}, ROCm {torch.version.hip}"


def _kernels() -> str:
    if kernels.is_off(kernels.VARIABLE):
        return f"switched off by {kernels.VARIABLE}"
    reason = kernels.no_triton_because()
    if reason is not None and torch.cuda.device_count():
        raise RuntimeError(f"Triton does not run, and PyTorch computes in its place: {reason}")
    return "Triton runs" if reason is None else f"none: {reason}"


def _self_test(device: torch.device) -> str:
    gelu = resolve("gelu")
    z = torch.linspace(-6, 6, 4096, device=device)
    backend = kernels.choose(z, gelu)
    y = backend.bias_act(z, None, gelu, dim=-1, encode=True, out=None)
    dz, *_ = backend.gradient(torch.ones_like(y), y, gelu, (), GradientRequest("output", False, False), dim=-1)
    wide = z.cpu().double().requires_grad_()
    (slope,) = torch.autograd.grad(gelu.function(wide).sum(), wide)
    assert dz is not None
    error = float((dz.cpu().double() - slope).abs().max())
    if not error <= TOLERANCE:
        raise ArithmeticError(f"gelu's derivative from its output is off by {error:.0e}; {TOLERANCE:.0e} is allowed")
    return f"gelu's derivative from its output is off by {error:.0e} at most"
