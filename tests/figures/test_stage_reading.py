"""The readings of cut models say what the numbers say, and nothing where there are none."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from labkit.figures.schedules import stages
from labkit.figures.schedules.stages import cut_reading, pipeline_reading

NAN = math.nan


class OneOf:
    """A run of so many workers, as far as readings look at it."""

    def __init__(self, workers: int) -> None:
        self.experiment, self.path = {"workers": workers}, object()


def pipelines(**columns: list[Any]) -> pd.DataFrame:
    rows = len(columns["microbatches"])
    usual: dict[str, list[Any]] = {
        "schedule": ["1f1b"] * rows,
        "ranks": [2] * rows,
        "bubble_measured": [0.5] * rows,
        "bubble_low": [0.4] * rows,
        "bubble_high": [0.6] * rows,
        "bubble_simulated": [0.45] * rows,
        "bubble_formula": [0.5] * rows,
        "bound": [2.0] * rows,
    }
    return pd.DataFrame(usual | columns, index=[f"run {n}" for n in range(rows)])


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ([0.9, 1.9], "brings no time, for its stages wait for each other; the last is 95%"),
        ([1.2, 1.9], "from 1.20 to 1.90; the last is 95% of what the bubble allows"),
        ([1.2, 1.0], "that is 50% of what the bubble allows: the rest goes to unequal stages"),
    ],
)
def test_more_micro_batches_are_judged_by_their_speed_up(
    monkeypatch: pytest.MonkeyPatch, speedups: list[float], said: str
) -> None:
    table = pipelines(microbatches=[1, 8], speedup=speedups)
    monkeypatch.setattr(stages, "pipeline_table", lambda runs, baseline: table)
    text = str(pipeline_reading([]))
    assert "**run 0**: ranks wait 50% of a step (40% to 60%)" in text
    assert said in text


def test_without_a_baseline_no_speed_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pipelines(microbatches=[1, 8], speedup=[NAN, NAN], bubble_measured=[NAN, NAN])
    monkeypatch.setattr(stages, "pipeline_table", lambda runs, baseline: table)
    text = str(pipeline_reading([]))
    assert "speed-up" not in text
    assert "ranks wait" not in text


def test_cuts_are_compared_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    index = pd.MultiIndex.from_tuples(
        [("one", 0), ("cut", 0), ("cut", 1), ("copies", 0)], names=["run", "rank"]
    )
    table = pd.DataFrame(
        {
            "bytes": [2048.0, 1024.0, 512.0, NAN],
            "bytes_predicted": [2048.0, 1000.0, 500.0, 4096.0],
            "payload_bytes": [0.0, 100.0, 300.0, 200.0],
            "utilisation": [1.0, 0.5, 0.7, NAN],
            "step_ms": [10.0, 6.0, 8.0, NAN],
        },
        index=index,
    )
    monkeypatch.setattr(stages, "rank_table", lambda runs: table)
    runs: list[Any] = [OneOf(1), OneOf(2), OneOf(2)]
    text = str(cut_reading(runs))
    assert (
        "**cut**: the fullest rank keeps 1 KiB (0.50 of one process), the busiest hands over 300 B "
        "a step, ranks compute 60% of the time, a step takes 8 ms, 0.80 of one process." in text
    )
    assert "keeps 4 KiB (2.00 of one process), as predicted" in text
    assert (
        "Least memory on a rank: **cut**; shortest step: **cut**; least traffic of those that "
        "send: **copies**." in text
    )
