"""``python -m bench gpu-check``, without a GPU: on the driver that launches nothing, and with kernels that hang."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import ROOT
from bench.__main__ import main
from bench.gpu import check as gpu_check
from bench.gpu import items as gpu_items
from bench.gpu.check import Check

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def where_nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def _start(out: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench", "gpu-check", "--out", str(out), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["gpu-check", "--out", str(tmp_path / "out")]
    assert main(command) == 2 and "no CUDA device is available to torch" in capsys.readouterr().err
    assert main([*command, "--fake", "--only", "context"]) == 2
    said = capsys.readouterr().err
    assert "there is no item 'context'" in said and "'contexts'" in said and not (tmp_path / "out").exists()


def test_it_runs_on_the_fake_driver(tmp_path: Path) -> None:
    """Some of each kind of item."""
    items = ("environment", "contexts", "dense", "tests")
    process = _start(tmp_path, "--fake", "--scale", "4", *(word for item in items for word in ("--only", item)))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    lines = _lines(tmp_path)
    assert [line["case"] for line in lines if line["item"] == "environment"] == ["versions"]
    assert {line["item"] for line in lines} == set(items)
    text = (tmp_path / "summary.md").read_text()
    assert text in printed and "- contexts: 7 of 7 passed" in text and f"torch {torch.__version__}" in text
    files = {"results.jsonl", "summary.md", "log.txt", "dense.json"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_killed_at_any_time_it_leaves_what_it_has(tmp_path: Path) -> None:
    for name in ("results.jsonl", "dense.json"):
        (tmp_path / name).write_text("left behind by an earlier run")
    process = _start(tmp_path, "--fake", "--only", "environment", "--only", "contexts")
    try:
        end = time.monotonic() + 120
        while (tmp_path / "dense.json").exists() or len(_lines(tmp_path)) < 3:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    lines = _lines(tmp_path)
    assert [line["item"] for line in lines[:3]] == ["environment", "contexts", "contexts"]
    assert "environment: 1 of 1 passed" in (tmp_path / "summary.md").read_text()


#: What takes the place of a process of an item: some pass, one hangs, one crashes, one is wrong.
_PROGRAM = """
import json, os, sys, time
done = json.loads(sys.argv[1])
def say(**line): print(json.dumps({"item": "contexts", **line}), flush=True)
print("some words of a library", flush=True)
for name in ("good", "hangs", "crashes", "wrong", "last"):
    if name in done:
        continue
    say(case=name, state="begins")
    if name == "hangs":
        time.sleep(100)
    if name == "crashes":
        os.abort()
    say(case=name, state="failed" if name == "wrong" else "passed")
sys.exit(1)
"""


def test_what_hangs_or_crashes_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = gpu_check._process
    environments: list[dict[str, str]] = []

    def process(command: Sequence[str], environment: dict[str, str], log: Path, stdout: int | None) -> Any:
        environments.append(environment)
        return started([sys.executable, "-c", _PROGRAM, command[-1]], environment, log, stdout)

    monkeypatch.setattr(gpu_check, "_process", process)
    monkeypatch.setattr(gpu_check, "CASE_SECONDS", 1.0)
    check = Check(tmp_path, fake=False)
    check.run("contexts", 60)
    states = {line["case"]: line["state"] for line in _lines(tmp_path)}
    assert states == {"good": "passed", "hangs": "crashed", "crashes": "crashed", "wrong": "failed", "last": "passed"}
    assert not check.passed and [environment[gpu_items.GPU] for environment in environments] == ["real"] * 3
    text = (tmp_path / "summary.md").read_text()
    assert "- contexts: 2 of 5 passed" in text and "contexts hangs: crashed: hung" in text


def test_a_command_is_stopped_with_its_children_and_keeps_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    check = Check(tmp_path, fake=False)
    monkeypatch.setattr(check, "_command", lambda name, seconds: [sys.executable, "-c", program])
    start = time.monotonic()
    check.run("tests", 2)
    assert time.monotonic() - start < 30
    assert [line["state"] for line in _lines(tmp_path)] == ["cut"] and not check.passed
    state = Path(f"/proc/{(tmp_path / 'log.txt').read_text().split()[1]}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # a zombie nobody has waited for is dead enough
        assert time.monotonic() - start < 60, "the child outlived its parent"
        time.sleep(0.05)


def test_what_it_runs_exists() -> None:
    known = {*gpu_check.ITEMS, *gpu_check.MEASURED, "tests"}
    assert {name for items in gpu_check.HALVES.values() for name in items} == known
    files = gpu_check.kernel_tests()
    assert len(files) > 3 and all((ROOT / file).exists() for file in files)
