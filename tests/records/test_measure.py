"""Test that metrics follow from history rows by the rules of measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import pytest

from labkit.experiment import Experiment
from labkit.model_parallel.memory import Memory
from labkit.records.run_metrics import RankResult, Verdict, WholeResult, summarise
from labkit.strategies import TFDistribute

GATE = Verdict(verdict="passed", max_abs_difference=0.0, tolerance=1e-9, reason="")
WHOLE = WholeResult([{"epoch": 0}], {"loss": 0.5, "accuracy": 0.9}, GATE)


def rank(weights: int = 8, gradients: int | None = 8, peak: int = 100) -> RankResult:
    """Return a rank's result after training a model of so many bytes."""
    own: dict[str, int | None] = {"weights": weights, "gradients": gradients, "optimizer": 0}
    return RankResult([], Memory([0], 16, own, own | {"gradients": 8}), peak)


def metrics_of(
    experiment: Experiment, found: list[dict[str, Any]], whole: WholeResult = WHOLE
) -> dict[str, Any]:
    return summarise(experiment, found, dict(enumerate([rank()] * experiment.workers)), whole)


def rows(seconds: list[list[float]], samples: int = 8, payload: int = 100) -> list[dict[str, Any]]:
    """Return history rows from seconds[step][rank], in the order in which ranks return them."""
    return [
        {
            "step": step,
            "rank": rank,
            "seconds": seconds[step][rank],
            "samples": samples,
            "payload_bytes": payload,
            "wire_bytes": 2 * payload,
            "codec_seconds": 0.0,
        }
        for rank in range(len(seconds[0]))
        for step in range(len(seconds))
    ]


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    metrics = metrics_of(Experiment(workers=2), rows([[9, 1], [0.1, 0.2], [0.3, 0.2]]))
    assert metrics["train_seconds"] == pytest.approx(9 + 0.2 + 0.3)
    assert metrics["step_ms"]["median"] == pytest.approx(250)
    assert metrics["samples_per_second"] == pytest.approx(16 / 0.25)


def test_the_first_step_stands_apart() -> None:
    metrics = metrics_of(Experiment(), rows([[5.0], [0.1], [0.1]]))
    assert metrics["first_step_ms"] == pytest.approx(5000)
    assert metrics["step_ms"] == pytest.approx({"median": 100, "p10": 100, "p90": 100})
    assert metrics["timed_steps"] == 2


def test_ten_warm_up_steps_are_left_out_where_there_are_enough() -> None:
    slow, fast = [[1.0]] * 11, [[0.1]] * 10
    metrics = metrics_of(Experiment(), rows(slow + fast))
    assert metrics["timed_steps"] == 10
    assert metrics["step_ms"]["p90"] == pytest.approx(100)


def test_twenty_steps_are_too_few_to_leave_any_out_but_the_first() -> None:
    metrics = metrics_of(Experiment(), rows([[1.0]] * 20))
    assert metrics["timed_steps"] == 19


def test_a_single_step_is_all_there_is() -> None:
    metrics = metrics_of(Experiment(), rows([[2.0]]))
    assert metrics["step_ms"]["median"] == pytest.approx(2000)
    assert metrics["samples_per_second"] == pytest.approx(4)


def test_bytes_count_per_rank_and_step() -> None:
    metrics = metrics_of(Experiment(workers=2), rows([[1, 1]] * 3, payload=7))
    assert (metrics["payload_bytes_per_step"], metrics["wire_bytes_per_step"]) == (7, 14)


def test_evaluation_becomes_test_metrics_and_a_missing_loss_is_null() -> None:
    metrics = metrics_of(Experiment(), rows([[1.0]]))
    assert (metrics["test_loss"], metrics["test_accuracy"]) == (0.5, 0.9)
    bare = metrics_of(Experiment(), rows([[1.0]]), replace(WHOLE, evaluation={}))
    assert bare["test_loss"] is None
    assert "test_accuracy" not in bare


def test_more_threads_than_cores_are_marked() -> None:
    cores = psutil.cpu_count() or 1
    fits = metrics_of(Experiment(workers=1, threads=cores), rows([[1.0]]))
    over = metrics_of(Experiment(workers=1, threads=cores + 1), rows([[1.0]]))
    assert (fits["oversubscribed"], over["oversubscribed"]) == (False, True)


def test_processes_of_other_frameworks_count_among_those_that_want_cores() -> None:
    cores = psutil.cpu_count() or 1
    alone = Experiment(workers=cores, strategy=TFDistribute("multi_worker_mirrored"))
    served = Experiment(workers=cores, strategy=TFDistribute("parameter_server", servers=2))
    found = [metrics_of(each, rows([[1.0]]))["oversubscribed"] for each in (alone, served)]
    assert found == [False, True]
    assert TFDistribute("parameter_server", servers=2).processes(3) == 6  # includes the coordinator
    assert TFDistribute("parameter_server", servers=2, colocated=True).processes(3) == 4
    assert TFDistribute("mirrored").processes(3) == 3  # devices, each with its own threads


def test_steps_under_the_microscope_are_not_timed() -> None:
    seen = rows([[9.0], [0.1], [5.0], [0.1]])
    seen[2]["relative_error"] = 0.3
    metrics = metrics_of(Experiment(), seen)
    assert metrics["timed_steps"] == 2
    assert metrics["step_ms"]["p90"] == pytest.approx(100)


def test_memory_is_said_by_rank_and_of_the_rank_that_needs_most_of_each_kind() -> None:
    ranks = [rank(weights=8, peak=50), rank(weights=6, gradients=None, peak=90)]
    metrics = summarise(Experiment(workers=2), rows([[1.0, 1.0]]), dict(enumerate(ranks)), WHOLE)
    assert metrics["memory_bytes"] == {"weights": 8, "gradients": 8, "optimizer": 0, "peak": 90}
    assert [part["rank"] for part in metrics["memory"]] == [0, 1]
    assert list(metrics["memory"][1]) == ["rank", "stages", "whole", "measured", "predicted"]
    assert metrics["memory"][1]["measured"]["gradients"] is None  # not measured on this rank
