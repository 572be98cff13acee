"""What a person sees while ranks work."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from labkit import Cluster, Experiment
from labkit.cluster.progress import Figure, Line, progress

ROWS = [
    {"rank": rank, "epoch": 0, "step": step, "loss": 2.0 - step, "seconds": 0.5, "samples": 4.0}
    for step in range(2)
    for rank in range(2)
]


def test_the_line_says_step_loss_and_the_speed_of_each_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = Line(Experiment(name="mine", workers=2, epochs=3), every=0.0, end="\n")
    line.update(ROWS)
    shown = capsys.readouterr().err
    for part in ("mine", "epoch 1/3", "step 2", "loss 1.0000", "rank 0 8/s", "rank 1 8/s"):
        assert part in shown


def test_the_line_asks_the_rank_that_knows_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    silent = {"loss": float("nan"), "samples": 0.0}
    line = Line(Experiment(workers=2), every=0.0, end="\n")
    line.update([row | (silent if row["rank"] == 1 else {}) for row in ROWS])
    shown = capsys.readouterr().err
    assert "loss 1.0000  rank 0 8/s\n" in shown


def test_the_line_is_rewritten_in_a_terminal_and_left_standing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = Line(Experiment(), every=0.0, end="")
    line.update(ROWS[:2])
    line.update(ROWS[2:])
    line.close()
    shown = capsys.readouterr().err
    assert shown.count("\r\x1b[2K") == 3
    assert shown.endswith("\n")
    assert shown.count("\n") == 1


def test_a_log_gets_few_lines_but_always_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    line = Line(Experiment(), every=60.0, end="\n")
    line._shown_at = float("inf")  # as if one had just been shown
    line.update(ROWS)
    assert capsys.readouterr().err == ""
    line.close()
    assert "step 2" in capsys.readouterr().err


def test_nothing_is_said_of_a_run_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Line(Experiment(), every=0.0, end="\n").close()
    assert capsys.readouterr().err == ""


def test_the_figure_grows_with_the_rows_of_each_rank() -> None:
    figure = Figure(Experiment(workers=2))
    figure.update(ROWS[:2])
    figure.update(ROWS[2:])
    losses, speeds = figure.widget.data[:2], figure.widget.data[2:]
    for trace in losses:
        assert (list(trace.x), list(trace.y)) == ([0, 1], [2.0, 1.0])
    for trace in speeds:
        assert (list(trace.x), list(trace.y)) == ([0, 1], [8.0, 8.0])


def test_a_job_and_a_pipe_get_whole_lines_and_a_terminal_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown() -> Any:
        display = progress(Experiment())
        assert isinstance(display, Line)
        return display.end

    assert shown() == "\n"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shown() == ""
    monkeypatch.setenv("LABKIT_JOB", "somewhere")
    assert shown() == "\n"


def test_a_real_run_is_shown_while_it_goes_on(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"rows": 64, "test_rows": 9}
    experiment = Experiment(model="linear", dataset_options=options, workers=2, gate=False)
    cluster.run(experiment)
    shown = capsys.readouterr().err
    assert "linear-digits-allreduce-w2  epoch 1/1  step 1  loss " in shown
    assert "rank 1 " in shown
