"""Test workers at their own pace: history rows are sorted by the time when steps ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sample_runs import experiment, metrics

from labkit.experiment import Experiment
from labkit.model_parallel.memory import Memory
from labkit.records import store
from labkit.records.analysis.curves import epoch_results, loss_curve
from labkit.records.analysis.spending import to_target
from labkit.records.run import Run
from labkit.records.run_metrics import RankResult, Verdict, WholeResult, summarise
from labkit.records.timed_steps import is_asynchronous, with_end_times

GATE = Verdict(verdict="passed", max_abs_difference=0.0, tolerance=1e-9, reason="")


def rows(lasts: list[float], counts: list[int], dropped: set[tuple[int, int]]) -> pd.DataFrame:
    """Return a history in which each worker has its own step time and number of steps."""
    found = [
        {
            "seed": 0,
            "epoch": step // 3,
            "step": step,
            "rank": rank,
            "loss": 2.0 - step / 10,
            "seconds": last,
            "compute_seconds": last,
            "codec_seconds": 0.0,
            "communicate_seconds": 0.0,
            "wait_seconds": 0.0,
            "payload_bytes": 10,
            "wire_bytes": 10,
            "messages": 2,
            "samples": 8,
            "staleness": None if (rank, step) in dropped else 1.0,
        }
        for rank, (last, count) in enumerate(zip(lasts, counts, strict=True))
        for step in range(count)
    ]
    return pd.DataFrame(found).sort_values(["step", "rank"], ignore_index=True)


# Worker 0 takes 1 s per step and ends 6 steps when worker 1, at 3 s per step, ends 2.
UNEQUAL = rows([1.0, 3.0], [6, 2], set())


def measured(history: pd.DataFrame) -> dict[str, Any]:
    own: dict[str, int | None] = {"weights": 8, "gradients": 8, "optimizer": 0}
    ranks = [RankResult([], Memory([0], 16, own, own), 100)] * 2
    whole = WholeResult([{"epoch": 0}], {"loss": 0.5}, GATE)
    found: list[dict[str, Any]] = history.to_dict("records")
    return summarise(Experiment(workers=2), found, dict(enumerate(ranks)), whole)


def test_workers_with_unequal_steps_are_timed_by_their_own_steps_and_the_run_by_its_clock() -> None:
    found = measured(UNEQUAL)
    assert found["train_seconds"] == pytest.approx(6.0)
    # The first two gradients end after 2 s, and the other six, of 8 rows each, by 6 s.
    assert found["first_step_ms"] == pytest.approx(2000)
    assert found["samples_per_second"] == pytest.approx(6 * 8 / 4.0)
    assert found["timed_steps"] == 6
    assert found["step_ms"] == pytest.approx({"median": 1000, "p10": 1000, "p90": 3000})


def test_the_other_stages_of_a_replica_make_no_steps_of_their_own() -> None:
    others = UNEQUAL.assign(rank=UNEQUAL["rank"] + 4, samples=0, loss=None, staleness=None)
    found = measured(pd.concat([UNEQUAL, others], ignore_index=True))
    plain = measured(UNEQUAL)
    for name in ("train_seconds", "first_step_ms", "samples_per_second"):
        assert found[name] == pytest.approx(plain[name])


def test_what_servers_dropped_is_no_throughput() -> None:
    found = measured(rows([1.0, 3.0], [6, 2], {(1, 1)}))
    assert found["samples_per_second"] == pytest.approx(5 * 8 / 4.0)


def test_equal_numbers_of_old_gradients_are_not_taken_for_common_steps() -> None:
    assert is_asynchronous(rows([1.0, 1.0], [3, 3], set()))
    assert not is_asynchronous(rows([1.0, 1.0], [3, 3], set()).assign(staleness=0.0))
    together = rows([1.0, 3.0], [3, 3], set()).drop(columns="staleness")
    assert not is_asynchronous(together)
    assert with_end_times(together)["ended"].tolist() == [3.0, 3.0, 6.0, 6.0, 9.0, 9.0]


def test_a_step_of_the_loss_curve_is_as_many_gradients_as_there_are_workers() -> None:
    curve = loss_curve(UNEQUAL)
    assert curve["step"].tolist() == [1, 2, 3, 4]
    # Gradients end in this order: worker 0 at 1 s and 2 s, both workers at 3 s, worker 0 again, and
    # both at 6 s.
    assert curve["seconds"].tolist() == [0.0, 1.0, 3.0, 4.0]
    assert curve["bytes"].tolist() == [0, 20, 40, 60]  # since the end of the first step
    assert curve["loss"].tolist() == pytest.approx([1.95, 1.9, 1.65, 1.7])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    directory = store.new_run_directory(tmp_path, "unequal")
    fields = experiment(epochs=2, clock="virtual")
    store.start(directory, fields)
    epochs = [  # seconds by the worker that evaluates
        {"epoch": 0, "step": 2, "seconds": 1.0, "loss": 1.0, "val_loss": 1.5, "val_accuracy": 0.5},
        {"epoch": 1, "step": 4, "seconds": 5.0, "loss": 0.5, "val_loss": 0.5, "val_accuracy": 0.9},
    ]
    whole = {"epochs": epochs, "clock": "virtual", "first_step_ms": 2000.0, "train_seconds": 6.0}
    store.finish(directory, metrics(2, 2) | whole, UNEQUAL)
    return Run(directory)


def test_an_epoch_of_workers_at_their_own_pace_ends_with_the_last_of_its_gradients(
    run: Run,
) -> None:
    found = epoch_results(run, loss_curve(run.history))
    assert found["seconds"].tolist() == [1.0, 4.0]  # since the end of the first step
    assert found["bytes"].tolist() == [20, 60]


def test_time_bytes_and_samples_to_a_target_count_what_was_done_by_then(run: Run) -> None:
    table = to_target({"a": run}, 0.5).iloc[0]
    assert (table["clock"], table["seeds"], table["reached"]) == ("virtual", 1, 1)
    # Two steps are four gradients: three of worker 0 and one of worker 1.
    assert (table["seconds"], table["bytes"], table["samples"]) == (3.0, 40, 32)
    assert to_target({"a": run}, 0.95).iloc[0]["reached"] == 0


def test_with_backups_an_update_is_of_fewer_gradients_than_there_are_workers(run: Run) -> None:
    run.experiment["strategy"] = {"name": "ParameterServer", "backup_workers": 1}
    found = epoch_results(run, loss_curve(run.history))
    assert found["step"].tolist() == [1.0, 2.0]  # each update has two gradients
    assert found["seconds"].tolist() == [0.0, 1.0]
    assert to_target({"a": run}, 0.9).iloc[0]["samples"] == 4 * 8
