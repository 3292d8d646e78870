"""Measuring: several ways to compute the same side by side in one run, on the CPU or on a CUDA device.

A machine drifts (clocks, neighbours, temperature), so functions that are compared take turns: in every round each runs
once, and the order rotates from round to round. A ratio is the median over rounds of (time / baseline's time in that
round), which a drift slower than a round leaves alone.
"""

import gc
import itertools
import math
import statistics
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedlayers.memory import peak_bytes, saved_bytes

from . import machine

Times = dict[str, list[float]]  # name -> microseconds of one call, a value per round

_NUMBERS = itertools.count()
_SAMPLE_SECONDS = 5e-4  # a CPU sample lasts at least this long, so that the clock's own 0.1 us does not matter
_FLUSH_BYTES = 256 << 20  # above every GPU's L2


@dataclass(frozen=True)
class Setting:
    """Where and how long a case is measured; ``quick``: in two rounds, to see that it works."""

    device: torch.device
    seconds: float = 0.0
    quick: bool = True


@dataclass(frozen=True)
class Variant:
    """One way to compute what a case is about.

    Attributes:
        modes: what is timed, by name.
        results: what is compared with the baseline's results before anything is timed; None: nothing.
        forward: its saved bytes are counted, without those of ``own``.
        step: its peak is measured.
    """

    modes: Mapping[str, Callable[[], Any]]
    results: Callable[[], Sequence[Tensor]] | None = None
    forward: Callable[[], Any] | None = None
    own: Any = ()
    step: Callable[[], Any] | None = None


def compare(
    makers: Mapping[str, Callable[[], Variant]], setting: Setting, *, allowed: float = 0.0, **timing: Any
) -> dict[str, dict[str, Any]]:
    """The rows of variants, by name: times, saved bytes and peaks. The first variant is the baseline.

    The row of a variant that raises, or whose results differ by more than ``allowed`` of their norm, is the error: a
    finding too, and no reason to lose the others. ``timing`` is for ``interleave``.
    """
    baseline = next(iter(makers))
    rows: dict[str, dict[str, Any]] = {}
    variants: dict[str, Variant] = {}
    expected: Sequence[Tensor] = ()
    for name, make in makers.items():
        try:
            variant = make()
            if variant.results is not None:
                found = variant.results()
                expected = found if name == baseline else expected
                expect_same(found, expected, allowed)
        except Exception as error:
            if name == baseline:
                raise
            rows[name] = failed(error)
        else:
            variants[name], rows[name] = variant, {}
    expected = found = ()  # so that nothing is held while others are measured
    modes = variants[baseline].modes
    if setting.quick:
        timing["min_rounds"] = 2
    for mode in modes:
        functions = {name: variant.modes[mode] for name, variant in variants.items()}
        times = interleave(functions, setting.device, seconds=setting.seconds / len(modes), **timing)
        for name, values in times.items():
            rows[name][mode] = summary(values, times[baseline])
    for name, variant in variants.items():
        if variant.forward is not None:
            rows[name]["saved_bytes"] = saved_bytes(variant.forward, exclude=variant.own)
        if variant.step is not None:
            rows[name]["peak_bytes"] = peak_bytes(variant.step, device=setting.device)
    return rows


def failed(error: Exception) -> dict[str, str]:
    """The row of a variant that raised an error."""
    if isinstance(error, ModuleNotFoundError):
        return {"skipped": f"{error.name} is not installed"}
    first_line, *_ = str(error).strip().splitlines() or ["no message"]
    return {"error": f"{type(error).__name__}: {first_line[:300]}"}


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    seconds: float,
    min_rounds: int = 5,
    max_rounds: int = 200,
    warm_up: int = 3,
    host: bool = False,
) -> Times:
    """Time ``functions`` in turns for about ``seconds``, after at least ``warm_up`` calls of each.

    On CUDA the time is the device's, between two events, with a cold L2 cache; the device is kept busy until the host
    has queued the call, as in a network with enough to do. With ``host`` it is the wall clock's on either device, over
    many calls in a row: what a call costs whoever makes it.
    """
    machine.keep_freed_memory()
    estimates = {name: _warm_up(function, device, warm_up) for name, function in functions.items()}
    use_events = device.type == "cuda" and not host
    calls = 1 if use_events else max(1, round(_SAMPLE_SECONDS * (10 if host else 1) / min(estimates.values())))
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if use_events else None
    fills = {name: _fills(function, flush) if flush is not None else 0 for name, function in functions.items()}
    rounds = int(seconds / (calls * sum(estimates.values()) * (2 if use_events else 1)))
    rounds = max(min_rounds, min(max_rounds, rounds))

    times: Times = {name: [] for name in functions}
    names = list(functions)
    gc.collect()
    gc.disable()  # a collection in the middle of a sample would be charged to whoever is being timed
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                function = functions[name]
                if flush is None:
                    times[name].append(_clock_sample(function, calls, device))
                else:
                    times[name].append(_event_sample(function, flush, fills[name]))
    finally:
        gc.enable()
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def summary(values: list[float], baseline: list[float]) -> dict[str, Any]:
    """What a result file says about the times of one variant, beside the baseline's."""
    times = {f"{key}_us": round(value, 3) for key, value in spread(values).items()}
    ratio = spread([value / base for value, base in zip(values, baseline, strict=True)])
    over = spread([value - base for value, base in zip(values, baseline, strict=True)])
    return {
        **times,
        "ratio": round(ratio["median"], 4),
        "ratio_q1": round(ratio["q1"], 4),
        "ratio_q3": round(ratio["q3"], 4),
        "over_eager_us": round(over["median"], 3),
        "rounds": len(values),
    }


def expect_same(got: Iterable[Tensor], expected: Iterable[Tensor], allowed: float) -> None:
    """Refuse to time what does not compute the same as eager: no test of accuracy."""
    for value, right in zip(got, expected, strict=True):
        error = float((value - right).float().norm() / right.float().norm().clamp_min(1e-30))
        if not error <= allowed:
            raise ArithmeticError(f"differs from eager by {error:.1e} of the norm, where {allowed} is allowed")


class Above(torch.autograd.Function):
    """What is above a layer in a network: it reads the output, keeps nothing of its own, and sends a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor) -> Tensor:
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.dy, None


def step(forward: Callable[[], Tensor], dy: Tensor, leaves: Iterable[Tensor]) -> None:
    """A forward and a backward pass, as in a network nobody holds the output; leaves have no gradients afterwards."""
    Above.apply(forward(), dy).backward()
    for leaf in leaves:
        leaf.grad = None


def _warm_up(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Run until caches, allocator and clocks have settled, and return the seconds of one call."""
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < calls or (time.perf_counter() - start < 0.02 and len(seconds) < 1000):
        seconds.append(_clock_sample(function, 1, device) * 1e-6)
    return max(statistics.median(seconds), 1e-7)


def _clock_sample(function: Callable[[], Any], calls: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    _synchronize(device)
    return (time.perf_counter_ns() - start) / calls * 1e-3


def _fills(function: Callable[[], Any], flush: Tensor) -> int:
    """How often to fill a tensor before a call, so that the device is at it until the host has queued the call."""
    host: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        function()
        host.append((time.perf_counter_ns() - start) * 1e-3)
    fill_us = min(_event_sample(flush.zero_, flush, 1) for _ in range(3))
    return 1 + math.ceil(1.5 * statistics.median(host) / fill_us)


def _event_sample(function: Callable[[], Any], flush: Tensor, fills: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(fills):
        flush.zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    time_us: float = start.elapsed_time(end) * 1e3
    return time_us


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compiled(module: Callable[..., Any], part: float = 1.0, **options: Any) -> Callable[..., Any]:
    """``torch.compile`` of a module, by code that no other has; ``part``: the budget, which it asks for at each call.

    The compiler keeps what it has compiled by code objects, and what it guards does not tell copies of a module apart
    that share their parameters: of several variants all would run what was compiled last.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    name = f"forward_{next(_NUMBERS)}"
    code = forward.__code__.replace(co_name=name, co_qualname=name)
    own = types.FunctionType(code, forward.__globals__, name, None, forward.__closure__)
    call = torch.compile(own, dynamic=False, **options)
    return call if part == 1.0 else torch._functorch.config.patch(activation_memory_budget=part)(call)
