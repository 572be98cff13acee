"""Test that an estimate rests on earlier runs on this machine, or says that there are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sample_runs import experiment, write_run

from labkit.common.errors import InvalidInput
from labkit.common.machine import OVERSUBSCRIBE
from labkit.common.units import duration_text
from labkit.jobs import estimate
from labkit.records import store

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "trains.ipynb"


def test_without_an_earlier_run_nothing_is_guessed(tmp_path: Path) -> None:
    line = estimate.of_experiment(experiment(), tmp_path / "runs")
    assert line.startswith("duration: no earlier run to estimate from; memory: at least 1.4 GiB")
    assert "at least 5.6 GiB for 8 ranks" in estimate.of_experiment(experiment(), tmp_path, 8)
    line = estimate.of_notebook(NOTEBOOK, {}, tmp_path / "runs")
    assert line.startswith("duration: no earlier run to estimate from; memory: at least 1.4 GiB")


def test_an_experiment_takes_what_its_epochs_took_before(tmp_path: Path) -> None:
    # 3 epochs of 20 steps of 500 ms took 30 s, which is 10 s per epoch.
    write_run(tmp_path, step_ms=500.0)
    line = estimate.of_experiment(experiment(epochs=6, repeats=2), tmp_path)
    assert line.startswith("duration: about 2 min 0 s, as measured once before")


def test_force_lets_all_processes_of_a_command_oversubscribe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OVERSUBSCRIBE, "")  # this test changes it, and monkeypatch restores it
    for force in (False, True):
        with pytest.raises(InvalidInput, match=r"9999 ranks need at least 6999.3 GiB"):
            estimate.refuse(9999, force)
        assert os.environ[OVERSUBSCRIBE] == ("1" if force else "")
    estimate.refuse(1, force=False)


def test_ranks_that_start_elsewhere_need_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_LAUNCHER", "slurm")
    estimate.refuse(9999, force=False)


def test_other_work_says_nothing_about_this(tmp_path: Path) -> None:
    write_run(tmp_path)
    for other in ({"workers": 4}, {"batch_size": 64}, {"model": "cnn"}):
        assert "no earlier run" in estimate.of_experiment(experiment(**other), tmp_path)


def test_a_notebook_takes_what_it_took_with_the_same_parameters(tmp_path: Path) -> None:
    for _ in range(2):
        job = store.new_job_directory(tmp_path, NOTEBOOK, {"workers": 4})
        times = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:42+00:00"}
        store.write_json(job / "status.json", {"state": "completed"} | times)
    line = estimate.of_notebook(NOTEBOOK, {"workers": 4}, tmp_path)
    assert line.startswith("duration: about 42 s, as measured 2 times before; memory: at least 2.8")
    assert "no earlier run" in estimate.of_notebook(NOTEBOOK, {"workers": 2}, tmp_path)


def test_memory_counts_the_largest_number_of_ranks_and_warns(tmp_path: Path) -> None:
    assert "at least 5.6 GiB for 8 ranks" in estimate.of_notebook(
        NOTEBOOK, {"workers": [1, 8]}, tmp_path
    )
    assert "too little" in estimate.memory(100_000)
    assert "too little" not in estimate.memory(0)


def test_durations_read_as_people_say_them() -> None:
    shown = [duration_text(value) for value in (0.04, 9.9, 59.6, 200, 7500)]
    assert shown == ["0.0 s", "9.9 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]
