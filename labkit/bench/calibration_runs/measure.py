"""Functions that measure the costs of experiments, and store these costs as a Calibration.

The measurements include whole training steps of each strategy on emulated networks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from labkit import datasets
from labkit.bench.calibration_runs.message_times import (
    codecs,
    collectives,
    emulated,
    overheads,
    wanted,
)
from labkit.bench.calibration_runs.model import (
    SMALL_SHAPES,
    ModelSeen,
    cost,
    look,
    replica_overhead,
)
from labkit.bench.runs import temporary_runs
from labkit.cluster import Cluster, RankError
from labkit.common.canonical_json import JSON, digest, label_of
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.experiment import Experiment
from labkit.forecast import (
    Calibration,
    CollectiveCost,
    ModelCost,
    Overhead,
    Spread,
    WayCost,
    model_of,
)
from labkit.forecast.calibration_store import earlier, merged, place, this_machine
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.run_metrics import WARM_UP
from labkit.records.timed_steps import with_end_times
from labkit.strategies import AllReduce

KIB, MIB = 2**10, 2**20
# The networks `FAST` and `SLOW` have data rates that no network preset of labkit has. The
# calibration times no training step on a preset network. A forecast for a preset network is
# therefore a prediction.
FAST = Network(name="700Mb", latency=70e-6, bandwidth=700e6 / 8)
SLOW = Network(name="50Mb", latency=200e-6, bandwidth=50e6 / 8)
# The constant WHOLE is the duration of a training run, divided by the measurement time
# `Effort.seconds`.
WHOLE = 0.25
TRAINED = (
    *("model", "model_options", "dataset", "dataset_options", "precision"),
    *("optimizer", "optimizer_options", "loss", "metrics", "learning_rate"),
)
# The constant STEPS contains the minimum and the maximum number of steps of a training run.
STEPS = (WARM_UP + 24, 200)
# The constant STRETCH is the default number of training steps in a timed block. If a strategy has
# an averaging period, a block contains one period.
STRETCH = 4


class Effort(NamedTuple):
    """The number of repeats, sizes and networks that a calibration measures.

    Attributes:
        rounds: Number of rounds over all models and batch sizes; each round traces all graphs
            again.
        seconds: Seconds spent on the steps of one model and batch size in a round.
        repeats: Number of repeats of the measurements of messages and compressors.
        sizes: Buffer sizes, in bytes, at which allreduces are timed.
        gradients: Gradient sizes, in bytes, at which compressors are timed.
        networks: Emulated networks on which whole steps are measured.
        runs: Number of training runs with each strategy and network.
    """

    rounds: int
    seconds: float
    repeats: int
    sizes: tuple[int, ...]
    gradients: tuple[int, ...]
    networks: tuple[Network, ...]
    runs: int


FULL = Effort(
    *(3, 8.0, 5, (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB), (64 * KIB, MIB, 4 * MIB)),
    *((FAST, SLOW), 3),
)
QUICK = Effort(1, 3.0, 2, (4 * KIB, 256 * KIB, 4 * MIB), (64 * KIB, 2 * MIB), (FAST,), 2)


def calibrate(
    experiments: Sequence[Experiment],
    workers: int = 2,
    batches: Sequence[int] = (16, 64, 256),
    threads: Sequence[int] = (1,),
    compressors: Sequence[Compressor | Mapping[str, JSON] | str] | None = None,
    quick: bool = False,
    keep: bool = True,
    file: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure the costs on this machine from which forecasts are computed, and store the costs.

    The costs are the memory of each model, and the times of training steps, messages, collectives
    and compressors. A calibration takes some minutes; `Experiment.forecast` reads the stored
    calibration.

    Args:
        experiments: Experiments whose model, data set, precision and optimizer are measured. For an
            experiment with at most `workers` ranks, whole steps of its strategy are also measured.
        workers: Maximum number of concurrent ranks; each number from 1 to this maximum is measured.
        batches: Batch sizes per rank, in samples, at which steps are measured.
        threads: Numbers of threads per rank. labkit starts new engines for each number, and
            measures with them.
        compressors: Compressors to time in addition to the strategies' own compressors. A
            compressor is given as an object, a name, or a mapping of fields. If the argument is
            None, labkit times every compressor that needs no arguments.
        quick: Whether to measure fewer repeats and sizes, which takes less time but is less exact.
        keep: Whether to merge the result into the stored calibration. A stored calibration belongs
            to one machine and one set of package versions.
        file: Path of a calibration file that replaces the stored calibration. The result is always
            merged into the given file.
        progress: Function that is called with each line of progress.

    Returns: The calibration. It includes earlier measurements, unless `keep` is False and `file` is
        None.

    Raises:
        InvalidInput: A number is less than 1, a list of numbers is empty, or a compressor is
            unknown.
    """
    for name, values in (("threads", threads), ("batches", batches), ("workers", (workers,))):
        if not values or min(values) < 1:
            raise InvalidInput(f"{name}={list(values)}: give whole numbers of 1 or more")
    chosen = wanted(compressors, experiments)
    path, keep = file or place(), keep or file is not None
    before = earlier(path) if keep else None
    calibrations: list[Calibration] = []
    for number, count in enumerate(threads):
        progress(f"starting {workers} ranks, threads={count}")
        with Cluster(workers=workers, threads=count) as cluster:
            bench = Bench(cluster, count, workers, QUICK if quick else FULL, progress)
            calibrations.append(bench.models(experiments, batches))
            # Messages and compressors are measured only with the first number of threads in the
            # list.
            if number == 0:
                calibrations += [bench.messages(calibrations[-1].models), bench.codecs(chosen)]
            calibrations.append(bench.ways(experiments, batches, reduce(merged, calibrations)))
    made = reduce(merged, calibrations)
    if before is not None and before.machine == made.machine:
        made = merged(before, made)
    if keep:
        made.save(path)
    return made


@dataclass(frozen=True)
class Bench:
    """Measures all parts of a calibration on ranks that are already running.

    Attributes:
        cluster: Cluster whose ranks have `threads` threads.
        threads: Number of threads per rank.
        workers: Maximum number of ranks that compute concurrently.
        effort: Number of repeats and sizes to measure.
        progress: Callback that receives progress lines.
    """

    cluster: Cluster
    threads: int
    workers: int
    effort: Effort
    progress: Callable[[str], None]

    def models(self, experiments: Sequence[Experiment], batches: Sequence[int]) -> Calibration:
        """Measure each model's steps and, at the largest batch size, its layers and memory."""
        different = {digest(model_of(each)): each for each in experiments}
        single_rank = [_alone(each, self.threads) for each in different.values()]
        for each in single_rank:
            if isinstance(each.dataset, str):
                datasets.ensure(each.dataset)
        seen: dict[int, dict[int, list[ModelSeen]]] = {
            number: defaultdict(list) for number in range(len(single_rank))
        }
        for turn in range(self.effort.rounds):
            for rows in sorted(batches)[:: -1 if turn % 2 else 1]:
                for number, each in enumerate(single_rank):
                    what = f"{rows} rows of {_name(each.model)} on {_data(each)}"
                    self.progress(f"round {turn + 1} of {self.effort.rounds}: {what}")
                    last = turn == self.effort.rounds - 1 and rows == max(batches)
                    arguments = each, rows, self.effort.seconds, last
                    seen[number][rows] += self.cluster.call(look, *arguments, ranks=self.workers)[
                        :1
                    ]
        costs = [
            _model(each, self.threads, seen[number]) for number, each in enumerate(single_rank)
        ]
        return self._made(models=costs)

    def messages(self, models: Sequence[ModelCost]) -> Calibration:
        """Measure allreduces and overheads with each number of ranks from 2 to `workers`."""
        gradients = [[w for layer in each.layers for w in layer.weights] for each in models]
        arguments = [SMALL_SHAPES, *gradients], self.effort.repeats
        sums: list[CollectiveCost] = []
        more: list[Overhead] = []
        for ranks in range(2, self.workers + 1):
            self.progress(f"messages of {ranks} ranks")
            found = collectives(self.cluster, ranks, [*self.effort.sizes], self.effort.repeats)
            own = self.cluster.call(overheads, *arguments, ranks=ranks)[0]
            sums += found
            more += [*own, *emulated(found)]
            seconds = self.effort.seconds, self.effort.rounds
            more.append(replica_overhead(self.cluster, ranks, *seconds, found, own))
        return self._made(collectives=sums, overheads=more)

    def codecs(self, compressors: Sequence[Compressor]) -> Calibration:
        """Measure the times of compressors for each gradient size."""
        self.progress(f"{len(compressors)} compressors")
        arguments = list(compressors), self.effort.gradients, self.effort.repeats
        return self._made(codecs=self.cluster.call(codecs, *arguments, ranks=self.workers)[0])

    def ways(
        self, experiments: Sequence[Experiment], batches: Sequence[int], parts: Calibration
    ) -> Calibration:
        """Measure whole steps of the experiments' strategies, and of training on one rank."""
        known = experiments_to_run(
            experiments, batches, self.effort.networks, self.workers, self._trained
        )
        seconds = WHOLE * self.effort.seconds
        arguments = self.cluster, known, parts, self.effort.runs, seconds, self.progress
        return self._made(ways=measured_ways(*arguments))

    def _trained(self, experiment: Experiment) -> dict[str, Any]:
        return _fields(experiment) | {"threads": self.threads, "verify": False}

    def _made(self, **fields: Sequence[object]) -> Calibration:
        return Calibration(
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=self.cluster.call(_seen_by_rank, ranks=1)[0] | this_machine(),
            **{name: tuple(each) for name, each in fields.items()},
        )


def _seen_by_rank(communicator: Communicator) -> dict[str, JSON]:
    from labkit.records import write

    return {name: each for name, each in write.describe().items() if name != "threads"}


def _alone(experiment: Experiment, threads: int) -> Experiment:
    """Return an experiment that trains the given experiment's model on one rank."""
    return Experiment(strategy=AllReduce(), threads=threads, verify=False, **_fields(experiment))


def _fields(experiment: Experiment) -> dict[str, Any]:
    return {name: getattr(experiment, name) for name in TRAINED}


def _model(experiment: Experiment, threads: int, seen: dict[int, list[ModelSeen]]) -> ModelCost:
    steps = []
    for rows, turns in sorted(seen.items()):
        for together in turns[0].steps:
            seconds: dict[str, list[float]] = defaultdict(list)
            for each in turns:
                for kind, found in each.steps[together].items():
                    seconds[kind] += found
            steps.append(cost(rows, threads, together, seconds))
    last = next(each for turns in seen.values() for each in turns if each.layers)
    return ModelCost(
        model=model_of(experiment),
        layers=last.layers,
        steps=tuple(steps),
        read={rows: Spread.of([each.read for each in turns]) for rows, turns in seen.items()},
        memory=last.memory,
        slots=last.slots,
    )


def _data(experiment: Experiment) -> str:
    return datasets.label(_name(experiment.dataset))


def _name(value: object) -> str:
    return value if isinstance(value, str) else label_of(value)


def experiments_to_run(
    experiments: Sequence[Experiment],
    batches: Sequence[int],
    networks: Sequence[Network],
    workers: int,
    trained: Callable[[Experiment], dict[str, Any]],
) -> list[Experiment]:
    """Return one experiment per strategy and network, and one per model and batch size.

    Args:
        experiments: Experiments with the strategies; experiments with more than `workers` ranks are
            omitted.
        batches: Batch sizes of the runs on one rank.
        networks: Networks to emulate.
        workers: Number of available ranks.
        trained: Function that takes an experiment, and returns the fields that define its model and
            optimizer.
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


def measured_ways(
    cluster: Cluster,
    ways: Sequence[Experiment],
    parts: Calibration,
    runs: int,
    seconds: float,
    progress: Callable[[str], None],
) -> list[WayCost]:
    """Run all experiments in turn, several times; return the step times of all runs.

    Args:
        cluster: Cluster with enough ranks for all experiments.
        ways: Experiments to measure.
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
            progress(
                f"timing complete training steps of {len(longer)} experiments, run "
                f"{turn + 1} of {runs}"
            )
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
            f"{run.name} has fewer than two blocks of {stretch} steps after the warm-up; train "
            "for more steps"
        )
    return float(np.median(np.diff(ended))) / stretch


def long_enough(experiment: Experiment, steps: int) -> Experiment:
    """Return a copy of the experiment that trains for at least `steps` steps."""
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
    """Return the number of steps that labkit times together."""
    period = strategy.get("period") if isinstance(strategy, dict) else None
    steps: int = epoch or 1 if period == "epoch" else period or 1
    return steps if steps > 1 else STRETCH
