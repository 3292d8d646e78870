"""Measurements behind the README: run ``python -m bench --help`` from the root of the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
