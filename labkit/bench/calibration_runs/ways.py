"""Whole steps of ways to train, on emulated networks: real runs, each begun anew, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from labkit.bench.temporary_runs import temporary_runs
from labkit.cluster import Cluster, RankError
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.forecast import Calibration, WayCost, model_of
from labkit.network import Network
from labkit.records.measure import WARM_UP
from labkit.records.pace import in_order
from labkit.records.run import Run
from labkit.strategies import AllReduce

STEPS = (WARM_UP + 24, 200)  # least and most of a run
STRETCH = 4  # steps that are timed together; of those that meet in periods, one of these


def asked(
    experiments: Sequence[Experiment],
    batches: Sequence[int],
    networks: Sequence[Network],
    workers: int,
    trained: Callable[[Experiment], dict[str, Any]],
) -> list[Experiment]:
    """What is trained: each way on each network, and each model by one rank, by batches.

    Args:
        experiments: whose strategies count, of those that want no more ranks than there are.
        batches: rows of one rank alone.
        networks: that are emulated.
        workers: ranks that there are.
        trained: fields of an experiment that say what is trained.
    """
    alone = [
        Experiment(strategy=AllReduce(), batch_size=rows, **trained(each))
        for each in experiments
        for rows in batches
    ]
    ways = [
        Experiment(
            strategy=each.strategy,
            workers=each.workers,
            batch_size=each.batch_size,
            network=network,
            **trained(each),
        )
        for each in experiments
        if each.workers > 1 and each.workers + each.strategy.extra_ranks(each.workers) <= workers
        for network in networks
    ]
    return list({each.hash8: each for each in (*alone, *ways)}.values())


def measured(
    cluster: Cluster,
    ways: Sequence[Experiment],
    parts: Calibration,
    runs: int,
    seconds: float,
    told: Callable[[str], None],
) -> list[WayCost]:
    """The typical steps of so many runs of each; every round goes through all, there and back.

    Args:
        cluster: of ranks enough.
        ways: see `asked`.
        parts: what was measured of them; a way of which they say no forecast is left out, as is
            one whose run fails.
        runs: of each.
        seconds: that a run is to train, by that forecast.
        told: is told what is measured next, and what is left out.
    """
    longer = [each for way in ways for each in _longer(way, parts, seconds, told)]
    found: dict[int, list[float]] = {number: [] for number in range(len(longer))}
    with temporary_runs():
        for turn in range(runs):
            told(f"whole steps of {len(longer)} ways, run {turn + 1} of {runs}")
            for number in list(found)[:: -1 if turn % 2 else 1]:
                try:
                    seconds = step_seconds(cluster.run(longer[number], show=False))
                except (InvalidInput, RankError) as error:
                    told(f"left out: {longer[number].label}: {error}")
                    del found[number]
                else:
                    found[number].append(seconds)
    return [
        WayCost(
            model=model_of(each),
            strategy=each.strategy.to_json(),
            workers=each.workers,
            threads=each.threads,
            batch=each.batch_size,
            network=each.network,
            runs=tuple(found[number]),
        )
        for number, each in enumerate(longer)
        if number in found
    ]


def step_seconds(run: Run) -> float:
    """What a global batch took in a run: the median over stretches of steps.

    Raises: InvalidInput, where it has not two of them.
    """
    stretch = _stretch(run.experiment["strategy"], run.experiment.get("steps"))
    ended = in_order(run.history).groupby("step")["ended"].max().to_numpy(float)[WARM_UP::stretch]
    if len(ended) < 2:
        raise InvalidInput(f"{run.name} has no two stretches of {stretch} steps: train for more")
    return float(np.median(np.diff(ended))) / stretch


def long_enough(experiment: Experiment, steps: int) -> Experiment:
    """The same for about so many steps, in epochs of whole batches."""
    rows = experiment.rows or steps * experiment.batch_size
    an_epoch = min(steps, max(1, rows // experiment.batch_size))
    return experiment.replace(steps=an_epoch, epochs=-(-steps // an_epoch))


def _longer(
    way: Experiment, parts: Calibration, seconds: float, told: Callable[[str], None]
) -> Iterator[Experiment]:
    try:
        step = way.forecast(calibration=parts).taken.seconds
    except InvalidInput as error:
        told(f"left out: {way.label}: {error}")
        return
    least = WARM_UP + 3 * _stretch(way.strategy.to_json(), way.epoch_steps) + 1
    yield long_enough(way, max(least, int(np.clip(seconds / step, *STEPS))))


def _stretch(strategy: Any, epoch: int | None) -> int:
    """Steps that are timed together: as many as there are from one meeting to the next."""
    period = strategy.get("period") if isinstance(strategy, dict) else None
    steps: int = epoch or 1 if period == "epoch" else period or 1
    return steps if steps > 1 else STRETCH
