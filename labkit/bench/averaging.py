"""What local steps cost beside bare ones, and how much of its wire time a stream hides."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from labkit.bench.timing import Row, added, head, spread
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.experiment import Experiment
from labkit.strategies import ElasticAveraging, ParameterAveraging
from labkit.strategies.replicas import Replicas

if TYPE_CHECKING:
    from labkit.worker.played import Stage

STEPS = 20  # of one stretch
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
        Of each strategy a step without an exchange, and what it takes more than the same gradient
        and update on all ranks at once; of streamed fragments what a step takes where meetings are
        waited for, where they are `delay` steps late, and the share of the former's added time that
        the latter hides.
    """
    experiment = Experiment(
        model="mlp",
        model_options={"widths": [width]},
        dataset="synthetic",
        dataset_options={"rows": 64 * ranks * STEPS, "test_rows": 64},
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
    ways: dict[str, Replicas] = {
        "averaging": ParameterAveraging(period=NEVER),
        "springs": ElasticAveraging(alpha=0.1, period=NEVER, center="allreduce"),
    }
    taken: dict[str, list[float]] = {"local": [], **{name: [] for name in ways}}
    stage = _stage(communicator, experiment)
    for number in range(1 + repeats):
        found = {"local": _bare(communicator, stage)}
        # The last step is one with a meeting.
        found |= {
            name: _played(communicator, stage, way, STEPS)[1:-1] for name, way in ways.items()
        }
        for name, seconds in found.items():
            if number:  # the first ones compile
                taken[name].append(_slowest(communicator, np.median(seconds)))
    rows = {name: spread(seconds) for name, seconds in taken.items()}
    for name in ways:
        rows[name] |= added(list(np.subtract(taken[name], taken["local"])))
    return rows


def _stream(communicator: Communicator, experiment: Experiment, repeats: int) -> dict[str, Row]:
    stage = _stage(communicator, experiment)
    local = _slowest(communicator, np.median([_bare(communicator, stage) for _ in range(3)]))
    once = ParameterAveraging(period=FRAGMENTS, fragments=FRAGMENTS)
    each = _slowest(communicator, np.median(_played(communicator, stage, once, STEPS)[1:-1]))
    delay = max(1, math.ceil(COMPUTE * (each - local) / local))
    period, steps = FRAGMENTS * (delay + 1), 2 * FRAGMENTS * (delay + 1) + 1
    ways: dict[str, Replicas] = {
        "waited for": ParameterAveraging(period=period, fragments=FRAGMENTS),
        "streamed": ParameterAveraging(period=period, fragments=FRAGMENTS, delay=delay),
    }
    taken: dict[str, list[float]] = {"local": [], **{name: [] for name in ways}}
    for _ in range(repeats):
        taken["local"].append(_slowest(communicator, np.mean(_bare(communicator, stage))))
        for name, way in ways.items():
            seconds = _played(communicator, stage, way, steps)[:-1]
            taken[name].append(_slowest(communicator, np.mean(seconds)))
    rows = {name: spread(seconds) for name, seconds in taken.items()}
    more = {name: np.subtract(taken[name], taken["local"]) for name in ways}
    for name in ways:
        rows[name] |= added(list(more[name]))
    hidden = 1 - more["streamed"] / more["waited for"]
    rows["streamed"] |= {"hidden": float(np.median(hidden)), "delay": delay}
    return rows


def _slowest(communicator: Communicator, seconds: np.floating) -> float:
    """Of all ranks."""
    own: list[float] = communicator.allgather(float(seconds))
    return max(own)


def _stage(communicator: Communicator, experiment: Experiment) -> Stage:
    from labkit.worker.feed import read
    from labkit.worker.played import Stage
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    session.compile(session.optimizer())
    stage = Stage(session, ParameterAveraging(period=NEVER))
    stage.hold([communicator.rank])
    return stage


def _bare(communicator: Communicator, stage: Stage) -> Sequence[float]:
    """Seconds of steps on all ranks at once: a gradient, and its update."""
    own, rank, taken = stage.roles.weights, communicator.rank, []
    communicator.meet("the next stretch of a benchmark")
    for _ in range(STEPS):
        start = time.perf_counter()
        own = stage.update(rank, stage.gradient(rank, own).values)
        taken.append(time.perf_counter() - start)
    return taken


def _played(
    communicator: Communicator, stage: Stage, strategy: Replicas, steps: int
) -> Sequence[float]:
    """Seconds of the steps of this rank's worker."""
    from labkit.programs import Diary
    from labkit.programs.ranks import RankWorld

    roles, rank, before = replace(stage.roles, steps=steps), communicator.rank, len(stage.rows)
    program = {rank: strategy.program(roles, rank)}
    diary = Diary(stage, steps)
    communicator.meet("the next stretch of a benchmark")
    world = RankWorld(
        program, roles.hosts, communicator, stage, diary, roles.weights.dtype, meanwhile=False
    )
    world.play()
    return [row["seconds"] for row in stage.rows[before:]]
