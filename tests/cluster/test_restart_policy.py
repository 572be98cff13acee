"""Test runs that continue after the deaths of ranks that they need, as a user sees them."""

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
from labkit.cluster.calls import RankError, Refused
from labkit.cluster.magic import DeathInCell, run_cell
from labkit.cluster.restart_policy import TRIES, RestartPolicy, ranks_to_blame
from labkit.communicator.status_table import ENDED
from labkit.records.checkpoints import CheckpointContext
from labkit.records.run import Run

ROWS, BATCH, EPOCHS = 72, 16, 60
X = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(np.float32)
QUESTION = Experiment(
    model="mlp", model_options={"widths": [8, 8]}, dataset=(X, (X[:, 0] > 0).astype(np.int32)),
    workers=2, batch_size=BATCH, epochs=EPOCHS, optimizer="adam", verify=False,
)  # fmt: skip
HANG = 120.0  # seconds


def weights(run: Run) -> list[bytes]:
    return [np.asarray(weight).tobytes() for weight in run.model().get_weights()]


def losses(run: Run) -> list[tuple[float, float, str]]:
    rows = run.history.sort_values(["rank", "step"])[["rank", "step", "loss"]]
    return [(rank, step, repr(loss)) for rank, step, loss in rows.itertuples(index=False)]


def killed(cluster: Cluster, question: Experiment, victims: dict[int, int], **more: Any) -> Run:
    """Kill each victim when the notebook has seen a certain step; return the run."""
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
    with Cluster(workers=2, fault_tolerant=True, spares=1, timeout=60) as up:
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
    assert by_checkpoint["ranks"] == [0]  # rank 1 is in the first entry of the record
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
    assert (fault["ranks"], fault["source"]) == ([0], "the surviving ranks")
    assert fault["bytes"] > 0
    assert weights(run) == weights(whole)
    assert "ranks" not in run.history or run.history["ranks"].isna().all()
    steps = run.history.groupby("step")["samples"].sum()
    assert (
        steps[fault["step"] :].tolist()
        == whole.history.groupby("step")["samples"].sum()[fault["step"] :].tolist()
    )


@pytest.fixture(scope="module")
def pair(own_folders: Path) -> Iterator[Cluster]:
    """Yield a cluster of two ranks without a spare."""
    with Cluster(workers=2, fault_tolerant=True, timeout=60, name="pair") as up:
        yield up


def wait_for(path: Path) -> None:
    end = time.monotonic() + HANG
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_death_in_the_check_of_equivalence_lets_the_run_begin_again(
    pair: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)

    def model() -> Any:
        """Rank 1 dies in the equivalence check, before it can train."""
        import os
        import time
        from pathlib import Path

        import keras

        checks = keras.config.dtype_policy().name == "float64"
        here = Path(folder, "checks")
        if checks and os.environ["OMPI_COMM_WORLD_RANK"] == "1" and not here.exists():
            here.touch()
            time.sleep(600)
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(2)])

    question = QUESTION.replace(
        model=model, model_options={}, loss="mse", dataset=(X, X[:, :2]), epochs=3, verify=True
    )
    processes = pair.view.apply_sync(os.getpid)
    live = pair.submit(question)
    wait_for(tmp_path / "checks")
    os.kill(processes[1], signal.SIGKILL)
    run = live.result()
    assert run.status["state"] == "completed"
    assert run.metrics["equivalence"]["verdict"] == "passed"
    (fault,) = run.metrics["faults"]
    assert (fault["ranks"], fault["step"], fault["source"]) == ([1], 0, "the begin")
    assert "rank 1 died: the run starts again from step 0" in capsys.readouterr().err


def hold_the_end(communicator: Any, folder: str) -> None:
    """Make rank 0 wait once at the end of its next run, just before it returns the result."""
    import time
    from pathlib import Path

    from labkit.worker import rank_state

    leave = rank_state.restore

    def restore() -> None:
        rank_state.restore = leave
        leave()
        Path(folder, "done").touch()
        time.sleep(600)

    if communicator.rank == 0:
        rank_state.restore = restore


@pytest.mark.slow
def test_a_result_that_dies_with_rank_0_is_handed_over_by_another(
    pair: Cluster, tmp_path: Path
) -> None:
    pair.call(hold_the_end, str(tmp_path))
    processes = pair.view.apply_sync(os.getpid)
    live = pair.submit(QUESTION.replace(epochs=3))
    wait_for(tmp_path / "done")
    os.kill(processes[0], signal.SIGKILL)
    run = live.result()
    assert run.status["state"] == "completed"
    assert len(run.metrics["epochs"]) == 3
    (fault,) = run.metrics["faults"]
    assert (fault["ranks"], fault["step"], fault["repeated"]) == ([0], 15, 0)


@pytest.mark.slow
def test_a_run_whose_only_result_dies_begins_again(pair: Cluster, tmp_path: Path) -> None:
    pair.call(hold_the_end, str(tmp_path))
    processes = pair.view.apply_sync(os.getpid)
    question = QUESTION.replace(strategy=lk.Pipeline(microbatches=2), epochs=3)
    live = pair.submit(question)
    wait_for(tmp_path / "done")
    os.kill(processes[0], signal.SIGKILL)
    run = live.result()
    assert run.status["state"] == "completed"
    (fault,) = run.metrics["faults"]
    assert (fault["ranks"], fault["repeated"]) == ([0], 15)


@pytest.mark.slow
def test_a_stop_ends_a_run_whose_rank_has_died(pair: Cluster, tmp_path: Path) -> None:
    pair.call(hold_the_end, str(tmp_path))
    processes = pair.view.apply_sync(os.getpid)
    live = pair.submit(QUESTION.replace(strategy=lk.Pipeline(microbatches=2), epochs=3))
    wait_for(tmp_path / "done")
    live.stop()
    os.kill(processes[0], signal.SIGKILL)
    assert live.result().status["state"] == "interrupted"


@pytest.mark.slow
def test_a_cell_whose_rank_dies_says_so_and_runs_again_on_request_alone(
    pair: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = f"""import os, signal, time; from pathlib import Path
folder, own = Path({str(tmp_path)!r}), os.environ["OMPI_COMM_WORLD_RANK"]
kept = 7
if own == "1" and len(list(folder.iterdir())) < deaths:
    Path(folder, str(os.getpid())).touch(); os.kill(os.getpid(), signal.SIGKILL)
print("alive", own)"""
    run_cell(pair, "deaths = 1")
    with pytest.raises(DeathInCell, match="rank 1 failed: its process has ended"):
        run_cell(pair, dies)
    capsys.readouterr()
    run_cell(pair, "print(globals().get('kept'))")
    assert capsys.readouterr().out == "[rank 0]\n7\n[rank 1]\nNone\n"
    run_cell(pair, dies.replace("deaths", "2"), retries=1)
    said = capsys.readouterr()
    assert "rank 1 died, so the cell runs again" in said.err
    assert said.out.endswith("[rank 0]\nalive 0\n[rank 1]\nalive 1\n")


DIED = RankError("rank 1 failed: its process has ended", 1)


@pytest.mark.parametrize(
    ("error", "dead", "all_ended", "expected"),
    [
        (DIED, {1}, False, [1]),
        (RankError("rank 0 failed: ValueError: a layer", 0), set(), False, []),
        (RankError("rank 0 failed: MPI error", 0), {2, 1}, False, [1, 2]),
        (
            RankError("the engines ended: rank 0 was ended by SIGKILL", 0, "", "SIGKILL"),
            set(),
            True,
            [0],
        ),
        (
            RankError("the engines ended: rank 0 was ended by SIGTERM", 0, "", "SIGTERM"),
            {0},
            True,
            [],
        ),
        (RankError("the engines ended: mpiexec was ended", None, "", "SIGKILL"), set(), True, []),
        (Refused("batch_size=3", 0), {1}, False, []),
    ],
)
def test_a_death_alone_sends_a_call_again(
    error: RankError, dead: set[int], all_ended: bool, expected: list[int]
) -> None:
    assert ranks_to_blame(error, dead, all_ended) == expected


VALUE = RankError("rank 0 failed: ValueError: a layer", 0)


@pytest.mark.parametrize(
    ("error", "dead", "all_ended", "outlived", "expected"),
    [
        (VALUE, {3}, False, [3], []),
        (
            RankError(
                "rank 2 did not reach the call in which other ranks wait: WaitTooLong: 60 s", 2
            ),
            {3},
            False,
            [3],
            [],
        ),
        (VALUE, {1, 2}, False, [1, 1], []),  # rank 2 is a spare, which had replaced rank 1
        (DIED, {1, 3}, False, [3], [1]),
        (RankError("the engines ended: all ranks have died", 0), {0}, True, [0], [0]),
        (RankError(f"rank 3 failed: {ENDED}, so its result is lost", 3), {3}, False, [3], [3]),
    ],
)
def test_an_error_after_a_death_that_a_call_has_outlived_is_the_program_s(
    error: RankError, dead: set[int], all_ended: bool, outlived: list[int], expected: list[int]
) -> None:
    assert ranks_to_blame(error, dead, all_ended, outlived) == expected


def test_a_rank_that_a_call_has_outlived_stands_in_the_record_once(tmp_path: Path) -> None:
    found = RestartPolicy(tmp_path, QUESTION, None)
    found.read([("fault", {"ranks": [0], "step": 10, "seconds": {}})])
    assert found.outlived == [0]
    dead = ranks_to_blame(DIED, {0, 1}, False, found.outlived)
    found.note_deaths(dead)
    found.roll_back(dead, DIED)
    assert [each["ranks"] for each in found.restarts] == [[0], [1]]
    assert (found.deaths, found.outlived) == (2, [])


def setbacks(folder: Path, **fields: Any) -> RestartPolicy:
    return RestartPolicy(folder, QUESTION.replace(**fields), CheckpointContext(lk.Checkpoint(25)))


def test_what_keeps_nothing_begins_again_and_says_so(tmp_path: Path) -> None:
    found = RestartPolicy(tmp_path, QUESTION, None)
    found.note_deaths([0, 1])
    assert found.roll_back([0, 1], DIED) is None
    assert (found.restarts[0]["source"], found.deaths) == ("the begin", 2)
    assert found.sentence == "rank 0, 1 died: the run starts again from step 0"


def test_deaths_before_the_first_step_end_a_run_only_when_they_come_again_and_again(
    tmp_path: Path,
) -> None:
    found = RestartPolicy(tmp_path, QUESTION, None)
    for _ in range(TRIES - 1):
        found.note_deaths([1])
        found.roll_back([1], DIED)
    found.note_deaths([1])
    with pytest.raises(
        RankError, match=f"{TRIES} calls that began at step 0 reached no later step"
    ):
        found.roll_back([1], DIED)


def test_a_run_whose_checkpoints_are_all_damaged_begins_again_and_keeps_them(
    tmp_path: Path,
) -> None:
    found = setbacks(tmp_path)
    for number in (1, 2):
        checkpoint = tmp_path / "checkpoints" / "25"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        found.note_deaths([1])
        found.roll_back([1], DIED)
        assert found.restarts[-1]["source"] == "the begin"
        (note,) = found.restarts[-1]["notes"]
        assert "no checkpoint is complete" in note
        assert note.endswith(f"the damaged checkpoints were moved to checkpoints.damaged-{number}")
        assert (tmp_path / f"checkpoints.damaged-{number}" / "25" / "manifest.json").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_halves_of_checkpoints_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "half").mkdir(parents=True)
    found = setbacks(tmp_path)
    found.note_deaths([1])
    found.roll_back([1], DIED)
    assert list(tmp_path.iterdir()) == []


def test_who_dies_at_the_same_step_again_and_again_ends_the_run(tmp_path: Path) -> None:
    died, row = RankError("rank 1 failed: its process has ended", 1), {"rank": 0, "step": 6}
    found = setbacks(tmp_path)
    for reached in (6, 9):
        found.note_deaths([1])
        found.read([("step", row | {"step": reached})])
        assert found.roll_back([1], died).resume is None
        found.note_restart()
        found.read([("doing", {"what": "training"}), ("step", row | {"step": reached})])
    assert [(each["step"], each["repeated"]) for each in found.restarts] == [(0, 7), (0, 10)]
    assert all(set(each["seconds"]) > {"prepare", "repeat"} for each in found.restarts)
    for reached in (3, 9)[: TRIES - 2]:  # each call gets further, but never past the old maximum
        found.note_deaths([1])
        found.read([("step", row | {"step": reached})])
        found.roll_back([1], died)
    found.note_deaths([1])
    with pytest.raises(RankError, match="ended; ranks had also died at step 10 before, and 3 "):
        found.roll_back([1], died)


def test_steps_of_programs_are_those_of_all_workers(tmp_path: Path) -> None:
    found = setbacks(tmp_path, strategy=lk.ParameterServer(colocated=True))
    found.note_deaths([1])
    found.read([("step", {"rank": rank, "step": step}) for step in range(6) for rank in (0, 1)])
    found.roll_back([1], RankError("rank 1 failed", 1))
    assert found.restarts[0]["repeated"] == 12


def test_a_kill_that_was_planted_happens_once(tmp_path: Path) -> None:
    kills = [lk.Fault("kill", rank=1, step=step) for step in (30, 10)]
    found = setbacks(tmp_path, faults=kills)
    found.note_deaths([1])
    found.roll_back([1], RankError("rank 1 failed", 1))
    assert list(found.experiment.faults) == kills[:1]


def test_a_planted_kill_that_a_call_has_outlived_happens_once(tmp_path: Path) -> None:
    kills = [lk.Fault("kill", rank=rank, step=10) for rank in (0, 1)]
    found = setbacks(tmp_path, faults=kills)
    found.read([("fault", {"ranks": [0], "step": 10, "seconds": {}})])
    found.note_deaths([1])
    found.roll_back([1], DIED)
    assert list(found.experiment.faults) == []
