"""Runs that are broken off and taken up again, from the outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment
from labkit.records.checkpoints import sealed
from labkit.records.run import Run

ROWS, BATCH, EPOCHS = 72, 16, 40
X = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(np.float32)
QUESTION = Experiment(
    model="mlp", model_options={"widths": [8]}, dataset=(X, (X[:, 0] > 0).astype(np.int32)),
    workers=2, batch_size=BATCH, epochs=EPOCHS, optimizer="adam", gate=False,
)  # fmt: skip
LONG = QUESTION.replace(epochs=300)  # some seconds
HANG = 120.0  # seconds


def wait_for(done: Any) -> None:
    limit = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


def weights(run: Run) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in run.model().get_weights()]


def losses(run: Run) -> list[tuple[float, ...]]:
    rows = run.history.sort_values(["rank", "step"])
    return list(rows[["rank", "step", "loss"]].itertuples(index=False, name=None))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"strategy": lk.ParameterServer()}, "trains by programs"),
        ({"clock": "virtual", "strategy": lk.ParameterServer(stages=2)}, "whole replicas"),
        ({"strategy": lk.TFDistribute()}, "processes of other"),
        ({"strategy": lk.DelayedGradients()}, "messages on their way"),
    ],
)
def test_what_has_no_state_that_could_be_kept_is_refused(fields: dict[str, Any], why: str) -> None:
    from labkit.cluster.resumed import checked

    with pytest.raises(lk.InvalidInput, match=why):
        checked(QUESTION.replace(**fields), 10)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_in_its_record(cluster: Cluster) -> None:
    whole = cluster.run(QUESTION)
    live = cluster.submit(QUESTION, checkpoint=lk.Checkpoint(50, keep=3))
    wait_for(lambda: len(live.rows) > 20)
    live.stop()
    stopped = live.result()
    assert stopped.status["state"] == "interrupted"
    before = len(stopped.history) // 2
    assert 0 < before < EPOCHS * 5
    again = cluster.run(QUESTION, resume=True)
    assert again.path == stopped.path
    assert again.status["state"] == "completed"
    assert again.status["resumed"][0]["step"] == before
    assert losses(again) == losses(whole)
    assert weights(again) == weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [True, False])
def test_a_play_on_the_virtual_clock_goes_on_bit_for_bit(stops: bool) -> None:
    servers = lk.ParameterServer(2, synchronous=False)
    question = QUESTION.replace(
        clock="virtual", workers=4, strategy=servers, network="1GbE",
        compute={"seconds": 0.1, "law": "lognormal"}, epochs=40, seed=int(stops),
    )  # fmt: skip
    whole = lk.run(question)
    with Cluster(workers=1, launcher="local", name="virtual") as cluster:
        live = cluster.submit(question, checkpoint=lk.Checkpoint(10_000 if stops else 25))
        wait_for(lambda: len(live.rows) > 60)
        if stops:
            live.stop()
        else:
            os.kill(cluster.state()["pid"], signal.SIGKILL)
            with pytest.raises(lk.LabkitError):
                live.result()
        wait_for(live.done)
    again = lk.run(question, resume=True)
    assert again.path == live.directory
    assert again.status["state"] == "completed"
    assert again.status["resumed"][0]["step"] > 0
    assert losses(again) == losses(whole)
    assert again.history.sum(numeric_only=True).equals(whole.history.sum(numeric_only=True))
    assert weights(again) == weights(whole)


@pytest.mark.slow
def test_the_newest_checkpoint_is_damaged_and_another_cut_goes_on_from_the_one_before(
    cluster: Cluster,
) -> None:
    short = QUESTION.replace(epochs=4, precision="float64")
    run = cluster.run(short, checkpoint=lk.Checkpoint(5, keep=3))
    newest = sealed(run.path)[0]
    file = newest / "rank1.npz"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    longer = short.replace(epochs=6)
    wanted = weights_of(cluster.run(longer))
    for strategy in (lk.AllReduce(), lk.Pipeline(microbatches=2), lk.TensorParallel(2)):
        found = cluster.run(longer.replace(strategy=strategy), resume=run)
        assert f"{newest.name}/rank1.npz is damaged" in str(found.status["resumed"])
        for own, other in zip(weights_of(found), wanted, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)


def weights_of(run: Run) -> list[np.ndarray]:
    return [np.asarray(each) for each in run.model().get_weights()]


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from test_resumed import LONG
import labkit as lk
with lk.Cluster(workers=2, name="resumed") as cluster:
    cluster.run(LONG, checkpoint=lk.Checkpoint(5))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_whoever_runs_it_is_ended_and_it_goes_on(
    number: signal.Signals, cluster: Cluster, tmp_path: Path
) -> None:
    whole = cluster.run(LONG)
    runs = tmp_path / "other"
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    environment = os.environ | {"LABKIT_RUNS": str(runs)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as process:
        wait_for(lambda: any(len(sealed(each)) > 1 for each in runs.glob("*/*")))
        process.send_signal(number)
        process.wait(HANG)
    (path,) = runs.glob("*/*")
    wait_for(lambda: Run(path).status["state"] != "running")
    assert Run(path).status["state"] in ("interrupted", "failed")
    os.environ["LABKIT_RUNS"] = str(runs)
    try:
        again = cluster.run(LONG, resume=True)
    finally:
        del os.environ["LABKIT_RUNS"]
    assert again.path.resolve() == path.resolve()
    assert again.status["resumed"][0]["step"] >= 5
    assert losses(again) == losses(whole)
    assert weights(again) == weights(whole)
