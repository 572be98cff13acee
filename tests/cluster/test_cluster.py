"""Test that clusters run experiments, survive failures, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from left import PATIENCE, left_of, processes

from labkit import Cluster, Experiment, InvalidInput, LabkitError
from labkit.cluster import RankError, leftovers
from labkit.cluster.launch import START_LIMIT
from labkit.records.run import load_runs

SMALL = {
    "dataset_options": {"rows": 64, "test_rows": 9},
    "model": "linear",
    "workers": 2,
    "batch_size": 32,
    "verify": False,
}


# --- ranks and results ---------------------------------------------------------------------------


def world_rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)


def pid_of(communicator: Any) -> int:
    return os.getpid()


def test_results_come_in_the_order_of_ranks(cluster: Cluster) -> None:
    assert cluster.call(lambda communicator: communicator.rank) == [0, 1, 2, 3]
    cluster.view.execute("from mpi4py import MPI; rank = MPI.COMM_WORLD.rank", block=True)
    assert cluster.view.pull("rank", block=True) == [0, 1, 2, 3]
    assert cluster.call(lambda communicator: world_rank(), ranks=3) == [0, 1, 2]


def test_arguments_reach_every_rank(cluster: Cluster) -> None:
    found = cluster.call(lambda c, a, b: (c.rank, a, b), "x", {"y": [1]}, ranks=2)
    assert found == [(0, "x", {"y": [1]}), (1, "x", {"y": [1]})]


@pytest.mark.slow
def test_a_cell_trains_with_the_drop_in(cluster: Cluster) -> None:
    cell = """
import keras, numpy as np, tensorflow as tf
from labkit import keras as lkk
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
communicator = lkk.init()
x = np.random.default_rng(0).standard_normal((50, 4)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1))).batch(16)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = lkk.DistributedOptimizer(keras.optimizers.SGD(0.1), communicator)
model.compile(optimizer=optimizer, loss="mse")
history = model.fit(
    lkk.shard(dataset, communicator), epochs=5, verbose=0, callbacks=lkk.callbacks(communicator)
)
losses = history.history["loss"]
"""
    cluster.view.execute(cell, block=True)
    losses = cluster.view.pull("losses", block=True)
    assert losses == [losses[0]] * 4
    assert losses[0][-1] < losses[0][0] / 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"workers": "2"}, "workers='2'"),
        ({"threads": -1}, "threads=-1"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        Cluster(**given)


@pytest.mark.parametrize("ranks", [0, 5, -1])
def test_more_ranks_than_there_are_cannot_be_called(cluster: Cluster, ranks: int) -> None:
    with pytest.raises(InvalidInput, match=f"ranks={ranks} is impossible; allowed: 1 to 4"):
        cluster.call(pid_of, ranks=ranks)


def test_an_experiment_that_does_not_fit_is_refused_before_anything_is_written(
    cluster: Cluster,
) -> None:
    with pytest.raises(
        InvalidInput,
        match=r"workers=5 are more than the 4 ranks of the cluster; use Cluster\(workers=5\)",
    ):
        cluster.run(Experiment(**SMALL | {"workers": 5}), show=False)
    with pytest.raises(InvalidInput, match=r"threads=2 .* use Cluster\(threads=2\)"):
        cluster.run(Experiment(**SMALL | {"threads": 2}), show=False)
    assert list(Path.cwd().iterdir()) == []


def test_a_cluster_of_the_same_name_and_another_shape_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidInput, match="is running with workers=4, not 5"):
        Cluster(workers=5, name=cluster.name)
    with pytest.raises(InvalidInput, match="is running with threads=1, not 2"):
        Cluster(workers=2, threads=2, name=cluster.name)


def test_a_smaller_share_of_a_cluster_is_attached_to_by_name(cluster: Cluster) -> None:
    with Cluster(workers=2, name=cluster.name) as part:
        assert part.call(pid_of) == cluster.call(pid_of)[:2]
        assert f"{cluster.name}: 2 ranks with 1 threads each, up" in repr(part)
    assert len(cluster.call(pid_of)) == 4


def test_while_one_rank_trains_the_others_import_what_training_needs(cluster: Cluster) -> None:
    def forget(communicator: Any) -> None:
        import sys

        sys.modules.pop("labkit.worker.session", None)

    def knows(communicator: Any) -> bool:
        import sys

        return "labkit.worker.session" in sys.modules

    cluster.call(forget)
    cluster.run(Experiment(**SMALL | {"workers": 1, "steps_per_epoch": 1}), show=False)
    assert cluster.call(knows) == [True] * 4


def test_a_cluster_that_is_up_is_told_by_leftovers(cluster: Cluster) -> None:
    assert cluster.folder.name in leftovers()


# --- what goes wrong on a rank -------------------------------------------------------------------


def test_a_failing_rank_is_named_its_run_kept_and_the_next_run_works(cluster: Cluster) -> None:
    def fails_on_one() -> Any:
        import keras
        from mpi4py import MPI

        class Fail(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if MPI.COMM_WORLD.rank == 1 and batch == 1:
                    print("about to fail")
                    raise ZeroDivisionError("as planned")

        return [Fail()]

    before = cluster.call(pid_of)
    experiment = Experiment(**SMALL)
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed: ZeroDivisionError: as planned") as caught:
        cluster.run(experiment.replace(callbacks=fails_on_one), show=False)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < cluster.timeout
    (failed,) = load_runs("runs")
    assert failed.status["state"] == "failed"
    assert failed.status["rank"] == 1
    assert "as planned" in failed.status["cause"]
    log = (failed.path / "logs" / "rank1.log").read_text()
    assert "about to fail" in log
    assert "ZeroDivisionError" in log
    assert (failed.path / "logs" / "rank0.log").exists()
    assert cluster.call(pid_of) == before
    assert cluster.run(experiment, show=False).status["state"] == "completed"


def test_an_error_of_several_lines_arrives_from_its_first(cluster: Cluster) -> None:
    def fails(communicator: Any) -> None:
        raise ValueError("the cause stands here\nand a detail there")

    with pytest.raises(RankError) as caught:
        cluster.call(fails, ranks=1)
    told = "rank 0 failed: ValueError: the cause stands here and a detail there"
    assert str(caught.value) == told


def test_a_rank_that_fails_after_the_last_exchange_does_not_hold_the_others(
    cluster: Cluster,
) -> None:
    def fail(communicator: Any) -> None:
        if communicator.rank == 0:
            raise ZeroDivisionError("at the very end")

    before = cluster.call(pid_of)
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 0 failed: ZeroDivisionError: at the very end"):
        cluster.call(fail)
    assert time.monotonic() - begin < cluster.timeout / 2
    assert cluster.call(pid_of) == before


def test_what_cannot_travel_is_a_failed_run_and_the_cluster_stays_free(cluster: Cluster) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        cluster.run(Experiment(**SMALL | {"callbacks": lambda: [lock]}), show=False)
    (failed,) = load_runs("runs")
    assert failed.status["state"] == "failed"
    with Cluster(workers=4, name=cluster.name) as other:
        assert len(other.call(pid_of)) == 4


# --- clusters that must end ----------------------------------------------------------------------


def script(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    (tmp_path / "child.py").write_text(text)
    with (tmp_path / "child.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "child.py"], stdout=subprocess.PIPE, stderr=log, text=True
        )


def wait_for(child: subprocess.Popen[str], word: str) -> str:
    assert child.stdout is not None
    for line in child.stdout:
        if word in line:
            return line
    pytest.fail(f"never said {word!r}: {Path('child.log').read_text()[-2000:]}")


@pytest.mark.slow
def test_a_cluster_lives_until_the_last_of_two_processes_lets_go_even_by_kill(
    tmp_path: Path, own_runtime: Path
) -> None:
    child = script(
        tmp_path,
        """
import os, time
import labkit
cluster = labkit.Cluster(workers=2, name="shared")
print("up", cluster.call(lambda communicator: os.getpid()), flush=True)
time.sleep(600)
""",
    )
    pids = wait_for(child, "up").split(maxsplit=1)[1]
    other = Cluster(workers=2, name="shared")
    assert str(other.call(pid_of)) == pids.strip()
    commands = " ".join(" ".join(process.cmdline()) for process in processes(own_runtime))
    for part in ("prterun", "controller", "engine", "keeper"):
        assert part in commands, part
    child.kill()
    child.wait()
    time.sleep(3)
    assert str(other.call(pid_of)) == pids.strip()
    other.close()
    assert left_of(own_runtime) == []
    assert leftovers() == []


@pytest.mark.slow
def test_kill_9_of_the_owner_of_a_busy_cluster_and_of_its_keeper_leaves_nothing(
    tmp_path: Path, own_runtime: Path
) -> None:
    """The hardest case: the keeper process is killed too, while the ranks compute."""
    child = script(
        tmp_path,
        """
import time
import labkit
cluster = labkit.Cluster(workers=2)
print("up", cluster.state()["pid"], flush=True)
cluster.call(lambda communicator: time.sleep(600))
""",
    )
    keeper = int(wait_for(child, "up").split()[1])
    time.sleep(1)
    assert len(processes(own_runtime)) >= 5
    child.kill()
    os.kill(keeper, signal.SIGKILL)
    child.wait()
    assert left_of(own_runtime) == []


@pytest.mark.slow
def test_an_interrupted_run_is_kept_and_its_process_leaves_nothing(
    tmp_path: Path, own_runtime: Path
) -> None:
    child = script(
        tmp_path,
        f"""
import time
import labkit
with labkit.Cluster(workers=2) as cluster:
    live = cluster.submit(labkit.Experiment(epochs=100_000, **{SMALL!r}))
    while not live.rows:
        time.sleep(0.1)
    print("training", flush=True)
    live.result()
""",
    )
    wait_for(child, "training")
    time.sleep(1)  # time for the child to call result()
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=PATIENCE) != 0
    assert "KeyboardInterrupt" in (tmp_path / "child.log").read_text()
    assert left_of(own_runtime) == []
    (run,) = load_runs("runs")
    assert run.status["state"] == "interrupted"
    assert "stopped by the user after" in run.status["cause"]
    assert len(run.history) > 0


@pytest.mark.slow
def test_the_end_of_a_rank_or_of_the_keeper_is_named_and_the_next_call_has_fresh_engines(
    own_runtime: Path, tmp_path: Path
) -> None:
    """The process is ended from outside, while the ranks wait for each other in a call."""

    def wait(communicator: Any, file: str) -> None:
        communicator.barrier()
        if communicator.rank == 0:
            Path(file).touch()
        while True:
            communicator.barrier()
            time.sleep(0.01)

    def ended(pid: int, number: int, name: str) -> RankError:
        def send() -> None:
            while not (tmp_path / name).exists():
                time.sleep(0.05)
            os.kill(pid, number)

        threading.Thread(target=send, daemon=True).start()
        with pytest.raises(RankError) as caught:
            cluster.call(wait, str(tmp_path / name))
        return caught.value

    with Cluster(workers=2) as cluster:
        before = cluster.call(pid_of)
        rank = ended(before[1], signal.SIGTERM, "rank")
        assert (rank.rank, rank.signal) == (1, "SIGTERM")
        assert "rank 1 was ended by SIGTERM" in str(rank)
        after = cluster.call(pid_of)
        assert len(after) == 2
        assert not set(before) & set(after)
        keeper = ended(cluster.state()["pid"] or 0, signal.SIGKILL, "keeper")
        assert (keeper.rank, keeper.signal) == (None, "SIGKILL")
        assert "the parent process of the engines was ended by SIGKILL" in str(keeper)
    assert left_of(own_runtime) == []


@pytest.mark.slow
def test_the_rank_that_others_wait_for_in_vain_is_to_blame(cluster: Cluster) -> None:
    def late(communicator: Any) -> None:
        if communicator.rank == 1:
            time.sleep(6)
        communicator.barrier("roll call")

    with Cluster(workers=4, name=cluster.name, timeout=2) as impatient:
        told = "rank 1 did not reach the call .* in roll call: rank 1 is in"
        with pytest.raises(RankError, match=told) as caught:
            impatient.call(late, ranks=2)
    assert caught.value.rank == 1


def test_shared_memory_of_ranks_has_no_name_that_could_outlive_them(cluster: Cluster) -> None:
    def named(communicator: Any) -> list[str]:
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        return [line for line in lines if "/sm_segment." in line and "(deleted)" not in line]

    assert cluster.call(named) == [[]] * 4


def test_engines_that_cannot_start_are_told_at_once_with_what_they_said(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "nonsense")
    begin = time.monotonic()
    with pytest.raises(LabkitError, match=r"the engines did not start: .*nonsense"):
        Cluster(workers=2)
    assert time.monotonic() - begin < START_LIMIT
    assert left_of(own_runtime) == []
