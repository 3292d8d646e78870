"""What ``gpu-check`` looks at in processes of its own: items, each a list of cases.

A process of an item prints a line of JSON when a case begins and one when it has ended, so that the parent knows which
one hangs or crashes. Each case names the kernel that it is about. The parent puts kernels that fail on a list, and
processes that start later do without them (``prepare``).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.activations import Activation, resolve
from fusedlayers.backends import GradientRequest

from . import ROOT, fake_gpu, machine, measure

#: In the environment of the processes: whether the driver is the fake one, and the kernels to do without.
FAKE, DENIED = "BENCH_FAKE_GPU", "BENCH_DENIED_KERNELS"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: How often a kernel has to compute the same bits.
REPEATS = 50

Findings = dict[str, Any]


class Case(NamedTuple):
    id: str
    run: Callable[[], Findings]
    #: The elementwise kernel that is not to be used any more where the case fails.
    kernel: str = ""


class Wrong(Exception):
    """Results are not what they should be."""


def prepare() -> None:
    """Install the fake driver if it is asked for, and take denied kernels out of use; before anything is launched. What
    is looked at are the kernels, also where a layer would be left to PyTorch."""
    sizes.GPU_BYTES = 0
    if os.environ.get(FAKE):
        fake_gpu.install()
    if os.environ.get(DENIED):
        from fusedlayers import backends
        from fusedlayers.backends import torch as reference

        backends.choose = lambda tensor, activation=None: reference


def is_fake() -> bool:
    return bool(os.environ.get(FAKE))


def device() -> torch.device:
    return torch.device("cpu" if is_fake() else "cuda")


def run_item(name: str, done: Sequence[str]) -> int:
    """Run the cases of an item that are not done, and print what came of each."""
    from . import gpu_fuse  # which takes from here

    failed = 0
    for case in {**ITEMS, "fuse": gpu_fuse.items}[name]():
        if case.id in done:
            continue
        _say(item=name, case=case.id, state="begins", kernel=case.kernel)
        start = time.monotonic()
        try:
            found = case.run()
            if not is_fake():
                torch.cuda.synchronize()
            _expect_kernels()
            state: dict[str, Any] = {"state": "passed", **found}
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {str(error)[:500]}"
            state = {"state": "failed", "error": message, "at": f"{os.path.basename(where.filename)}:{where.lineno}"}
        _say(item=name, case=case.id, kernel=case.kernel, seconds=round(time.monotonic() - start, 3), **state)
    return 1 if failed else 0


def _expect_kernels() -> None:
    """Torch must not have computed in a kernel's place."""
    from fusedlayers.backends.triton import fallback

    if fallback._failed:
        raise Wrong(f"could not be launched: {sorted(map(str, fallback._failed))}")


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


# --- environment ------------------------------------------------------------------------------------------------------


def _environment() -> Iterator[Case]:
    yield Case("versions", _versions)
    yield Case("launch", _first_launch)


def _versions() -> Findings:
    found = machine.describe(device())
    if not is_fake():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "capability": f"{properties.major}.{properties.minor}",
            "bytes": properties.total_memory,
            "free_bytes": torch.cuda.mem_get_info()[0],
            "processors": properties.multi_processor_count,
        }
    return found


def _first_launch() -> Findings:
    z = _normal(1000, 100, dtype=torch.float32)
    start = time.monotonic()
    y = _triton().bias_act(z, None, resolve("relu"), dim=-1, encode=False, out=None)
    seconds = time.monotonic() - start
    _expect_equal(y, torch.relu(z), "relu")
    return {"first_launch_seconds": round(seconds, 3)}


def _triton() -> Any:
    # Here, because the fake driver must come first.
    from fusedlayers.backends import triton

    return triton


def _normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device())


# --- one call of each kernel, beside float64 and torch ----------------------------------------------------------------

ELEMENTWISE = ("forward", "backward from y", "backward from z", "gate", "gate's backward", "inverse")
ROWS, COLUMNS = 1027, 1000


def _kernels() -> Iterator[Case]:
    for dtype in DTYPES:
        for kernel in ELEMENTWISE:
            for name in ("gelu", "silu", "elu"):
                run = partial(_check_elementwise, kernel, resolve(name), dtype)
                yield Case(f"{kernel}/{name}/{_short(dtype)}", run, kernel)


def _check_elementwise(kernel: str, activation: Activation, dtype: torch.dtype) -> Findings:
    z, b, up, dy = (
        _normal(*shape, dtype=dtype, seed=i, scale=3.0 if i == 0 else 1.0)
        for i, shape in enumerate(((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS), (ROWS, COLUMNS)))
    )
    backend = _triton()
    sum_ = z + b
    leaf, other = sum_.detach().requires_grad_(), up.detach().requires_grad_()
    torchs = activation.plain(leaf) * (other if kernel.startswith("gate") else 1)
    torchs_gradients = torch.autograd.grad(torchs, [leaf, other], dy, allow_unused=True)
    exact_leaf, exact_other = (t.detach().double().requires_grad_() for t in (sum_, up))
    exact = activation.function(exact_leaf) * (exact_other if kernel.startswith("gate") else 1)
    exact_gradients = torch.autograd.grad(exact, [exact_leaf, exact_other], dy.double(), allow_unused=True)
    encode = kernel in ("backward from y", "inverse")

    def run() -> list[Tensor]:
        if kernel == "gate":
            return [backend.gate(sum_, up, activation, (), None)]
        if kernel == "gate's backward":
            parts = [sum_.clone(), up.clone()]
            backend.gate_gradient(dy.clone(), *parts, activation, (), ())
            return parts
        if kernel == "forward":
            return [backend.bias_act(z, b, activation, dim=-1, encode=False, out=None)]
        y = backend.bias_act(sum_, None, activation, dim=-1, encode=encode, out=None)
        if kernel == "inverse":
            return [backend.inverse(y, activation, None)]
        saved, request = sum_, GradientRequest("input", False, True)
        if encode:
            saved, request = y, GradientRequest("output", False, True)
        return list(backend.gradient(dy, saved, activation, (), request, dim=-1))

    results = _repeated(run)
    if kernel == "inverse":
        return {}  # how exact it can be depends on y; the tests look at that
    if kernel in ("forward", "gate"):
        return _compare(results[0], torchs.detach(), exact.detach(), floor=0.0)
    # y is rounded to its dtype, and so is the derivative that it tells.
    floor = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype] if encode else 0.0
    theirs, right = torchs_gradients[0], exact_gradients[0]
    assert theirs is not None and right is not None
    found = _compare(results[0], theirs, right, floor=floor)
    if kernel == "gate's backward":
        assert torchs_gradients[1] is not None and exact_gradients[1] is not None
        _compare(results[1], torchs_gradients[1], exact_gradients[1], floor=0.0)
    elif results[1] is not None:
        _compare(results[1], theirs.sum(0), right.sum(0), floor=floor)
    return found


def _repeated(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What a kernel computes, if it does so again."""
    results = run()
    for again in range(1 if is_fake() else REPEATS):
        for one, other in zip(results, run(), strict=True):
            _expect_equal(other, one, f"repeat {again}")
    return results


def _compare(ours: Tensor, torchs: Tensor, exact: Tensor, *, floor: float) -> Findings:
    """The errors of both, relative to the norm; ours may be twice torch's, or ``floor``."""
    norm = float(exact.norm())
    error, torchs_error = (float((t.double() - exact).norm()) / norm for t in (ours, torchs))
    if not is_fake() and not error <= 2 * torchs_error + floor + 1e-6:
        raise Wrong(f"errs by {error:.2e} of the norm, torch by {torchs_error:.2e}, and {floor:.0e} is allowed")
    return {"error": error, "torchs_error": torchs_error}


def _expect_equal(got: Tensor | None, expected: Tensor | None, what: str) -> None:
    if is_fake() or got is None or expected is None:
        return
    different = (got != expected) & ~(got.isnan() & expected.isnan())
    if bool(different.any()):
        raise Wrong(f"{what}: {int(different.sum())} of {different.numel()} numbers differ")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- NVIDIA's sanitizer -----------------------------------------------------------------------------------------------


def _sanitizer() -> Iterator[Case]:
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck"):
        yield Case(tool, partial(_sanitize, path, tool))


def _sanitize(path: str, tool: str) -> Findings:
    if not os.path.exists(path):
        return {"skipped": "there is no compute-sanitizer"}
    program = (
        "import torch, fusedlayers as fl\n"
        "from fusedlayers import sizes\n"
        "sizes.SMALL_BYTES = sizes.MEDIUM_BYTES = sizes.GPU_BYTES = sizes.GPU_MEDIUM_BYTES = 0\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    shapes = (133, 64), (96, 64), (96,)\n"
        "    x, w, b = (torch.randn(s, device='cuda', dtype=dtype, requires_grad=True) for s in shapes)\n"
        "    fl.dense_bias_act(x, w, b, 'gelu').sum().backward()\n"
    )
    command = [path, "--tool", tool, sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    lines = [line for line in run.stdout.splitlines() if "SUMMARY" in line]
    if not lines:
        return {"skipped": (run.stdout + run.stderr)[-300:]}
    if not any("0 errors" in line or "0 hazards" in line for line in lines):
        raise Wrong("; ".join(lines))
    return {"summary": lines[-1]}


# --- what a call costs the host ---------------------------------------------------------------------------------------


def _host() -> Iterator[Case]:
    for rows in (64,) if is_fake() else (64, 8192):
        for name in ("dense", "bias_act", "gelu", "mlp"):
            yield Case(f"{name}/{rows}", partial(_measure_host, name, rows))


def _measure_host(name: str, rows: int) -> Findings:
    dtype, functional = torch.bfloat16, torch.nn.functional
    shapes_of = ((rows, 1024), (4096, 1024), (4096,), (1024, 4096), (1024,))
    x, w, b, w2, b2 = (_normal(*s, dtype=dtype, seed=i, scale=0.03).requires_grad_() for i, s in enumerate(shapes_of))
    wide = _normal(rows, 4096, dtype=dtype).requires_grad_()
    gelu = functional.gelu
    calls: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "dense": (lambda: gelu(functional.linear(x, w, b)), lambda: fl.dense_bias_act(x, w, b, "gelu")),
        "bias_act": (lambda: gelu(wide + b), lambda: fl.bias_act(wide, b, "gelu")),
        "gelu": (lambda: gelu(wide), lambda: fl.gelu(wide)),
        "mlp": (
            lambda: functional.linear(gelu(functional.linear(x, w, b)), w2, b2),
            lambda: fl.mlp(x, w, b, w2, b2, "gelu"),
        ),
    }
    found: Findings = {}
    for who, call in zip(("eager", "fusedlayers"), calls[name], strict=True):

        def step(call: Callable[[], Tensor] = call) -> None:
            y = call()
            y.backward(torch.ones_like(y))

        for _ in range(3):
            step()
        found[who] = {"launches": _launches(step), "host_us": _host_time(step)}
    return found


def _launches(step: Callable[[], None]) -> int | None:
    if is_fake():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kinds: list[str] = [event.device_type.name for event in profile.events() or ()]
    return kinds.count("CUDA")


def _host_time(step: Callable[[], None], calls: int = 50) -> float:
    """Microseconds until Python has queued a step, the median; the device is behind."""
    times = []
    for _ in range(calls):
        if not is_fake():
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return round(measure.spread(times)["median"], 1)


# --- where kernels run ------------------------------------------------------------------------------------------------


def _contexts() -> Iterator[Case]:
    for name, run in (
        ("graph", _in_a_graph),
        ("side stream", _on_a_stream),
        ("threads", _on_threads),
        ("out of memory", _out_of_memory),
    ):
        yield Case(name, run)


def _step(seed: int = 0) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    rows = 512 if is_fake() else 4096  # where nothing is launched, a CPU multiplies
    shapes = ((rows, 512), (2048, 512), (2048,))
    made = (_normal(*s, dtype=torch.bfloat16, seed=seed + i, scale=0.05) for i, s in enumerate(shapes))
    x, w, b = (tensor.requires_grad_() for tensor in made)

    def step() -> list[Tensor]:
        y = fl.dense_bias_act(x, w, b, "gelu")
        return [y.detach().clone(), *torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]

    return step, [x, w, b]


def _the_same(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for one, right in zip(got, expected, strict=True):
        _expect_equal(one, right, what)


def _in_a_graph() -> Findings:
    step, tensors = _step()
    expected = step()
    if is_fake():
        return {}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    _the_same(captured, expected, "replayed")
    with torch.no_grad():
        tensors[0].mul_(0.5)
    graph.replay()
    _the_same(captured, step(), "replayed on other numbers")
    return {}


def _on_a_stream() -> Findings:
    step, _ = _step()
    expected = step()
    if is_fake():
        return {}
    stream = torch.cuda.Stream()
    for _ in range(20):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = step()
        torch.cuda.current_stream().wait_stream(stream)
        _the_same(got, expected, "on a side stream")
    return {}


def _on_threads() -> Findings:
    errors: list[str] = []

    def work(seed: int) -> None:
        try:
            step, _ = _step(seed)
            expected = step()
            for _ in range(1 if is_fake() else 20):
                _the_same(step(), expected, f"on thread {seed}")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise Wrong("; ".join(errors))
    return {}


def _out_of_memory() -> Findings:
    step, _ = _step()
    expected = step()
    if is_fake():
        return {}
    z = torch.zeros(1 << 28, dtype=torch.bfloat16, device="cuda").requires_grad_()
    held = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            held.append(torch.empty(256 << 20, dtype=torch.int8, device="cuda"))
    try:
        fl.bias_act(z, None, "gelu")
    except torch.OutOfMemoryError:
        held.clear()
        torch.cuda.empty_cache()
        _the_same(step(), expected, "after memory had run out")
        return {}
    raise Wrong("512 MiB were found where less than 256 were free")


#: Name -> its cases.
ITEMS: dict[str, Callable[[], Iterator[Case]]] = {
    "environment": _environment,
    "kernels": _kernels,
    "sanitizer": _sanitizer,
    "host": _host,
    "contexts": _contexts,
}
