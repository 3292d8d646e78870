"""What a result was measured on: names for people, and a slug for the folder."""

import ctypes
import datetime
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

# Memory size, socket and marketing words say nothing that tells results apart.
_NOISE = re.compile(r"(?i)\(R\)|\(TM\)|@.*|\b(\d+GB|\d+-Core|HBM\w*|SXM\w*|PCIe|NVL|CPU|Processor|Graphics)\b")


def device_name(device: torch.device) -> str:
    """The maker's name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return models[0].strip() if models else platform.processor() or platform.machine()


def slug(device: torch.device, threads: int) -> str:
    """A folder name: ``nvidia-h100``, ``amd-epyc-avx2-4-threads``."""
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", device_name(device).replace("-SXM", " SXM")).lower())
    if device.type == "cpu":
        words += [_instructions(), str(threads), "threads"]
    return "-".join(words)


def _instructions() -> str:
    """The vector instructions that PyTorch uses here: processors of one name differ in them, and results with them."""
    return torch.backends.cpu.get_cpu_capability().lower()


@functools.cache
def keep_freed_memory() -> bool:
    """Have glibc keep what is freed; whether it does.

    By itself it gives large blocks back to the system, or keeps them, by a threshold that moves with what was freed
    last. Blocks that are taken anew are zeroed page by page, and the time of the same eager layer swings by 1.9."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; other systems
        return False
    trim_threshold, mmap_max = -1, -4  # as malloc.h numbers them
    return bool(mallopt(trim_threshold, (1 << 31) - 1) and mallopt(mmap_max, 0))


def warn_if_busy(description: dict[str, Any]) -> None:
    """Say so when others compute here: with one of four cores taken, eager gelu of 16 numbers takes 8 ms, not 13 us."""
    load = description["load_average"]
    if description["device"]["kind"] == "cpu" and load is not None and load > 0.5:
        print(f"warning: the load average is {load}; other processes make CPU times here meaningless, small ones most")


def describe(device: torch.device) -> dict[str, Any]:
    """Device, versions and date, as they stand at the head of a result file."""
    has_triton = importlib.util.find_spec("triton") is not None
    threads = torch.get_num_threads()
    name = device_name(device) if device.type == "cuda" else f"{device_name(device)} ({_instructions().upper()})"
    return {
        "device": {"kind": device.type, "name": name, "slug": slug(device, threads)},
        "threads": threads,
        # Processes that wanted to run in the last minute; on an idle machine, started from there, about 0.
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "keeps_freed_memory": keep_freed_memory(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton") if has_triton else None,
            "cuda": torch.version.cuda if device.type == "cuda" else None,
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
