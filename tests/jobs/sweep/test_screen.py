"""Test what a sweep displays: whole lines in a log, one changing line in a terminal."""

from __future__ import annotations

import io

import pytest

from labkit.common.terminal import text_width
from labkit.jobs.sweep.progress_screen import SweepScreen
from labkit.jobs.sweep.sweep_plan import SweepMember

MEMBER = SweepMember("001_x=1", {"x": 1}, 0, 1, 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_for_each_member_that_ended() -> None:
    log = io.StringIO()
    screen = SweepScreen(12, done=4, stream=log)
    screen.tick({"001_x=1": 1.0}, "")
    screen.ended(MEMBER, "completed", None, 4.2, "about 30 s left")
    screen.ended(MEMBER, "failed", "no use", 2.0, "")
    screen.close()
    assert log.getvalue().splitlines() == [
        "[ 5/12] 001_x=1  completed in 4.2 s; about 30 s left",
        "[ 6/12] 001_x=1  failed in 2.0 s: no use",
    ]


def test_a_terminal_shows_what_runs_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    screen = SweepScreen(3, done=1, stream=terminal)
    screen.tick({"002_x=2": 1.0, "003_x=3": 65.0}, "about 5.0 s left")
    screen.tick({}, "too soon to be shown")
    assert terminal.getvalue().removeprefix("\r\x1b[2K") == (
        "1 of 3 completed · about 5.0 s left · running: 002_x=2 (1.0 s), 003_x=3 (1 min 5 s)"
    )


def test_a_narrow_terminal_never_gets_a_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    SweepScreen(3, done=0, stream=terminal).tick({"学" * 100: 1.0}, "")
    assert text_width(terminal.getvalue().removeprefix("\r\x1b[2K")) < 30


def test_time_left_is_that_of_the_members_that_ended() -> None:
    screen = SweepScreen(9, done=0, stream=io.StringIO())
    assert screen.remaining_time(9, {}, 1) == ""
    screen.ended(MEMBER, "completed", None, 10.0, "")
    screen.ended(MEMBER, "completed", None, 20.0, "")
    assert (
        screen.remaining_time(4, {"a": 5.0, "b": 40.0}, 2) == "about 35 s left"
    )  # (4 × 15 + 10 + 0) / 2
    assert screen.remaining_time(0, {}, 2) == ""
