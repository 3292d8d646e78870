"""The compiled loops: ``loops.c``, built at first use with the system's C compiler, cached, and loaded.

The cache is ``$XDG_CACHE_HOME/fusedlayers`` (``~/.cache/fusedlayers``), or a folder of the user's own among the
temporary files where that cannot be written to. A file's name holds a hash of the source, the compiler, its options and
the processor's features, so that machines that share a home do not share code. A file is written under another name and
then renamed, so that processes may build at the same time.

``FUSEDLAYERS_CPU_LOOPS=off`` switches the loops off. Without them, and without a compiler, activations whose derivative
is fitted are left to PyTorch on CPUs.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import torch

#: Of the environment: whether there are to be loops.
VARIABLE = "FUSEDLAYERS_CPU_LOOPS"
SWITCHED_OFF = f"{VARIABLE} switches the compiled loops off"
NO_COMPILER = "there is no C compiler to build the loops with"
SOURCE = Path(__file__).with_name("loops.c")
#: Not -ffast-math: a library built with it makes the processor flush subnormal numbers, in torch's arithmetic too.
OPTIONS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-fopenmp")
#: How compilers are told to use all that this processor has; tried in turn.
NATIVE = ("-march=native",), ("-mcpu=native",), ()
TIMEOUT_SECONDS = 60
#: The last bytes of a cached file.
END = b"fusedlayers: all of it"

_lock = threading.Lock()
#: What is still to be said: after the result is cached, because a warning may be an exception.
_unsaid: list[str] = []


def shared_object() -> ctypes.CDLL | None:
    """The loops, or None where there are none (``missing_because``)."""
    return _found()[0]


def missing_because(*, may_build: bool = True) -> str | None:
    """Why there are no loops, or None where there are; without ``may_build`` as far as that shows before any attempt to
    build them."""
    if may_build or _find.cache_info().currsize:
        return _found()[1]
    if is_off(VARIABLE):
        return SWITCHED_OFF
    return NO_COMPILER if find_compiler() is None else None


def _found() -> tuple[ctypes.CDLL | None, str | None]:
    with _lock:
        found = _find()
        if _unsaid:
            warnings.warn(_unsaid.pop(), RuntimeWarning, stacklevel=3)
        return found


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str | None]:
    if is_off(VARIABLE):
        return None, SWITCHED_OFF
    compiler = find_compiler()
    if compiler is None:
        _unsaid.append(
            "fusedlayers: there is no C compiler to build the loops for CPUs with, so activations whose derivative is "
            f"fitted are left to PyTorch there; install one, or silence this by {VARIABLE}=off"
        )
        return None, NO_COMPILER
    try:
        return _load(compiler), None
    except (OSError, subprocess.SubprocessError, UnicodeError) as error:
        detail = getattr(error, "stderr", None) or error
        _unsaid.append(
            "fusedlayers: the loops for CPUs could not be built or loaded, so activations whose derivative is fitted "
            f"are left to PyTorch there; {VARIABLE}=off silences this. {str(detail).strip()[-500:]}"
        )
        return None, f"the loops could not be built with {compiler[0]}"


def is_off(variable: str) -> bool:
    """Whether a variable of the environment says "off".

    Raises:
        ValueError: it says neither "on" nor "off".
    """
    value = os.environ.get(variable, "").lower() or "on"
    if value not in ("on", "off"):
        raise ValueError(f"{variable}: got {value!r}, expected 'on' or 'off'")
    return value == "off"


def find_compiler() -> list[str] | None:
    """The command that ``$CC`` names, or the first one found."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        try:
            words = shlex.split(command)
        except ValueError:  # a quotation mark without another
            continue
        if words and shutil.which(words[0]):
            return words
    return None


def _load(compiler: list[str]) -> ctypes.CDLL:
    name = f"loops-{_hash(compiler)}.so"
    problem: OSError | subprocess.SubprocessError | None = None
    for folder in cache_folders():
        path = folder / name
        try:
            if not _made(folder):
                continue
            if _is_whole(path):
                try:
                    return ctypes.CDLL(str(path))
                except OSError:  # of another system
                    pass
            _build(compiler, path)
            return ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            problem = error
    raise problem or OSError("no folder can be written to")


def _is_whole(path: Path) -> bool:
    """Whether the file is there, up to its end: loading one that a full disk has cut short would end the process."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END), os.SEEK_END)
            return file.read() == END
    except OSError:
        return False


def cache_folders() -> tuple[Path, Path]:
    """Where the library may be kept, tried in turn."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "fusedlayers", Path(tempfile.gettempdir()) / f"fusedlayers-{os.getuid()}"


def _made(folder: Path) -> bool:
    """Make a folder, and return whether nobody else can put code there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def version_of(compiler: list[str]) -> str:
    """A compiler's own words of its version."""
    command = [*compiler, "--version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False).stdout


def _hash(compiler: list[str]) -> str:
    version = version_of(compiler)
    features = sorted((k, v) for k, v in torch.cpu.get_capabilities().items() if isinstance(v, (bool, str)))
    parts = SOURCE.read_text(), compiler, version, OPTIONS, NATIVE, features, torch.__version__
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _build(compiler: list[str], path: Path) -> None:
    """Compile to ``path``, with the first options that the compiler takes."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        for options in NATIVE:
            command = [*compiler, *OPTIONS, *options, "-o", scratch, str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
            if done.returncode == 0:
                break
        done.check_returncode()
        with open(scratch, "ab") as file:
            file.write(END)  # which no loader reads
        os.chmod(scratch, 0o700)
        os.replace(scratch, path)
    finally:
        if os.path.exists(scratch):
            os.unlink(scratch)
