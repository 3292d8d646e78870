"""How far a long run is: a line on stderr every ten seconds, and none on stdout."""

import io
from types import SimpleNamespace

import pytest

from fusedlayers.utils import progress


class Clock:
    """What stands for ``time`` in the module: nobody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def run(clock: Clock, seconds: float) -> None:
    on_stage = progress.asked("fit", True)
    for number in range(4):
        on_stage(f"stage {number}", number / 4)
        clock.now += seconds


def test_a_line_after_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run(clock, 6)
    assert capsys.readouterr() == ("", " 50% stage 2, 12 s left\n")
    run(clock, 2)
    assert capsys.readouterr() == ("", "")
    run(clock, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [" 25% stage 1, 5 min left", " 50% stage 2, 3 min left", " 75% stage 3, 2 min left"]


def test_nothing_is_shown_where_nothing_can_be(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, object()):
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
        run(clock, 6)
    assert capsys.readouterr().out == ""
