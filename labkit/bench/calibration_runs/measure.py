"""One calibration, from experiments to what is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from labkit import datasets
from labkit.bench.calibration_runs import ways
from labkit.bench.calibration_runs.messages import codecs, collectives, emulated, overheads, wanted
from labkit.bench.calibration_runs.model import SMALL_SHAPES, ModelSeen, look, replica_overhead
from labkit.cluster import Cluster
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
    model_of,
)
from labkit.forecast.calibration_store import earlier, merged, place, this_machine
from labkit.network import Network
from labkit.strategies import AllReduce

KIB, MIB = 2**10, 2**20


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        rounds: over all models and numbers of rows, in each of which everything is traced anew.
        seconds: of steps, for a model and number of rows in a round.
        repeats: of messages and codecs.
        sizes: bytes of the buffers of allreduces.
        gradients: bytes of what codecs encode.
        networks: on which whole steps are measured.
        runs: of each of these.
    """

    rounds: int
    seconds: float
    repeats: int
    sizes: tuple[int, ...]
    gradients: tuple[int, ...]
    networks: tuple[Network, ...]
    runs: int


# Of their own: what is asked on a network with a name was not calibrated.
FAST = Network(name="700Mb", latency=70e-6, bandwidth=700e6 / 8)
SLOW = Network(name="50Mb", latency=200e-6, bandwidth=50e6 / 8)
FULL = Effort(
    *(3, 8.0, 5, (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB), (64 * KIB, MIB, 4 * MIB)),
    *((FAST, SLOW), 3),
)
QUICK = Effort(1, 3.0, 2, (4 * KIB, 256 * KIB, 4 * MIB), (64 * KIB, 2 * MIB), (FAST,), 2)
WHOLE = 0.25  # of the seconds for a model: those of a run that is measured as a whole


def calibrate(
    experiments: Sequence[Experiment],
    workers: int = 2,
    batches: Sequence[int] = (16, 64, 256),
    threads: Sequence[int] = (1,),
    compressors: Sequence[Compressor | Mapping[str, JSON] | str] | None = None,
    quick: bool = False,
    keep: bool = True,
    file: Path | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure on this machine what forecasts are made from, and keep it.

    Args:
        experiments: whose model, data set, precision and optimizer count; and, of those that want
            no more ranks than there are, whole steps of their strategies.
        workers: ranks that compute at once, at most: 1 to so many.
        batches: rows of a rank's batch.
        threads: of a rank; each wants engines of its own.
        compressors: to time, beside those of the strategies; None: all that need no fields.
        quick: measure fewer repeats and sizes.
        keep: as this machine's calibration, beside what was measured before with these versions.
        file: keep it there instead.
        told: is told what is measured next.

    Raises:
        InvalidInput: a value that cannot be.
    """
    for name, given in (("threads", threads), ("batches", batches), ("workers", (workers,))):
        if not given or min(given) < 1:
            raise InvalidInput(f"{name}={list(given)}: give whole numbers from 1 on")
    chosen = wanted(compressors, experiments)
    path, keep = file or place(), keep or file is not None
    before = earlier(path) if keep else None
    found: list[Calibration] = []
    for number, count in enumerate(threads):
        told(f"starting {workers} ranks, threads={count}")
        with Cluster(workers=workers, threads=count) as cluster:
            bench = Bench(cluster, count, workers, QUICK if quick else FULL, told)
            found.append(bench.models(experiments, batches))
            if number == 0:  # the rest is done by one thread, whatever training has
                found += [bench.messages(found[-1].models), bench.codecs(chosen)]
            found.append(bench.ways(experiments, batches, reduce(merged, found)))
    made = reduce(merged, found)
    if before is not None and before.machine == made.machine:
        made = merged(before, made)
    if keep:
        made.save(path)
    return made


@dataclass(frozen=True)
class Bench:
    """Calibrations of parts, by ranks that are up.

    Attributes:
        cluster: of as many threads a rank.
        threads, workers, effort, told: see `calibrate`.
    """

    cluster: Cluster
    threads: int
    workers: int
    effort: Effort
    told: Callable[[str], None]

    def models(self, experiments: Sequence[Experiment], batches: Sequence[int]) -> Calibration:
        """Steps of all, interleaved; layers and memory at the largest batch."""
        different = {digest(model_of(each)): each for each in experiments}
        asked = [_alone(each, self.threads) for each in different.values()]
        for each in asked:
            if isinstance(each.dataset, str):
                datasets.ensure(each.dataset)
        seen: dict[int, dict[int, list[ModelSeen]]] = {
            number: defaultdict(list) for number in range(len(asked))
        }
        for turn in range(self.effort.rounds):
            for rows in sorted(batches)[:: -1 if turn % 2 else 1]:
                for number, each in enumerate(asked):
                    what = f"{rows} rows of {_name(each.model)} on {_data(each)}"
                    self.told(f"round {turn + 1} of {self.effort.rounds}: {what}")
                    last = turn == self.effort.rounds - 1 and rows == max(batches)
                    given = each, rows, self.effort.seconds, last
                    seen[number][rows] += self.cluster.call(look, *given, ranks=self.workers)[:1]
        costs = [_model(each, self.threads, seen[number]) for number, each in enumerate(asked)]
        return self._made(models=costs)

    def messages(self, models: Sequence[ModelCost]) -> Calibration:
        """Allreduces by level, and overheads for these models, of 2, 3, … ranks."""
        gradients = [[w for layer in each.layers for w in layer.weights] for each in models]
        given = [SMALL_SHAPES, *gradients], self.effort.repeats
        sums: list[CollectiveCost] = []
        more: list[Overhead] = []
        for ranks in range(2, self.workers + 1):
            self.told(f"messages of {ranks} ranks")
            found = collectives(self.cluster, ranks, [*self.effort.sizes], self.effort.repeats)
            own = self.cluster.call(overheads, *given, ranks=ranks)[0]
            sums += found
            more += [*own, *emulated(found)]
            seconds = self.effort.seconds, self.effort.rounds
            more.append(replica_overhead(self.cluster, ranks, *seconds, found, own))
        return self._made(collectives=sums, overheads=more)

    def codecs(self, compressors: Sequence[Compressor]) -> Calibration:
        """What compressors take."""
        self.told(f"{len(compressors)} compressors")
        given = list(compressors), self.effort.gradients, self.effort.repeats
        return self._made(codecs=self.cluster.call(codecs, *given, ranks=self.workers)[0])

    def ways(
        self, experiments: Sequence[Experiment], batches: Sequence[int], parts: Calibration
    ) -> Calibration:
        """Whole steps of the experiments' strategies, and of one rank alone."""
        known = ways.asked(experiments, batches, self.effort.networks, self.workers, self._trained)
        seconds = WHOLE * self.effort.seconds
        given = self.cluster, known, parts, self.effort.runs, seconds, self.told
        return self._made(ways=ways.measured(*given))

    def _trained(self, experiment: Experiment) -> dict[str, Any]:
        return _fields(experiment) | {"threads": self.threads, "gate": False}

    def _made(self, **fields: Sequence[object]) -> Calibration:
        return Calibration(
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=self.cluster.call(_seen_by_rank, ranks=1)[0] | this_machine(),
            **{name: tuple(each) for name, each in fields.items()},
        )


def _seen_by_rank(communicator: Communicator) -> dict[str, JSON]:
    from labkit.records import environment

    return {name: each for name, each in environment.describe().items() if name != "threads"}


def _alone(experiment: Experiment, threads: int) -> Experiment:
    """Its model on one rank, trained as `AllReduce` does."""
    return Experiment(strategy=AllReduce(), threads=threads, gate=False, **_fields(experiment))


def _fields(experiment: Experiment) -> dict[str, Any]:
    return {name: getattr(experiment, name) for name in TRAINED}


TRAINED = (
    *("model", "model_options", "dataset", "dataset_options", "precision"),
    *("optimizer", "optimizer_options", "loss", "metrics", "learning_rate"),
)


def _model(experiment: Experiment, threads: int, seen: dict[int, list[ModelSeen]]) -> ModelCost:
    from labkit.bench.calibration_runs.parts import cost

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
