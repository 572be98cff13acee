"""Test how fast scheduled blocks reach an optimum; the runs are written by the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sample_runs import write_run

from labkit.figures import dependencies, optimality_gap, summarize_blocks
from labkit.records.run import Run

OPTIMUM = 2.0


def scheduled(root: Path, select: str, losses: Sequence[float]) -> Run:
    """Return a run that has these losses before its rounds."""
    found = {"clock": "virtual", "network": "1GbE", "wire_bytes_per_step": 64.0}
    strategy = {"name": "BlockCoordinateDescent", "selection": select}
    steps = {"workers": 2, "epochs": 1, "steps": len(losses)}
    run = write_run(root, measured=found, strategy=strategy, **steps)
    history = pd.read_parquet(run.path / "history.parquet")
    told = history.assign(loss=np.take(losses, history["step"]))
    told.to_parquet(run.path / "history.parquet")
    return Run(run.path)


def reaching(root: Path, select: str, after: int, rounds: int = 12) -> Run:
    """Return a run that reaches the optimum after this number of rounds."""
    steps = np.arange(rounds)
    return scheduled(root, select, np.where(steps < after, 3.0, OPTIMUM).tolist())


def test_the_gap_is_drawn_by_rounds(tmp_path: Path) -> None:
    figure = optimality_gap([scheduled(tmp_path, "priority", [4.0, 3.0, 2.0])], OPTIMUM)
    (trace,) = [t for t in figure.data if len(t.x) == 3]
    np.testing.assert_allclose(trace.y[:2], [1.0, 0.5])
    assert 0 < trace.y[2] < 1e-15  # a logarithmic axis cannot show 0
    assert figure.layout.title.text == "Optimality gap by rounds · virtual clock · network 1GbE"


@pytest.mark.parametrize(
    ("priority", "chance", "said"),
    [
        (3, 8, ": reproduced: 0.38 of the rounds of random"),
        (9, 6, "**not** reproduced: 1.50 of the rounds of random"),
    ],
)
def test_the_reading_says_who_was_there_first(
    tmp_path: Path, priority: int, chance: int, said: str
) -> None:
    runs = [reaching(tmp_path, "priority", priority), reaching(tmp_path, "random", chance)]
    text = summarize_blocks(runs, OPTIMUM)
    assert f"**priority**, {priority} rounds to a relative gap of 1e-6; 64 B on the wire" in text
    assert said in text.replace("; ", ": ")


def test_and_who_never_was(tmp_path: Path) -> None:
    runs = [reaching(tmp_path, "priority", 3), reaching(tmp_path, "random", 99)]
    text = summarize_blocks(runs, OPTIMUM)
    assert "**random**; 1 seed, 0 of them reached a relative gap of 1e-6; relative gap 0.5" in text
    assert ": reproduced" in text
    assert "the factor is unknown" in text
    # If no run reaches the optimum, no run is named as the first.
    nobody = [reaching(tmp_path, way, 99) for way in ("priority", "random")]
    assert "chance" not in summarize_blocks(nobody, OPTIMUM)


def test_who_depends_on_whom_is_drawn_above_the_threshold() -> None:
    couplings = np.array([[0.0, 0.5, 0.1], [0.5, 0.0, 0.3], [0.1, 0.3, 0.0]])
    figure = dependencies(couplings, 0.3)
    np.testing.assert_array_equal(figure.data[0].z, np.where(couplings >= 0.3, couplings, 0))
    assert "2 pairs of 3 with a coupling of 0.3 or more" in figure.alt
    assert couplings[0, 1] == 0.5  # the caller's array is unchanged
