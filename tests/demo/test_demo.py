"""The demo: a fair comparison, measured and shown truthfully. Tiny sizes; the default run takes most of a minute."""

import re
from collections.abc import Iterator

import pytest
import torch

from fusedlayers.__main__ import main
from fusedlayers.demo.command import DEFAULTS, MIB, Outcomes
from fusedlayers.demo.training import Settings, compare, standard_library_bytes

TINY = Settings(device=torch.device("cpu"), dtype=torch.float32, steps=30, batch=4, context=32, width=32, layers=2)
HIDDEN_ELEMENTS = TINY.layers * TINY.batch * TINY.context * 4 * TINY.width


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share such small operations wait for each other: 30 s instead of 1 on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return compare(TINY, standard_library_bytes(), print)


# --- model and training -----------------------------------------------------------------------------------------------


def test_losses_start_equal_and_fall_together(outcomes: Outcomes) -> None:
    eager, fused = (torch.tensor(outcome.losses, dtype=torch.float64) for outcome in outcomes.values())
    assert len(eager) == len(fused) == TINY.steps
    torch.testing.assert_close(fused[0], eager[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(fused, eager, rtol=1e-3, atol=0)
    assert (eager[-5:] < eager[0] - 1.5).all()


def test_fused_saves_one_hidden_buffer_less_in_each_layer(outcomes: Outcomes) -> None:
    # And what the norms return.
    assert outcomes["eager"].saved_bytes - outcomes["fused"].saved_bytes > 4 * HIDDEN_ELEMENTS


# --- report -----------------------------------------------------------------------------------------------------------


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "cpu", TINY)
    assert main(["demo", "--device=cpu", "--steps=3"]) == 0
    output = capsys.readouterr()
    assert output.err == ""  # a run that takes less than ten seconds shows no progress
    eager, fused = (
        float(re.findall(rf"^ *([\d.]+) .* {name}$", output.out, re.MULTILINE)[0]) for name in ("eager", "fused")
    )
    assert eager - fused > 4 * HIDDEN_ELEMENTS / MIB
