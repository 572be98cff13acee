"""Test figures of averaging periods and gossip; the runs are written by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import write_run

from labkit.figures import (
    consensus,
    period_cost,
    summarize_consensus,
    summarize_period,
    summarize_slow_worker,
)
from labkit.programs import Roles
from labkit.records.run import Run


def met(
    root: Path,
    accuracy: float,
    period: int = 0,
    outer: str | None = None,
    strategy: dict[str, Any] | None = None,
    steps: int = 0,
) -> Run:
    """Return a run with this averaging period (0: every step) and this test accuracy."""
    found: dict[str, Any] = {
        "clock": "virtual",
        "network": "wan",
        "test_accuracy": accuracy,
        "repeats": 3,
        "spread": {"test_accuracy": [accuracy - 0.01, accuracy + 0.01]},
        "wire_bytes_per_step": 8e6 / max(period, 1),
        "train_seconds": 90.0,
        "epochs": [{"step": steps}] if steps else [],
    }
    way = {"name": "ParameterAveraging", "period": period, "outer_optimizer": outer}
    strategy = strategy or (way if period else {"name": "AllReduce", "compressor": None})
    return write_run(root, measured=found, strategy=strategy, workers=8)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    means = [met(tmp_path, accuracy, period) for period, accuracy in ((16, 0.89), (64, 0.7))]
    return [met(tmp_path, 0.9), *means, met(tmp_path, 0.85, 64, "nesterov")]


def test_accuracy_falls_along_a_line_a_rule(runs: list[Run]) -> None:
    figure = period_cost(runs)
    assert figure.layout.title.text == "Accuracy by period · virtual clock · network wan"
    lines = {t.name: t for t in figure.data if t.x[0] is not None and t.line.width == 2}
    assert list(lines["averaging"].x) == [16, 64]
    assert list(lines["averaging"].y) == [0.89, 0.7]
    assert "outer Nesterov, every 64: 85.0%" in figure.alt


def test_the_reading_says_whether_the_published_shapes_came(runs: list[Run]) -> None:
    said = summarize_period(runs)
    assert "**averaging, every 16**, 89.0% (3 seeds, 88.0% to 90.0%)" in said
    assert "488 KiB on the wire per step" in said
    assert said.count(": reproduced") == 3
    assert (
        "Synchronization periods above 32 steps cost accuracy, beyond the spread of the seeds** "
        "(Lin 2020): reproduced: averaging, every 64 70.0%" in said
    )
    assert "outer Nesterov, every 64 85.0%; averaging, every 64 70.0%" in said


def free(root: Path, delayed: int, accuracies: tuple[float, ...]) -> Run:
    """Return an asynchronous run with these accuracies, one per epoch of 20 steps."""
    epochs = [
        {"epoch": epoch, "step": 20 * (epoch + 1), "seconds": 1.0, "val_accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies)
    ]
    found = {"test_accuracy": accuracies[-1], "epochs": epochs}
    spent = {"wire_bytes_per_step": 1e6, "train_seconds": 9.0}
    strategy = {"name": "AsynchronousDiLoCo", "period": 8, "momentum_delay": delayed}
    return write_run(root, measured=found | spent, strategy=strategy, workers=2)


@pytest.mark.parametrize(
    ("at_once", "said"),
    [
        ((0.5, 0.7, 0.9), ": reproduced: {}; after 60 steps without delayed Nesterov"),
        (
            (0.5, 0.7, 0.8),
            ": reproduced: {}; without delayed Nesterov, some seeds do not reach the accuracy",
        ),
        (
            (0.7, 0.9, 0.9),
            "**not** reproduced: {}; after 40 steps without delayed Nesterov",
        ),
    ],
)
def test_steps_with_and_without_delayed_nesterov(
    at_once: tuple[float, ...], said: str, tmp_path: Path
) -> None:
    runs = [free(tmp_path, 8, (0.5, 0.89, 0.9)), free(tmp_path, 1, at_once)]
    ours = (
        "nearly the final accuracy of delayed Nesterov is reached after 40 steps "
        "with delayed Nesterov"
    )
    assert said.format(ours) in summarize_period(runs)


@pytest.mark.parametrize(("far", "said"), [(0.86, "reproduced"), (0.85, "**not** reproduced")])
def test_springs_stand_long_periods_or_not(far: float, said: str, tmp_path: Path) -> None:
    strategies = [{"name": "ElasticAveraging", "period": period} for period in (8, 64)]
    found = [
        met(tmp_path, accuracy, 8, strategy=strategy)
        for accuracy, strategy in zip((0.875, far), strategies, strict=True)
    ]
    assert f"within the spread of the seeds** (Zhang 2015): {said}" in summarize_period(found)


@pytest.mark.parametrize(("mean", "said"), [(0.83, "reproduced"), (0.84, "**not** reproduced")])
def test_springs_are_held_against_the_mean_at_the_longest_period(
    mean: float, said: str, tmp_path: Path
) -> None:
    springs = met(tmp_path, 0.855, 64, strategy={"name": "ElasticAveraging", "period": 64})
    runs = [springs, met(tmp_path, mean, 64), met(tmp_path, 0.9, 128)]
    assert (
        "elastic averaging is more accurate than averaging, beyond the spread of the seeds** "
        f"(Zhang 2015): {said}" in summarize_period(runs)
    )


@pytest.mark.parametrize(("accuracy", "said"), [(0.83, "reproduced"), (0.82, "**not** reproduced")])
def test_four_bits_are_held_against_full_precision(
    accuracy: float, said: str, tmp_path: Path
) -> None:
    compressor = {"name": "ErrorFeedback", "inner": {"name": "QSGD", "levels": 7, "bucket": 32}}
    way = {"name": "ParameterAveraging", "period": 16, "outer_optimizer": "nesterov"}
    few = met(tmp_path, accuracy, strategy=way | {"compressor": compressor})
    reading = summarize_period([met(tmp_path, 0.845, 16, "nesterov"), few])
    what = (
        "With outer gradients in 4 bits, the accuracy is that of full precision, within the spread "
        "of the seeds** (Douillard 2025)"
    )
    assert f"{what}: {said}: outer Nesterov, in 4 bits, every 16 {accuracy:.1%}" in reading


def test_periods_that_training_never_had_are_held_against_nothing(tmp_path: Path) -> None:
    runs = [met(tmp_path, 0.9, steps=192), met(tmp_path, 0.8, 500, steps=192)]
    runs.append(met(tmp_path, 0.85, 500, "nesterov", steps=192))
    said = summarize_period(runs)
    assert said.count("training has 192 steps, so replicas synchronized once, at the end") == 2
    assert ": reproduced" not in said
    assert "not" not in said


def test_once_an_epoch_stands_at_the_steps_of_one(tmp_path: Path) -> None:
    run = met(tmp_path, 0.9, strategy={"name": "ParameterAveraging", "period": "epoch"}, steps=24)
    assert "averaging, every 24" in summarize_period([run])


def test_and_says_where_they_did_not_come(tmp_path: Path) -> None:
    runs = [met(tmp_path, 0.9), met(tmp_path, 0.8, 8), met(tmp_path, 0.8, 64)]
    runs.append(met(tmp_path, 0.81, 64, "nesterov"))
    assert summarize_period(runs).count("**not** reproduced") == 2
    assert ": reproduced" not in summarize_period(runs[:1])


def gossiped(
    root: Path, topology: str | None, distance: float, seconds: float = 30.0, **more: bool
) -> Run:
    """Return a run of gossip on a topology, or of allreduce, with this final consensus distance."""
    epochs: list[dict[str, Any]] = [
        {"epoch": e, "step": 2 * (e + 1), "seconds": 1.0} for e in (0, 1)
    ]
    if topology is not None:
        epochs = [e | {"consensus_distance": distance * (2 - e["epoch"])} for e in epochs]
    found = {"clock": "virtual", "network": "wan", "test_accuracy": 0.9, "epochs": epochs}
    found |= {"train_seconds": seconds, "wire_bytes_per_step": 1e6}
    strategy = (
        {"name": "Gossip", "topology": topology} | more if topology else {"name": "AllReduce"}
    )
    return write_run(root, measured=found, strategy=strategy, workers=8)


@pytest.fixture
def consensus_runs(tmp_path: Path) -> list[Run]:
    graphs = [gossiped(tmp_path, *each) for each in (("ring", 0.5), ("random_pairs", 0.1))]
    return [gossiped(tmp_path, None, 0.0, 90.0), *graphs]


def test_distances_fall_by_epochs(consensus_runs: list[Run]) -> None:
    figure = consensus(consensus_runs)
    assert figure.layout.title.text == "Consensus distance · virtual clock · network wan"
    assert [list(t.y) for t in figure.data if t.x[0] is not None] == [[1.0, 0.5], [0.2, 0.1]]


def test_the_reading_names_gap_and_distance(consensus_runs: list[Run]) -> None:
    said = summarize_consensus(consensus_runs)
    assert "spectral gap 0.195, consensus distance 0.5 at the end" in said
    assert "all workers have the same weights" in said
    assert said.count(": reproduced") == 3
    assert "**not** reproduced" not in said


def test_and_says_what_did_not_come(tmp_path: Path) -> None:
    consensus_runs = [gossiped(tmp_path, None, 0.0, 9.0), gossiped(tmp_path, "ring", 0.1)]
    said = summarize_consensus([*consensus_runs, gossiped(tmp_path, "random_pairs", 0.5)])
    assert said.count("**not** reproduced") == 2


def test_an_epoch_with_a_slow_worker_is_told_by_who_waits(tmp_path: Path) -> None:
    together = gossiped(tmp_path, None, 0.0, 90.0)
    for seconds, said in ((15.0, ": reproduced"), (30.0, ": **not** reproduced")):
        free = gossiped(tmp_path, "ring", 0.1, seconds, asynchronous=True)
        told = summarize_slow_worker([together, free])
        assert "**ring, asynchronous**" in told
        assert said in told


def test_the_distance_is_the_root_mean_square() -> None:
    roles = Roles(3, [], 1, 1, np.zeros(2), [0, 1, 2])
    parts = {0: np.array([0.0, 0.0]), 1: np.array([3.0, 0.0]), 2: np.array([0.0, 6.0])}
    # The mean of the three vectors is (1, 2), so their squared distances from it are 5, 8 and 17.
    assert roles.consensus_distance(parts) == pytest.approx(np.sqrt(30 / 3))
