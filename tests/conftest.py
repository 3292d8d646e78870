"""What must be settled before any test module is imported.

Triton decides when it decorates a function whether to interpret it. Without a GPU its kernels run in the interpreter
on CPU tensors, so TRITON_INTERPRET is set here; ``gpu.py`` says where tensors then live. Subprocesses inherit the
variable: ``test_aot.py``, which compiles for real, takes it out of theirs. With a GPU nothing is interpreted.

The fixtures are for tests of the Triton kernels.
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import settings
import slow
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores; threads that meet after every operation would wait for the others' to yield.
    torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # torch 2.11 makes a stand-in for the missing GPU when something first traces, and frees it with the thread that
    # traced (pytorch#178950, a crash). Tests trace on short-lived threads; this one lasts.
    torch._C._ensureCUDADeviceGuardSet()


gc.disable()  # of what is imported, and of tens of thousands of tests, nothing is garbage, and looking takes seconds


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow.mark(items)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a module draws while it is imported follows from its own name."""
    settings.seed(collector.nodeid)


@pytest.fixture(autouse=True)
def numbers_follow_from_the_name(request: pytest.FixtureRequest) -> None:
    """What a test draws follows from its own name: it fails always or never, alone and among others."""
    settings.seed(request.node.nodeid)


@pytest.fixture(autouse=True, scope="session")
def little_is_fused() -> dict[str, int]:
    return settings.fuse_little()


@pytest.fixture
def sizes_that_ship(little_is_fused: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All limits are those of users, those that the module's tests lower too."""
    from fusedlayers.calls import sizes

    monkeypatch.undo()
    for name, size in little_is_fused.items():
        monkeypatch.setattr(sizes, name, size)


@pytest.fixture(autouse=True, scope="session")
def language_is_exchanged_once() -> None:
    """Triton's interpreter exchanges its language's functions at each launch, and looks through all of them again at
    each call of a function in a kernel, which takes a quarter of a test's time: they have been exchanged then."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    exchange, language = interpreter._patch_lang, interpreter.tl
    is_builtin = language.core.is_builtin

    def exchange_once(function: Any) -> Any:
        for value in function.__globals__.values():
            if (value is language or value is language.core) and is_builtin(value.arange):
                return exchange(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = exchange_once


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """No plan, for a test may have exchanged what it depends on; and no activation that a test has registered, for
    others iterate over the table."""
    from fusedlayers.activations import table
    from fusedlayers.calls import plan

    by_name = dict(table.by_name)
    stand_ins = {target: list(entries) for target, entries in table.stand_ins.items()}
    by_spelling = dict(table.by_spelling)
    yield
    plan._plans.clear()
    if len(table.by_name) != len(by_name):
        for names, before in ((table.by_name, by_name), (table.by_spelling, by_spelling), (table.stand_ins, stand_ins)):
            names.clear()
            names.update(before)  # type: ignore[arg-type]


@pytest.fixture
def small_values_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are made for values of 64 bytes or more, and second runs of leaves stop from 4 KiB on."""
    from fusedlayers.recipes import region, second_run

    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)
    monkeypatch.setattr(second_run, "STOPPED_BYTES", 1 << 12)


Switch = Callable[[bool], None]


@pytest.fixture
def has_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton finds a GPU's driver, as far as the choice of a backend asks."""
    from fusedlayers import kernels
    from fusedlayers.kernels import triton

    monkeypatch.setattr(triton, "missing_because", lambda: None)
    kernels._for_gpus.cache_clear()
    yield
    kernels._for_gpus.cache_clear()


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Switch:
    """What switches between Triton and what there is without it, on whatever device the tests run."""
    from fusedlayers import kernels
    from fusedlayers.calls import plan, sizes
    from fusedlayers.kernels import cpu, reference, triton

    for size in ("SMALL_BYTES", "MEDIUM_BYTES", "GPU_BYTES", "GPU_MEDIUM_BYTES"):
        monkeypatch.setattr(sizes, size, 0)

    def switch(on: bool) -> None:
        def choose(tensor: torch.Tensor, activation: Any = None) -> Any:
            if on and (activation is None or triton.computes(activation)):
                return triton
            return cpu if tensor.is_cpu else reference

        monkeypatch.setattr(kernels, "choose", choose)
        plan._plans.clear()

    return switch


#: How the kernels divide their work: as they do, in 64-bit arithmetic, and in tiny tiles by so few programs that each
#: has several steps, and the last one fewer than the others.
SPLITS: dict[str, dict[str, Any]] = {
    "default": {},
    "int64": {"index_of": lambda extent: pytest.importorskip("triton.language").int64},
    "steps": {"TILE": 64, "PROGRAMS": 5},
    "one program": {"TILE": 64, "PROGRAMS": 1},
}


@pytest.fixture(params=SPLITS)
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from fusedlayers.kernels.triton import elementwise, tiles
    from fusedlayers.utils.caching import BoundedCache

    for name, value in SPLITS[request.param].items():
        monkeypatch.setattr(tiles, name, value)
    for launches in ("_launches", "_gradient_launches"):  # what is kept was made in another way
        monkeypatch.setattr(elementwise, launches, BoundedCache())
    name: str = request.param
    return name


@pytest.fixture
def interpreter_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert numbers as GPUs do: its bfloat16 is cut off, its subnormals are wrong, and what two
    numbers compare to is not a boolean."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        before, after = source.dtype.scalar, dtype.scalar
        if before.is_fp32() and after.is_bf16():
            bits = torch.tensor(source.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        elif before.is_bf16() and after.is_fp32():
            bits = (source.data.astype("uint32") << 16).view("float32")
        else:
            return self.cast_impl(source, dtype)
        return interpreter.TensorHandle(bits, after)

    for name in ("create_fp_trunc", "create_fp_ext"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, cast)

    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar.is_bf16():  # their bits would be multiplied
            a, b = (cast(self, t, interpreter.tl.float32) for t in (a, b))
        return dot(self, a, b, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)

    splat = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, block: Any, number: Any) -> Any:
        if number.data.dtype == bool:  # a comparison's result, with the type of what was compared
            number = interpreter.TensorHandle(number.data, interpreter.tl.int1)
        return splat(self, block, number)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", create_splat)

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        # Triton 3.6 makes an integer of an array of one element, which numpy 2.4 no longer does.
        tensor.__index__ = lambda self: int(self.handle.data.reshape(()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
