"""Metrics follow from rows by the rules of measurement."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from labkit.experiment import Experiment
from labkit.records.measure import summarise

RESULT = {
    "evaluation": {"loss": 0.5, "accuracy": 0.9},
    "equivalence": {},
    "exchange": {},
    "epochs": [{"epoch": 0}],
    "memory": {"weights": 8},
    "memory_by_rank": [],
    "partition": None,
}


def rows(seconds: list[list[float]], samples: int = 8, payload: int = 100) -> list[dict[str, Any]]:
    """History rows from seconds[step][rank], in the order in which ranks hand them in."""
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
    metrics = summarise(Experiment(workers=2), rows([[9, 1], [0.1, 0.2], [0.3, 0.2]]), RESULT)
    assert metrics["train_seconds"] == pytest.approx(9 + 0.2 + 0.3)
    assert metrics["step_ms"]["median"] == pytest.approx(250)
    assert metrics["samples_per_second"] == pytest.approx(16 / 0.25)


def test_the_first_step_stands_apart() -> None:
    metrics = summarise(Experiment(), rows([[5.0], [0.1], [0.1]]), RESULT)
    assert metrics["first_step_ms"] == pytest.approx(5000)
    assert metrics["step_ms"] == pytest.approx({"median": 100, "p10": 100, "p90": 100})
    assert metrics["timed_steps"] == 2


def test_ten_warm_up_steps_are_left_out_where_there_are_enough() -> None:
    slow, fast = [[1.0]] * 11, [[0.1]] * 10
    metrics = summarise(Experiment(), rows(slow + fast), RESULT)
    assert metrics["timed_steps"] == 10
    assert metrics["step_ms"]["p90"] == pytest.approx(100)


def test_twenty_steps_are_too_few_to_leave_any_out_but_the_first() -> None:
    metrics = summarise(Experiment(), rows([[1.0]] * 20), RESULT)
    assert metrics["timed_steps"] == 19


def test_a_single_step_is_all_there_is() -> None:
    metrics = summarise(Experiment(), rows([[2.0]]), RESULT)
    assert metrics["step_ms"]["median"] == pytest.approx(2000)
    assert metrics["samples_per_second"] == pytest.approx(4)


def test_bytes_count_per_rank_and_step() -> None:
    metrics = summarise(Experiment(workers=2), rows([[1, 1]] * 3, payload=7), RESULT)
    assert (metrics["payload_bytes_per_step"], metrics["wire_bytes_per_step"]) == (7, 14)


def test_evaluation_becomes_test_metrics_and_a_missing_loss_is_null() -> None:
    metrics = summarise(Experiment(), rows([[1.0]]), RESULT)
    assert (metrics["test_loss"], metrics["test_accuracy"]) == (0.5, 0.9)
    bare = summarise(Experiment(), rows([[1.0]]), RESULT | {"evaluation": {}})
    assert bare["test_loss"] is None
    assert "test_accuracy" not in bare


def test_more_threads_than_cores_are_marked() -> None:
    cores = psutil.cpu_count() or 1
    fits = summarise(Experiment(workers=1, threads=cores), rows([[1.0]]), RESULT)
    over = summarise(Experiment(workers=1, threads=cores + 1), rows([[1.0]]), RESULT)
    assert (fits["oversubscribed"], over["oversubscribed"]) == (False, True)


def test_steps_under_the_microscope_are_not_timed() -> None:
    seen = rows([[9.0], [0.1], [5.0], [0.1]])
    seen[2]["relative_error"] = 0.3
    metrics = summarise(Experiment(), seen, RESULT)
    assert metrics["timed_steps"] == 2
    assert metrics["step_ms"]["p90"] == pytest.approx(100)
