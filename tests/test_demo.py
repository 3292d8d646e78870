"""The demo: a fair comparison, measured and shown truthfully. Tiny sizes; the default run takes most of a minute."""

import argparse
import io
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedlayers.activations import resolve
from fusedlayers.cli import main
from fusedlayers.demo import training
from fusedlayers.demo.command import DEFAULTS, SECONDS, register, settings_from
from fusedlayers.demo.corpus import batches, standard_library_bytes
from fusedlayers.demo.model import ACTIVATIONS, BYTES, ByteTransformer
from fusedlayers.demo.report import COLORS, MIB, Outcomes, losses_to, plot, table
from fusedlayers.demo.training import NO_LIMIT, Outcome, Settings, compare, trainers

TINY = Settings(
    device=torch.device("cpu"),
    dtype=torch.float32,
    activation="gelu",
    steps=30,
    batch=4,
    context=32,
    width=32,
    layers=2,
    seed=0,
)
HIDDEN_ELEMENTS = TINY.layers * TINY.batch * TINY.context * 4 * TINY.width


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share such small operations wait for each other: 30 s instead of 1 on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus() -> torch.Tensor:
    return standard_library_bytes()


@pytest.fixture(scope="module")
def outcomes(corpus: torch.Tensor) -> Outcomes:
    return compare(TINY, corpus)


# --- corpus -----------------------------------------------------------------------------------------------------------


def test_corpus_is_the_standard_library(corpus: torch.Tensor) -> None:
    assert len(corpus) > 1_000_000
    assert Path(re.__file__).parent.with_name("os.py").read_bytes()[:200] in bytes(corpus.tolist())


def test_corpus_is_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (("b.py", b"two"), ("a.py", b"one"), ("c.txt", b"three")):
        (tmp_path / name).write_bytes(text)
    assert bytes(standard_library_bytes(tmp_path).tolist()) == b"one\ntwo"


def test_a_directory_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no .*py files in {re.escape(str(tmp_path))}, expected"):
        standard_library_bytes(tmp_path)


def test_batches_are_excerpts_and_repeat_with_the_seed() -> None:
    corpus = torch.arange(200, dtype=torch.uint8)
    first, again, other = (list(itertools.islice(batches(corpus, 8, 5, seed), 3)) for seed in (1, 1, 2))
    for (inputs, targets), (inputs_again, _), (inputs_other, _) in zip(first, again, other, strict=True):
        assert inputs.shape == targets.shape == (8, 5)
        assert torch.equal(targets, inputs + 1)  # each target is the byte that follows
        assert torch.equal(inputs, inputs_again)
        assert not torch.equal(inputs, inputs_other)


def test_batches_reach_both_ends_of_the_corpus() -> None:
    inputs, targets = next(batches(torch.arange(7, dtype=torch.uint8), 200, 5, 0))
    assert inputs.min() == 0
    assert targets.max() == 6


# --- model and training -----------------------------------------------------------------------------------------------


def test_model_does_not_see_the_future() -> None:
    model = ByteTransformer(32, 2, 16, "gelu")
    text = torch.randint(BYTES, (1, 16))
    changed = text.clone()
    changed[0, 10] += 1
    before, after = model(text % BYTES), model(changed % BYTES)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any(dim=-1).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_called_as_in_the_table(name: str) -> None:
    x = torch.linspace(-5, 5, 1001)
    assert torch.equal(ACTIVATIONS[name]()(x), resolve(name).plain(x))


def test_both_start_from_the_same_weights_and_leave_the_global_seed_alone() -> None:
    state = torch.get_rng_state()
    eager, fused = (trainer.model.state_dict() for trainer in trainers(TINY).values())
    assert torch.equal(torch.get_rng_state(), state)
    assert eager.keys() == fused.keys()
    assert all(torch.equal(eager[name], fused[name]) for name in eager)
    assert all(eager[name].data_ptr() != fused[name].data_ptr() for name in eager)


def test_measuring_teaches_nothing(corpus: torch.Tensor) -> None:
    trainer = trainers(TINY)["fused"]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.measure(*next(batches(corpus, TINY.batch, TINY.context, 0)))
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_losses_start_equal_and_fall_together(outcomes: Outcomes) -> None:
    eager, fused = (torch.tensor(outcome.losses, dtype=torch.float64) for outcome in outcomes.values())
    assert len(eager) == len(fused) == TINY.steps
    torch.testing.assert_close(fused[0], eager[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(fused, eager, rtol=1e-3, atol=0)
    assert (eager[-5:] < eager[0] - 1.5).all()


def test_fused_saves_one_hidden_buffer_less_in_each_layer(outcomes: Outcomes) -> None:
    # And what the norms return.
    assert outcomes["eager"].saved_bytes - outcomes["fused"].saved_bytes > 4 * HIDDEN_ELEMENTS


def test_fused_needs_less_at_its_peak(corpus: torch.Tensor) -> None:
    # More layers than elsewhere: with two, the temporaries of one layer's backward weigh as much as the buffers spared.
    both = compare(replace(TINY, layers=8, steps=1), corpus)
    assert both["fused"].peak_bytes < 0.9 * both["eager"].peak_bytes


def test_relu_saves_less_too(corpus: torch.Tensor) -> None:
    both = compare(replace(TINY, activation="relu", steps=1), corpus)
    assert both["fused"].saved_bytes < both["eager"].saved_bytes


def test_bfloat16_halves_the_hidden_buffers(corpus: torch.Tensor) -> None:
    both = compare(replace(TINY, activation="silu", dtype=torch.bfloat16, steps=1), corpus)
    assert both["eager"].saved_bytes - both["fused"].saved_bytes > 2 * HIDDEN_ELEMENTS
    assert both["fused"].losses[0] == pytest.approx(both["eager"].losses[0], rel=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_on_a_gpu(corpus: torch.Tensor) -> None:
    both = compare(replace(TINY, device=torch.device("cuda"), dtype=torch.float16), corpus)
    assert both["eager"].saved_bytes - both["fused"].saved_bytes > 2 * HIDDEN_ELEMENTS
    assert both["fused"].losses == pytest.approx(both["eager"].losses, rel=1e-2)
    assert both["fused"].losses[-1] < both["fused"].losses[0] - 1


# --- report -----------------------------------------------------------------------------------------------------------


def test_step_time_is_the_median() -> None:
    assert Outcome(saved_bytes=0, peak_bytes=0, times_ms=[900.0, 2.0, 3.0]).step_ms == 3.0


MADE_UP: Outcomes = {
    "eager": Outcome(saved_bytes=40 * MIB, peak_bytes=50 * MIB, losses=[5.5, 2.5], times_ms=[10.0]),
    "fused": Outcome(saved_bytes=30 * MIB, peak_bytes=45 * MIB, losses=[5.5, 2.4], times_ms=[8.0]),
}


def test_table_states_the_figures_and_their_ratios() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(table(MADE_UP))
    rows = [re.findall(r"[\w./]+", line) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["eager", "40.00", "50.00", "10.0", "5.5000", "2.5000"] in rows
    assert ["fused", "30.00", "45.00", "8.0", "5.5000", "2.4000"] in rows
    assert ["fused", "/", "eager", "0.75", "0.90", "0.80"] in rows


def test_progress_says_the_losses_a_hundred_times() -> None:
    said: list[tuple[str, float]] = []
    losses_to(lambda stage, part: said.append((stage, part)), replace(TINY, steps=4))(MADE_UP)
    assert said == [("step 2: loss 2.400 (eager 2.500)", 0.5)]
    said.clear()
    on_step = losses_to(lambda stage, part: said.append((stage, part)), replace(TINY, steps=200, seconds=100))
    for steps, time_ms in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 10_000.0), (5, 10_000.0), (6, 90_000.0)):
        on_step({name: Outcome(0, 0, losses=[1.0] * steps, times_ms=[time_ms / 2]) for name in MADE_UP})
    assert [part for _, part in said] == [0.01, 0.1, 0.9]  # by steps, then by seconds


def test_training_ends_when_its_time_is_over(corpus: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 2.0)  # each step of each variant takes two seconds
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))
    outcomes = compare(replace(TINY, seconds=7), corpus)
    assert [len(outcome.losses) for outcome in outcomes.values()] == [2, 2]


@pytest.mark.parametrize(
    ("options", "steps", "seconds"),
    [
        ([], DEFAULTS["cpu"]["steps"], SECONDS),
        (["--steps=7"], 7, NO_LIMIT),
        (["--seconds=5"], DEFAULTS["cpu"]["steps"], 5),
        (["--steps=7", "--seconds=5"], 7, 5),
    ],
)
def test_the_time_is_limited_unless_the_steps_are_said(options: list[str], steps: int, seconds: int) -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    settings = settings_from(parser.parse_args(["demo", "--device=cpu", *options]))
    assert (settings.steps, settings.seconds) == (steps, seconds)


def test_plot_draws_both_variants_and_leaves_matplotlib_alone(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    before = dict(matplotlib.rcParams)
    plot(MADE_UP, "a title", tmp_path / "demo.png")
    assert dict(matplotlib.rcParams) == before
    picture = torch.from_numpy(imread(tmp_path / "demo.png")[..., :3].copy())
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1000
    eager, fused = (
        (picture - torch.tensor(to_rgb(color))).abs().amax(-1).lt(0.01).double().mean() for color in COLORS.values()
    )
    assert 0.05 < fused < eager < 0.3  # shares of the picture; the bars of fewer bytes are smaller


@pytest.mark.parametrize("is_terminal", [False, True])
def test_command_prints_a_table_and_writes_a_picture(
    is_terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "demo.png"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    sizes = [
        f"--{name}={getattr(TINY, name)}" for name in ("batch", "context", "width", "layers", "activation", "seed")
    ]
    assert main(["demo", "--device=cpu", *sizes, "--steps=3", f"--out={path}"]) == 0
    output = capsys.readouterr()
    assert ("loss" in output.err) == is_terminal and (output.err == "") != is_terminal
    assert "\x1b" not in output.out
    saved = {
        name: float(re.findall(rf"^\W*{name}\W+([\d.]+)", output.out, re.MULTILINE)[0]) for name in ("eager", "fused")
    }
    assert saved["eager"] - saved["fused"] > 4 * HIDDEN_ELEMENTS / MIB
    assert str(path) in output.out
    assert path.stat().st_size > 20_000
