"""Runs that go on when ranks die which they cannot do without, from the outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment
from labkit.cluster.calls import RankError
from labkit.cluster.setbacks import Setbacks
from labkit.records.checkpoints import Keeping
from labkit.records.run import Run

ROWS, BATCH, EPOCHS = 72, 16, 60
X = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(np.float32)
QUESTION = Experiment(
    model="mlp", model_options={"widths": [8, 8]}, dataset=(X, (X[:, 0] > 0).astype(np.int32)),
    workers=2, batch_size=BATCH, epochs=EPOCHS, optimizer="adam", gate=False,
)  # fmt: skip
HANG = 120.0  # seconds


def weights(run: Run) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in run.model().get_weights()]


def losses(run: Run) -> list[tuple[float, float, str]]:
    rows = run.history.sort_values(["rank", "step"])[["rank", "step", "loss"]]
    return [(rank, step, repr(loss)) for rank, step, loss in rows.itertuples(index=False)]


def killed(cluster: Cluster, question: Experiment, victims: dict[int, int], **more: Any) -> Run:
    """The run whose ranks are killed, each when the notebook has seen that a step was taken."""
    processes = cluster.view.apply_sync(os.getpid)
    live, end = cluster.submit(question, **more), time.monotonic() + HANG
    for victim, step in victims.items():
        while not any(row["step"] >= step for row in list(live.rows)):
            assert time.monotonic() < end
            assert not live.done(), live.result()
            time.sleep(0.002)
        os.kill(processes[victim], signal.SIGKILL)
    return live.result()


@pytest.fixture(scope="module")
def tolerant(own_folders: Path) -> Iterator[Cluster]:
    with Cluster(workers=2, fault_tolerant=True, spares=1, limit=60) as up:
        yield up


@pytest.mark.slow
def test_stages_go_on_from_a_neighbours_copy_and_without_a_spare_from_the_checkpoint(
    tolerant: Cluster,
) -> None:
    question = QUESTION.replace(strategy=lk.Pipeline(microbatches=2))
    whole = tolerant.run(question)
    run = killed(tolerant, question, {1: 60, 0: 200}, checkpoint=25)
    assert run.status["state"] == "completed"
    by_spare, by_checkpoint = run.metrics["faults"]
    assert by_spare["ranks"] == [1]
    assert by_spare["source"] == "memory"
    (copy,) = by_spare["copies"]
    assert (copy["of"], copy["from"], copy["age"]) == (1, 0, by_spare["repeated"])
    assert copy["bytes"] > 0
    assert set(by_spare["seconds"]) == {"detect", "agree", "rebuild", "repeat"}
    assert by_checkpoint["ranks"] == [0, 1]
    assert by_checkpoint["source"] == "checkpoint"
    assert by_checkpoint["step"] >= 25
    assert by_checkpoint["step"] % 25 == 0
    assert by_checkpoint["repeated"] >= 0
    assert set(by_checkpoint["seconds"]) == {"detect", "rebuild", "prepare", "repeat"}
    assert losses(run) == losses(whole)
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_replicas_stay_as_many_where_there_is_a_spare(tolerant: Cluster) -> None:
    whole = tolerant.run(QUESTION)
    run = killed(tolerant, QUESTION, {0: 60})
    assert run.status["state"] == "completed"
    (fault,) = run.metrics["faults"]
    assert (fault["ranks"], fault["source"]) == ([0], "the ranks that live")
    assert fault["bytes"] > 0
    assert weights(run) == weights(whole)
    assert "ranks" not in run.history or run.history["ranks"].isna().all()
    steps = run.history.groupby("step")["samples"].sum()
    assert (
        steps[fault["step"] :].tolist()
        == whole.history.groupby("step")["samples"].sum()[fault["step"] :].tolist()
    )


def setbacks(folder: Path, **fields: Any) -> Setbacks:
    return Setbacks(folder, QUESTION.replace(**fields), Keeping(lk.Checkpoint(25)))


def test_who_dies_at_the_same_step_again_ends_the_run(tmp_path: Path) -> None:
    died, row = RankError("rank 1 failed: its process has ended", 1), {"rank": 0, "step": 6}
    found = setbacks(tmp_path)
    for reached in (6, 9):
        found.notice([1])
        found.hear([("step", row | {"step": reached})])
        assert found.go_back([1], died).resume is None
        found.sent()
        found.hear([("doing", {"what": "training"}), ("step", row | {"step": reached})])
    assert [(each["step"], each["repeated"]) for each in found.told] == [(0, 7), (0, 10)]
    assert all(set(each["seconds"]) > {"prepare", "repeat"} for each in found.told)
    found.notice([1])
    with pytest.raises(RankError, match="ended; ranks had died at step 10 before, and gone back"):
        found.go_back([1], died)


def test_steps_of_programs_are_those_of_all_workers(tmp_path: Path) -> None:
    found = setbacks(tmp_path, strategy=lk.ParameterServer(colocated=True))
    found.notice([1])
    found.hear([("step", {"rank": rank, "step": step}) for step in range(6) for rank in (0, 1)])
    found.go_back([1], RankError("rank 1 failed", 1))
    assert found.told[0]["repeated"] == 12


def test_a_kill_that_was_planted_happens_once(tmp_path: Path) -> None:
    kills = [lk.Fault("kill", rank=1, step=step) for step in (30, 10)]
    found = setbacks(tmp_path, faults=kills)
    found.notice([1])
    found.go_back([1], RankError("rank 1 failed", 1))
    assert list(found.experiment.faults) == kills[:1]
