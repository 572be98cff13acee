"""Test the progress that a terminal without widgets shows while ranks work."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from live_sample import ROWS, Told

from labkit import Cluster, Experiment
from labkit.cluster.run_progress import ProgressLine, RunProgress, in_notebook, line


@pytest.fixture
def live(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_the_line_says_step_loss_and_the_speed_of_each_rank(
    live: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    live.tell("step", *ROWS)
    ProgressLine(every=0.0, end="\n").draw(live)
    shown = capsys.readouterr().err
    for part in ("mine", "epoch 1/3", "step 2", "loss 1.0000", "rank 0 8/s", "rank 1 8/s"):
        assert part in shown


def test_the_line_says_how_long_it_will_take(
    live: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    live.progress = RunProgress(3, clock=lambda: now[0])
    live.tell("plan", {"steps": 4})
    live.tell("step", *ROWS[:2])
    now[0] = 0.5
    live.tell("step", *ROWS[2:])
    ProgressLine(every=0.0, end="\n").draw(live)
    assert "  5 s left\n" in capsys.readouterr().err


def test_the_line_asks_the_rank_that_knows_the_loss(
    live: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {"loss": float("nan"), "samples": 0.0}
    live.tell("step", *(row | (silent if row["rank"] == 1 else {}) for row in ROWS))
    ProgressLine(every=0.0, end="\n").draw(live)
    assert "loss 1.0000  rank 0 8/s\n" in capsys.readouterr().err


def test_the_line_is_rewritten_in_a_terminal_and_left_standing(
    live: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ProgressLine(every=0.0, end="")
    live.tell("step", *ROWS[:2])
    shown.draw(live)
    live.tell("step", *ROWS[2:])
    shown.draw(live)
    shown.close(live)
    text = capsys.readouterr().err
    assert text.count("\r\x1b[2K") == 3
    assert text.endswith("\n")
    assert text.count("\n") == 1


def test_the_line_of_a_narrow_terminal_does_not_wrap_before_its_end(
    live: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    shown = ProgressLine(every=0.0, end="")
    live.tell("step", *ROWS)
    shown.draw(live)
    shown.close(live)
    _, drawn, last = capsys.readouterr().err.split("\r\x1b[2K")
    assert len(drawn) == 29
    assert last.startswith(drawn)
    assert "rank 1 8/s" in last


def test_a_log_gets_few_lines_but_always_the_last(
    live: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ProgressLine(every=60.0, end="\n")
    shown._shown_at = float("inf")  # as if a line had just been printed
    live.tell("step", *ROWS)
    shown.draw(live)
    assert capsys.readouterr().err == ""
    shown.close(live)
    assert "step 2" in capsys.readouterr().err


def test_nothing_is_said_of_a_run_without_rows(
    live: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    ProgressLine(every=0.0, end="\n").close(live)
    assert capsys.readouterr().err == ""


def test_a_job_and_a_pipe_get_whole_lines_and_a_terminal_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert line().end == "\n"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert line().end == ""
    monkeypatch.setenv("LABKIT_JOB", "somewhere")
    assert line().end == "\n"
    assert not in_notebook()


def test_a_real_run_is_shown_while_it_goes_on(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"rows": 64, "test_rows": 9}
    experiment = Experiment(model="linear", dataset_options=options, workers=2, verify=False)
    cluster.run(experiment)
    shown = capsys.readouterr().err
    assert "linear-digits-allreduce-w2  epoch 1/1  step 1  loss " in shown
    assert "rank 1 " in shown
