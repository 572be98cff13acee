"""Test that runs that differ only in their seeds are read as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import write_run

from labkit.records import store
from labkit.records.analysis.columns import group_seeds
from labkit.records.run import Run
from labkit.records.verdict import accuracies


def test_seeds_of_one_setting_are_one_run_with_a_spread(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, workers=workers, seed=seed, measured={"test_accuracy": 0.8 + seed / 10})
        for workers in (1, 2)
        for seed in (0, 1)
    ]
    found = group_seeds(runs)
    assert [run.experiment["workers"] for run in found] == [1, 2]
    assert found[0].metrics["test_accuracy"] == pytest.approx(0.85)
    assert found[0].metrics["spread"]["test_accuracy"] == pytest.approx([0.8, 0.9])
    assert accuracies(found[1]) == {0: 0.8, 1: 0.9}
    assert sorted(found[0].history["seed"].unique()) == [0, 1]


def test_the_same_again_and_what_failed_stand_alone(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, seed=seed) for seed in (0, 0, 1)]
    failed = store.new_run_directory(tmp_path, "failed")
    store.start(failed, runs[0].experiment, {})
    store.fail(failed, "no luck")
    found = group_seeds([*runs, Run(failed)])
    assert [len(run.seeds) for run in found] == [2, 0, 0]
    assert found[1] == runs[1]
    assert found[2].status["state"] == "failed"
