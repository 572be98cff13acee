"""Kill trainings with checkpoints at random moments, resume them, and compare the results."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster
from labkit.cluster.resume import validate_checkpoint
from labkit.common.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.records.checkpoints import complete_checkpoints
from labkit.records.folders import scan
from labkit.records.run import Run
from labkit.records.store import END_STATES
from labkit.records.timed_steps import is_applied
from labkit.strategies import STRATEGIES
from tests.acceptance.faults import crash_worker
from tests.acceptance.faults.claims import data, named
from tests.acceptance.faults.crash_worker import EVERY

WORKERS = 2
LIMIT = 120.0  # timeout of a wait, seconds
WHO = ("caller", "caller", "rank", "caller", "all")  # processes that are killed, in turn


def measure(repeats: int, known: Sequence[Row]) -> Iterator[Row]:
    """Kill trainings at moments uniform over their duration, then resume and compare them.

    The campaign kills the caller of `cluster.run`, a rank, or the caller and all ranks, in turn.
    The strategies that support checkpoints take turns, on both clocks.

    Args:
        repeats: kills.
        known: Rows of earlier runs of the campaign.

    Returns: One row per kill: whether it came before the end (`struck`), the `step` of the
        checkpoint from which training resumed, and whether the result is the `same` as without a
        kill.
    """
    done = {row["number"] for row in known if row["what"] == "resumes"}
    wanted = [number for number in range(repeats) if number not in done]
    if not wanted:
        return
    asked = list(kept())
    whole: dict[int, tuple[Run, float]] = {}
    with temporary_runs() as folder, Cluster(workers=WORKERS + 1, name="resumed-faults") as cluster:
        for number in wanted:
            turn = number % len(asked)
            experiment = asked[turn]
            if turn not in whole:
                # This run imports libraries before the timed part.
                cluster.run(experiment.replace(epochs=1), show=False)
                begin = time.monotonic()
                run = cluster.run(experiment, show=False)
                whole[turn] = run, time.monotonic() - begin
            yield _resumed(cluster, number, experiment, *whole[turn], folder)


def kept() -> Iterator[Experiment]:
    """Yield an experiment for each strategy whose training labkit can checkpoint and resume."""
    for kind in STRATEGIES.values():
        for clock in ("wall", "virtual"):
            try:
                asked = Experiment(
                    model="mlp",
                    model_options={"widths": [8, 8]},
                    dataset=data(72),
                    strategy=kind(),
                    clock=clock,
                    virtual={"compute_time": 0.01} if clock == "virtual" else None,
                    workers=WORKERS,
                    batch_size=16,
                    epochs=120,
                    optimizer="sgd" if clock == "virtual" else "adam",
                    verify=False,
                )
                validate_checkpoint(asked, EVERY, resume=True)
            except InvalidInput:
                continue
            if asked.ranks <= WORKERS + 1:
                yield asked


def _resumed(
    cluster: Cluster, number: int, asked: Experiment, whole: Run, seconds: float, folder: Path
) -> Row:
    draw, who = np.random.default_rng([number, 13]), WHO[number % len(WHO)]
    moment, victim = float(draw.uniform(0, seconds)), int(draw.integers(asked.ranks))
    folder = folder / str(number)
    before, os.environ["LABKIT_RUNS"] = os.environ["LABKIT_RUNS"], str(folder)
    try:
        struck = _killed(cluster, asked, who, victim, moment, folder)
        (found,) = scan(folder).usable
        kept = len(complete_checkpoints(found.path))
        run = cluster.run(asked, show=False, resume=True)
    finally:
        os.environ["LABKIT_RUNS"] = before
    resumed = run.status.get("resumed") or [{"step": 0}]
    row = head("faults", named(asked.strategy), "resumes", asked.workers, None, number=number)
    row |= {"clock": asked.clock, "killed": who, "moment": moment, "struck": struck}
    row |= {"kept": kept, "step": int(resumed[-1]["step"]), "same": same(asked, run, whole)}
    shutil.rmtree(folder)
    return row


def _killed(
    cluster: Cluster, asked: Experiment, who: str, victim: int, moment: float, folder: Path
) -> bool:
    """Train in another process and kill it; return whether the kill came before the end."""
    ranks = cluster.view.apply_sync(os.getpid)
    folder.mkdir()
    file = folder / "asked"
    file.write_bytes(pickle.dumps(asked))
    told = [cluster.name, str(cluster.workers), str(file)]
    words = [sys.executable, "-P", "-m", crash_worker.__name__, *told]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        limit = time.monotonic() + LIMIT
        while not list(folder.rglob("rank0.jsonl")) and process.poll() is None:
            if time.monotonic() > limit:
                process.kill()
                raise LabkitError(f"{named(asked.strategy)} did not begin")
            time.sleep(0.01)
        time.sleep(moment)
        struck = process.poll() is None
        if who in ("caller", "all"):
            process.kill()
        # A call that has ended no longer needs its ranks, but the resumed call needs them.
        dying = {"all": ranks, "rank": [ranks[victim]], "caller": []}[who] if struck else []
        for rank in dying:
            psutil.Process(rank).kill()
        process.wait(LIMIT)
    limit = time.monotonic() + LIMIT
    # If one rank dies, all engines end; the next call starts new engines.
    while (dying and cluster.how_ended() is None) or any(
        each.status["state"] not in END_STATES for each in scan(folder).usable
    ):
        if time.monotonic() > limit:
            raise LabkitError(f"{named(asked.strategy)}: its record or its engines go on")
        time.sleep(0.1)
    return struck


def same(asked: Experiment, run: Run, whole: Run) -> bool:
    """Return whether two runs have equal losses and equal weights, bit for bit.

    Asynchronous runs on the wall clock never repeat exactly. For these runs, both must apply the
    same number of gradients, and every worker must compute each step once.
    """
    waits = asked.strategy.cell(asked.workers).synchronization in ("synchronous", "periodic")
    if asked.clock == "wall" and not waits:
        done, wanted = (int(is_applied(each.history).sum()) for each in (run, whole))
        return done == wanted and _is_gapless(run)
    return _state(run) == _state(whole)


def _is_gapless(run: Run) -> bool:
    """Return whether each worker computed the steps 0, 1, 2, … without gaps, each once."""
    steps = run.history.groupby("rank")["step"]
    return all(sorted(own) == list(range(len(own))) for _, own in steps)


def _state(run: Run) -> tuple[bytes, list[bytes]]:
    rows = run.history.sort_values(["rank", "step"])[["rank", "step", "loss"]]
    return rows.to_numpy(float).tobytes(), [each.tobytes() for each in run.model().get_weights()]
