"""What is installed here, what of this package works, and what does not: the findings of `fusedlayers doctor`.

Nothing is decided here. Each question goes to the function that layers ask, and what that raises, warns of or logs is
what is broken: the reasons are those of the library, and cannot contradict it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from . import __version__, backends
from .activations import resolve
from .backends import GradientRequest, gpu_settings
from .backends.cpu import build, onednn
from .utils.formatting import first_line, size_text

#: What works without them too, with reasons to install them.
OPTIONAL = {
    "rich": "the demo and bars of progress",
    "matplotlib": "plots and the demo",
    "scikit-learn": "an example",
    "transformers": "fusedlayers.integrations.transformers",
    "accelerate": "training with transformers",
    "lightning": "fusedlayers.integrations.lightning",
}
#: Of the environment, in the order of what is asked.
VARIABLES = (gpu_settings.VARIABLE, gpu_settings.FILE_VARIABLE, gpu_settings.MARGIN_VARIABLE, build.VARIABLE)
#: How far gelu's derivative may be off. By the loops it is 2e-5, where the function is flattest.
TOLERANCE = 1e-3

Question = tuple[str, Callable[[], str]]
"""A name, and what finds the answer."""


@dataclass(frozen=True)
class Finding:
    """What is known of one thing.

    Attributes:
        section, name: what it is.
        text: how it is.
        problems: what is broken about it; of what works, and of what need not be there, nothing.
    """

    section: str
    name: str
    text: str
    problems: tuple[str, ...]


def findings() -> Iterator[Finding]:
    """Everything that is asked, each answered when it is reached. Nothing is raised, whatever is broken."""
    for section, questions in SECTIONS.items():
        for name, question in questions():
            yield _answered(section, name, question)


def _answered(section: str, name: str, question: Callable[[], str]) -> Finding:
    with _warnings() as said:
        try:
            text = question()
        except Exception as error:  # of drivers, compilers, file systems
            text = "broken"
            said.append(f"{type(error).__name__}: {first_line(error)}")
    return Finding(section, name, text, tuple(said))


class _Collector(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is warned of meanwhile, and what this package logs as a warning, neither of which is shown."""
    said: list[str] = []
    log, collector = logging.getLogger(__package__), _Collector(said)
    propagated, log.propagate = log.propagate, False
    log.addHandler(collector)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for of_the_future in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", of_the_future)
            yield said
        said += [str(warning.message) for warning in warned]
    finally:
        log.removeHandler(collector)
        log.propagate = propagated


# --- versions ---------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Question]:
    yield "fusedlayers", lambda: f"{__version__} in {Path(__file__).parent}"
    yield "python", lambda: f"{platform.python_version()}, {sys.executable}"
    yield "torch", lambda: torch.__version__
    yield "einops", partial(importlib.metadata.version, "einops")
    yield "triton", partial(_version, "triton", "kernels for GPUs")
    for name, purpose in OPTIONAL.items():
        yield name, partial(_version, name, purpose)


def _version(name: str, purpose: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name) is not None:  # under another name, as triton in torch's nightly builds
            return str(importlib.import_module(name).__version__)
        return f"not installed; for {purpose}"


# --- CPU --------------------------------------------------------------------------------------------------------------


def _cpu() -> Iterator[Question]:
    yield "processor", _processor
    yield "threads", lambda: f"{torch.get_num_threads()} for torch, {os.cpu_count()} of the machine"
    yield "C compiler", _compiler
    yield "compiled loops", _loops
    yield "arithmetic", partial(_arithmetic, torch.device("cpu"))
    yield "torch's libraries", _libraries
    yield "float32 matmuls", partial(onednn.describe_matmuls, torch.float32)
    yield "bfloat16 matmuls", partial(onednn.describe_matmuls, torch.bfloat16)


def _processor() -> str:
    name = torch.cpu.get_capabilities().get("cpu_name", "unknown")
    return f"{name}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()} in torch"


def _compiler() -> str:
    command, named = build.find_compiler(), os.environ.get("CC", "")
    if command is None:
        return "none; CC, cc, gcc and clang were looked for"
    version = next(iter(build.version_of(command).splitlines()), "it says no version")
    ignored = f"; CC is {named!r}, which is not there" if named and shlex.join(command) != named else ""
    return f"{shutil.which(command[0])}: {version}{ignored}"


def _loops() -> str:
    library = build.shared_object()
    if library is not None:
        return f"loaded from {library._name}"
    return f"none: {build.missing_because()}; GELU, SiLU, Mish, norms and others are PyTorch's on CPUs"


def _libraries() -> str:
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    onednn_text = "oneDNN" if torch.backends.mkldnn.is_available() else "no oneDNN"
    return f"{blas.group(1) if blas else 'no BLAS'}, {onednn_text}"


def _arithmetic(device: torch.device) -> str:
    """A pass forward and backward by what layers get, beside float64.

    Raises:
        ArithmeticError: the derivative is wrong.
    """
    gelu = resolve("gelu")
    z = torch.linspace(-6, 6, 4096, device=device)
    backend = backends.choose(z, gelu)
    y = backend.bias_act(z, None, gelu, dim=-1, encode=True, out=None)
    dz, *_ = backend.gradient(torch.ones_like(y), y, gelu, (), GradientRequest("output", False, False), dim=-1)
    wide = z.cpu().double().requires_grad_()
    (slope,) = torch.autograd.grad(gelu.function(wide).sum(), wide)
    assert dz is not None
    error = float((dz.cpu().double() - slope).abs().max())
    text = f"gelu's derivative from its output is off by {error:.0e} at most on 4096 numbers from -6 to 6"
    if not error <= TOLERANCE:
        raise ArithmeticError(f"{text}; {TOLERANCE:.0e} is allowed")
    return text


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpu() -> Iterator[Question]:
    yield "torch", _torch_for_gpus
    for device in _devices():
        for name, question in (
            ("name", _gpu_name),
            ("kernels", _kernels),
            ("arithmetic", _arithmetic),
            ("tuned file", _tuned),  # before who reads it too, and would be warned in its place
            ("matmuls", _gpu_matmuls),
        ):
            yield f"{device} {name}", partial(question, device)


def _devices() -> list[torch.device]:
    """None where torch cannot look for them, which the question before this has told."""
    with _warnings():
        try:
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        except Exception:
            return []


def _torch_for_gpus() -> str:
    toolkit = torch.version.cuda or torch.version.hip
    built = f"built for {'CUDA' if torch.version.cuda else 'ROCm'} {toolkit}" if toolkit else "built without CUDA"
    torch.cuda.is_available()  # warns where a driver is too old
    found = [f"{torch.cuda.device_count()} GPUs found" if toolkit else "no GPU is looked for"]
    other = torch.accelerator.current_accelerator()
    if other is not None and other.type not in backends.DEVICES:
        found.append(f"{other.type} is left to PyTorch")
    return ", ".join([built, *found])


def _gpu_name(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {size_text(found.total_memory)}, compute capability {found.major}.{found.minor}"


def _kernels(device: torch.device) -> str:
    if gpu_settings.allowed() == "off":
        return "off: PyTorch computes"
    reason = backends.no_triton_because()
    if reason is not None:
        raise RuntimeError(f"Triton does not run, and PyTorch computes in its place: {reason}")
    return "Triton's"


def _gpu_matmuls(device: torch.device) -> str:
    weight = torch.empty(3072, 768, dtype=torch.float16, device=device)
    return "; ".join(backends.describe_matmuls(weight, resolve("gelu")))


def _tuned(device: torch.device) -> str:
    if backends.no_triton_because() is not None:
        return "none without Triton"
    from .backends.triton import dispatch

    path = dispatch.tuned_path(device)
    if path is None:
        return f"none: there is no home folder; {gpu_settings.FILE_VARIABLE} may name a file"
    if not path.exists():
        dispatch.tuned(device)  # warns where the environment names it
        return f"none yet: fusedlayers tune would write {path}"
    return f"{len(dispatch.tuned(device))} matmuls in {path}"


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings() -> Iterator[Question]:
    yield (
        gpu_settings.VARIABLE,
        lambda: f"{_value(gpu_settings.VARIABLE)}: kernels on GPUs are {gpu_settings.allowed()!r}",
    )
    yield gpu_settings.FILE_VARIABLE, partial(_value, gpu_settings.FILE_VARIABLE)
    yield gpu_settings.MARGIN_VARIABLE, lambda: f"matmuls leave {gpu_settings.margin()} multiprocessors free"
    yield build.VARIABLE, lambda: f"{_value(build.VARIABLE)}: loops are {'off' if build.are_switched_off() else 'on'}"
    for name in sorted(name for name in os.environ if name.startswith("FUSEDLAYERS_") and name not in VARIABLES):
        yield name, partial(_unknown, name)
    yield "cache", _cache


def _value(name: str) -> str:
    value = os.environ.get(name)
    return "not set" if value is None else repr(value)


def _unknown(name: str) -> str:
    raise ValueError(f"nobody reads {name}; there are {', '.join(VARIABLES)}")


def _cache() -> str:
    """The first folder that can be used, and why those before it cannot.

    Raises:
        OSError: there is none.
    """
    refused: list[str] = []
    for folder in build.cache_folders():
        reason = build.refused_because(folder)
        if reason is None:
            files = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
            used = f"{folder} can be written to; {len(files)} files, {size_text(sum(files))}"
            return "; ".join([used, *refused])
        refused.append(f"{folder} is not used: {reason}")
    raise OSError("; ".join(refused))


SECTIONS = {"versions": _versions, "CPU": _cpu, "GPU": _gpu, "settings": _settings}
