"""Measurements of whole training steps of each strategy on emulated networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from labkit.bench.runs import temporary_runs
from labkit.cluster import Cluster, RankError
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.forecast import Calibration, WayCost, model_of
from labkit.network import Network
from labkit.records.measure import WARM_UP
from labkit.records.pace import with_end_times
from labkit.records.run import Run
from labkit.strategies import AllReduce

STEPS = (WARM_UP + 24, 200)  # minimum and maximum number of steps of a run
STRETCH = 4  # number of steps timed as one block, unless the strategy has an averaging period


def experiments_to_run(
    experiments: Sequence[Experiment],
    batches: Sequence[int],
    networks: Sequence[Network],
    workers: int,
    trained: Callable[[Experiment], dict[str, Any]],
) -> list[Experiment]:
    """Return the experiments to run: each strategy on each network, and each model on one rank.

    Args:
        experiments: Experiments with the strategies; experiments with more than `workers` ranks are
            omitted.
        batches: Batch sizes of the runs on one rank.
        networks: Networks to emulate.
        workers: Number of available ranks.
        trained: Function of an experiment that returns the experiment's fields that define model
            and optimizer.
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
    progress: Callable[[str], None],
) -> list[WayCost]:
    """Run each experiment several times, interleaved; return the step time of each run.

    Args:
        cluster: Cluster with enough ranks for all experiments.
        ways: Experiments from `experiments_to_run`.
        parts: Calibration from which the duration of each run is forecast. Experiments without a
            forecast are omitted. An experiment is also omitted if one of its runs fails.
        runs: Number of runs of each experiment.
        seconds: Desired training time of a run in seconds, from which the number of steps is
            computed.
        progress: Callback that receives lines about the progress, including the reason of each
            omission.
    """
    longer = [each for way in ways for each in _longer(way, parts, seconds, progress)]
    found: dict[int, list[float]] = {number: [] for number in range(len(longer))}
    with temporary_runs():
        for turn in range(runs):
            progress(f"whole steps of {len(longer)} experiments, run {turn + 1} of {runs}")
            for number in list(found)[:: -1 if turn % 2 else 1]:
                try:
                    seconds = step_seconds(cluster.run(longer[number], show=False))
                except (InvalidInput, RankError) as error:
                    progress(f"left out: {longer[number].label}: {error}")
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
    """Return the median seconds per step (global batch) of a run, over blocks of steps.

    Raises:
        InvalidInput: The run has fewer than two blocks of steps.
    """
    stretch = _stretch(run.experiment["strategy"], run.experiment.get("steps_per_epoch"))
    ended = (
        with_end_times(run.history).groupby("step")["ended"].max().to_numpy(float)[WARM_UP::stretch]
    )
    if len(ended) < 2:
        raise InvalidInput(
            f"{run.name} has fewer than two stretches of {stretch} steps; train for more steps"
        )
    return float(np.median(np.diff(ended))) / stretch


def long_enough(experiment: Experiment, steps: int) -> Experiment:
    """Return the experiment with at least `steps` steps, in epochs of whole batches."""
    rows = experiment.rows or steps * experiment.batch_size
    an_epoch = min(steps, max(1, rows // experiment.batch_size))
    return experiment.replace(steps_per_epoch=an_epoch, epochs=-(-steps // an_epoch))


def _longer(
    way: Experiment, parts: Calibration, seconds: float, progress: Callable[[str], None]
) -> Iterator[Experiment]:
    try:
        step = way.forecast(calibration=parts).step.seconds
    except InvalidInput as error:
        progress(f"left out: {way.label}: {error}")
        return
    least = WARM_UP + 3 * _stretch(way.strategy.to_json(), way.epoch_steps) + 1
    yield long_enough(way, max(least, int(np.clip(seconds / step, *STEPS))))


def _stretch(strategy: Any, epoch: int | None) -> int:
    """Return how many steps are timed as one block: the averaging period, or `STRETCH` if none."""
    period = strategy.get("period") if isinstance(strategy, dict) else None
    steps: int = epoch or 1 if period == "epoch" else period or 1
    return steps if steps > 1 else STRETCH
