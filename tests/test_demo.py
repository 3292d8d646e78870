"""The demo: a fair comparison, measured and shown truthfully. Tiny sizes; the default run takes most of a minute."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fusedlayers.__main__ import main
from fusedlayers.demo.command import DEFAULTS, MIB, Outcomes, table
from fusedlayers.demo.training import Outcome, Settings, batches, compare, standard_library_bytes, trainers

TINY = Settings(
    device=torch.device("cpu"),
    dtype=torch.float32,
    steps=30,
    batch=4,
    context=32,
    width=32,
    layers=2,
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
    return compare(TINY, corpus, print)


# --- corpus -----------------------------------------------------------------------------------------------------------


def test_batches_are_excerpts_and_repeat() -> None:
    corpus = torch.arange(200, dtype=torch.uint8)
    first, again = (list(itertools.islice(batches(corpus, 8, 5), 3)) for _ in range(2))
    for (inputs, targets), (inputs_again, _) in zip(first, again, strict=True):
        assert inputs.shape == targets.shape == (8, 5)
        assert torch.equal(targets, inputs + 1)  # each target is the byte that follows
        assert torch.equal(inputs, inputs_again)
    assert not torch.equal(first[0][0], first[1][0])


# --- model and training -----------------------------------------------------------------------------------------------


def test_both_start_from_the_same_weights_and_leave_the_global_seed_alone() -> None:
    state = torch.get_rng_state()
    eager, fused = (trainer.model.state_dict() for trainer in trainers(TINY).values())
    assert torch.equal(torch.get_rng_state(), state)
    assert eager.keys() == fused.keys()
    assert all(torch.equal(eager[name], fused[name]) for name in eager)
    assert all(eager[name].data_ptr() != fused[name].data_ptr() for name in eager)


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
    both = compare(replace(TINY, layers=8, steps=1), corpus, print)
    assert both["fused"].peak_bytes < 0.9 * both["eager"].peak_bytes


# --- report -----------------------------------------------------------------------------------------------------------


MADE_UP: Outcomes = {
    "eager": Outcome(saved_bytes=40 * MIB, peak_bytes=50 * MIB, losses=[5.5, 2.5], times_ms=[10.0]),
    "fused": Outcome(saved_bytes=30 * MIB, peak_bytes=45 * MIB, losses=[5.5, 2.4], times_ms=[8.0]),
}


def test_table_states_the_figures_and_their_ratios() -> None:
    rows = [line.split() for line in table(MADE_UP)]
    assert rows[1:3] == [
        ["40.00", "50.00", "10.00", "5.5000", "2.5000", "eager"],
        ["30.00", "45.00", "8.00", "5.5000", "2.4000", "fused"],
    ]
    assert rows[3] == ["0.75", "0.90", "0.80", "fused", "/", "eager"]


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "cpu", TINY)
    assert main(["demo", "--device=cpu", "--steps=3"]) == 0
    output = capsys.readouterr()
    assert output.err == ""  # a run that takes less than ten seconds shows no progress
    eager, fused = (
        float(re.findall(rf"^ *([\d.]+) .* {name}$", output.out, re.MULTILINE)[0]) for name in ("eager", "fused")
    )
    assert eager - fused > 4 * HIDDEN_ELEMENTS / MIB
