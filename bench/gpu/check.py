"""``python -m bench gpu-check --out DIR``: everything that needs a GPU, for whoever has one for ten minutes.

Two halves, in order of worth. The first, of five minutes, has whole models: their times, peaks and bits after ``fuse``.
The second, of nine minutes at most, has CUDA graphs, streams, threads, memory that runs out, the tests of the kernels,
and the benchmarks of small calls and of layers.

Each item is a process of its own with a time limit. What it finds is appended to ``DIR/results.jsonl`` at once, so that
whoever stops this loses only the case at hand. A case that fails, hangs or crashes is named there. At the end, and
after each item, ``DIR/summary.md`` has a line for each.

With ``--fake`` a driver that launches nothing takes the GPU's place (``fake.py``): it shows that everything runs,
and fills Triton's cache (``TRITON_CACHE_DIR``) with what the same versions of torch and Triton need on a Hopper.

The process exits with 0 if everything passed, 1 if not, 2 without a GPU.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from fusedlayers.utils import progress

from .. import ROOT
from . import items, models

#: Items of this process's own kind: name -> cases.
ITEMS: dict[str, Callable[[], Iterable[items.Case]]] = {
    "environment": items.environment,
    "times": models.times,
    "bits": models.bits,
    "contexts": models.contexts,
}
#: Items that are benchmarks.
MEASURED = ("overhead", "dense", "mlp", "conv")
_GRACE_SECONDS = 5  # from the polite signal to the one that cannot be refused
#: A case may take so long; the first of a process compiles, and starts CUDA.
CASE_SECONDS, FIRST_CASE_SECONDS = 60.0, 120.0
#: What a half consists of, in order, with the seconds of each: a half stays below nine minutes.
HALVES = {
    1: {"environment": 15, "times": 195, "bits": 90},
    2: {"contexts": 60, "tests": 130, "overhead": 70, "dense": 45, "mlp": 50, "conv": 45},
}


def kernel_tests() -> list[str]:
    """The files of tests that launch kernels on a GPU."""
    folder = "tests/kernels/triton"
    names = sorted(path.name for path in (ROOT / folder).glob("test_triton*.py"))
    return [*(f"{folder}/{name}" for name in (*names, "test_codegen.py")), "tests/activations/test_capture.py"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--half", type=int, choices=HALVES, help="only this half, for a machine that is lent twice")
    parser.add_argument("--only", action="append", metavar="ITEM", help="only this item; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="of all time limits (default: 1)")
    parser.add_argument("--fake", action="store_true", help="without a GPU, by a driver that launches nothing")
    parser.add_argument("--item", help=argparse.SUPPRESS)  # this process is one of those
    parser.add_argument("--done", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    if options.item:
        return items.run_item(options.item, ITEMS[options.item](), json.loads(options.done))
    if not (options.fake or torch.cuda.is_available()):
        print(
            "bench gpu-check: no CUDA device is available to torch "
            f"{torch.__version__}; run this on a machine with an NVIDIA GPU and a CUDA build of torch, or with --fake",
            file=sys.stderr,
        )
        return 2
    known = {name: s for half, of_half in HALVES.items() if options.half in (None, half) for name, s in of_half.items()}
    unknown = sorted(set(options.only or ()) - known.keys())
    if unknown:
        print(f"bench gpu-check: there is no item {unknown[0]!r}; there are {sorted(known)}", file=sys.stderr)
        return 2
    check = Check(options.out.resolve(), options.fake)
    todo = {name: s * options.scale for name, s in known.items() if not options.only or name in options.only}
    done = [*accumulate(todo.values(), initial=0.0)]
    on_stage = progress.shown()
    for (name, seconds), before in zip(todo.items(), done, strict=False):
        on_stage(name, before / done[-1])
        check.run(name, seconds)
    print((check.out / "summary.md").read_text(encoding="utf-8"))
    return 0 if check.passed else 1


class Check:
    """A run: its folder, and what it has found."""

    def __init__(self, out: Path, fake: bool) -> None:
        self.out, self.fake = out, fake
        self.lines: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "summary.md", "log.txt", *(f"{name}.json" for name in MEASURED)):
            (out / name).unlink(missing_ok=True)  # an old file must not pass for a result of this run

    @property
    def passed(self) -> bool:
        return all(line["state"] in ("passed", "ended") for line in self.lines)

    def run(self, name: str, seconds: float) -> None:
        print(f"{name}: at most {seconds:.0f} s ...", flush=True)
        if name in ITEMS:
            self._run_cases(name, seconds)
        else:
            self._run_command(name, seconds)
        (self.out / "summary.md").write_text(self.summary(), encoding="utf-8")

    def note(self, **line: Any) -> None:
        """Append a finding, so that it is there whatever happens next."""
        self.lines.append(line)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _run_cases(self, name: str, seconds: float) -> None:
        """The cases of an item, in a process that is started again after a case that hangs or crashes."""
        end = time.monotonic() + seconds
        done: list[str] = []
        while True:
            command = [sys.executable, "-m", "bench", "gpu-check", "--out", str(self.out)]
            command += ["--item", name, "--done", json.dumps(done)]
            begun: str | None = None
            with _process(command, self._environment(), self.out / "log.txt", subprocess.PIPE) as process:
                for line in _lines(process, end):
                    begun = line["case"] if line["state"] == "begins" else None
                    if begun is None:
                        done.append(line["case"])
                        self.note(**line)
            if time.monotonic() >= end:
                self.note(item=name, state="cut", error="the item's time is up", case=begun or "")
                return
            if process.returncode in (0, 1):
                return
            if begun is None:
                self.note(item=name, state="crashed", error=f"exit code {process.returncode}; see log.txt")
                return
            how = "hung" if process.returncode == -signal.SIGKILL else f"crashed, exit code {process.returncode}"
            self.note(item=name, state="crashed", error=how, case=begun)
            done.append(begun)

    def _run_command(self, name: str, seconds: float) -> None:
        start = time.monotonic()
        with _process(self._command(name, seconds), self._environment(), self.out / "log.txt", None) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # A benchmark stops by itself at its budget; some seconds more are for the case at hand.
                process.wait(seconds + (0 if name == "tests" else 15))
            was_stopped = process.poll() is None
            if was_stopped:
                process.send_signal(signal.SIGINT)  # pytest then still says what it has seen
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
        state = "cut" if was_stopped else "ended" if process.returncode == 0 else "failed"
        line = {"item": name, "state": state, "seconds": round(time.monotonic() - start, 1)}
        self.note(**line, exit_code=process.returncode)

    def _command(self, name: str, seconds: float) -> list[str]:
        if name == "tests":
            processes = max(2, min(12, (os.cpu_count() or 2) - 4))
            parallel = ["-n", str(processes)] if importlib.util.find_spec("xdist") else []
            collect, files = (["--collect-only"], kernel_tests()[:1]) if self.fake else ([], kernel_tests())
            # Not the options of pyproject.toml, some of which are plug-ins'; nor a plug-in that warns of processes.
            plain = ["-o", "addopts=", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]
            return [sys.executable, "-m", "pytest", *plain, *parallel, *collect, *files]
        device = ["--device", "cpu" if self.fake else "cuda"]
        command = [sys.executable, "-m", "bench", name, *device, "--out", str(self.out)]
        return [*command, "--budget", str(round(10 if self.fake else seconds))]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # with it cuBLAS can be deterministic
        return environment | {items.GPU: "fake" if self.fake else "real"}

    def summary(self) -> str:
        """What came of it, on one page: each item, and everything that did not pass."""
        lines = ["# gpu-check" + (" on the fake driver: nothing was launched" if self.fake else ""), ""]
        versions = next((line for line in self.lines if line.get("case") == "versions"), {})
        if "versions" in versions:
            found = ", ".join(f"{name} {version}" for name, version in versions["versions"].items() if version)
            lines += [f"{versions['device']['name']}: {found}", ""]
        for name in dict.fromkeys(line["item"] for line in self.lines):
            of_item = [line for line in self.lines if line["item"] == name]
            count = sum(line["state"] in ("passed", "ended") for line in of_item)
            lines.append(f"- {name}: {count} of {len(of_item)} passed")
        bad = [line for line in self.lines if line["state"] not in ("passed", "ended")]
        lines += ["", "## What did not pass", ""] if bad else []
        lines += [f"- {line['item']} {line.get('case', '')}: {line['state']}: {line.get('error', '')}" for line in bad]
        log = self.out / "log.txt"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:] if log.exists() else []
        return "\n".join([*lines, "", "## The log's end", "", "```", *tail, "```", ""])


@contextlib.contextmanager
def _process(
    command: Sequence[str], environment: dict[str, str], log: Path, stdout: int | None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in the repository's root whose words go to ``log``; at the end it is killed, with its children."""
    with log.open("ab") as output:
        # A session of its own: so signals reach the compiler's and pytest's worker processes too.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stdout or output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(process: "subprocess.Popen[bytes]", end: float) -> Iterator[dict[str, Any]]:
    """What a process prints, until it ends, says nothing for too long, or the time is up."""
    found: queue.Queue[dict[str, Any] | None] = queue.Queue()
    stdout = process.stdout
    assert stdout is not None

    def read() -> None:
        with stdout:
            for line in stdout:
                with contextlib.suppress(ValueError):  # a library's own words
                    found.put(json.loads(line))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    patience = FIRST_CASE_SECONDS
    while True:
        try:
            line = found.get(timeout=max(0.0, min(patience, end - time.monotonic())))
        except queue.Empty:
            return  # and is killed
        if line is None:
            process.wait()
            return
        patience = CASE_SECONDS if line["state"] != "begins" else patience
        yield line
