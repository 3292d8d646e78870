"""``python -m bench gpu-check``, without a GPU: on the driver that launches nothing, and with kernels that hang."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import ROOT, gpu_check, gpu_items
from bench.gpu_check import Check, Item

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


def test_it_refuses_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = _start(tmp_path / "out")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "no CUDA device is available to torch" in printed
    assert not (tmp_path / "out").exists()


def test_it_refuses_unknown_items(tmp_path: Path) -> None:
    process = _start(tmp_path / "out", "--fake", "--only", "kernel")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "there is no item 'kernel'" in printed and "'kernels'" in printed


def test_it_runs_on_the_fake_driver(tmp_path: Path) -> None:
    """Some of each kind of item."""
    items = ("environment", "contexts", "pointwise", "tests")
    process = _start(tmp_path, "--fake", "--scale", "4", *(word for item in items for word in ("--only", item)))
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    lines = _lines(tmp_path)
    assert [line["case"] for line in lines if line["item"] == "environment"] == ["versions", "launch"]
    assert {line["item"] for line in lines} == set(items)
    text = (tmp_path / "summary.md").read_text()
    assert text in printed and "- contexts: 4 of 4 passed" in text and f"torch {torch.__version__}" in text
    files = {"results.jsonl", "summary.md", "log.txt", "pointwise.json"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_killed_at_any_time_it_leaves_what_it_has(tmp_path: Path) -> None:
    for name in ("results.jsonl", "dense.json"):
        (tmp_path / name).write_text("left behind by an earlier run")
    process = _start(tmp_path, "--fake", "--only", "environment", "--only", "kernels")
    try:
        end = time.monotonic() + 120
        while (tmp_path / "dense.json").exists() or len(_lines(tmp_path)) < 4:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    lines = _lines(tmp_path)
    assert len(lines) >= 4 and lines[2]["item"] == "kernels" and lines[2]["kernel"] in gpu_items.ELEMENTWISE
    assert "environment: 2 of 2 passed" in (tmp_path / "summary.md").read_text()


#: What takes the place of a process that looks at kernels: some pass, one hangs, one crashes, one is wrong.
_PROGRAM = """
import json, os, sys, time
done = json.loads(sys.argv[1])
def say(**line): print(json.dumps({"item": "kernels", **line}), flush=True)
print("some words of a library", flush=True)
for name in ("good", "hangs", "crashes", "wrong", "last"):
    if name in done:
        continue
    say(case=name, kernel=f"kernel of {name}", state="begins")
    if name == "hangs":
        time.sleep(100)
    if name == "crashes":
        os.abort()
    say(case=name, kernel=f"kernel of {name}", state="failed" if name == "wrong" else "passed")
sys.exit(1)
"""


def test_what_hangs_or_crashes_is_not_used_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = gpu_check._process
    environments: list[dict[str, str]] = []

    def process(command: Sequence[str], environment: dict[str, str], log: Path, stdout: int | None) -> Any:
        environments.append(environment)
        return started([sys.executable, "-c", _PROGRAM, command[-1]], environment, log, stdout)

    monkeypatch.setattr(gpu_check, "_process", process)
    monkeypatch.setattr(gpu_check, "CASE_SECONDS", 1.0)
    check = Check(tmp_path, fake=False, scale=1.0)
    check.run(Item("kernels", 60))
    states = {line["case"]: line["state"] for line in _lines(tmp_path)}
    assert states == {"good": "passed", "hangs": "crashed", "crashes": "crashed", "wrong": "failed", "last": "passed"}
    assert check.denied == ["kernel of hangs", "kernel of crashes", "kernel of wrong"] and not check.passed
    asked = [environment[gpu_items.DENIED] for environment in environments]
    assert asked == ["", "kernel of hangs", "kernel of hangs;kernel of crashes"]
    text = (tmp_path / "summary.md").read_text()
    assert "- kernels: 2 of 5 passed" in text and "kernels hangs: crashed: hung" in text
    assert "not used any more: kernel of hangs, kernel of crashes, kernel of wrong" in text


def test_an_item_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = gpu_check._process
    monkeypatch.setattr(
        gpu_check, "_process", lambda command, *more: started([sys.executable, "-c", _PROGRAM, command[-1]], *more)
    )
    check, start = Check(tmp_path, fake=False, scale=1.0), time.monotonic()
    check.run(Item("kernels", 2))
    assert time.monotonic() - start < 30
    (cut,) = (line for line in _lines(tmp_path) if line["state"] == "cut")
    assert cut["case"] == "hangs" and cut["kernel"] == "kernel of hangs"


def test_a_command_is_stopped_with_its_children_and_keeps_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    check = Check(tmp_path, fake=False, scale=1.0)
    monkeypatch.setattr(check, "_command", lambda name, seconds: [sys.executable, "-c", program])
    start = time.monotonic()
    check.run(Item("tests", 2))
    assert time.monotonic() - start < 30
    assert [line["state"] for line in _lines(tmp_path)] == ["cut"] and not check.passed
    state = Path(f"/proc/{(tmp_path / 'log.txt').read_text().split()[1]}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # a zombie nobody has waited for is dead enough
        assert time.monotonic() - start < 60, "the child outlived its parent"
        time.sleep(0.05)


def test_denied_kernels_are_not_used() -> None:
    program = (
        "import torch\n"
        "from bench import gpu_items\n"
        "gpu_items.prepare()\n"
        "from fusedlayers import backends\n"
        "print(backends.choose(torch.zeros(2)).__name__)\n"
    )

    def found(denied: str) -> str:
        environment = {**os.environ, gpu_items.FAKE: "1", gpu_items.DENIED: denied}
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert found("") == "fusedlayers.backends.triton"
    assert found("gate") == "fusedlayers.backends.torch"


def test_it_says_where_the_library_is_slower() -> None:
    row = {"id": "model/a", "group": "model", "variants": {"fusedlayers": {"forward": {"ratio": 1.2, "ratio_q1": 1.1}}}}
    failed = {"id": "model/b", "group": "model", "variants": {"fusedlayers": {"error": "RuntimeError: no"}}}
    assert list(gpu_check.slower_than_eager({"cases": [row, failed]})) == [
        "- model/a forward: 1.200x eager: MISSED (never slower)",
        "- model/b: MISSED: RuntimeError: no",
    ]


def test_each_half_fits_into_nine_minutes() -> None:
    for items in gpu_check.HALVES.values():
        grids = sum(item.name in gpu_check.GRIDS for item in items)
        stops = gpu_check._GRACE_SECONDS * sum(item.name not in {*gpu_items.ITEMS, "fuse"} for item in items)
        assert sum(item.seconds for item in items) + 15 * grids + stops <= 9 * 60
    first = [item for item in gpu_check.HALVES[1] if item.name in ("environment", "kernels")]
    assert sum(item.seconds for item in first) <= 2 * 60
    known = {*gpu_items.ITEMS, *gpu_check.GRIDS, "fuse", "tests"}
    assert {item.name for items in gpu_check.HALVES.values() for item in items} == known
    assert all((ROOT / f"tests/test_{name}.py").exists() for name in gpu_check.KERNEL_TESTS)


def _wrong() -> Iterator[gpu_items.Case]:
    def raise_it() -> dict[str, Any]:
        raise gpu_items.Wrong("all of it")

    yield gpu_items.Case("right", dict, "a kernel")
    yield gpu_items.Case("wrong", raise_it, "another")


def test_cases_say_what_came_of_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(gpu_items.FAKE, "1")
    monkeypatch.setitem(gpu_items.ITEMS, "mine", _wrong)
    assert gpu_items.run_item("mine", []) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["case"], line["state"]) for line in lines] == [
        ("right", "begins"),
        ("right", "passed"),
        ("wrong", "begins"),
        ("wrong", "failed"),
    ]
    assert lines[3]["error"] == "Wrong: all of it" and lines[3]["kernel"] == "another"
    assert gpu_items.run_item("mine", ["wrong"]) == 0
    right, torchs = torch.ones(8, dtype=torch.float64), torch.ones(8)
    monkeypatch.delenv(gpu_items.FAKE)
    assert gpu_items._compare(torchs, torchs, right, floor=0.0) == {"error": 0.0, "torchs_error": 0.0}
    with pytest.raises(gpu_items.Wrong, match="errs by"):
        gpu_items._compare(torchs * 1.01, torchs, right, floor=1e-3)
    with pytest.raises(gpu_items.Wrong, match="2 of 8 numbers differ"):
        gpu_items._expect_equal(torch.tensor([1.0] * 6 + [2.0, torch.nan]), torchs, "repeat 1")


def test_the_hosts_part_is_measured_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "overhead", "--fake-gpu", "--quick", "--only", "dense/gelu"]
    process = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    (row,) = json.loads((tmp_path / "host.json").read_text())["cases"]
    assert row["group"] == "host" and row["variants"]["fusedlayers"]["forward_backward"]["ratio"] > 0
