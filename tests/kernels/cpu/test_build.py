"""How the compiled loops are built, cached and loaded, and what layers do where they cannot be had."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import plans_of
from reference import relative
from settings import ROOT
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.calls import plan
from fusedlayers.kernels import cpu
from fusedlayers.kernels.cpu import build, elementwise, loops

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the stand-ins for compilers are shell scripts")


def _forget(*modules: Any) -> None:
    """Everything that depends on the library, or what these modules have of that, and plans."""
    for module in modules or (build, loops, elementwise):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
    plan._plans.clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process that has not looked for the loops, with an empty cache and no temporary files; a folder for both."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("FUSEDLAYERS_CPU_LOOPS", "CC"):
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield tmp_path
    monkeypatch.undo()
    _forget()


@pytest.fixture(scope="module")
def compiled() -> str:
    """The library that this machine's compiler makes."""
    library = build.shared_object()
    if library is None:
        pytest.skip(str(build.missing_because()))
    return str(library._name)


def _script(folder: Path, body: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Compiler:
    """A stand-in for the compiler, as ``$CC`` names it: it copies a library, and counts how often."""

    def __init__(self, folder: Path, library: str, before: str = "") -> None:
        self.log = folder / "log"
        self.path = _script(
            folder,
            f"""case "$*" in *--version) echo stand-in; exit 0;; esac
            echo "$@" >> "{self.log}"
            {before}
            for word; do [ "$last" = -o ] && cp "{library}" "$word"; last=$word; done""",
        )

    @property
    def runs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def compiler(fresh: Path, compiled: str, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler(fresh, compiled)
    monkeypatch.setenv("CC", str(stand_in.path))
    return stand_in


def _folders(fresh: Path) -> tuple[Path, Path]:
    return fresh / "home" / "fusedlayers", fresh / "temporary" / f"fusedlayers-{os.getuid()}"


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _works(library: Any) -> bool:
    """Whether the loops are those, and compute."""
    if library is None or build.shared_object() is not library:
        return False
    y = cpu.bias_act(torch.linspace(-3, 3, 999), None, resolve("gelu"), dim=-1, encode=False, out=None)
    return torch.allclose(y, F.gelu(torch.linspace(-3, 3, 999)), atol=1e-6)


# --- without the loops ------------------------------------------------------------------------------------------------


def _switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_CPU_LOOPS", "off")


def _no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def _fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(_script(folder, "echo No space left on device >&2; exit 1")))


def _writes_garbage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = folder / "garbage"
    garbage.write_text("garbage")
    monkeypatch.setenv("CC", str(Compiler(folder, str(garbage)).path))


def _never_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setenv("CC", str(_script(folder, "exec sleep 60")))


def _no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parent in ("home", "temporary"):
        folder.joinpath(parent, "in the way").parent.mkdir(exist_ok=True)
    for path in _folders(folder):
        path.write_text("a file, where a folder should be: root may write anywhere else")


#: Name -> how the loops are made impossible, what a warning says or None, and what plans say.
WITHOUT: dict[str, tuple[Any, str | None, str]] = {
    "switched off": (_switched_off, None, "FUSEDLAYERS_CPU_LOOPS switches the compiled loops off"),
    "no compiler": (_no_compiler, "there is no C compiler", "there is no C compiler to build the loops with"),
    "it fails": (_fails, "No space left on device", "could not be built with"),
    "it writes garbage": (_writes_garbage, ".so", "could not be built with"),
    "it never ends": (_never_ends, "timed out", "could not be built with"),
    "no folder": (_no_folder, "File exists", "could not be built with"),
}


@pytest.mark.parametrize("how", WITHOUT)
def test_without_the_loops_torch_computes_and_plans_say_why(
    how: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_impossible, warned, reason = WITHOUT[how]
    make_impossible(fresh, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _check_layers(reason)
            _forget(elementwise)  # so that the next call asks again for the library
    assert [w.category for w in caught] == [RuntimeWarning] * (warned is not None)
    if warned is not None:
        message = str(caught[0].message)
        assert warned in message and "FUSEDLAYERS_CPU_LOOPS=off" in message and len(message) < 800
    if how == "no folder":
        assert all(folder.is_file() for folder in _folders(fresh))
    elif how != "it writes garbage":  # which stays, and is built again by the next process
        assert all(_files(folder) == [] for folder in _folders(fresh))


def _check_layers(reason: str) -> None:
    x = torch.randn(128, 64, requires_grad=True)
    gelu, tanh, softplus = (fl.FusedDenseAct(64, 256, name) for name in ("gelu", "tanh", "softplus"))
    (made,) = plans_of(gelu, x)
    assert made.path == "composite" and reason in str(made) and str(made).startswith("not fused: ")
    (made,) = plans_of(fl.FusedMLP(64, 256), x)
    assert made.path == "composite" and reason in str(made)
    # What costs torch one operation, or few, stays fused; and so does what is asked for.
    for fused in (tanh, softplus, fl.FusedDenseAct(64, 256, "gelu", save="output")):
        (made,) = plans_of(fused, x)
        assert made.path == "fused" and made.saved == "output", made
    assert plans_of(gelu, x.detach().requires_grad_())[0].saved == "eager"
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for layer in (gelu, tanh, softplus, fl.FusedDenseAct(64, 256, "gelu", save="output")):
            _check_gradients(layer.to(dtype), x.detach().to(dtype), most)
    z, up = torch.randn(2, 99)
    torch.testing.assert_close(cpu.gate(z, up, resolve("silu"), (), None), F.silu(z) * up)


def _check_gradients(layer: Any, x: Tensor, most: float) -> None:
    sources = [x.requires_grad_(), layer.weight, layer.bias]
    y = layer(x)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(x.dtype)
    ours = [y, *torch.autograd.grad(y, sources, dy)]
    doubles = [t.detach().double().requires_grad_() for t in sources]
    exact = resolve(layer.activation).function(F.linear(*doubles))
    for found, expected in zip(ours, [exact, *torch.autograd.grad(exact, doubles, dy.double())], strict=True):
        assert relative(found, expected) < most


@pytest.mark.parametrize("value", ["off", "OFF", "", "on"])
def test_the_switch(value: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_CPU_LOOPS", value)
    is_on = value in ("", "on")
    assert (build.shared_object() is not None) == is_on and len(compiler.runs) == is_on


def test_a_switch_that_is_neither_on_nor_off_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_CPU_LOOPS", "nope")
    with pytest.raises(ValueError, match=r"^FUSEDLAYERS_CPU_LOOPS: got 'nope', expected 'on' or 'off'$"):
        build.shared_object()


# --- the compiler -----------------------------------------------------------------------------------------------------


def test_a_broken_compiler_is_asked_once_where_warnings_are_errors(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fresh / "runs"
    monkeypatch.setenv("CC", str(_script(fresh, f"echo run >> {log}; exit 1")))
    with pytest.raises(RuntimeWarning, match="FUSEDLAYERS_CPU_LOOPS=off"):
        build.shared_object()
    runs = log.read_text()
    assert build.shared_object() is None and "could not be built" in str(build.missing_because())
    assert log.read_text() == runs


def test_a_compiler_that_does_not_know_this_processor_is_asked_for_less(
    fresh: Path, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = 'case "$*" in *=native*) exit 1;; esac'
    stand_in = Compiler(fresh, compiled, refuses)
    monkeypatch.setenv("CC", str(stand_in.path))
    assert _works(build.shared_object())
    assert ["-march=native" in run for run in stand_in.runs] == [True, False, False]
    assert ["-mcpu=native" in run for run in stand_in.runs] == [False, True, False]


def test_no_option_gives_up_the_rules_of_arithmetic() -> None:
    # A library that is linked with -ffast-math makes the processor flush subnormals. The others change what NaN,
    # infinities and sums are.
    allowed = {"-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp"}
    options = [*build.OPTIONS, *sum(build.NATIVE, ())]
    assert {option for option in options if option.startswith("-f")} <= allowed
    assert "-O3" in options and "-Ofast" not in options


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_process_builds_once_and_the_next_one_not_at_all(fresh: Path, compiler: Compiler) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.shared_object(), range(4)))
    assert len({id(library) for library in found}) == 1 and _works(found[0]) and len(compiler.runs) == 1
    folder, other = _folders(fresh)
    (name,) = _files(folder)
    built = (folder / name).stat()
    assert name.startswith("loops-") and stat.S_IMODE(folder.stat().st_mode) == 0o700 and not other.exists()
    assert stat.S_IMODE(built.st_mode) == 0o700
    _forget()
    assert _works(build.shared_object()) and len(compiler.runs) == 1
    assert (folder / name).stat().st_mtime_ns == built.st_mtime_ns and _files(folder) == [name]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x7fELF garbage"], ids=["empty", "text", "header"])
def test_a_damaged_file_is_built_again(content: bytes, fresh: Path, compiler: Compiler, compiled: str) -> None:
    # In another process than that which loaded it, whose code it would overwrite: the name is known before.
    folder, _ = _folders(fresh)
    folder.mkdir(parents=True, mode=0o700)
    path = folder / f"loops-{build._hash([str(compiler.path)])}.so"
    path.write_bytes(content)
    assert _works(build.shared_object()) and len(compiler.runs) == 1
    assert path.read_bytes().startswith(Path(compiled).read_bytes()) and _files(folder) == [path.name]


def test_the_name_tells_what_the_file_was_made_of_and_for(
    fresh: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(compiler.path)]
    names = [build._hash(command)]
    assert build._hash(command) == names[0]

    def differs(target: Any, attribute: str, value: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, value)
            names.append(build._hash(command))

    source = fresh / "loops.c"
    source.write_text(build.SOURCE.read_text() + "\n")
    differs(build, "SOURCE", source)
    differs(build, "OPTIONS", (*build.OPTIONS, "-g"))
    differs(torch.cpu, "get_capabilities", lambda: {"avx2": True, "cpu_name": "another"})
    differs(torch, "__version__", "3.0")
    names.append(build._hash([*command, "-m64"]))
    compiler.path.write_text(compiler.path.read_text().replace("echo stand-in", "echo stand-in 2.0"))
    names.append(build._hash(command))
    assert len(set(names)) == len(names) == 7


def _in_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("")


def _for_all_to_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


@pytest.mark.parametrize("makes_unfit", [_in_the_way, _for_all_to_write])
def test_a_folder_that_cannot_or_must_not_be_used_is_replaced_by_one_among_temporary_files(
    makes_unfit: Any, fresh: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = _folders(fresh)
    makes_unfit(folder, monkeypatch)
    if folder.is_dir():  # code that somebody may have put there must not be loaded
        (folder / f"loops-{build._hash([str(compiler.path)])}.so").write_text("not to be loaded")
    before = _files(folder)
    for _ in range(2):
        _forget()
        library = build.shared_object()
        assert _works(library) and Path(library._name).parent == other  # type: ignore[union-attr]
    assert len(compiler.runs) == 1 and _files(folder) == before
    assert len(_files(other)) == 1 and stat.S_IMODE(other.stat().st_mode) == 0o700


# --- the package ------------------------------------------------------------------------------------------------------


def test_the_package_carries_its_source() -> None:
    package = ROOT / "fusedlayers"
    assert build.SOURCE.is_file() and build.SOURCE.parent == Path(build.__file__).parent
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fusedlayers"]
    others = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert others == set(listed) and "kernels/cpu/loops.c" in listed


# --- in processes of their own ----------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys, time, warnings
from pathlib import Path

# Python 3.12 warns of forks beside threads, as those that OpenBLAS and torch.set_num_threads start.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import torch
torch.set_num_threads(2)
import fusedlayers as fl
from fusedlayers.kernels.cpu import build, loops
layer = fl.FusedDenseAct(64, 256, "gelu")
home, log = map(Path, sys.argv[1:])
found = {"files after import": sorted(map(str, home.rglob("*"))), "runs after import": log.exists()}

def in_children(count):
    # Each of the processes finds the loops, and computes with one thread.
    def child():
        torch.set_num_threads(1)
        while not go.exists():
            time.sleep(0.001)
        z = torch.linspace(-3, 3, 1 << 16)
        return build.shared_object() is not None and torch.allclose(fl.gelu(z), torch.nn.functional.gelu(z), atol=1e-6)
    go = home / "go"
    go.unlink(missing_ok=True)
    children = []
    for _ in range(count):
        process = os.fork()
        if not process:
            status = 1
            try:
                status = int(not child())
            finally:
                os._exit(status)
        children.append(process)
    go.write_text("")
    return [os.waitpid(process, 0)[1] for process in children]

def runs():
    return len(log.read_text().splitlines())

folder = home / "fusedlayers"
found["four at once"] = in_children(4), runs(), len(list(folder.iterdir()))
found["a fifth"] = in_children(1), runs(), len(list(folder.iterdir()))

(name,) = folder.iterdir()
whole = name.read_bytes()
found["cut short"] = []
for count in (100, len(whole) // 2, len(whole) * 7 // 8):
    name.unlink()
    name.write_bytes(whole[:count])
    found["cut short"] += in_children(1)
    found["cut short"].append(name.read_bytes() == whole)
name.unlink()
name.write_bytes(whole)

# No loop has run yet: the threads that the first one starts inherit the mode of the one that loads the library.
assert build.shared_object() is not None
with torch.inference_mode():
    fl.gelu(torch.randn(1 << 20))
    tiny = torch.full((1 << 20,), 1e-40)
    found["subnormal"] = float(torch.tensor(1e-40) * 1.0) > 0, bool((tiny * 1.0 > 0).all())

# After threads have run: a child that uses one thread has no need of those that it has not inherited.
found["a child of threads"] = in_children(2)
print(json.dumps(found))
"""


def test_in_processes_of_their_own(compiled: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    stand_in = Compiler(tmp_path, compiled, "sleep 0.3")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home"), "CC": str(stand_in.path)}
    environment.pop("FUSEDLAYERS_CPU_LOOPS", None)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "home"), str(stand_in.log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["files after import"] == [] and not found["runs after import"]
    statuses, runs, files = found["four at once"]
    assert statuses == [0] * 4 and files == 1
    assert runs > 1, "they did not build at the same time"
    assert found["a fifth"] == [[0], runs, 1]
    # Loading a file that was cut short would end the process with SIGBUS: its pages are mapped, and lie behind its end.
    assert found["cut short"] == [0, True] * 3
    assert found["subnormal"] == [True, True]
    assert found["a child of threads"] == [0, 0]
