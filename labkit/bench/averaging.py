"""What local steps cost beside bare ones, and how much of its wire time a stream hides."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from labkit.bench.command import AS_JSON, TIMES, show_rows
from labkit.bench.servers import Counted
from labkit.bench.timing import Row, added, head, spread
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.experiment import Experiment
from labkit.strategies import Codistillation, ElasticAveraging, ParameterAveraging
from labkit.strategies.replicas import Replicas

if TYPE_CHECKING:
    from labkit.programs.actions import Vector
    from labkit.worker.played import ComputeBackend

STEPS = 6  # of one stretch
TURNS = 8  # stretches of each kind in a repeat, one after the other and back again
NEVER = 1_000_000  # steps from one meeting to the next: all are local
FRAGMENTS = 4
COMPUTE = 1.5  # times the wire time that steps last behind which a fragment is to hide


def measure(
    ranks: int = 2, repeats: int = 5, network: str = "100Mb", width: int = 1024
) -> list[Row]:
    """Time local steps of strategies beside bare ones, and meetings that wait beside late ones.

    Args:
        ranks: each with a worker.
        repeats: of everything.
        network: emulated, for the stream.
        width: of the hidden layer of the `mlp`; the batch is 64 a worker.

    Returns:
        Of each strategy a step without an exchange, what it takes more than the same gradient and
        update on all ranks at once, the ratio of both, and what of the step is neither of the two
        (own_ms), which no change of the machine's speed touches. Of streamed fragments what a step
        takes where meetings are waited for, and where they are `delay` steps late; how long a
        fragment is on the wire; and the share of the former's added time that the latter hides.
    """
    experiment = Experiment(
        model="mlp",
        model_options={"widths": [width]},
        dataset="synthetic",
        dataset_options={"rows": 64 * ranks * STEPS, "test_rows": 64, "shape": [784]},
        batch_size=64 * ranks,
        workers=ranks,
        strategy=ParameterAveraging(period=NEVER),
        gate=False,
    )
    with Cluster(workers=ranks) as cluster:
        found = cluster.call(_local, experiment, repeats, ranks=ranks)[0]
        late = cluster.call(_stream, experiment, repeats, ranks=ranks, network=network)[0]
    case = f"mlp-{width}"
    rows = [head("averaging", case, name, ranks) | row for name, row in found.items()]
    return rows + [head("averaging", case, name, ranks, network) | r for name, r in late.items()]


def _local(communicator: Communicator, experiment: Experiment, repeats: int) -> dict[str, Row]:
    ways: dict[str, Replicas | None] = {
        "local": None,
        "averaging": ParameterAveraging(period=NEVER),
        "springs": ElasticAveraging(alpha=0.1, period=NEVER, center="allreduce"),
        "codistillation": Codistillation(period=NEVER),
    }
    stage = _stage(communicator, experiment)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    beside: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + repeats):
        own: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TURNS):
            # Back again every other turn: nobody always follows the same one.
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                seconds, more = _stretch(communicator, stage, ways[name])
                own[name].append(float(np.median(seconds)))
                beside[name] += more if number else []
        if number:  # the first ones compile
            slowest = {n: np.max(communicator.allgather(each), axis=0) for n, each in own.items()}
            for name in ways:
                taken[name].append(float(np.median(slowest[name])))
                ratios[name].append(float(np.median(slowest[name] / slowest["local"])))
    rows = {name: spread(seconds) for name, seconds in taken.items()}
    for name in list(ways)[1:]:
        rows[name] |= added(list(np.subtract(taken[name], taken["local"])))
        rows[name]["ratio"] = float(np.median(ratios[name]))
        rest: float = max(communicator.allgather(float(np.median(beside[name]))))
        rows[name]["own_ms"] = 1e3 * rest
    return rows


def _stretch(
    communicator: Communicator, stage: ComputeBackend, way: Replicas | None
) -> tuple[Sequence[float], list[float]]:
    """Seconds of the steps of a stretch, and what of them is neither gradient nor update.

    Without the first step, and the last one, which has a meeting.
    """
    if way is None:
        return _bare(communicator, stage, STEPS)[1:-1], []
    counted = _Counted(stage)
    seconds = _played(communicator, stage, way, STEPS, counted)
    rest = np.subtract(seconds, np.diff([0.0, *counted.after]))
    return seconds[1:-1], rest[1:-1].tolist()


class _Counted(Counted):
    """A stage that knows how long it has computed by each update."""

    def __init__(self, stage: ComputeBackend) -> None:
        super().__init__(stage)
        self.after: list[float] = []

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """The stage's."""
        found = super().update(holder, gradient, rate)
        self.after.append(self.seconds)
        return found


def _stream(communicator: Communicator, experiment: Experiment, repeats: int) -> dict[str, Row]:
    stage = _stage(communicator, experiment)
    local = _wall(communicator, [_bare(communicator, stage, STEPS) for _ in range(3)])
    wire = min(_wire(communicator, stage) for _ in range(3))
    delay = max(1, math.ceil(COMPUTE * wire / local))
    period = FRAGMENTS * (delay + 1)
    ways: dict[str, Replicas] = {
        "waited for": ParameterAveraging(period=period, fragments=FRAGMENTS),
        "streamed": ParameterAveraging(period=period, fragments=FRAGMENTS, delay=delay),
    }
    taken: dict[str, list[float]] = {"local": [], **{name: [] for name in ways}}
    for number in range(1 + repeats):
        found = {"local": [_bare(communicator, stage, period)]}
        # One step more: in the last one all fragments meet once more.
        found |= {n: [_played(communicator, stage, w, period + 1)[:-1]] for n, w in ways.items()}
        for name, stretches in found.items():
            seconds = _wall(communicator, stretches)
            if number:
                taken[name].append(seconds)
    rows = {name: spread(seconds) for name, seconds in taken.items()}
    more = {name: np.subtract(taken[name], taken["local"]) for name in ways}
    for name in ways:
        rows[name] |= added(list(more[name]))
    rows["streamed"] |= {
        "delay": delay,
        "wire_ms": 1e3 * wire,
        "hidden": float(np.median(1 - more["streamed"] / more["waited for"])),
    }
    return rows


def _wire(communicator: Communicator, stage: ComputeBackend) -> float:
    """Seconds that a fragment is on the wire."""
    fragment = np.zeros(stage.roles.weights.size // FRAGMENTS, stage.roles.weights.dtype)
    communicator.meet("the next stretch of a benchmark")
    start = time.perf_counter()
    communicator.mean(fragment, 1.0, "ring", total=float(communicator.size))
    slowest: float = max(communicator.allgather(time.perf_counter() - start))
    return slowest


def _wall(communicator: Communicator, stretches: Sequence[Sequence[float]]) -> float:
    """Seconds of a step on average, of the slowest rank."""
    own = float(np.median([np.mean(each) for each in stretches]))
    slowest: float = max(communicator.allgather(own))
    return slowest


def _stage(communicator: Communicator, experiment: Experiment) -> ComputeBackend:
    from labkit.worker.feed import read
    from labkit.worker.played import ComputeBackend
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    session.compile(session.optimizer())
    stage = ComputeBackend(session, ParameterAveraging(period=NEVER))
    stage.hold([communicator.rank])
    return stage


def _bare(communicator: Communicator, stage: ComputeBackend, steps: int) -> Sequence[float]:
    """Seconds of steps on all ranks at once: a gradient, and its update."""
    own, rank, moments = stage.roles.weights, communicator.rank, []
    communicator.meet("the next stretch of a benchmark")
    for _ in range(steps):
        moments.append(time.perf_counter())
        own = stage.update(rank, stage.gradient(rank, own).values)
    return [stop - start for start, stop in pairwise([*moments, time.perf_counter()])]


def _played(
    communicator: Communicator,
    stage: ComputeBackend,
    strategy: Replicas,
    steps: int,
    counted: Counted | None = None,
) -> Sequence[float]:
    """Seconds of the steps of this rank's worker."""
    from labkit.programs import EventLog
    from labkit.programs.mpi_runtime import MpiRuntime

    roles, rank, before = replace(stage.roles, steps=steps), communicator.rank, len(stage.rows)
    program = {rank: strategy.program(roles, rank)}
    scenes = counted or stage
    given = communicator, scenes, EventLog(scenes, steps), roles.weights.dtype
    communicator.meet("the next stretch of a benchmark")
    MpiRuntime(program, roles.hosts, *given, meanwhile=False).play()
    return [row["seconds"] for row in stage.rows[before:]]


@click.command("averaging")
@click.option("--workers", default=2, show_default=True, help="Each on a rank.")
@click.option("--network", default="100Mb", show_default=True, help="Emulated, for the stream.")
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def command(workers: int, network: str, repeats: int, file: Path | None) -> None:
    """Time local steps beside bare ones, and how much of its wire time a stream hides."""
    columns = {"what": "what", "network": "network"} | TIMES
    columns |= {"added_ms": "added ms", "ratio": "ratio", "own_ms": "no gradient, no update, ms"}
    columns |= {"wire_ms": "wire ms", "delay": "steps late", "hidden": "hidden"}
    show_rows(measure(workers, repeats, network), columns, file)
