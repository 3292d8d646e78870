"""How far a long run is: a line on stderr every ten seconds, and none on stdout."""

import io
from types import SimpleNamespace

import pytest

from bench import grid
from fusedlayers.utils import progress
from fusedlayers.utils.formatting import duration_text


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


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (3000, "50 min"), (6000, "1 h 40 min"), (90000, "25 h 0 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


def test_nothing_is_shown_where_nothing_can_be(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, object()):
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
        run(clock, 6)
    assert capsys.readouterr().out == ""


def test_a_grid_is_as_far_as_its_cases_or_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(), []
    monkeypatch.setattr(grid, "time", clock)
    monkeypatch.setattr(progress, "shown", lambda: lambda stage, part: said.append((stage, part)))
    for _ in grid.until(clock.now + 100, "abcd"):
        clock.now += 45
    assert said == [("a", 0.0), ("b", 0.45), ("c", 0.9)]
    said.clear()
    for _ in grid.until(clock.now + 100, "ab"):
        clock.now += 1
    assert said == [("a", 0.0), ("b", 0.5)]
