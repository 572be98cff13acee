"""Test results over two parameters as a table: a row per combination, numbers with units."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sample_runs import FAILED_GATE, write_run

from labkit.common.errors import InvalidInput
from labkit.records.analysis.columns import axes_of, cross_table, has_grid
from labkit.records.run import Run

ONE_BIT = {"name": "AllReduce", "algorithm": "ring", "compressor": {"name": "OneBit"}}


def grid(root: Path, **failed: object) -> dict[str, Run]:
    """Return runs of workers x compressors x seeds; OneBit with 2 workers may fail the gate."""
    return {
        f"{workers} {kind} {seed}": write_run(
            root,
            workers=workers,
            seed=seed,
            step_ms=8.0 / workers,
            measured={"test_accuracy": 0.9 + seed / 100} | (failed if last else {}),
            **({"strategy": ONE_BIT} if kind == "OneBit" else {}),
        )
        for workers in (2, 1)
        for kind in ("none", "OneBit")
        for seed in (0, 2, 1)
        if not (last := (workers, kind) == (2, "OneBit")) or seed == 0
    }


def test_a_row_is_a_combination_with_the_median_of_its_runs(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    # The horizontal axis has numbers, and the vertical axis has words.
    assert axes_of(list(runs.values())) == ("workers", "compressor")
    table = cross_table(runs, "workers", "compressor", ["test_accuracy", "step_ms.median"])
    assert list(table.columns) == [
        *("workers", "compressor", "runs", "equivalence_failed", "test_accuracy", "step_ms.median")
    ]
    assert list(zip(table["compressor"], table["workers"], strict=True)) == [
        *((None, 1), (None, 2), ("OneBit", 1), ("OneBit", 2))
    ]
    assert list(table["runs"].map(len)) == [3, 3, 3, 1]
    assert table["test_accuracy"].tolist() == pytest.approx([0.91, 0.91, 0.91, 0.9])
    assert table["step_ms.median"].tolist() == pytest.approx([8.0, 4.0, 8.0, 4.0])


def test_a_run_without_a_verdict_of_equality_has_results_and_no_speed(tmp_path: Path) -> None:
    table = cross_table(grid(tmp_path, equivalence=FAILED_GATE), "workers", "compressor")
    assert list(table.columns[4:]) == ["test_accuracy", "samples_per_second"]
    assert list(table["equivalence_failed"]) == [0, 0, 0, 1]
    assert np.isnan(table["samples_per_second"].iloc[3])
    assert table["test_accuracy"].iloc[3] == 0.9


def test_a_misspelt_measure_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"'test_los' \(did you mean 'test_loss'"):
        cross_table(grid(tmp_path), "workers", "compressor", ["test_los"])


def test_a_closer_look_is_no_axis(tmp_path: Path) -> None:
    strategies = [{"name": "AllReduce", "compression_stats_every": each} for each in (0, 10)]
    runs = [write_run(tmp_path, strategy=s, epochs=n) for s in strategies for n in (1, 2)]
    assert not has_grid(runs)
