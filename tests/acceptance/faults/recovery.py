"""Kill ranks of trainings that need all ranks: a spare or a checkpoint must replace each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil

from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster, RankError
from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.records.run import Run
from tests.acceptance.faults.claims import named
from tests.acceptance.faults.crash_worker import EVERY
from tests.acceptance.faults.resumes import WORKERS, kept, same

BEGIN = 120.0  # timeout for the first step of a training, seconds


def measure(repeats: int, known: Sequence[Row]) -> Iterator[Row]:
    """Kill a rank at a random moment of a training, and check how the training continues.

    Strategies take turns if they support checkpoints and cannot continue without the dead rank;
    each has a spare rank and a checkpoint every few steps. The ranks are engines of one cluster:
    ranks 0 to n - 1 train, and the last rank is the spare.

    Args:
        repeats: Number of kills that must hit a running training.
        known: Rows of earlier runs of the campaign.

    Returns: One row per kill: whether the run `finished`, the `source` of its restored state, and
        whether the result is the `same` as without a kill, see the function `same`.
    """
    done = [row for row in known if row["what"] == "comebacks"]
    struck = sum(bool(row["struck"]) for row in done)
    number = 1 + max((int(row["number"] or 0) for row in done), default=-1)
    if struck >= repeats:
        return
    asked = [each for each in kept() if each.clock == "wall" and not each.strategy.fault_tolerant]
    whole: dict[int, tuple[Run, float]] = {}
    with (
        temporary_runs(),
        Cluster(
            workers=WORKERS + 1, name="comeback-faults", fault_tolerant=True, spares=1
        ) as cluster,
    ):
        while struck < repeats:
            turn = number % len(asked)
            if turn not in whole:
                # This run imports libraries before the timed part.
                cluster.run(asked[turn].replace(epochs=1), show=False)
                begin = time.monotonic()
                run = cluster.run(asked[turn], show=False)
                whole[turn] = run, time.monotonic() - begin
            row = _killed(cluster, number, asked[turn], *whole[turn])
            struck += bool(row["struck"])
            number += 1
            yield row


def _killed(cluster: Cluster, number: int, asked: Experiment, whole: Run, seconds: float) -> Row:
    """Kill a rank during one training; return the row of this kill."""
    draw = np.random.default_rng([number, 17])
    moment, victim = float(draw.uniform(0, seconds)), int(draw.integers(asked.ranks))
    processes = cluster.view.apply_sync(os.getpid)
    live = cluster.submit(asked, checkpoint=EVERY)
    limit = time.monotonic() + BEGIN
    while not live.rows and not live.done():
        if time.monotonic() > limit:
            raise LabkitError(f"{named(asked.strategy)} did not begin")
        time.sleep(0.01)
    time.sleep(moment)
    if struck := not live.done():
        psutil.Process(processes[victim]).kill()
    why = ""
    try:
        run = live.result()
    except RankError as error:
        why, run = str(error), None
    row = head("faults", named(asked.strategy), "comebacks", asked.workers, None, number=number)
    row |= {"rank": victim, "moment": moment, "struck": struck, "finished": run is not None}
    faults = run.metrics["faults"] if run is not None else []
    row |= {"source": ", ".join(each["source"] for each in faults), "why": why}
    for name in ("detect", "agree", "rebuild", "prepare", "repeat"):
        if faults and name in faults[0]["seconds"]:
            row[f"{name}_s"] = faults[0]["seconds"][name]
    return row | {"same": run is not None and same(asked, run, whole)}
