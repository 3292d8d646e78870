"""The command line: what it accepts, what it refuses, and how it says so."""

import pkgutil
import subprocess
import sys
import tomllib

import pytest
import torch
from settings import ROOT

import fusedlayers as fl
from fusedlayers.__main__ import main
from fusedlayers.demo import command as demo


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, error = capsys.readouterr()
    assert not out and "demo" in error and error.startswith("usage: fusedlayers [-h]")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fusedlayers {fl.__version__}\n"


def test_python_m_runs_the_same_command_and_imports_nothing_heavy() -> None:
    done = python("-W", "error", "-X", "importtime", "-m", "fusedlayers", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: fusedlayers ")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "torch" in imported  # or the line above reads the wrong column
    assert "matplotlib" not in imported


def test_the_console_script_is_main_and_the_extras_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["fusedlayers"]) is main
    assert any(need.startswith("matplotlib") for need in project["optional-dependencies"]["demo"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["paint"], ["paint", "demo"]),
        (["demo", "--device", "tpu"], ["tpu", "cuda"]),
        (["demo", "--steps", "0"], ["--steps", "whole number from 1", "'0'"]),
        (["demo", "--batch", "many"], ["--batch", "'many'"]),
        (["demo", "--stps", "3"], ["unrecognized arguments: --stps 3"]),
    ],
)
def test_wrong_usage_is_refused_with_a_reason(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    reason = output.err.splitlines()[-1]
    assert all(part in reason for part in expected), reason


def raising(error: BaseException) -> object:
    def function(*args: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "smaller --batch than 3"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_run_that_fails_says_why(
    error: BaseException, code: int, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "compare", raising(error))
    assert main(["demo", "--batch", "3"]) == code
    assert expected in capsys.readouterr().err.splitlines()[-1]
