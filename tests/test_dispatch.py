"""Which matmul is chosen, by rule and by times that the tests make up, on a device that need not be there; and what
computes where a kernel cannot be launched."""

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Switch
from gpu import DEVICE, INTERPRETER_WARNINGS
from reference import assert_as_good_as_torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import backends, cli, sizes
from fusedlayers import tuning as public
from fusedlayers.activations import resolve
from fusedlayers.backends import GradientRequest, gpu_settings
from fusedlayers.backends import torch as reference
from fusedlayers.call import with_operands
from fusedlayers.memory import saved_bytes
from fusedlayers.profiling import explanation

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError, OutOfResources

from fusedlayers.backends import triton as backend  # after the line that skips without it
from fusedlayers.backends.triton import dispatch, elementwise, fallback, gemm, operations, sums, tuning
from fusedlayers.backends.triton.dispatch import LIBRARY, Question
from fusedlayers.backends.triton.gemm import Tiling

pytestmark = [pytest.mark.filterwarnings(*INTERPRETER_WARNINGS), pytest.mark.usefixtures("interpreter_converts")]

CPU = torch.device("cpu")
QUESTION = Question("layer", "gelu", torch.bfloat16, 5000, 3072, 768)
CANDIDATES = [LIBRARY, "narrow", "wide"]
TILING = Tiling(16, 32, 16, 1, 4, 2)


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A process that knows nothing, and an empty cache folder; call it for another process."""
    monkeypatch.setattr(fallback, "_failed", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(gpu_settings.FILE_VARIABLE, raising=False)
    forget = dispatch.tuned.cache_clear
    forget()
    yield forget
    forget()


class Bench:
    """Candidates that take the time they are said to, and give the result they are said to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
        self.times = times
        self.results: dict[str, Tensor | Exception] = {}
        self.rows: list[int] = []
        self.last = ""
        self.candidates = CANDIDATES
        self.session = tuning.Session()
        monkeypatch.setattr(tuning, "_time", self.time)

    def scratch(self, rows: int) -> Callable[[str], list[Tensor]]:
        self.rows.append(rows)
        return self.run

    def run(self, candidate: str) -> list[Tensor]:
        self.last = candidate
        result = self.results.get(candidate, torch.ones(2, 4))
        if isinstance(result, Exception):
            raise result
        return [result]

    def time(self, function: Callable[[], object]) -> float:
        function()
        return self.times[self.last]

    def choose(self, question: Question = QUESTION, candidates: list[str] = CANDIDATES) -> str:
        self.candidates = candidates
        return dispatch.choose(question, CPU, self)

    def tune(self, *questions: Question) -> list[Path]:
        with dispatch.asking(self.session.ask):
            for question in questions or (QUESTION,):
                self.choose(question)
        return self.session.save()


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_nothing_is_timed_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However the candidates' times look, the choice is the same, and nothing is written."""
    for times in ({"narrow": 1.0, "wide": 3.0}, {"narrow": 3.0, "wide": 1.0}):
        bench = Bench(monkeypatch, library=2.0, **times)
        assert bench.choose() == LIBRARY and bench.rows == []
    assert list(tmp_path.iterdir()) == []


RULE = dispatch.Rule("9", 2, 1024)


@pytest.mark.parametrize(
    ("architecture", "dtype", "inner", "expected"),
    [
        ("9", torch.bfloat16, 1024, "wide"),
        ("9", torch.bfloat16, 1025, LIBRARY),
        ("9", torch.float32, 768, LIBRARY),
        ("8", torch.bfloat16, 768, LIBRARY),
    ],
    ids=str,
)
def test_the_table_decides(
    architecture: str, dtype: torch.dtype, inner: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "architecture", lambda device: architecture)
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    question = QUESTION._replace(dtype=dtype, inner=inner)
    assert bench.choose(question) == LIBRARY
    monkeypatch.setattr(dispatch, "RULES", (RULE,))
    assert bench.choose(question) == expected
    assert bench.choose(question, candidates=[LIBRARY]) == LIBRARY
    assert bench.choose(question._replace(rows=64, columns=64, inner=64)) == LIBRARY


def test_architectures_are_those_of_the_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert dispatch.architecture(torch.device("cuda", 7)) == "9" and dispatch.architecture(CPU) == ""
    assert all(rule.architecture in gemm.TILINGS for rule in (*dispatch.RULES, RULE))


def test_what_was_tuned_comes_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    bench.tune()
    monkeypatch.setattr(dispatch, "architecture", lambda device: "9")
    monkeypatch.setattr(dispatch, "RULES", (RULE,))
    assert bench.choose() == "narrow" and bench.choose(QUESTION._replace(inner=1000)) == "wide"
    assert bench.choose(candidates=[LIBRARY, "wide"]) == "wide"  # of what there is for this call
    with fl.use_kernels("rule"):
        assert bench.choose() == "wide" and dispatch.answers_for("gelu", 3072, 768, CPU) == ["matmuls by rule"]
    assert bench.choose() == "narrow" and len(bench.rows) == 1


@pytest.mark.usefixtures("has_driver")
def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class OnGPU:
        is_cpu, is_cuda, dtype = False, True, torch.float32

    tensor: Any = OnGPU()
    assert backends.choose(tensor) is backend
    with fl.use_kernels("off"):
        assert backends.choose(tensor) is reference
        with fl.use_kernels("tuned"):
            assert backends.choose(tensor) is backend
    assert backends.choose(tensor) is backend
    backends._for_gpus.cache_clear()
    monkeypatch.setattr(backend, "missing_because", lambda: "AssertionError: libcuda.so cannot found!")
    assert backends.choose(tensor) is backends.choose(tensor) is reference
    assert caplog.text.count("Triton does not run on this GPU") == 1 and "libcuda.so" in caplog.text
    with pytest.raises(ValueError, match="use_kernels: got 'none', expected one of 'off', 'rule', 'tuned'"):
        fl.use_kernels("none")  # before it is entered


def test_without_triton_a_gpu_is_left_to_torch_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    backends._for_gpus.cache_clear()
    try:
        assert backends._for_gpus() is backends._for_gpus() is reference
    finally:
        backends._for_gpus.cache_clear()
    assert caplog.text.count("torch operations compute in its place: Triton is not installed") == 1


@pytest.mark.parametrize(("word", "expected"), [("", "tuned"), ("OFF", "off"), ("rule", "rule")])
def test_the_environment_says_what_may_run(word: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_settings._State, "kernels", None)
    monkeypatch.setenv(gpu_settings.VARIABLE, word)
    assert gpu_settings.allowed() == expected
    monkeypatch.setattr(gpu_settings._State, "kernels", None)
    monkeypatch.setenv(gpu_settings.VARIABLE, "fast")
    with pytest.raises(ValueError, match="FUSEDLAYERS_KERNELS: got 'fast', expected one of"):
        gpu_settings.allowed()


def test_plans_are_made_anew_where_the_kernels_are_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    choose = backends.choose
    monkeypatch.setattr(
        backends, "choose", lambda *arguments: made.append(gpu_settings.allowed()) or choose(*arguments)
    )
    x = torch.randn(64, 1024, requires_grad=True)
    for _ in range(2):
        fl.layer_norm(x, 1024, save="output")
        with fl.use_kernels("rule"):
            fl.layer_norm(x, 1024, save="output")
    assert made[-3:] == ["rule", "tuned", "rule"]


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", CANDIDATES)
def test_the_fastest_is_chosen(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, **{**dict.fromkeys(CANDIDATES, 100.0), best: 80.0})
    bench.tune(QUESTION, QUESTION)
    assert bench.rows == [8192] and bench.choose() == best  # measured once
    (answer,) = dispatch.answers_for("gelu", 3072, 768, CPU)
    ratio = "the next takes 1.25x its time" if best == LIBRARY else "0.80x the library's time"
    assert answer == f"layer, up to 8192 rows of bfloat16: {best} (tuned: {ratio})"
    assert dispatch.answers_for("gelu", 768, 3072, CPU) == [answer]
    for other in (("silu", 3072, 768), ("gelu", 3072, 769)):
        assert dispatch.answers_for(*other, CPU) == ["matmuls by rule, nothing is tuned"]


@pytest.mark.parametrize(("time", "expected"), [(97.0, "wide"), (97.1, LIBRARY)])
def test_a_win_of_less_than_three_percent_is_none(time: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=100.0, narrow=99.0, wide=time)
    bench.tune()
    assert bench.choose() == expected


def test_rows_are_told_apart_by_powers_of_two_up_to_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    counts = 4097, 8192, 8193, 16384, 16385, 1 << 30
    bench.tune(*(QUESTION._replace(rows=rows) for rows in counts))
    assert bench.rows == [8192, 16384]
    assert all(bench.choose(QUESTION._replace(rows=rows)) == "narrow" for rows in counts)


def test_small_products_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    assert bench.tune(QUESTION._replace(rows=64, columns=64, inner=64), QUESTION._replace(inner=0)) == []
    assert bench.rows == []


@pytest.mark.parametrize("result", [1.01, float("nan"), RuntimeError("no such instruction")], ids=str)
def test_what_is_wrong_is_not_used(
    result: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=1.5)
    bench.results["narrow"] = result if isinstance(result, Exception) else torch.full((2, 4), result)
    question = QUESTION._replace(dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        bench.tune(question)
    assert bench.choose(question) == "wide"
    said = "no such instruction" if isinstance(result, Exception) else "its results differ from the library's "
    said += "in what is no number" if result != result else ""
    assert "a fused matmul (narrow) is not used" in caplog.text and said in caplog.text
    bench.results["wide"] = RuntimeError()
    bench.tune(question._replace(inner=1024))
    assert bench.choose(question._replace(inner=1024)) == LIBRARY


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    bench.results["narrow"] = torch.full((2, 4), 1.01)
    bench.tune()
    assert bench.choose() == "narrow"  # which is a unit in bfloat16


def test_without_memory_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)

    def scratch(rows: int) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(bench, "scratch", scratch)
    bench.tune()
    assert bench.session.skipped == {QUESTION.in_general: "there is no memory to measure it"}
    assert bench.choose() == LIBRARY


@pytest.mark.parametrize(("free", "rows"), [(1 << 33, 8192), (1 << 28, 1024), (1 << 22, None)])
def test_scratch_memory_is_at_most_half_of_what_is_free(
    free: int, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 34))
    question = QUESTION.in_general
    if rows is None:
        with pytest.raises(torch.OutOfMemoryError):
            tuning._rows(question, torch.device("cuda"))
        return
    assert tuning._rows(question, torch.device("cuda")) == rows
    assert 2 * (rows * 12 + 2 * 768) * 3072 <= free // 2


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    monkeypatch.setattr(tuning, "_is_capturing", lambda device: True)
    bench.tune()
    assert bench.rows == [] and bench.session.skipped == {QUESTION.in_general: "a CUDA graph is being captured"}


# --- remembering ------------------------------------------------------------------------------------------------------


def test_the_next_process_reads_what_was_tuned(
    forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (path,) = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).tune()
    assert path.parent == tmp_path / "fusedlayers" and list(path.parent.iterdir()) == [path]
    forgets()
    later = Bench(monkeypatch, library=1.0, narrow=2.0, wide=3.0)
    assert later.choose() == "narrow" and later.choose(QUESTION._replace(inner=1024)) == LIBRARY and later.rows == []
    written = json.loads(path.read_text())
    assert written["about"]["torch"] == torch.__version__ and written["about"]["device"] == "cpu"
    assert written["choices"] == {
        "layer gelu bfloat16 8192x3072x768": {
            "candidate": "narrow",
            "times_us": {"library": 2.0, "narrow": 1.0, "wide": 3.0},
        }
    }
    later.tune(QUESTION._replace(inner=1024))  # beside what was known
    forgets()
    assert later.choose() == "narrow" and len(dispatch.tuned(CPU)) == 2


def test_the_file_can_be_named(
    forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shared" / "tuned.json"
    monkeypatch.setenv(gpu_settings.FILE_VARIABLE, str(path))
    assert Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).tune() == [path]
    assert Bench(monkeypatch).choose() == "narrow"
    forgets()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    for _ in range(2):
        assert Bench(monkeypatch).choose() == LIBRARY
    assert caplog.text.count("is not used, for it was tuned with torch ") == 1 and ", here 0.0.0" in caplog.text


def test_other_versions_have_other_files(forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).tune()
    forgets()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert Bench(monkeypatch).choose() == LIBRARY


ENTRY = str(QUESTION.in_general)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"choices": 3}', "\x00", "[" * 100_000),
        *(
            json.dumps({"about": {}, "choices": {question: entry}})
            for question, entry in (
                *((ENTRY, entry) for entry in (3, {}, {"candidate": "wide", "times_us": {"library": 1.0}})),
                *(
                    (ENTRY, {"candidate": "wide", "times_us": {"library": time, "wide": 1.0}})
                    for time in ("a", 0, -1, None, True, [1])
                ),
                *((text, {"candidate": "library", "times_us": {"library": 1.0}}) for text in ("gelu", "a b c d")),
            )
        ),
    ],
    ids=range(17),
)
def test_a_broken_file_is_none(
    text: str,
    forgets: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (path,) = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).tune()
    path.write_text(text)
    forgets()
    later = Bench(monkeypatch, library=3.0, narrow=2.0, wide=1.0)
    assert later.choose() == later.choose() == LIBRARY
    assert caplog.text.count(f"{path} cannot be read") == 1 and "run fusedlayers tune" in caplog.text
    later.tune()
    assert later.choose() == "wide"


def test_a_folder_that_cannot_be_written_is_an_error_of_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fusedlayers").write_text("a file")
    with pytest.raises(OSError, match=r"tune: .* cannot be written .*; name another file in FUSEDLAYERS_TUNED"):
        Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).tune()

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert Bench(monkeypatch).choose() == LIBRARY
    with pytest.raises(OSError, match="tune: there is no home folder; name a file in FUSEDLAYERS_TUNED"):
        Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).tune()


def test_the_file_is_in_the_home_folder_if_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    path = dispatch.tuned_path(CPU)
    assert path is not None and path.parent == Path.home() / ".cache" / "fusedlayers"


# --- what layers make of it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh", "silu"])
@pytest.mark.parametrize("shape", [(37, 24), (3, 7, 24), (24,)], ids=str)
def test_dense_layers(
    activation: str, shape: tuple[int, ...], fused: list[str], on_triton: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_triton(True)
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator).to(DEVICE).requires_grad_() for s in (shape, (40, 24), (40,)))
    dy = torch.randn(*shape[:-1], 40, generator=generator).to(DEVICE)
    y = fl.dense_bias_act(x, w, b, activation)
    assert fused == ["linear_act"]
    found = torch.autograd.grad(y, (x, w, b), dy)
    function = resolve(activation).plain
    torchs = function(F.linear(x, w, b))
    expected = torch.autograd.grad(torchs, (x, w, b), dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact_y = function(F.linear(*leaves))
    exact = torch.autograd.grad(exact_y, leaves, dy.double())
    assert_as_good_as_torch(y.detach(), torchs.detach(), exact_y.detach())
    for ours, theirs, true in zip(found, expected, exact, strict=True):
        assert ours.shape == true.shape
        if activation in ("relu", "tanh"):
            assert_as_good_as_torch(ours, theirs, true)
        else:
            torch.testing.assert_close(ours.double(), true, atol=1e-4, rtol=1e-5)
    with torch.no_grad():
        fl.dense_bias_act(x, w, b, activation)
    assert len(fused) == 2
    with torch.no_grad():
        fl.dense_bias_act(x, w, None, activation)
    assert len(fused) == 3


def test_a_layer_with_an_epilogue_keeps_what_the_others_keep(
    fused: list[str], on_triton: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_triton(True)
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((64, 24), (40, 24), (40,)))
    assert saved_bytes(lambda x: fl.dense_bias_act(x, w, b, "gelu"), x, exclude=[x, w, b]) == 64 * 40 * 4
    assert fused


def test_autocast(fused: list[str], on_triton: Switch) -> None:
    on_triton(True)
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((64, 24), (40, 24), (40,)))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = fl.dense_bias_act(x, w, b, "tanh")
        assert fused == ["linear_act"] and y.dtype is torch.bfloat16
        for _ in range(3):  # the weight's cast is shared
            kept = saved_bytes(lambda: fl.dense_bias_act(x, w, b, "tanh"), exclude=[x, b])
        assert kept == 2 * (64 * 40 + 64 * 24 + 40 * 24)
        twice = saved_bytes(lambda: fl.dense_bias_act(x, w, b, "tanh") + fl.dense_bias_act(x, w, b, "tanh"))
        assert twice <= 2 * kept - 2 * 40 * 24
        with torch.no_grad():
            exact = fl.dense_bias_act(x, w, b, "tanh")
            assert torch.equal(exact, y) and len(fused) == 7
        torchs = F.linear(x, w, b).tanh()
    dy = torch.randn_like(y)
    found, theirs = (torch.autograd.grad(result, (x, w, b), dy) for result in (y, torchs))
    for ours, other in zip(found, theirs, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, other, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_results_of_medium_size(
    cast: torch.dtype | None, fused: list[str], on_triton: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operation activates them in place, but where a matmul was tuned to do so."""
    on_triton(True)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 1 << 30)
    monkeypatch.setattr(sizes, "GPU_MEDIUM_BYTES", 1 << 30)
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((2, 32, 24), (40, 24), (40,)))
    with torch.autocast(DEVICE.type, cast, enabled=cast is not None):
        y, expected = fl.dense_bias_act(x, w, b, "tanh"), F.linear(x, w, b).tanh()
        assert fused == ["linear_act"] and y.dtype is expected.dtype
        monkeypatch.setattr(dispatch, "choose", lambda question, device, job: LIBRARY)
        assert torch.equal(fl.dense_bias_act(x, w, b, "tanh"), expected) and len(fused) == 1
    torch.testing.assert_close(y, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("case", ["residual", "input", "operands", "transposed", "no tf32"])
def test_the_others_have_none(case: str, fused: list[str], on_triton: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    on_triton(True)
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((64, 24), (40, 24), (40,)))
    residual = torch.randn(64, 40, device=DEVICE) if case == "residual" else None
    save = "input" if case == "input" else "auto"
    activation: Any = torch.nn.PReLU().to(DEVICE) if case == "operands" else "gelu"
    if case == "transposed":
        x = torch.randn(24, 64, device=DEVICE).t().requires_grad_()
    if case == "no tf32":
        monkeypatch.setattr(dispatch, "tf32_is_allowed", lambda: False)
    y = fl.dense_bias_act(x, w, b, activation, residual=residual, save=save)
    assert fused == []
    expected = F.linear(x, w, b) + (0 if residual is None else residual)
    torch.testing.assert_close(y, activation(expected) if case == "operands" else F.gelu(expected))


def test_second_derivatives(fused: list[str], on_triton: Switch) -> None:
    on_triton(True)
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((17, 24), (40, 24), (40,)))

    def penalty(layer: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad(layer(x, w, b).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, w, b))

    found = penalty(lambda *t: fl.dense_bias_act(*t, "tanh"))
    for ours, theirs in zip(found, penalty(lambda *t: F.linear(*t).tanh()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


def test_layers_and_blocks_say_what_was_tuned(monkeypatch: pytest.MonkeyPatch, on_triton: Switch) -> None:
    on_triton(True)
    monkeypatch.setattr(explanation, "COUNT", 1 << 10)  # the interpreter runs the activation
    choices = {
        QUESTION.in_general: dispatch.Choice("wide", {LIBRARY: 10.0, "wide": 8.0}),
        Question("gradient hidden", "gelu", torch.float16, 256, 3072, 768): dispatch.Choice(
            LIBRARY, {LIBRARY: 10.0, "wide": 12.5, "narrow": None}
        ),
    }
    monkeypatch.setattr(dispatch, "tuned", lambda device: choices)
    layer, plain = fl.FusedDenseAct(768, 3072, "gelu"), fl.FusedDenseAct(768, 3072, "silu")
    line = "layer, up to 8192 rows of bfloat16: wide (tuned: 0.80x the library's time)"
    assert line in repr(layer) and repr(plain).endswith("matmuls by rule, nothing is tuned)")
    explained = fl.explain(layer)
    gradient = "gradient hidden, up to 256 rows of float16: library (tuned: the next takes 1.25x its time)"
    assert explained.layer == repr(layer).replace("(", ": ", 1)[:-1] == explained.to_dict()["layer"]
    assert explained.layer.endswith(f"{gradient}, {line}") and str(explained).startswith(f"{explained.layer}\n")
    assert fl.explain(plain).layer.endswith("matmuls by rule, nothing is tuned") and not fl.explain("gelu").layer
    with fl.use_kernels("rule"):
        assert repr(layer).endswith("matmuls by rule)")

    block, gated = fl.FusedMLP(768, 3072), fl.FusedGatedMLP(768, 3072, activation="gelu")
    assert repr(block).count(line) == 2 and repr(gated).count(line) == 1
    block.fc1.register_forward_hook(lambda *arguments: None)
    assert "matmul" not in repr(block)


@pytest.mark.usefixtures("has_driver")
def test_layers_say_why_no_kernel_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    w, gelu = torch.ones(4, 4), resolve("gelu")
    assert backends.describe_matmuls(w, gelu) == ["matmuls by rule, nothing is tuned"]
    assert backends.describe_matmuls(w.double(), gelu) == []
    with fl.use_kernels("off"):
        assert backends.describe_matmuls(w, gelu) == ["matmuls are PyTorch's: kernels are off"]
    monkeypatch.setattr(backend, "missing_because", lambda: "no driver")
    backends._for_gpus.cache_clear()
    assert backends.describe_matmuls(w, gelu) == ["matmuls are PyTorch's: Triton does not run here"]


# --- tune -------------------------------------------------------------------------------------------------------------


def test_a_model_is_tuned(
    on_triton: Switch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_triton(True)
    monkeypatch.setattr(public, "_have_kernels", lambda devices: True)
    monkeypatch.setattr(dispatch, "SMALL", 0)
    monkeypatch.setattr(dispatch, "tf32_is_allowed", lambda: True)
    monkeypatch.setattr(gemm, "tilings", lambda device, itemsize: {"tiled": TILING})
    times = iter(range(1000))
    monkeypatch.setattr(tuning, "_time", lambda function: 100.0 if next(times) % 2 == 0 else 80.0)
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), fl.FusedMLP(24, 40, 24, save="output")).to(DEVICE)
    state, x = torch.get_rng_state(), torch.randn(37, 24, device=DEVICE)
    torch.set_rng_state(state)
    stages: list[tuple[str, float]] = []
    report = fl.tune(model, x, progress=lambda *stage: stages.append(stage))
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert len(report.choices) == 2 and not report.skipped
    measured = [(f"measuring {question}", number / 2) for number, question in enumerate(report.choices)]
    assert stages == [("counting matmuls", 0.0), *measured]
    assert all(choice == "tiled (tuned: 0.80x the library's time)" for choice in report.choices.values())
    assert f"written to {report.files[0]}" in str(report) and report.files[0].parent == tmp_path / "fusedlayers"
    assert any("tiled (tuned" in line for line in backends.describe_matmuls(model[1].fc1.weight, resolve("gelu")))
    assert "nothing to choose" in str(fl.tune(torch.nn.Linear(2, 2).to(DEVICE), torch.ones(2, device=DEVICE)))

    # Arguments of both kinds arrive.
    (tmp_path / "made.py").write_text(
        "import torch\n"
        "class Scaled(torch.nn.Linear):\n"
        "    def forward(self, x, *, by): return by * super().forward(x)\n"
        "def make(): return Scaled(2, 2), (torch.ones(2),), {'by': 3.0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["tune", "made:make"]) == 0
    out, err = capsys.readouterr()
    assert "nothing to choose" in out and "\x1b" not in out and "counting matmuls" in err


def test_what_cannot_be_tuned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(2)
    with pytest.raises(TypeError, match=r"tune: model must be an nn.Module, got int: 3"):
        fl.tune(3, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tune: the model is on cpu, expected a GPU"):
        fl.tune(model, x)
    monkeypatch.setattr(public, "_have_kernels", lambda devices: True)
    with (
        fl.use_kernels("off"),
        pytest.raises(ValueError, match="tune: FUSEDLAYERS_KERNELS or use_kernels has switched"),
    ):
        fl.tune(model, x)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tune: Triton is not installed"):
        fl.tune(model, x)
    assert cli.main(["tune", "os"]) == 2 and "expected MODULE:FACTORY" in capsys.readouterr().err


# --- kernels that cannot be launched ----------------------------------------------------------------------------------


class Broken:
    """A kernel that cannot be launched."""

    arg_names = ()

    def __init__(self, error: Exception, launched: list[str] | None = None) -> None:
        self.error, self.launched = error, launched

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            if self.launched is not None:
                self.launched.append("")
            raise self.error

        return launch


ERROR = "no kernel image is available for execution on the device"


@pytest.mark.parametrize("error", [OutOfResources(9, 1, "registers"), RuntimeError(ERROR), OSError("no cc")], ids=str)
def test_torch_computes_what_cannot_be_launched(
    error: Exception, on_triton: Switch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_triton(True)
    monkeypatch.setattr(fallback, "_warned", set())
    launched: list[str] = []
    broken = Broken(error, launched)
    norms = importlib.import_module("fusedlayers.backends.triton.row_norm")  # its name is a function's too
    for module, kernel in (
        *((elementwise, f"{name}_kernel") for name in ("bias_act", "gradient")),
        (sums, "sums_kernel"),
        *((norms, f"{name}_kernel") for name in ("rms_norm", "row_norm_gradient")),
    ):
        monkeypatch.setattr(module, kernel, broken)
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((64, 24), (40, 24), (40,)))
    norm_weight = torch.ones(40, device=DEVICE, requires_grad=True)

    def step(dense: Any, norm: Any) -> list[Tensor]:
        y = norm(dense(x, w, b))
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), (x, w, b, norm_weight))]

    def torchs() -> list[Tensor]:
        return step(lambda *t: F.linear(*t).tanh(), lambda y: F.rms_norm(y, (40,), norm_weight, 1e-5))

    for _ in range(2):
        count = len(launched)
        found = step(
            lambda *t: fl.dense_bias_act(*t, "tanh", save="output"),
            lambda y: fl.rms_norm(y, 40, norm_weight, 1e-5, save="output"),
        )
        for ours, theirs in zip(found, torchs(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    if not isinstance(error, OSError):  # the system may be in order the next time
        assert 0 < count == len(launched)  # no second try
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
    assert "cannot run on" in caplog.text and "torch operations compute in its place" in caplog.text


def test_sums_that_cannot_be_launched_are_torchs(on_triton: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the gradient has been written over the saved output."""
    on_triton(True)

    monkeypatch.setattr(sums, "sums_kernel", Broken(OutOfResources(9, 1, "registers")))
    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((64, 24), (40, 24), (40,)))
    found = torch.autograd.grad(fl.dense_bias_act(x, w, b, "tanh").sum(), (x, w, b))
    for ours, theirs in zip(found, torch.autograd.grad(F.linear(x, w, b).tanh().sum(), (x, w, b)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_matmul_that_cannot_be_launched_is_the_librarys(fused: list[str], on_triton: Switch) -> None:
    on_triton(True)

    def broken(*arguments: Any, **options: Any) -> Any:
        raise OutOfResources(9, 1, "shared memory")

    x, w, b = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((64, 24), (40, 24), (40,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "linear_act", broken)
        patch.setattr(gemm, "linear_gradient", broken)
        w2 = torch.randn(24, 40, device=DEVICE, requires_grad=True)
        for _ in range(2):
            y = fl.mlp(x, w, b, w2, None, "tanh")
            expected = F.linear(F.linear(x, w, b).tanh(), w2)
            torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
            for ours, theirs in zip(*(torch.autograd.grad(r.sum(), (x, w, b, w2)) for r in (y, expected)), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        InterpreterError("a mistake in the kernel"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_raised(error: Exception, on_triton: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    on_triton(True)
    monkeypatch.setattr(elementwise, "bias_act_kernel", Broken(error))
    with pytest.raises(type(error)):
        fl.bias_act(torch.randn(64, 40, device=DEVICE, requires_grad=True), None, "tanh", save="output")


# --- scratch numbers --------------------------------------------------------------------------------------------------


def layer(rows: int = 37) -> operations.Layer:
    x, w, b = (torch.randn(s, device=DEVICE) for s in ((rows, 24), (40, 24), (40,)))
    return operations.Layer(x, w, b, resolve("gelu"), (), True)


def backwards(gated: bool, hidden: bool) -> operations.Backwards:
    dy, w = torch.randn(37, 24, device=DEVICE), torch.randn(24, 40, device=DEVICE)
    parts = [torch.randn(37, 40, device=DEVICE) for _ in range(1 + gated)]
    return operations.Backwards(dy, w, parts, resolve("gelu"), (), GradientRequest("input", True, not gated), hidden)


@pytest.mark.parametrize(
    ("gated", "hidden"), [(None, None), (False, False), (False, True), (True, False), (True, True)]
)
def test_candidates_are_run_on_numbers_of_their_own(gated: Any, hidden: Any, fused: list[str]) -> None:
    job: Any = layer() if gated is None else backwards(gated, hidden)
    tensors = [t for field in job for t in (field if isinstance(field, list) else [field]) if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    state = torch.get_rng_state()
    run = job.scratch(64)
    library, again, tiled = run(LIBRARY), run(LIBRARY), run("tiled")
    assert len(library) == len(tiled) >= 1
    for a, b, c in zip(library, again, tiled, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)  # from the same numbers each time
        assert c.shape[0] in (64, 40)
        torch.testing.assert_close(a, c, atol=2e-4, rtol=1e-4, equal_nan=True)
        assert 0.01 < float(a.nanmean().square() + a.nan_to_num().square().mean()) < 1e3
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(tensor, kept)
    assert torch.equal(torch.get_rng_state(), state)


def test_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def choose(question: Question, device: torch.device, job: Any) -> str:
        asked.append(str(question))
        return job.candidates[0]

    monkeypatch.setattr(dispatch, "choose", choose)
    assert layer().choose() == LIBRARY
    layer()._replace(encode=False).choose()
    layer()._replace(encode=False, b=None).choose()
    for gated, hidden in ((False, False), (False, True), (True, True)):
        assert backwards(gated, hidden).choose() == LIBRARY
    job = backwards(False, False)
    job._replace(request=GradientRequest("output", True, True)).choose()
    assert asked == [
        "layer bias encoded gelu float32 37x40x24",
        "layer bias gelu float32 37x40x24",
        "layer gelu float32 37x40x24",
        "gradient bias gelu float32 37x40x24",
        "gradient hidden bias gelu float32 37x40x24",
        "gradient gated hidden gelu float32 37x40x24",
        "gradient given_output bias gelu float32 37x40x24",
    ]
    dy, w, parts, activation, *rest = job
    assert backend.linear_gradient(dy, w, parts, activation, (), rest[1], hidden=False) is None


def test_float32_is_multiplied_as_tf32_or_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tilings", lambda device, itemsize: {"tiled": TILING})
    a = torch.randn(8, 16)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision, expected in (("tf32", {"tiled": TILING}), ("ieee", {})):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert operations._tilings(a, a) == expected
            assert operations._tilings(a.bfloat16(), a.bfloat16()) == {"tiled": TILING}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert operations._tilings(a.bfloat16(), a) == operations._tilings(a.bfloat16().t(), a.bfloat16()) == {}


def test_torchs_relu_epilogue_is_a_candidate_for_relu_with_a_bias() -> None:
    relu = layer()._replace(activation=resolve("relu"))
    assert relu.candidates == [LIBRARY, operations.RELU_EPILOGUE] and layer().candidates == [LIBRARY]
    assert relu._replace(b=None).candidates == [LIBRARY]
    torch.testing.assert_close(relu.run(operations.RELU_EPILOGUE), relu.run(LIBRARY))


def test_scratch_layers_have_what_is_no_number() -> None:
    (y,) = layer()._replace(activation=resolve("relu")).scratch(64)(LIBRARY)
    assert bool(y[:, 0].isnan().all()) and not bool(y[:, 1:].isnan().any())


@pytest.mark.parametrize("change", ["a row", "a number", "a NaN", "half a unit"])
def test_differences(change: str) -> None:
    expected = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    expected[3, 5] = torch.nan
    ours = expected.clone()
    if change == "a row":
        ours[2000] = 0
    elif change == "a number":
        ours[2000, 7] += 2
    elif change == "a NaN":
        ours[3, 5] = 0
    else:
        ours *= 1 + 2**-9
    found = tuning._differs([ours], [expected], torch.bfloat16)
    assert (found is None) == (change == "half a unit")
    assert change != "a NaN" or found == "in what is no number"


def test_names_of_functions_that_are_not_the_same_differ() -> None:
    first, second = (
        with_operands(resolve(function), (8, 8), torch.float32).activation
        for function in (lambda z: z.sin() * z, lambda z: z.cos() * z)
    )
    assert first.name == second.name == "<lambda>"
    assert operations._identity(first) != operations._identity(second)
    assert (
        operations._identity(first) == operations._identity(first) and operations._identity(resolve("gelu")) == "gelu"
    )


def test_rows_begin_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tilings", lambda device, itemsize: {"tiled": TILING})

    def tilings(columns: int, inner: int, first: int = 0) -> Any:
        x = torch.empty(first + 8 * inner, dtype=torch.bfloat16)[first:].view(8, inner)
        return operations._tilings(x, torch.empty(columns, inner, dtype=torch.bfloat16))

    assert tilings(16, 24) == tilings(16, 24, first=8) == {"tiled": TILING}
    assert tilings(16, 20) == tilings(20, 16) == tilings(16, 24, first=4) == {}


def test_devices_without_tensor_cores_have_no_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm.tilings(CPU, 2) == {}
    monkeypatch.setattr(torch.version, "hip", None)
    for major, expected in ((7, None), (8, "8"), (9, "9"), (10, "10"), (12, "8")):
        gemm.tilings.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        found = gemm.tilings(torch.device("cuda"), 2)
        assert list(found.values()) == list(gemm.TILINGS[expected][2] if expected else ())
        assert list(found) == [str(t) for t in found.values()]
    gemm.tilings.cache_clear()
