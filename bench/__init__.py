"""Measurements behind the README: run ``python -m bench --help`` from the root of the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

#: Device kind -> the memory format of convolutions that is measured first and shown: torch's default on CPUs, and what
#: GPUs are fast in. Sequences have one format only.
MAIN_FORMAT = {"cpu": "contiguous", "cuda": "channels_last"}
