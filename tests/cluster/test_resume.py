"""Test runs that are interrupted and resumed, as a user sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment
from labkit.cluster.resume import (
    begin_record,
    checkpoint_context,
    find_resumable,
    find_run,
    validate_checkpoint,
)
from labkit.common import reads
from labkit.records import provenance, store
from labkit.records.checkpoints import FOLDER, RESUME_VARIABLE, complete_checkpoints, publish
from labkit.records.run import Run
from labkit.strategies import STRATEGIES

ROWS, BATCH, EPOCHS = 72, 16, 40
X = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(np.float32)
QUESTION = Experiment(
    model="mlp", model_options={"widths": [8]}, dataset=(X, (X[:, 0] > 0).astype(np.int32)),
    workers=2, batch_size=BATCH, epochs=EPOCHS, optimizer="adam", verify=False,
)  # fmt: skip
LONG = QUESTION.replace(epochs=300)  # some seconds
SERVED = LONG.replace(strategy=lk.ParameterServer(2, colocated=True))
PLAYED = QUESTION.replace(
    clock="virtual", workers=4, strategy=lk.ParameterServer(2, synchronous=False), network="1GbE",
    virtual={"compute_time": {"seconds": 0.1, "distribution": "lognormal"}}, epochs=150,
)  # fmt: skip
HANG = 120.0  # seconds


def wait_for(done: Any) -> None:
    limit = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


def told(run: Run) -> tuple[list[tuple[float, ...]], list[bytes]]:
    """Return the losses of a run, and the bytes of its trained weights."""
    rows = run.history.sort_values(["rank", "step"])
    losses = list(rows[["rank", "step", "loss"]].itertuples(index=False, name=None))
    return losses, [weight.tobytes() for weight in weights(run)]


def weights(run: Run) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in run.model().get_weights()]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return uninterrupted runs, with which the resumed runs are compared."""
    with pytest.MonkeyPatch.context() as patch:  # a folder in which resumed runs do not look
        patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("whole")))
        return {each.hash8: cluster.run(each) for each in (LONG, SERVED, PLAYED)}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"strategy": lk.ParameterServer(stages=2)}, "by programs with a split model"),
        ({"clock": "virtual", "strategy": lk.ParameterServer(stages=2)}, "split model"),
        ({"strategy": lk.TFDistribute()}, "processes of other"),
        ({"strategy": lk.DelayedGradients()}, "messages in flight"),
    ],
)
@pytest.mark.parametrize("asked", [{"checkpoint": 10}, {"resume": True}, {"resume": "runs/x"}])
def test_what_has_no_state_that_could_be_kept_is_refused(
    fields: dict[str, Any], why: str, asked: dict[str, Any]
) -> None:
    (name,) = asked
    with pytest.raises(lk.InvalidInput, match=f"{name}=.*{why}.*allowed on clock='wall': AllRed"):
        validate_checkpoint(QUESTION.replace(**fields), **{"checkpoint": None, **asked})


def test_of_those_that_are_no_programs_other_frameworks_and_the_unlocked_are_not_kept() -> None:
    kept = {name for name, kind in STRATEGIES.items() if kind.resumable}
    assert kept == {"AllReduce", "Pipeline", "Layerwise", "TensorParallel", "SpatialParallel"}


def test_one_run_is_no_begin_for_several_trainings() -> None:
    with pytest.raises(lk.InvalidInput, match="give resume=True, or repeats=1"):
        validate_checkpoint(QUESTION.replace(repeats=2), None, "runs/x")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        lk.LabkitError, match="is not the folder of a run: give a run, a run's folder, or True"
    ):
        find_run(tmp_path)


def test_programs_go_on_with_the_same_experiment_alone(tmp_path: Path) -> None:
    half = tmp_path / FOLDER / "half"
    half.mkdir(parents=True)
    publish(half, {"taken": 7, "ranks": 2, "experiment": SERVED.to_json(), "files": {}})
    found = checkpoint_context(SERVED, None, Run(tmp_path), goes_on=False)
    assert found is not None
    with pytest.raises(lk.InvalidInput, match="on ranks=2, and this experiment differs"):
        checkpoint_context(SERVED.replace(workers=4), None, Run(tmp_path), goes_on=False)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [LONG, SERVED], ids=["allreduce", "servers"])
def test_a_run_that_was_stopped_goes_on_in_its_record(
    asked: Experiment, cluster: Cluster, whole: dict[str, Run]
) -> None:
    live = cluster.submit(asked, checkpoint=lk.Checkpoint(50, max_to_keep=3))
    wait_for(lambda: len(live.rows) > 20)
    live.stop()
    stopped = live.result()
    assert stopped.status["state"] == "interrupted"
    before = len(stopped.history) // 2
    assert 0 < before < 300 * 5
    again = cluster.run(asked, resume=True)
    assert again.path == stopped.path
    assert again.status["state"] == "completed"
    step = again.status["resumed"][0]["step"]
    assert step == before if not asked.uses_programs else 0 < step <= 2 * before
    assert told(again) == told(whole[asked.hash8])


@pytest.mark.slow
def test_asynchronous_servers_lose_nothing_and_hear_nothing_twice(cluster: Cluster) -> None:
    servers = lk.ParameterServer(1, synchronous=False, transport="one_sided")
    asked = LONG.replace(strategy=servers)
    live = cluster.submit(asked, checkpoint=lk.Checkpoint(100_000))
    wait_for(lambda: len(live.rows) > 20)
    live.stop()
    assert live.result().status["state"] == "interrupted"
    again = cluster.run(asked, resume=True)
    assert 0 < again.status["resumed"][0]["step"] < len(again.history)
    gradients = sorted(again.history[["rank", "step"]].itertuples(index=False, name=None))
    assert len(gradients) == len(set(gradients)) == 300 * 5 * 2
    for _, events in again.update_log.groupby("server"):
        heard = sorted(events[["worker", "step"]].itertuples(index=False, name=None))
        assert heard == gradients
        assert sorted(events["update"]) == list(range(len(gradients)))


@pytest.mark.slow
@pytest.mark.parametrize("stops", [True, False])
def test_a_play_on_the_virtual_clock_goes_on_bit_for_bit(
    stops: bool, cluster: Cluster, whole: dict[str, Run]
) -> None:
    own = nullcontext(cluster) if stops else Cluster(workers=1, launcher="local", name="virtual")
    with own as player:
        live = player.submit(PLAYED, checkpoint=lk.Checkpoint(10_000 if stops else 25))
        wait_for(lambda: len(live.rows) > 60)
        if stops:
            live.stop()
        else:
            os.kill(player.state()["pid"], signal.SIGKILL)
            with pytest.raises(lk.LabkitError):
                live.result()
        wait_for(live.done)
    again, played = lk.run(PLAYED, resume=True), whole[PLAYED.hash8]
    assert again.path == live.directory
    assert again.status["state"] == "completed"
    assert again.status["resumed"][0]["step"] > 0
    assert told(again) == told(played)
    assert again.history.sum(numeric_only=True).equals(played.history.sum(numeric_only=True))


@pytest.mark.slow
def test_the_newest_checkpoint_is_damaged_and_another_cut_goes_on_from_the_one_before(
    cluster: Cluster,
) -> None:
    short = QUESTION.replace(epochs=4, precision="float64")
    run = cluster.run(short, checkpoint=lk.Checkpoint(5, max_to_keep=3))
    newest = complete_checkpoints(run.path)[0]
    file = newest / "rank1.npz"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    longer = short.replace(epochs=6)
    wanted = weights(cluster.run(longer))
    for strategy, workers in (
        (lk.AllReduce(), 1),
        (lk.Pipeline(microbatches=2), 2),
        (lk.TensorParallel(2), 4),
    ):
        other_cut = longer.replace(strategy=strategy, workers=workers)
        found = cluster.run(other_cut, resume=run)
        assert f"{newest.name}/rank1.npz is damaged" in str(found.status["resumed"])
        for own, other in zip(weights(found), wanted, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)


SCRIPT = """
import os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_resume import {asked}
import labkit as lk
with lk.Cluster(workers=2, name="resumed") as cluster:
    Path({ranks!r}).write_text(" ".join(map(str, cluster.view.apply_sync(os.getpid))))
    cluster.run({asked}, checkpoint=lk.Checkpoint(5))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ranks_too", "asked"),
    [
        (signal.SIGTERM, False, "LONG"),
        (signal.SIGKILL, False, "LONG"),
        (signal.SIGKILL, True, "SERVED"),
    ],
)
def test_whoever_runs_it_is_ended_and_it_goes_on(
    number: signal.Signals,
    ranks_too: bool,
    asked: str,
    cluster: Cluster,
    whole: dict[str, Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = LONG if asked == "LONG" else SERVED
    runs, ranks = tmp_path / "other", tmp_path / "ranks"
    monkeypatch.setenv("LABKIT_RUNS", str(runs))
    script = SCRIPT.format(folder=str(Path(__file__).parent), ranks=str(ranks), asked=asked)
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_for(lambda: any(len(complete_checkpoints(each)) > 1 for each in runs.glob("*/*")))
        process.send_signal(number)
        for rank in ranks.read_text().split() if ranks_too else ():
            os.kill(int(rank), number)
        process.wait(HANG)
    (path,) = runs.glob("*/*")
    wait_for(lambda: Run(path).status["state"] != "running")
    assert Run(path).status["state"] == "interrupted"
    reached = len(Run(path).history) // 2 if number == signal.SIGTERM else 5
    again = cluster.run(experiment, resume=True)
    assert again.path.resolve() == path.resolve()
    assert again.status["resumed"][0]["step"] >= reached
    assert told(again) == told(whole[experiment.hash8])


def test_a_resumed_job_repeats_the_runs_whose_inputs_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job"
    monkeypatch.setenv("LABKIT_JOB", str(job))
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    experiment = Experiment(model="mlp", dataset="digits", workers=2)
    Path("data.csv").write_text("1")
    reads.forget()
    Path("data.csv").read_text()
    for name in ("kept", "outdated"):
        (job / name).mkdir(parents=True)
        begin_record(job / name, experiment, None)
        store.finish(job / name, {"epochs": []}, [])
    Path("data.csv").write_text("2")
    record = store.read_json(job / "kept" / provenance.FILE)
    store.write_json(job / "kept" / provenance.FILE, record | {"files": {}})
    found = find_resumable(experiment, None)
    assert found is not None
    assert found.path == job / "kept"
    assert find_resumable(experiment, None) is None
    assert {path.name for path in job.iterdir()} == {"kept", ".earlier"}
