"""``python -m bench gpu-check --out DIR``: everything that needs a GPU, in one go, for whoever has one for ten minutes.

Runs the test suite and the matmul, dense, mlp, pointwise, custom, conv and norm grids, each in a process of its own
with a time limit, so that a hanging kernel or a crash of one takes nothing from the others; what a part had written by
then stays. DIR gets tests.log, bench.log, summary.md, dense.png, mlp.png, and a JSON file of each grid.

The process exits with 0 if all tests passed and the grids ran and met their targets, 1 if not, 2 without a GPU.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import ROOT, conv, custom, dense, layers, machine, matmul, mlp, norm, pointwise

#: Seconds for each part; with starting up and the summary they stay below nine minutes.
TEST_SECONDS = 140
#: The matmuls first: what they compile the others find.
GRID_SECONDS = {"matmul": 50, "dense": 40, "mlp": 55, "pointwise": 20, "custom": 15, "conv": 20, "norm": 15}
SUBJECTS = {
    "matmul": matmul,
    "dense": dense,
    "mlp": mlp,
    "pointwise": pointwise,
    "custom": custom,
    "conv": conv,
    "norm": norm,
}
_GRACE_SECONDS = 10  # from the polite signal to the one that cannot be refused


@dataclass(frozen=True)
class Part:
    """How one process ended."""

    name: str
    seconds: float
    exit_code: int | None  # None: stopped at its limit

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def __str__(self) -> str:
        end = "stopped at its time limit" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{self.name}: {end}, {self.seconds:.0f} s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything (default: 9)")
    parser.add_argument("pytest_args", nargs="*", help="behind --: arguments for pytest, e.g. -- -k dense")


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print(
            "bench gpu-check: no CUDA device is available to torch "
            f"{torch.__version__}; run this on a machine with an NVIDIA GPU and a CUDA build of torch",
            file=sys.stderr,
        )
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = [f"{subject}.{kind}" for subject in SUBJECTS for kind in ("json", "png")]
    for name in ("tests.log", "bench.log", "summary.md", *results):
        (out / name).unlink(missing_ok=True)  # an old file must not pass for a result of this run
    scale = options.minutes / 9.0
    bench = [sys.executable, "-m", "bench"]
    budgets = [round(GRID_SECONDS[subject] * scale) for subject in SUBJECTS]
    grids = [
        [*bench, subject, "--device", "cuda", "--out", str(out), "--budget", str(budget)]
        for subject, budget in zip(SUBJECTS, budgets, strict=True)
    ]
    parts = [
        run_part(
            "tests", [sys.executable, *pytest_command(options.pytest_args)], out / "tests.log", TEST_SECONDS * scale
        )
    ]
    for command, budget in zip(grids, budgets, strict=True):
        # A grid stops by itself at its budget; 15 seconds more are for the case at hand.
        parts.append(run_part(command[3], command, out / "bench.log", budget + 15 * scale))
    text = summary(out, parts)
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    complete = all((out / f"{name}.json").exists() for name in SUBJECTS)
    return 0 if complete and all(part.ok for part in parts) and "MISSED" not in text else 1


def pytest_command(arguments: list[str]) -> list[str]:
    """The whole suite, on several processes where pytest-xdist is there: most of it is compiling, not computing."""
    processes = max(2, min(12, (os.cpu_count() or 2) - 4))
    parallel = ["-n", str(processes)] if importlib.util.find_spec("xdist") else []
    return ["-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *parallel, *(arguments or ["tests"])]


def run_part(name: str, command: list[str], log: Path, seconds: float) -> Part:
    """Run a command from the root of the repository, append its output to ``log``, and stop it at its limit."""
    print(f"{name}: at most {seconds:.0f} s ...", flush=True)
    start = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("a", encoding="utf-8") as output:
        # A session of its own, so that the limit reaches the compiler's and pytest's worker processes too.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        exit_code: int | None = None
        try:
            exit_code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then still says what it has seen
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        finally:
            _kill_group(process)
    part = Part(name, time.monotonic() - start, exit_code)
    print(part, flush=True)
    return part


def summary(out: Path, parts: list[Part]) -> str:
    """What came of it, on one page: how each part ended, every target met or missed, the tests' last lines."""
    device = torch.device("cuda")
    versions = machine.describe(device)["versions"]
    lines = [f"# gpu-check on {machine.device_name(device)}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    lines += [f"- {part}" for part in parts]
    for subject, module in SUBJECTS.items():
        path = out / f"{subject}.json"
        lines += ["", f"## {subject}", ""]
        if not path.exists():
            lines.append("no result; bench.log says why")
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        lines.append(f"{len(result['cases'])} cases measured, {len(result['not_run'])} not reached in time")
        lines += [f"- {line}" for line in module.acceptance(result)]
        if subject in ("dense", "mlp", "conv", "norm"):
            lines += [line for line in _slower_than_eager(result) if line not in lines]
    log = (out / "tests.log").read_text(encoding="utf-8", errors="replace").splitlines()
    lines += ["", "## tests", "", "```", *log[-15:], "```", ""]
    return "\n".join(lines)


def _slower_than_eager(result: dict[str, Any]) -> list[str]:
    """The grids' promise is "never slower"; a lower quartile above 1 is what noise does not explain."""
    lines = []
    for row, ours in layers.rows_of(result):
        if "error" in ours:
            lines.append(f"- {row['id']}: MISSED: {ours['error']}")
        for mode in ("forward", "forward_backward"):
            if row["group"] == "model" and mode in ours and ours[mode]["ratio_q1"] > 1:
                lines.append(f"- {row['id']} {mode}: {ours[mode]['ratio']:.3f}x eager: MISSED (never slower)")
    return lines


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
