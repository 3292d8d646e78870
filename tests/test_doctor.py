"""`fusedlayers doctor`: it says what the library itself says, and nothing that is broken breaks it."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusedlayers as fl
from fusedlayers import doctor, kernels
from fusedlayers.__main__ import main
from fusedlayers.kernels.cpu import build


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None of whoever runs the tests."""
    for name in (kernels.VARIABLE, build.VARIABLE, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    kernels._for_gpus.cache_clear()
    yield
    kernels._for_gpus.cache_clear()


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not looked for the loops."""
    build._find.cache_clear()
    yield
    monkeypatch.undo()
    build._find.cache_clear()


def told(name: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What is said of one thing, where the exit code is this."""
    assert main(["doctor"]) == code
    out, _ = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith(f"{name}  "))
    return line.removeprefix(name).strip()


def test_what_works_is_said_once_and_the_exit_code_is_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if build.missing_because() is not None:
        pytest.skip(str(build.missing_because()))
    monkeypatch.setenv(kernels.VARIABLE, "off")
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "BROKEN" not in out and out.endswith("\n\nNothing is broken.\n")
    for words in (fl.__version__, torch.__version__, build.shared_object()._name, "'off'"):  # type: ignore[union-attr]
        assert words in out


# --- CPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unbuilt")
def test_a_compiler_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert "there is no C compiler" in told("compiled loops", capsys, 1)
    assert told("compiled loops", capsys).startswith(f"none: {build.missing_because()}; GELU, SiLU, Mish")
    assert told("C compiler", capsys) == "none"
    assert "off by" in told("self-test on cpu", capsys)


@pytest.mark.usefixtures("unbuilt")
def test_loops_that_are_switched_off_are_not_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(build.VARIABLE, "off")
    assert told("compiled loops", capsys).startswith(f"none: {build.VARIABLE} switches the compiled loops off")
    assert told(build.VARIABLE, capsys) == "'off'"


@pytest.mark.usefixtures("unbuilt")
def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho cannot find -lgomp >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "cannot find -lgomp" in told("compiled loops", capsys, 1)


def test_wrong_arithmetic_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gradient = kernels.cpu.gradient
    monkeypatch.setattr(kernels.cpu, "gradient", lambda *a, **k: (gradient(*a, **k)[0] + 0.1, None))  # type: ignore[operator]
    assert "is off by 1e-01; 1e-03 is allowed" in told("self-test on cpu", capsys, 1)


# --- GPUs, whose place a CPU takes ------------------------------------------------------------------------------------


def test_triton_that_does_not_run_is_broken_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "no_triton_because", lambda: "Triton is not installed")
    assert told("Triton's kernels", capsys) == "none: Triton is not installed"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "one")
    cpu = torch.device("cpu")
    monkeypatch.setattr(doctor, "_self_test", lambda device, test=doctor._self_test: test(cpu))
    assert told("Triton's kernels", capsys, 1).endswith("PyTorch computes in its place: Triton is not installed")
    monkeypatch.setenv(kernels.VARIABLE, "off")
    assert told("Triton's kernels", capsys) == f"switched off by {kernels.VARIABLE}"
    assert told("cuda:0", capsys) == "one" and "off by" in told("self-test on cuda:0", capsys)


def test_a_driver_that_is_too_old_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert "The NVIDIA driver on your system is too old" in told("GPUs", capsys, 1)
