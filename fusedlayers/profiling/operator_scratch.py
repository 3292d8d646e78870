"""Scratch memory: what an operator allocates while it runs, and frees before it returns.

A depthwise convolution on a CPU takes several times its output. Only the allocators see it. On a CPU a profiler records
their events, and every operator is marked in the profile; CUDA keeps a peak, which is reset before every operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import RecordFunction
from ..memory import cpu_events, is_cpu_allocation


class CpuScratch:
    """Scratch bytes of each operator, in the order of calls; available after ``during``."""

    _MARK = "fusedlayers operator"

    def __init__(self, device: torch.device) -> None:
        self.bytes: list[int] = []

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with RecordFunction(self._MARK):
            return operator(*args, **kwargs)

    def during(self, function: Callable[[], None]) -> None:
        live = peak = end = 0
        is_inside = False
        for event in cpu_events(function):
            if is_inside and event.start_ns() > end:
                self.bytes.append(peak - live)
                is_inside = False
            if event.name() == self._MARK:
                is_inside, end, peak = True, event.start_ns() + event.duration_ns(), live
            elif is_cpu_allocation(event):
                live += event.nbytes()
                peak = max(peak, live)
        if is_inside:
            self.bytes.append(peak - live)


class CudaScratch:
    """The same on a GPU, available at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: list[int] = []

    def call(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            return operator(*args, **kwargs)
        finally:
            most, left = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
            self.bytes.append(most - left)

    def during(self, function: Callable[[], None]) -> None:
        function()
