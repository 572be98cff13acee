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


def killed(cluster: Cluster, question: Experiment, victim: int, step: int, **more: Any) -> Run:
    """The run whose rank is killed when the notebook has seen it take the step."""
    processes = cluster.view.apply_sync(os.getpid)
    live, end = cluster.submit(question, **more), time.monotonic() + HANG
    while not any(row["rank"] == victim and row["step"] >= step for row in list(live.rows)):
        assert time.monotonic() < end
        assert not live.done(), live.result()
        time.sleep(0.002)
    os.kill(processes[victim], signal.SIGKILL)
    return live.result()


@pytest.fixture(scope="module")
def tolerant(own_folders: Path) -> Iterator[Cluster]:
    with Cluster(workers=2, fault_tolerant=True, limit=60) as up:
        yield up


@pytest.mark.slow
def test_stages_go_on_from_the_newest_checkpoint_bit_for_bit(tolerant: Cluster) -> None:
    question = QUESTION.replace(strategy=lk.Pipeline(microbatches=2))
    whole = tolerant.run(question)
    run = killed(tolerant, question, 1, 80, checkpoint=25)
    assert run.status["state"] == "completed"
    (fault,) = run.metrics["faults"]
    assert fault["ranks"] == [1]
    assert fault["source"] == "checkpoint"
    assert fault["step"] >= 25
    assert fault["step"] % 25 == 0
    assert fault["repeated"] >= 0
    assert set(fault["seconds"]) == {"detect", "rebuild", "prepare", "repeat"}
    assert losses(run) == losses(whole)
    assert weights(run) == weights(whole)


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


def test_a_kill_that_was_planted_happens_once(tmp_path: Path) -> None:
    kills = [lk.Fault("kill", rank=1, step=step) for step in (30, 10)]
    found = setbacks(tmp_path, faults=kills)
    found.notice([1])
    found.go_back([1], RankError("rank 1 failed", 1))
    assert list(found.experiment.faults) == kills[:1]
