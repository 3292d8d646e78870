"""`fusedlayers doctor`: it says what the library itself says, and nothing that is broken breaks it."""

import importlib.metadata
import importlib.util
import json
import sys
import tomllib
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers import backends, cli, doctor
from fusedlayers.backends import gpu_settings
from fusedlayers.backends.cpu import build, onednn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of whoever runs the tests."""
    for name in (*doctor.VARIABLES, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_settings._State, "kernels", None)
    monkeypatch.setattr(doctor, "_devices", list)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not looked for the loops."""
    build._find.cache_clear()
    yield
    monkeypatch.undo()
    build._find.cache_clear()


def asked(section: str, name: str) -> doctor.Finding:
    return doctor._answered(section, name, dict(doctor.SECTIONS[section]())[name])


def text_of(section: str, name: str) -> str:
    """Of a finding without problems."""
    finding = asked(section, name)
    assert finding.problems == ()
    return finding.text


def problem_of(section: str, name: str) -> str:
    (problem,) = asked(section, name).problems
    return problem


def test_what_works_is_said_once_and_the_exit_code_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    if build.missing_because() is not None:
        pytest.skip(str(build.missing_because()))
    assert cli.main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "!!" not in out and out.endswith("\n\nNothing is broken.\n")
    lines = out.splitlines()
    assert [line for line in lines if line and line[0] != " "][:4] == ["versions", "CPU", "GPU", "settings"]
    for words in (fl.__version__, torch.__version__, build.shared_object()._name, "not set"):  # type: ignore[union-attr]
        assert words in out


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_TUNE", "tuned.json")
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_ok"] is False
    (finding,) = (finding for finding in report["findings"] if finding["problems"])
    assert finding == {
        "section": "settings",
        "name": "FUSEDLAYERS_TUNE",
        "text": "broken",
        "problems": [f"ValueError: nobody reads FUSEDLAYERS_TUNE; there are {', '.join(doctor.VARIABLES)}"],
    }
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "!!  ValueError: nobody reads FUSEDLAYERS_TUNE" in out and out.endswith("\n\nBroken: 1, marked with !!\n")


def test_all_that_can_be_installed_is_named() -> None:
    project = tomllib.loads(Path(__file__).parent.with_name("pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    names = {finding.name for finding in doctor.findings() if finding.section == "versions"}
    assert all(any(need.startswith(name) for name in names) for need in needed)


def test_what_is_not_installed_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in ("rich", "einops"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    rich = ModuleType("rich")  # of a distribution with another name
    rich.__spec__, rich.__version__ = ModuleSpec("rich", None), "14.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rich", rich)
    assert text_of("versions", "rich") == "14.9"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert text_of("versions", "rich") == "not installed; for the demo and bars of progress"
    assert "einops" in problem_of("versions", "einops")  # which must be there


# --- CPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unbuilt")
def test_a_compiler_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "there is no C compiler" in problem_of("CPU", "compiled loops")
    assert text_of("CPU", "compiled loops").startswith(f"none: {build.missing_because()}; GELU, SiLU, Mish")
    assert text_of("CPU", "C compiler") == "none; CC, cc, gcc and clang were looked for"
    assert "off by" in text_of("CPU", "arithmetic")


@pytest.mark.usefixtures("unbuilt")
def test_loops_that_are_switched_off_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "off")
    assert text_of("CPU", "compiled loops").startswith(f"none: {build.VARIABLE} switches the compiled loops off")
    assert text_of("settings", f"{build.VARIABLE}") == "'off': loops are off"


@pytest.mark.usefixtures("unbuilt")
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho cannot find -lgomp >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none gets out
        assert "cannot find -lgomp" in problem_of("CPU", "compiled loops")


def test_a_compiler_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if build.find_compiler() is None:
        pytest.skip("there is no other one")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert text_of("CPU", "C compiler").endswith("; CC is 'no-such-compiler', which is not there")


def test_wrong_arithmetic_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = backends.cpu.gradient
    monkeypatch.setattr(backends.cpu, "gradient", lambda *a, **k: (gradient(*a, **k)[0] + 0.1, None))  # type: ignore[operator]
    assert "numbers from -6 to 6; 1e-03 is allowed" in problem_of("CPU", "arithmetic")


def test_whose_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_onednn_wins", lambda dtype, with_post_op: dtype is torch.float32 or with_post_op)
    with_activation = "oneDNN's with an activation that it knows from 1,048,576 multiply-adds on"
    assert text_of("CPU", "float32 matmuls") == f"{with_activation}, without from 67,108,864; else PyTorch's"
    assert text_of("CPU", "bfloat16 matmuls") == f"{with_activation}; else PyTorch's"
    monkeypatch.setattr(onednn, "_onednn_wins", lambda dtype, with_post_op: False)
    assert text_of("CPU", "float32 matmuls") == "PyTorch's"
    monkeypatch.setattr(onednn, "onednn_is_enabled", lambda: False)
    assert text_of("CPU", "float32 matmuls") == "PyTorch's: oneDNN is switched off"


# --- GPUs, whose place a CPU takes ------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    dispatch = pytest.importorskip("fusedlayers.backends.triton.dispatch")
    monkeypatch.setattr(doctor, "_devices", lambda: [CPU])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backends, "no_triton_because", lambda: None)
    dispatch.tuned.cache_clear()
    yield dispatch
    monkeypatch.undo()
    dispatch.tuned.cache_clear()


def test_a_gpu_that_works(gpu: Any, tmp_path: Path) -> None:
    assert text_of("GPU", "cpu kernels") == "Triton's"
    path = gpu.tuned_path(CPU)
    assert text_of("GPU", "cpu tuned file") == f"none yet: fusedlayers tune would write {path}"
    path.parent.mkdir(exist_ok=True)
    times = {"library": 2.0, "tiled": 1.0}
    choices = {"linear gelu float16 64x64x64": {"candidate": "tiled", "times_us": times}}
    path.write_text(json.dumps({"about": gpu.about_device(CPU), "choices": choices}))
    gpu.tuned.cache_clear()
    assert text_of("GPU", "cpu tuned file") == f"1 matmuls in {path}"


def test_triton_that_does_not_run_is_broken(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "no_triton_because", lambda: "Triton is not installed")
    assert problem_of("GPU", "cpu kernels").endswith("PyTorch computes in its place: Triton is not installed")
    assert text_of("GPU", "cpu tuned file") == "none without Triton"
    with fl.use_kernels("off"):
        assert text_of("GPU", "cpu kernels") == "off: PyTorch computes"


def test_a_tuned_file_of_no_use_is_broken(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(gpu_settings.FILE_VARIABLE, str(path))
    assert problem_of("GPU", "cpu tuned file").endswith("is not there: run fusedlayers tune")
    path.write_text("{")
    gpu.tuned.cache_clear()
    assert "cannot be read" in problem_of("GPU", "cpu tuned file")
    path.write_text(json.dumps({"about": gpu.about_device(CPU) | {"torch": "1.0"}, "choices": {}}))
    gpu.tuned.cache_clear()
    assert "it was tuned with torch 1.0" in problem_of("GPU", "cpu tuned file")


def test_a_driver_that_is_too_old_is_broken(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert problem_of("GPU", "torch") == "The NVIDIA driver on your system is too old"
    assert asked("GPU", "cpu name").text == "broken"  # of what is no GPU there is no name


def test_a_driver_that_raises_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_count() -> int:
        raise RuntimeError("no driver")

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert doctor._devices() == []


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_word_that_is_none_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of("settings", f"{gpu_settings.VARIABLE}") == "not set: kernels on GPUs are 'tuned'"
    monkeypatch.setattr(gpu_settings._State, "kernels", None)
    monkeypatch.setenv(gpu_settings.VARIABLE, "fast")
    assert "got 'fast', expected one of 'off', 'rule', 'tuned'" in problem_of("settings", f"{gpu_settings.VARIABLE}")


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    monkeypatch.setattr(build, "cache_folders", lambda: (home, temporary))
    assert text_of("settings", "cache") == f"{home} can be written to; 0 files, 0 B"
    (home / "loops.so").write_bytes(b"12")
    assert text_of("settings", "cache") == f"{home} can be written to; 1 files, 2 B"
    home.chmod(0o777)
    assert text_of("settings", "cache").endswith(f"; {home} is not used: others may write to it")
    temporary.rmdir()
    temporary.write_text("a file")
    assert "others may write to it; " in problem_of("settings", "cache") and str(temporary) in problem_of(
        "settings", "cache"
    )
