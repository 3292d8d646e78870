"""Which matmul is chosen: by times that the tests make up, on a device that need not be there."""

import json
import logging
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
from fusedlayers.activations import resolve
from fusedlayers.backends import GradientRequest
from fusedlayers.call import with_operands
from fusedlayers.memory import saved_bytes

pytest.importorskip("triton")

from fusedlayers.backends import triton as backend  # after the line that skips without it
from fusedlayers.backends.triton import dispatch, gemm, operations
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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def forget() -> None:
        dispatch._answers.cache_clear()
        dispatch._Remembered.of.cache_clear()

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
        monkeypatch.setattr(dispatch, "_time", self.time)

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


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", CANDIDATES)
def test_the_fastest_is_chosen(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, **{**dict.fromkeys(CANDIDATES, 100.0), best: 80.0})
    assert bench.choose() == best
    assert bench.choose() == best and len(bench.rows) == 1  # measured once
    (answer,) = dispatch.answers_for("gelu", 3072, 768, CPU)
    ratio = "the next takes 1.25x its time" if best == LIBRARY else "0.80x the library's time"
    assert answer == f"layer, up to 8192 rows of bfloat16: {best} (measured: {ratio})"
    assert dispatch.answers_for("gelu", 768, 3072, CPU) == [answer]
    assert dispatch.answers_for("silu", 3072, 768, CPU) == dispatch.answers_for("gelu", 3072, 769, CPU) == []


def test_rows_are_told_apart_by_powers_of_two_up_to_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    for rows in (4097, 8192, 8193, 16384, 16385, 1 << 30):
        assert bench.choose(QUESTION._replace(rows=rows)) == "narrow"
    assert bench.rows == [8192, 16384]


def test_small_products_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    assert bench.choose(QUESTION._replace(rows=64, columns=64, inner=64)) == LIBRARY
    assert bench.choose(QUESTION._replace(inner=0)) == LIBRARY
    assert bench.choose(candidates=[LIBRARY]) == LIBRARY
    assert bench.rows == []


@pytest.mark.parametrize("result", [1.01, float("nan"), RuntimeError("no such instruction")], ids=str)
def test_what_is_wrong_is_not_used(
    result: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=1.5)
    bench.results["narrow"] = result if isinstance(result, Exception) else torch.full((2, 4), result)
    question = QUESTION._replace(dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        assert bench.choose(question) == "wide"
    said = "no such instruction" if isinstance(result, Exception) else "its results differ from the library's "
    said += "in what is no number" if result != result else ""
    assert "a fused matmul (narrow) is not used" in caplog.text and said in caplog.text
    bench.results["wide"] = RuntimeError()
    assert bench.choose(question._replace(inner=1024)) == LIBRARY


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    bench.results["narrow"] = torch.full((2, 4), 1.01)
    assert bench.choose() == "narrow"  # which is a unit in bfloat16


def test_without_memory_a_rule_decides_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)

    def scratch(rows: int) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(bench, "scratch", scratch)
    assert bench.choose() == LIBRARY
    (answer,) = dispatch.answers_for("gelu", 3072, 768, CPU)
    assert answer.endswith("library (by rule: no memory was left to measure)")
    assert list(tmp_path.iterdir()) == []


# --- without measuring ------------------------------------------------------------------------------------------------


def test_deterministic_algorithms_are_chosen_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(dispatch, "by_rule", lambda *arguments: "wide")
    assert bench.choose() == "wide" and bench.rows == []
    assert dispatch.answers_for("gelu", 3072, 768, CPU) == []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert bench.choose() == "narrow"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert bench.choose() == "wide"  # whatever was measured before


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    monkeypatch.setattr(dispatch, "_is_capturing", lambda device: True)
    assert bench.choose() == LIBRARY and bench.rows == []
    monkeypatch.setattr(dispatch, "_is_capturing", lambda device: False)
    assert bench.choose() == "narrow"
    monkeypatch.setattr(dispatch, "_is_capturing", lambda device: True)
    assert bench.choose() == "narrow"  # which is known by now


@pytest.mark.parametrize(
    "capability, dtype, inner, expected",
    [
        ((9, 0), torch.bfloat16, 1024, "wide"),
        ((9, 0), torch.bfloat16, 1025, LIBRARY),
        ((9, 0), torch.float32, 768, LIBRARY),
        ((10, 0), torch.float16, 768, "wide"),
        ((8, 0), torch.bfloat16, 768, LIBRARY),
    ],
    ids=str,
)
def test_the_rule(
    capability: tuple[int, int], dtype: torch.dtype, inner: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    question = QUESTION._replace(dtype=dtype, inner=inner)
    assert dispatch.by_rule(question, torch.device("cuda"), CANDIDATES) == expected


# --- remembering ------------------------------------------------------------------------------------------------------


def test_the_next_process_does_not_measure(
    forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).choose()
    forgets()
    later = Bench(monkeypatch, library=1.0, narrow=2.0, wide=3.0)
    assert later.choose() == "narrow" and later.rows == []
    assert later.choose(candidates=[LIBRARY, "wide"]) == LIBRARY  # of what there is for this call
    assert later.choose(QUESTION._replace(inner=1024)) == LIBRARY and later.rows == [8192]
    (path,) = (tmp_path / "fusedlayers").iterdir()
    kept = json.loads(path.read_text())
    assert kept["torch"] == torch.__version__ and len(kept["kernels"]) == 16 and kept["device"] == "cpu"
    assert kept["times_us"]["layer gelu bfloat16 8192x3072x768"] == {"library": 2.0, "narrow": 1.0, "wide": 3.0}


def test_other_versions_have_other_times(forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).choose()
    forgets()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    later = Bench(monkeypatch, library=1.0, narrow=2.0, wide=3.0)
    assert later.choose() == LIBRARY and later.rows == [8192]


def test_new_candidates_are_measured(forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    Bench(monkeypatch, library=2.0, narrow=1.0).choose(candidates=[LIBRARY, "narrow"])
    forgets()
    later = Bench(monkeypatch, library=2.0, narrow=1.0, wide=0.5)
    assert later.choose() == "wide"


def test_processes_add_to_one_file(forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = dispatch._Remembered(CPU), dispatch._Remembered(CPU)
    first.put("one", {"library": 1.0})
    second.put("two", {"library": 2.0})
    assert dispatch._Remembered(CPU).times == {"one": {"library": 1.0}, "two": {"library": 2.0}}


ENTRY = str(QUESTION.in_general)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"times_us": 3}', "\x00", "[" * 100_000),
        *(
            json.dumps({"times_us": {ENTRY: entry}})
            for entry in (
                *(3, "library narrow wide", ["library", "narrow", "wide"], {"narrow": 1.0, "wide": 2.0}),
                *({"library": time, "narrow": 1.0, "wide": 2.0} for time in ("a", 0, -1, None, True, [1])),
            )
        ),
    ],
    ids=range(16),
)
def test_a_broken_file_is_none(
    text: str, forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).choose()
    (path,) = (tmp_path / "fusedlayers").iterdir()
    path.write_text(text)
    forgets()
    later = Bench(monkeypatch, library=1.0, narrow=2.0, wide=3.0)
    assert later.choose() == LIBRARY and later.rows == [8192]
    assert json.loads(path.read_text())["times_us"]


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fusedlayers").write_text("a file")
    with caplog.at_level(logging.INFO):
        assert Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0).choose() == "narrow"
    assert "are not kept for the next process" in caplog.text


def test_without_a_home_folder_times_are_kept_for_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    bench = Bench(monkeypatch, library=2.0, narrow=1.0, wide=3.0)
    with caplog.at_level(logging.INFO):
        assert bench.choose() == bench.choose() == "narrow" and len(bench.rows) == 1
    assert "Could not determine home directory" in caplog.text


def test_times_are_kept_in_the_home_folder_if_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert dispatch.cache_folder() == Path.home() / ".cache" / "fusedlayers"


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


def test_layers_and_blocks_say_what_was_measured(on_triton: Switch) -> None:
    on_triton(True)
    answers = dispatch._answers(CPU)
    answers[QUESTION.in_general] = dispatch.Answer("wide", "measured: 0.80x the library's time")
    gradient = Question("gradient hidden", "gelu", torch.float16, 256, 3072, 768)
    answers[gradient] = dispatch.Answer(LIBRARY, "measured: the next takes 1.25x its time")
    layer, plain = fl.FusedDenseAct(768, 3072, "gelu"), fl.FusedDenseAct(768, 3072, "silu")
    line = "layer, up to 8192 rows of bfloat16: wide (measured: 0.80x the library's time)"
    assert line in repr(layer) and "measured" not in repr(plain)
    explained = fl.explain(layer)
    assert explained.matmuls == (
        "gradient hidden, up to 256 rows of float16: library (measured: the next takes 1.25x its time)",
        line,
    )
    assert f"  matmul: {line}" in str(explained) and explained.to_dict()["matmuls"] == list(explained.matmuls)
    assert fl.explain(plain).matmuls == fl.explain("gelu").matmuls == ()

    block, gated = fl.FusedMLP(768, 3072), fl.FusedGatedMLP(768, 3072, activation="gelu")
    assert repr(block).count(line) == 2 and repr(gated).count(line) == 1
    block.fc1.register_forward_hook(lambda *arguments: None)
    assert "measured" not in repr(block)


# --- scratch numbers --------------------------------------------------------------------------------------------------


def layer(rows: int = 37) -> operations.Layer:
    x, w, b = (torch.randn(s, device=DEVICE) for s in ((rows, 24), (40, 24), (40,)))
    return operations.Layer(x, w, b, resolve("gelu"), (), True)


def backwards(gated: bool, hidden: bool) -> operations.Backwards:
    dy, w = torch.randn(37, 24, device=DEVICE), torch.randn(24, 40, device=DEVICE)
    parts = [torch.randn(37, 40, device=DEVICE) for _ in range(1 + gated)]
    return operations.Backwards(dy, w, parts, resolve("gelu"), (), GradientRequest("input", True, not gated), hidden)


@pytest.mark.parametrize("gated, hidden", [(None, None), (False, False), (False, True), (True, False), (True, True)])
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
    found = dispatch._differs([ours], [expected], torch.bfloat16)
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
