"""Test up to which batch size each learning-rate rule works; the runs are written by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit.figures import large_batch, large_batch_table, summarize_large_batch
from labkit.records.analysis.columns import group_seeds
from labkit.records.run import Run

TARGET = 0.8
EPOCHS = 5  # each epoch has 20 steps of 256 samples


def scaled(root: Path, workers: int, epochs: int, rule: str = "linear", **asked: Any) -> Run:
    """Return a run that reaches the target after this number of epochs; 0 means never."""
    reached = [(0.85 if epochs and epoch >= epochs - 1 else 0.5) for epoch in range(EPOCHS)]
    curve = [
        {"step": 20 * (n + 1), "seconds": (n + 1) / workers, "val_accuracy": value}
        for n, value in enumerate(reached)
    ]
    found = {"clock": "virtual", "network": "10GbE", "epochs": curve, "train_seconds": 5 / workers}
    given = {"clock": "virtual", "optimizer": "sgd", "epochs": EPOCHS, "workers": workers}
    given |= {"learning_rate_scaling": rule, "warmup_epochs": 0.0}
    return write_run(root, measured=found, **(given | asked))


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Return runs: the linear rule works for 4 workers, slower for 8, not for 16; LARS does."""
    linear = [scaled(tmp_path, workers, epochs) for workers, epochs in ((4, 2), (8, 3), (16, 0))]
    warm = [scaled(tmp_path, k, epochs, warmup_epochs=2.0) for k, epochs in ((4, 2), (16, 0))]
    lars = [scaled(tmp_path, k, n, "sqrt", optimizer="lars") for k, n in ((1, 2), (16, 4))]
    return [scaled(tmp_path, 1, 2, "none"), *linear, *warm, *lars]


def test_one_worker_counts_for_all_rules_of_its_optimizer(runs: list[Run]) -> None:
    table = large_batch_table(runs, TARGET)
    assert [*table.index] == [
        ("fixed rate", 1),
        *(("linear", workers) for workers in (1, 4, 8, 16)),
        *(("linear, warm-up", workers) for workers in (1, 4, 16)),
        *(("LARS, square root", workers) for workers in (1, 16)),
    ]
    linear = table.loc["linear"]
    assert linear["reached"].tolist() == [1, 1, 1, 0]
    assert linear["samples"].tolist()[:3] == [10240, 10240, 15360]
    assert linear["all_samples"].tolist() == [25600] * 4
    assert linear["all_seconds"][16] == 5 / 16


def test_lines_end_where_crosses_begin(runs: list[Run]) -> None:
    figure = large_batch(runs, TARGET)
    assert (
        figure.layout.title.text
        == "Samples and time to reach 80% accuracy, by number of workers · virtual clock · "
        "network 10GbE"
    )
    drawn = [trace for trace in figure.data if trace.name == "linear" and trace.x[0] is not None]
    panels = [[t for t in drawn if t.xaxis == axis] for axis in ("x", "x2")]
    for own, measure in zip(panels, ("samples", "seconds"), strict=True):
        line, cross = own
        assert list(line.x) == [1, 4, 8], measure
        assert (cross.marker.symbol, cross.text[0]) == ("x", "0 of 1 seeds reached the target")
    assert list(panels[0][1].y) == [25600]
    assert "linear, 8 workers: 15,360 samples, 375 ms" in figure.alt
    assert "linear, 16 workers: target reached by 0 of 1 seeds" in figure.alt


def test_the_reading_begins_with_what_did_not_come(runs: list[Run]) -> None:
    said = summarize_large_batch(runs, TARGET).splitlines()
    assert said[0] == (
        "- **linear, warm-up reaches the target with more workers than linear** (Goyal 2017): "
        "**not** "
        "reproduced: it reaches the target with up to 4 workers, against 8 with linear."
    )
    assert said[1] == (
        "- **With the linear scaling rule, more workers need no more samples than one worker, "
        "within the range of the seeds** (Goyal 2017): reproduced: the claim holds up to 4 "
        "workers; with 8 workers 15,360 samples."
    )
    assert said[2] == (
        "- **The linear scaling rule fails with many workers** (Goyal 2017): reproduced: with 16 "
        "workers 0 of 1 seeds reached the target."
    )
    assert (
        "**LARS, square root reaches the target with more workers than linear, warm-up**" in said[3]
    )
    assert said[4].startswith(
        "- Fastest to 80% accuracy: **LARS, square root, 16 workers**, 250 ms;"
    )
    assert said[-1] == (
        "- **LARS, square root**: with 1 worker 10,240 samples, with 16 workers 20,480 samples."
    )


def test_bands_and_seeds_that_did_not_reach_it_are_said(tmp_path: Path) -> None:
    one = [scaled(tmp_path, 1, epochs, "none", seed=n) for n, epochs in enumerate((1, 2))]
    four = [scaled(tmp_path, 4, epochs, seed=n) for n, epochs in enumerate((0, 2))]
    said = summarize_large_batch(group_seeds([*one, *four]), TARGET)
    assert said.splitlines()[0] == (
        "- **With the linear scaling rule, more workers need no more samples than one worker, "
        "within the range of the seeds** (Goyal 2017): **not** reproduced: with 1 worker 7,680 "
        "samples (2 seeds, 5,120 to 10,240); with 4 workers 1 of 2 seeds reached the target."
    )
    assert "Fastest to 80% accuracy: **fixed rate, 1 worker**, 1.5 s (2 seeds, 1 s to 2 s)." in said


def test_without_a_run_that_arrives_nothing_is_first(tmp_path: Path) -> None:
    said = summarize_large_batch([scaled(tmp_path, 4, 0), scaled(tmp_path, 8, 0)], TARGET)
    assert said.splitlines()[0] == "- No learning-rate rule reached 80% accuracy with all seeds."
    assert large_batch([scaled(tmp_path, 4, 0)], TARGET).alt.endswith("by 0 of 1 seeds.")
