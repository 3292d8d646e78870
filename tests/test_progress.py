"""How far a long run is: a bar in a terminal, a line now and then elsewhere, never a word on stdout."""

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from bench import grid
from fusedlayers.utils import progress
from fusedlayers.utils.formatting import duration_text

SHOW_CURSOR = "\x1b[?25h"


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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What makes stderr a terminal, after ``capsys`` has exchanged it."""

    def make() -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")

    return make


class Writer:
    """A stream that has little."""

    def __init__(self, written: list[str]) -> None:
        self.write = written.append

    def flush(self) -> None:
        pass


def run(clock: Clock, seconds: float) -> None:
    with progress.asked("fit", True) as on_stage:
        for number in range(4):
            on_stage(f"stage {number}", number / 4)
            clock.now += seconds


def test_elsewhere_a_line_after_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run(clock, 6)
    assert capsys.readouterr() == ("", " 50% stage 2, 12 s left\n")
    run(clock, 2)
    assert capsys.readouterr() == ("", "")
    run(clock, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        " 25% stage 1, 5 min left",
        " 50% stage 2, 3 min left",
        " 75% stage 3, 2 min left",
    ]


def test_in_a_terminal_a_bar_that_vanishes(
    clock: Clock, terminal: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    terminal()
    run(clock, 2)
    out, err = capsys.readouterr()
    assert out == "" and "stage 3, 2 s left" in err and "75%" in err and "stage 0, " not in err
    assert err.endswith("\x1b[2K") and SHOW_CURSOR in err


def test_a_narrow_terminal_cuts_the_text_and_not_the_bar(
    terminal: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    terminal()
    monkeypatch.setenv("COLUMNS", "60")
    with progress.shown() as on_stage:
        on_stage("a stage of a long name " * 4, 0.0)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    bar, end = "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 20, "\N{HORIZONTAL ELLIPSIS}"
    assert re.search(f"\r{bar} +0% a stage of a long name a .*{end}[\r\n]", shown)


def test_names_are_no_markup(terminal: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    terminal()
    with progress.shown() as on_stage:
        on_stage("measuring [bold]", 0.0)
    assert "measuring [bold]" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["without rich", "dumb"])
def test_terminals_without_a_bar_have_lines(
    reason: str,
    clock: Clock,
    terminal: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal()
    if reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(progress, "find_spec", lambda name: None)
    run(clock, 6)
    assert capsys.readouterr() == ("", " 50% stage 2, 12 s left\n")


def test_colours_by_force_are_no_terminal(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on CI
    run(clock, 6)
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (3000, "50 min"), (6000, "1 h 40 min"), (90000, "25 h 0 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


@pytest.mark.parametrize("stream", ["none", "closed", "one that only writes"])
def test_nothing_is_shown_where_nothing_can_be(
    stream: str, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    closed = io.StringIO()
    closed.close()
    streams = {"none": None, "closed": closed, "one that only writes": Writer(written)}
    monkeypatch.setattr(sys, "stderr", streams[stream])
    run(clock, 6)
    assert capsys.readouterr().out == ""
    assert "".join(written) == ("" if stream in ("none", "closed") else " 50% stage 2, 12 s left\n")


def test_a_bar_without_a_stdout(
    clock: Clock, terminal: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        run(clock, 2)
    assert "stage 3, 2 s left" in capsys.readouterr().err


# --- grids of the benchmarks ------------------------------------------------------------------------------------------


def test_a_grid_that_raises_gives_the_terminal_back(
    terminal: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    terminal()
    stderr = sys.stderr

    def measure() -> None:
        for case, _, _ in grid.until(time.monotonic() + 60, "ab"):
            raise KeyError(case)

    with pytest.raises(KeyError):
        measure()
    assert sys.stderr is stderr and SHOW_CURSOR in capsys.readouterr().err


def test_a_grid_is_as_far_as_its_cases_or_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(), []

    class Shown:
        def __enter__(self) -> progress.OnStage:
            return lambda stage, part: said.append((stage, part))

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(grid, "time", clock)
    monkeypatch.setattr(progress, "shown", Shown)
    for _ in grid.until(clock.now + 100, "abcd"):
        clock.now += 45
    assert said == [("a", 0.0), ("b", 0.45), ("c", 0.9)]
    said.clear()
    for _ in grid.until(clock.now + 100, "ab"):
        clock.now += 1
    assert said == [("a", 0.0), ("b", 0.5)]
