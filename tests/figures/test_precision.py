"""Precision in tables and sentences: compute apart from wire, and what memory may be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_compression import write_method
from sample_runs import FAILED_GATE

from labkit.common.errors import LabkitError
from labkit.figures import loss_scale_reading, loss_scales, memory_reading, precision_table
from labkit.records.run import Run
from labkit.records.store import new_run_directory, start

KEPT = {"weights": 4000, "gradients": 4000, "optimizer": 12, "peak": 10**9}


def written(
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
    base = written(tmp_path, precision="float32")
    wide = written(tmp_path, 2, precision="float64", payload=80_000)
    half = written(tmp_path, precision="float32", compressor={"name": "Float16"}, payload=20_000)
    table = precision_table([base, wide, half], base)
    assert table["compute"].tolist() == ["float32", "float64", "float32"]
    assert table["wire"].tolist() == ["as the gradients", "as the gradients", "Float16"]
    assert table["payload_bytes_per_step"].tolist() == [40_000, 80_000, 20_000]
    assert table["weights_bytes"].tolist() == [4000, 8000, 4000]
    assert table["verdict"].tolist() == ["baseline", "no verdict", "no verdict"]


def test_a_failed_gate_has_no_milliseconds(tmp_path: Path) -> None:
    base = written(tmp_path)
    bad = written(tmp_path, measured={"equivalence": FAILED_GATE}, compressor={"name": "Float16"})
    assert precision_table([base, bad], base)["step_ms"].isna().tolist() == [False, True]


def test_memory_is_held_against_the_baseline_but_peaks_are_not(tmp_path: Path) -> None:
    base = written(tmp_path, precision="float32")
    scaled = written(
        tmp_path, precision="mixed_float16", measured={"memory_bytes": KEPT | {"optimizer": 36}}
    )
    said = memory_reading([base, scaled, written(tmp_path, 2, precision="float64")], base)
    assert "**precision mixed_float16** keeps as many bytes as the baseline" in said
    assert (
        "**precision float64** keeps 7.81 KiB of weights (2x), 7.81 KiB of gradients (2x)." in said
    )
    assert "no measure of one precision against another" in said
    assert "float32** keeps" not in said


def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    base = written(tmp_path)
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
    said = loss_scale_reading(rows)
    assert said == (
        "Skipped: step 1 by all ranks. The ranks had the same loss scale after every step."
    )
    assert "Skipped: no step" in loss_scale_reading(scales(0, [8.0], [1]))


def test_ranks_that_part_are_told() -> None:
    rows = scales(0, [8.0, 8.0], [1, 2]) + scales(1, [8.0, 4.0], [1, 1])
    said = loss_scale_reading(rows)
    assert "step 1 by rank 1 only" in said
    assert "did not stay alike" in said
