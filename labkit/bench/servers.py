"""What parameter servers add to a step, and what the virtual clock adds to its gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import psutil

from labkit.bench.command import AS_JSON, TIMES, numbers, show_rows
from labkit.bench.interleave import Step, take
from labkit.bench.steps import CASES
from labkit.bench.timing import Row, added, head, spread
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.experiment import Experiment
from labkit.network import ComputeTime
from labkit.strategies import ParameterServer

if TYPE_CHECKING:
    from labkit.communicator import Carrier, Letter
    from labkit.programs import Gradient
    from labkit.programs.actions import Vector
    from labkit.worker.played import ComputeBackend

STEPS = 10  # of one stretch, which is timed as a whole
EPOCH = 4  # steps that 64 workers take to show what they keep


def measure(workers: Sequence[int] = (16, 64), ranks: int = 2, repeats: int = 5) -> list[Row]:
    """Time the event loop beside what it calls, and servers on ranks beside a bare allreduce.

    The model is `mlp` with the widths of the exchange's case, the batch 64 a worker, float32.

    Args:
        workers: on the virtual clock, a row each, with one asynchronous server.
        ranks: of the wall clock, each with a worker and a server; then one more, for the server.
        repeats: of everything.

    Returns:
        Of the virtual clock the ratio of the loop's time to the time spent in gradients and
        updates, by repeat and as the median, and by how many copies of the weights the process has
        grown at most since one gradient and one update were compiled, beside how many gradients
        were in flight at most; of the wall clock what a step with servers adds to one without an
        exchange, what a bare ring allreduce of the same bytes adds, and the ratio of both; with a
        server on a rank of its own, what an asynchronous step adds, beside a synchronous one.
    """
    rows = []
    alone = ParameterServer(servers=1, synchronous=False)
    shared = ParameterServer(servers=ranks, colocated=True, placement="sharded")
    with Cluster(workers=ranks) as cluster:
        for count in workers:
            wanted = _experiment(count, alone, virtual=True)
            found = cluster.call(_virtual, wanted, repeats, ranks=1)[0]
            row = head("servers", "mlp-1024", "event loop", count, repeats=repeats)
            rows.append(row | {"clock": "virtual"} | found)
        for what, each in cluster.call(_carry, repeats, ranks=2)[0].items():
            rows.append(head("servers", "4 MiB", what, 2, repeats=repeats) | each)
        kinds = {"servers": _experiment(ranks, shared)}
        for what, each in cluster.call(_wall, kinds, repeats)[0].items():
            rows.append(head("servers", "mlp-1024", what, ranks, repeats=repeats) | each)
    waits = {"synchronous server": True, "asynchronous server": False}
    with Cluster(workers=ranks + 1) as cluster:
        kinds = {
            what: _experiment(ranks, ParameterServer(servers=1, synchronous=each))
            for what, each in waits.items()
        }
        for what, each in cluster.call(_wall, kinds, repeats)[0].items():
            rows.append(head("servers", "mlp-1024", what, ranks + 1, repeats=repeats) | each)
    return rows


def _experiment(workers: int, strategy: ParameterServer, virtual: bool = False) -> Experiment:
    fields: dict[str, Any] = (
        {"clock": "virtual", "compute": ComputeTime(seconds=0.01)} if virtual else {}
    )
    rows = workers * 64 * (EPOCH if virtual else STEPS)
    return Experiment(
        model="mlp",
        model_options={"widths": list(CASES["mlp-1024"].widths)},
        dataset="synthetic",
        dataset_options={"rows": rows, "test_rows": 64, "shape": [784]},
        batch_size=64 * workers,
        workers=workers,
        strategy=strategy,
        gate=False,
        **fields,
    )


def _stage(communicator: Communicator, experiment: Experiment) -> ComputeBackend:
    from labkit.worker.feed import read
    from labkit.worker.played import ComputeBackend
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    session.compile(session.optimizer())
    stage = ComputeBackend(session, ParameterServer(**experiment.strategy.model_dump()))
    stage.hold([n for n, place in enumerate(stage.roles.hosts) if place == communicator.rank])
    return stage


class Counted:
    """A stage that counts the seconds of what it computes, and the most that it had in memory."""

    def __init__(self, stage: ComputeBackend) -> None:
        self._stage, self.seconds, self.peak = stage, 0.0, 0
        self._under_way, self.in_flight = 0, 0
        self._process = psutil.Process()
        self.step, self.snapshot, self.stops = stage.step, stage.snapshot, stage.stops
        self.forward, self.backward = stage.forward, stage.backward
        self.distilled, self.predictions = stage.distilled, stage.predictions
        self.curved = stage.curved
        self.states, self.adopt, self.forget = stage.states, stage.adopt, stage.forget

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """The stage's."""
        start = time.perf_counter()
        found = self._stage.gradient(worker, weights)
        self.seconds += time.perf_counter() - start
        self._under_way += 1
        self.in_flight = max(self.in_flight, self._under_way)
        return found

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Likewise."""
        start = time.perf_counter()
        found = self._stage.update(holder, gradient, rate)
        self.seconds += time.perf_counter() - start
        self._under_way -= 1
        self.peak = max(self.peak, self._process.memory_info().rss)
        return found


def _virtual(communicator: Communicator, experiment: Experiment, repeats: int) -> Row:
    from labkit.programs import EventLog
    from labkit.programs.timing import TimingModel
    from labkit.programs.virtual_runtime import VirtualRuntime

    stage = _stage(communicator, experiment.replace(clock="virtual"))
    stage.hold(stage.roles.servers)
    strategy = ParameterServer(servers=1, synchronous=False)
    # The graphs are compiled before memory is looked at: of them there is one, whoever computes.
    first = stage.gradient(0, stage.roles.weights)
    stage.update(stage.roles.servers[0], first.values, 0.0)
    before = psutil.Process().memory_info().rss
    loops, ratios, grown = [], [], 0.0
    for number in range(1 + repeats):
        counted = Counted(stage)
        hosts = stage.roles.hosts
        programs = {n: strategy.program(stage.roles, n) for n in range(len(hosts))}
        laws = TimingModel(ComputeTime(seconds=0.01), {}, 0)
        diary = EventLog(counted, stage.roles.steps)
        start = time.perf_counter()
        VirtualRuntime(programs, hosts, counted, diary, laws).play()
        seconds = time.perf_counter() - start
        grown = max(grown, (counted.peak - before) / stage.roles.weights.nbytes)
        if number:  # the first one touches its memory
            loops.append(seconds)
            ratios.append(seconds / counted.seconds)
    more = {"ratio": float(np.median(ratios)), "ratio_max": max(ratios), "copies": grown}
    more |= {"in_flight": counted.in_flight}
    return spread(loops) | more | {"bytes": stage.roles.weights.nbytes}


def _carry(communicator: Communicator, repeats: int) -> dict[str, Row]:
    """A gradient of 4 MiB pushed, and as many weights fetched, by both transports in turn."""
    values = np.ones(2**20, np.float32)
    two, one = "two-sided push and fetch", "one-sided push and fetch"
    carriers: dict[str, Carrier] = {
        two: communicator.mailbox(),
        one: communicator.slots({(0, 1): values.nbytes, (1, 0): values.nbytes}),
    }
    found: dict[str, list[float]] = {name: [] for name in carriers}
    for number in range(1 + repeats):
        for name, carrier in carriers.items():
            seconds = [there_and_back(communicator, carrier, values) for _ in range(20)]
            if number:  # the first ones touch their memory
                found[name].append(float(np.median(seconds)))
    for carrier in carriers.values():
        carrier.close()
    rows = {name: spread(seconds) | {"bytes": values.nbytes} for name, seconds in found.items()}
    rows[one]["ratio"] = float(np.median(np.array(found[one]) / np.array(found[two])))
    return rows


def there_and_back(communicator: Communicator, mailbox: Carrier, values: Vector) -> float:
    """Seconds until rank 0 has what rank 1 sent for what it got."""
    letters: list[Letter] = []
    patience = communicator.patience
    communicator.meet("the next message of a benchmark")
    start = time.perf_counter()
    for sends in (0, 1):
        patience.begin()
        if communicator.rank == sends:
            mailbox.post((sends, 1 - sends), np.zeros(1), values.view(np.uint8))
        polls = 0
        while communicator.rank != sends and not letters:
            patience.pause(polls)
            letters = mailbox.collect()
            polls += 1
    while not mailbox.idle:
        patience.pause(0)
    seconds = time.perf_counter() - start
    communicator.meet("the end of a message of a benchmark")
    for letter in letters:
        mailbox.free(letter.route)
    return seconds


def _wall(
    communicator: Communicator, experiments: Mapping[str, Experiment], repeats: int
) -> dict[str, Row]:
    """Steps with servers of each kind, in turn with those without; a ring's, where all compute."""
    from labkit.programs import EventLog
    from labkit.programs.mpi_runtime import MpiRuntime

    stages = {what: _stage(communicator, each) for what, each in experiments.items()}
    stage, rank = next(iter(stages.values())), communicator.rank
    shard, weights = stage.whole_shard(), stage.roles.weights
    buffer = communicator.allocate(weights.size, weights.dtype)

    def steps(exchange: bool) -> None:
        own = weights
        for _ in range(STEPS if rank < stage.roles.workers else 0):
            found = stage.gradient(rank, own).values
            if exchange:
                buffer[...] = found
                communicator.mean(buffer, 1.0, "ring", total=float(communicator.size))
                found = buffer.copy()
            own = shard.update(found)

    def serve(what: str) -> None:
        # Whoever began sooner would push into the stretch before, which others are still in.
        communicator.meet("a stretch with servers")
        own, strategy = stages[what], ParameterServer(**experiments[what].strategy.model_dump())
        here = [n for n, place in enumerate(own.roles.hosts) if place == rank]
        programs = {n: strategy.program(own.roles, n) for n in here}
        diary = EventLog(own, own.roles.steps)
        given = communicator, own, diary, weights.dtype, strategy.serves_concurrently
        MpiRuntime(programs, own.roles.hosts, *given).play()

    kinds: dict[str, Step] = {"local": lambda: steps(exchange=False)}
    if communicator.size == stage.roles.workers:
        kinds["ring"] = lambda: steps(exchange=True)
    kinds |= {what: partial(serve, what) for what in experiments}
    taken = take(
        kinds,
        lambda: communicator.meet("the next stretch of a benchmark"),
        lambda own: np.array(communicator.allgather(own)),
        repeats,
    )
    rows = {}
    _, least, *others = kinds
    for kind in kinds:
        rows[kind] = spread([each / STEPS for each in taken.seconds[kind]])
        rows[kind] |= {"bytes": weights.nbytes}
        if kind != "local":
            rows[kind] |= added([each / STEPS for each in taken.added[kind]])
        if kind in others:
            ratios = np.array(taken.added[kind]) / np.array(taken.added[least])
            rows[kind]["ratio"] = float(np.median(ratios))
    return rows


@click.command("servers")
@click.option("--workers", default="16,64", show_default=True, callback=numbers)
@click.option("--ranks", default=2, show_default=True, help="Of the wall clock.")
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def command(workers: list[int], ranks: int, repeats: int, file: Path | None) -> None:
    """Time parameter servers: the virtual clock's loop, and what they add to a step on ranks."""
    columns = {"what": "what", "workers": "workers", "clock": "clock"} | TIMES
    columns |= {"added_ms": "added ms", "ratio": "ratio", "copies": "copies of the weights"}
    columns |= {"in_flight": "gradients in flight"}
    show_rows(measure(workers, ranks, repeats), columns, file)
