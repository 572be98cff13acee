"""Test that a Run reads its directory, and that tables and aggregates match the records."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from sample_runs import FAILED_GATE, experiment, write_run

from labkit.common.errors import LabkitError
from labkit.records import store
from labkit.records.run import Run, key_metrics, load_runs, to_dataframe, verdict
from labkit.records.run_metrics import aggregate


def test_a_run_gives_what_was_written(tmp_path: Path) -> None:
    run = write_run(tmp_path, workers=2, epochs=3)
    assert run.experiment == experiment()
    assert run.status["state"] == "completed"
    assert run.metrics["step_ms"]["median"] == 5.0
    assert run.metrics is run.metrics
    assert run.environment["cores"] == 2
    assert len(run.history) == 2 * 3 * 20
    assert run.history is run.history
    assert run.seeds == []


def test_a_run_in_progress_has_no_metrics_and_an_empty_history(tmp_path: Path) -> None:
    store.start(tmp_path, experiment(), {})
    run = Run(tmp_path)
    assert run.metrics == {}
    assert list(run.history.columns) == list(store.HISTORY_COLUMNS)
    assert len(run.history) == 0
    assert verdict(run) == "not run"
    store.write_json(tmp_path / "metrics.json", {"test_loss": 0.5})
    assert run.metrics == {"test_loss": 0.5}


@pytest.mark.heavy
def test_a_run_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"has no model.keras \(state: completed\)"):
        write_run(tmp_path).model()


def test_load_runs_orders_by_start_and_takes_folders_and_lists(tmp_path: Path) -> None:
    second, first = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for run, moment in ((first, "2026-01-01T00Z"), (second, "2026-01-02T00Z")):
        record = store.read_json(run.path / "status.json")
        store.write_json(run.path / "status.json", record | {"started": moment})
    assert load_runs(tmp_path) == [first, second]
    assert load_runs([tmp_path / "a", tmp_path]) == [first, second]


def test_frame_has_one_flat_row_a_run(tmp_path: Path) -> None:
    table = to_dataframe([write_run(tmp_path), write_run(tmp_path, workers=4, network="1GbE")])
    assert list(table["workers"]) == [2, 4]
    assert list(table["strategy.algorithm"]) == ["ring", "ring"]
    assert table["model_options.widths"][0] == "[64]"
    assert table["equivalence.verdict"][0] == "passed"
    assert table["network"][1] == "1GbE"
    assert list(table["epochs"]) == [3, 3]
    json.loads(table.to_json(orient="records"))


def test_frame_of_a_thousand_runs_takes_under_three_seconds(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    to_dataframe([run])  # import pandas before the measurement
    files = {path.name: path.read_bytes() for path in run.path.iterdir() if path.suffix == ".json"}
    for number in range(1000):
        directory = tmp_path / f"{number:04d}"
        directory.mkdir()
        for name, content in files.items():
            (directory / name).write_bytes(content)
    began = time.process_time()
    assert len(to_dataframe(load_runs(tmp_path))) == 1001
    assert time.process_time() - began < 3


def test_aggregate_gives_medians_spread_and_the_worst_verdict(tmp_path: Path) -> None:
    seeds = [
        write_run(tmp_path, f"seed{k}", seed=k, step_ms=ms, measured={"test_loss": loss})
        for k, (ms, loss) in enumerate([(5.0, 0.3), (7.0, 0.1), (6.0, 0.9)])
    ]
    merged = aggregate(seeds)
    assert merged["test_loss"] == 0.3
    assert merged["step_ms"]["median"] == 6.0
    assert merged["spread"]["test_loss"] == [0.1, 0.9]
    assert merged["spread"]["step_ms.median"] == [5.0, 7.0]
    assert merged["repeats"] == 3
    assert merged["epochs"][2]["seconds"] == pytest.approx(0.76)
    assert merged["equivalence"]["verdict"] == "passed"
    bad = write_run(tmp_path, "seed3", measured={"equivalence": FAILED_GATE})
    assert aggregate([*seeds, bad])["equivalence"] == FAILED_GATE


def test_aggregate_of_nothing_completed_says_so(tmp_path: Path) -> None:
    store.start(tmp_path, experiment(), {})
    with pytest.raises(LabkitError, match="none of 1 repeats completed"):
        aggregate([Run(tmp_path)])


def test_repeats_are_found_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    top = write_run(tmp_path)
    for k in (10, 2, 0):
        write_run(top.path, f"seed{k}", seed=k)
    assert [seed.name for seed in top.seeds] == ["seed0", "seed2", "seed10"]
    assert load_runs(tmp_path) == [top]


def test_load_runs_takes_patterns_and_finds_the_folder_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [write_run(tmp_path / "runs" / f"00{number}_x") for number in (1, 2)]
    assert load_runs(tmp_path / "runs" / "00*") == runs
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")  # the working folder of a kernel under `labkit lab`
    with pytest.raises(LabkitError, match="no folder runs"):
        load_runs("runs")
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    assert load_runs("runs") == runs
    assert load_runs(["runs/001_*"]) == runs[:1]
    with pytest.raises(LabkitError, match=r"no folder runs/9\*"):
        load_runs("runs/9*")


def test_a_failed_gate_hides_every_speed(tmp_path: Path) -> None:
    run = write_run(tmp_path, measured={"equivalence": FAILED_GATE})
    assert verdict(run) == "failed (max |Δ| 0.25)"
    assert "test_accuracy" in key_metrics(run)
    assert not {"samples_per_second", "step_ms.median", "train_seconds"} & set(key_metrics(run))


def test_the_html_of_a_run_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path, name="x", model="<script>alert(1)</script>")
    store.fail(run.path, "<img src=x onerror=alert(1)>")
    shown = run._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown
    assert "&lt;script&gt;" in shown
