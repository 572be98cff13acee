"""A benchmark of training steps without exchange, and of overlapped parameter averaging."""

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
from labkit.bench.servers import Counted, compute_backend
from labkit.bench.timing import Row, added, head, spread
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.experiment import Experiment
from labkit.strategies import Codistillation, ElasticAveraging, ParameterAveraging
from labkit.strategies.replicas import Replicas

if TYPE_CHECKING:
    from labkit.programs.actions import Vector
    from labkit.worker.compute_backend import ComputeBackend

STEPS = 6  # The constant STEPS is the number of training steps in a timed block.
# The constant TURNS is the number of timed blocks of each kind of training step in one repeat.
TURNS = 8
# The constant NEVER is an averaging period so long that no timed training step averages weights.
NEVER = 1_000_000
FRAGMENTS = 4
# The constant COMPUTE is the ratio of compute time to transfer time. The training steps of this
# compute time hide the transfer.
COMPUTE = 1.5


def measure(
    ranks: int = 2, repeats: int = 5, network: str = "100Mb", width: int = 1024
) -> list[Row]:
    """Measure the local steps of strategies, and compare blocking with overlapped averaging.

    Args:
        ranks: Number of ranks, with one worker each.
        repeats: Number of repeats of each measurement.
        network: Network that is emulated for the streamed (overlapped) averaging.
        width: Width of the hidden layer of the model `mlp`; the batch has 64 rows per worker.

    Returns: One row per strategy with the times of its local steps, and rows for streamed
        (overlapped) averaging. The row of a strategy contains the time of a step without exchange.
        A step of bare training computes only the gradient and the update. The row also contains the
        time that the strategy adds to bare training. `ratio` is the strategy's step time divided by
        the step time of bare training. `own_ms` is the time per step that is spent neither on the
        gradient nor on the update. Rows of streamed averaging contain the step time of blocking
        averaging. Rows of streamed averaging also contain the step time of overlapped averaging.
        Overlapped averaging runs during the next `delay` training steps. The row of streamed
        averaging also contains the time to transfer one fragment of the weights. The column
        `hidden` is the fraction of averaging time that overlaps training. If `hidden` is 1,
        overlapped averaging adds no time to a step.
    """
    experiment = Experiment(
        model="mlp",
        model_options={"widths": [width]},
        dataset="synthetic",
        dataset_options={"rows": 64 * ranks * STEPS, "test_rows": 64, "shape": [784]},
        batch_size=64 * ranks,
        workers=ranks,
        strategy=ParameterAveraging(period=NEVER),
        verify=False,
    )
    with Cluster(workers=ranks) as cluster:
        local = cluster.call(_local, experiment, repeats, ranks=ranks)[0]
        streamed = cluster.call(_stream, experiment, repeats, ranks=ranks, network=network)[0]
    case = f"mlp-{width}"
    rows = [head("averaging", case, name, ranks) | row for name, row in local.items()]
    return rows + [
        head("averaging", case, name, ranks, network) | r for name, r in streamed.items()
    ]


def _local(communicator: Communicator, experiment: Experiment, repeats: int) -> dict[str, Row]:
    ways: dict[str, Replicas | None] = {
        "local": None,
        "averaging": ParameterAveraging(period=NEVER),
        "springs": ElasticAveraging(alpha=0.1, period=NEVER, center="allreduce"),
        "codistillation": Codistillation(period=NEVER),
    }
    stage = compute_backend(communicator, experiment, ParameterAveraging(period=NEVER))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    beside: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + repeats):
        own: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TURNS):
            # Every second round times the kinds of steps in reverse order. The reversal varies
            # which kind of step precedes another kind.
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                seconds, more = _stretch(communicator, stage, ways[name])
                own[name].append(float(np.median(seconds)))
                beside[name] += more if number else []
        if number:  # The first repeat is not counted, because it also traces the TensorFlow graphs.
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
    """Return the seconds of each step, and its seconds apart from gradient and update.

    The result omits the first step and the last step of the block. The last step of a block also
    averages the weights.
    """
    if way is None:
        return _bare(communicator, stage, STEPS)[1:-1], []
    counted = _Counted(stage)
    seconds = _played(communicator, stage, way, STEPS, counted)
    rest = np.subtract(seconds, np.diff([0.0, *counted.after]))
    return seconds[1:-1], rest[1:-1].tolist()


class _Counted(Counted):
    """A backend wrapper that records, at each update, the total compute time so far."""

    def __init__(self, stage: ComputeBackend) -> None:
        super().__init__(stage)
        self.after: list[float] = []

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Update weights with the wrapped backend, and record the accumulated compute time."""
        weights = super().update(holder, gradient, rate)
        self.after.append(self.seconds)
        return weights


def _stream(communicator: Communicator, experiment: Experiment, repeats: int) -> dict[str, Row]:
    stage = compute_backend(communicator, experiment, ParameterAveraging(period=NEVER))
    local = _wall(communicator, [_bare(communicator, stage, STEPS) for _ in range(3)])
    wire = min(_wire(communicator, stage) for _ in range(3))
    delay = max(1, math.ceil(COMPUTE * wire / local))
    period = FRAGMENTS * (delay + 1)
    ways: dict[str, Replicas] = {
        "waited for": ParameterAveraging(period=period, fragments=FRAGMENTS),
        "streamed": ParameterAveraging(period=period, fragments=FRAGMENTS, overlap_steps=delay),
    }
    taken: dict[str, list[float]] = {"local": [], **{name: [] for name in ways}}
    for number in range(1 + repeats):
        found = {"local": [_bare(communicator, stage, period)]}
        # The last step of a training run is not timed, because it averages all fragments of the
        # weights.
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
    """Return the seconds that an allreduce takes on the slowest rank."""
    fragment = np.zeros(stage.roles.weights.size // FRAGMENTS, stage.roles.weights.dtype)
    communicator.barrier("the barrier before the next timed part of a benchmark")
    start = time.perf_counter()
    communicator.mean(fragment, 1.0, "ring", total=float(communicator.size))
    slowest: float = max(communicator.allgather(time.perf_counter() - start))
    return slowest


def _wall(communicator: Communicator, stretches: Sequence[Sequence[float]]) -> float:
    """Return the median of the blocks' mean step times on the slowest rank, in seconds."""
    own = float(np.median([np.mean(each) for each in stretches]))
    slowest: float = max(communicator.allgather(own))
    return slowest


def _bare(communicator: Communicator, stage: ComputeBackend, steps: int) -> Sequence[float]:
    """Return the seconds of each step (gradient and update); all ranks compute concurrently."""
    own, rank, moments = stage.roles.weights, communicator.rank, []
    communicator.barrier("the barrier before the next timed part of a benchmark")
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
    """Run a strategy for some steps; return the seconds of each step of this rank's worker."""
    from labkit.programs import EventLog
    from labkit.programs.mpi_runtime import MpiRuntime

    roles, rank, before = replace(stage.roles, steps=steps), communicator.rank, len(stage.rows)
    program = {rank: strategy.program(roles, rank)}
    scenes = counted or stage
    arguments = communicator, scenes, EventLog(scenes, steps), roles.weights.dtype
    communicator.barrier("the barrier before the next timed part of a benchmark")
    MpiRuntime(program, roles.hosts, *arguments, meanwhile=False).play()
    return [row["seconds"] for row in stage.rows[before:]]


@click.command("averaging")
@click.option("--workers", default=2, show_default=True, help="Number of workers, one per rank.")
@click.option(
    "--network",
    default="100Mb",
    show_default=True,
    help="Emulated network on which streamed weight averaging is timed.",
)
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(workers: int, network: str, repeats: int, file: Path | None) -> None:
    """Time local steps, and the share of communication that streamed averaging hides."""
    columns = {"what": "what", "network": "network"} | TIMES
    columns |= {"added_ms": "added ms", "ratio": "ratio", "own_ms": "other ms"}
    columns |= {"wire_ms": "wire ms", "delay": "overlap steps", "hidden": "hidden share"}
    show_rows(measure(workers, repeats, network), columns, file)
