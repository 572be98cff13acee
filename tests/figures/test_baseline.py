"""Test comparisons with a baseline: by seed, by precision, and by memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_compression import TOP_K, write_method
from sample_runs import FAILED_GATE

from labkit.common.errors import LabkitError
from labkit.figures import (
    loss_scales,
    precision_table,
    seed_by_seed,
    summarize_loss_scale,
    summarize_memory,
    summarize_seed,
)
from labkit.records.run import Run
from labkit.records.store import new_run_directory, start

FED_BACK = {"name": "ErrorFeedback", "inner": TOP_K}


def written(root: Path, losses: list[float], compressor: dict[str, object]) -> Run:
    """Return a run whose seeds have these test losses."""
    run = write_method(root, [0.9] * len(losses), compressor=compressor)
    for seed, loss in zip(run.seeds, losses, strict=True):
        file = seed.path / "metrics.json"
        file.write_text(file.read_text().replace('"test_loss": ', f'"test_loss": {loss}, "was": '))
    return run


def test_the_lower_test_loss_is_counted_by_seed(tmp_path: Path) -> None:
    with_feedback = written(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5], FED_BACK)
    without = written(tmp_path, [0.2, 0.3, 0.4, 0.5, 0.4], TOP_K)
    table = seed_by_seed(with_feedback, without)
    assert table["lower_test_loss"].tolist() == [True, True, True, True, False]
    assert table["baseline_test_loss"].tolist() == [0.2, 0.3, 0.4, 0.5, 0.4]
    said = summarize_seed(with_feedback, without)
    assert "On the data set digits, after 60 steps on 2 workers" in said
    assert (
        "ErrorFeedback(TopK(ratio=0.01)) ends with a lower test loss than TopK(ratio=0.01)" in said
    )
    assert "**4 of 5 seeds**: mean 0.3 against 0.36; if both were equally good" in said
    assert "would be lower by chance in 19% of such comparisons" in said  # (5 + 1) / 32


def test_equal_losses_are_not_lower(tmp_path: Path) -> None:
    runs = [written(tmp_path, [0.2, 0.3], each) for each in (FED_BACK, TOP_K)]
    said = summarize_seed(*runs)
    assert "training loss (mean of the last 20 steps)" in said
    assert said.count("**0 of 2 seeds**") == 2


def test_runs_of_other_seeds_are_refused(tmp_path: Path) -> None:
    one = write_method(tmp_path, compressor=TOP_K)
    other = write_method(tmp_path / "other", compressor=FED_BACK)
    file = other.path / "experiment.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    with pytest.raises(LabkitError, match="have no completed seed in common"):
        seed_by_seed(Run(other.path), one)


KEPT = {"weights": 4000, "gradients": 4000, "optimizer": 12, "peak": 10**9}


def precision_written(
    root: Path, factor: int = 1, measured: dict[str, Any] | None = None, **fields: Any
) -> Run:
    fields.setdefault("precision", "float32")
    kept = {kind: factor * value for kind, value in KEPT.items()}
    return write_method(
        root, measured={"memory_bytes": kept, "codec_ms_per_step": 0.5} | (measured or {}), **fields
    )


def test_the_precision_of_the_wire_stands_apart_from_that_of_the_computation(
    tmp_path: Path,
) -> None:
    base = precision_written(tmp_path, precision="float32")
    wide = precision_written(tmp_path, 2, precision="float64", payload=80_000)
    half = precision_written(
        tmp_path, precision="float32", compressor={"name": "Float16"}, payload=20_000
    )
    table = precision_table([base, wide, half], base)
    assert table["compute"].tolist() == ["float32", "float64", "float32"]
    assert table["wire"].tolist() == ["as the gradients", "as the gradients", "Float16"]
    assert table["payload_bytes_per_step"].tolist() == [40_000, 80_000, 20_000]
    assert table["weights_bytes"].tolist() == [4000, 8000, 4000]
    assert table["verdict"].tolist() == ["baseline", "no verdict", "no verdict"]


def test_a_failed_gate_has_no_milliseconds(tmp_path: Path) -> None:
    base = precision_written(tmp_path)
    bad = precision_written(
        tmp_path, measured={"equivalence": FAILED_GATE}, compressor={"name": "Float16"}
    )
    assert precision_table([base, bad], base)["step_ms"].isna().tolist() == [False, True]


def test_memory_is_held_against_the_baseline_but_peaks_are_not(tmp_path: Path) -> None:
    base = precision_written(tmp_path, precision="float32")
    scaled = precision_written(
        tmp_path, precision="mixed_float16", measured={"memory_bytes": KEPT | {"optimizer": 36}}
    )
    said = summarize_memory(
        [base, scaled, precision_written(tmp_path, 2, precision="float64")], base
    )
    assert "**precision mixed_float16** keeps as many bytes in memory as the baseline" in said
    assert (
        "**precision float64** keeps 7.81 KiB of weights (2x), 7.81 KiB of gradients (2x)." in said
    )
    assert "do not compare the memory of precisions" in said
    assert "float32** keeps" not in said


def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    base = precision_written(tmp_path)
    folder = new_run_directory(tmp_path, "waits")
    start(folder, base.experiment | {"seed": 9}, {})
    with pytest.raises(LabkitError, match="give completed runs"):
        precision_table([base, Run(folder)], base)


def scales(rank: int, values: list[float], updates: list[int]) -> list[dict[str, float]]:
    pairs = enumerate(zip(values, updates, strict=True))
    return [
        {"step": step, "rank": rank, "loss_scale": scale, "updates": made}
        for step, (scale, made) in pairs
    ]


def test_a_step_that_all_ranks_skip_is_named() -> None:
    rows = scales(0, [8.0, 4.0, 4.0], [1, 1, 2]) + scales(1, [8.0, 4.0, 4.0], [1, 1, 2])
    assert loss_scales(rows)["updates"][1].tolist() == [1, 1, 2]
    said = summarize_loss_scale(rows)
    assert said == (
        "Skipped: step 1 by all ranks. The ranks had the same loss scale after every step."
    )
    assert "Skipped: no step" in summarize_loss_scale(scales(0, [8.0], [1]))


def test_ranks_that_part_are_told() -> None:
    rows = scales(0, [8.0, 8.0], [1, 2]) + scales(1, [8.0, 4.0], [1, 1])
    said = summarize_loss_scale(rows)
    assert "step 1 by rank 1 only" in said
    assert "had different loss scales" in said
