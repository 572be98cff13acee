"""A benchmark of parameter servers: time added to a step, and overhead of virtual clocks."""

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
from labkit.bench.steps import CASES
from labkit.bench.timing import Row, Step, added, head, spread, time_on_ranks
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.experiment import Experiment, VirtualClock
from labkit.network import ComputeTime
from labkit.strategies import ParameterServer
from labkit.strategies.strategy import ProgramStrategy

if TYPE_CHECKING:
    from labkit.communicator import AnyMailbox, Letter
    from labkit.programs import Gradient
    from labkit.programs.actions import Vector
    from labkit.worker.compute_backend import ComputeBackend

STEPS = 10  # The constant STEPS is the number of training steps that are timed as one block.
EPOCH = 4  # The constant EPOCH is the number of steps of each worker while memory is measured.


def measure(workers: Sequence[int] = (16, 64), ranks: int = 2, repeats: int = 5) -> list[Row]:
    """Measure the virtual clock's event loop, and compare parameter servers with an allreduce.

    The model `mlp` in float32 has the layer widths of benchmark case mlp-1024. Each worker has a
    batch of 64 rows.

    Args:
        workers: Numbers of workers to simulate on the virtual clock with one asynchronous server.
            Each number gives one row.
        ranks: Number of ranks in the wall-clock measurements; each rank has a worker and a
            colocated server. The measurement of a dedicated server uses one additional rank.
        repeats: Number of repeats of each measurement.

    Returns: Rows of the virtual clock contain the largest number of gradients in flight. They also
        contain the event loop's time divided by the time of gradients and updates. Rows of the
        virtual clock also contain the peak memory growth after compilation. The memory growth is
        given as a multiple of the weights' bytes. Rows of the wall clock contain the time that
        servers add to a local step. Rows of the wall clock also contain the added time of a ring
        allreduce. The ring allreduce sums the same bytes as the servers. Rows of the wall clock
        also contain the ratio of both added times. Rows of a dedicated server compare asynchronous
        with synchronous steps.
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
    fields: dict[str, Any] = {"virtual": VirtualClock(compute_time=0.01)} if virtual else {}
    rows = workers * 64 * (EPOCH if virtual else STEPS)
    return Experiment(
        model="mlp",
        model_options={"widths": list(CASES["mlp-1024"].widths)},
        dataset="synthetic",
        dataset_options={"rows": rows, "test_rows": 64, "shape": [784]},
        batch_size=64 * workers,
        workers=workers,
        strategy=strategy,
        verify=False,
        **fields,
    )


def compute_backend(
    communicator: Communicator, experiment: Experiment, strategy: ProgramStrategy
) -> ComputeBackend:
    """Return a compiled backend for the workers and servers of this rank (collective call)."""
    from labkit.worker.compute_backend import ComputeBackend
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    session.compile(session.optimizer())
    stage = ComputeBackend(session, strategy)
    stage.hold([n for n, place in enumerate(stage.roles.hosts) if place == communicator.rank])
    return stage


class Counted:
    """A backend wrapper that records compute time, peak memory and gradients in flight."""

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
        """Compute a gradient with the wrapped backend, and record the time of the computation."""
        start = time.perf_counter()
        found = self._stage.gradient(worker, weights)
        self.seconds += time.perf_counter() - start
        self._under_way += 1
        self.in_flight = max(self.in_flight, self._under_way)
        return found

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Update weights with the wrapped backend, and record compute time and memory."""
        start = time.perf_counter()
        found = self._stage.update(holder, gradient, rate)
        self.seconds += time.perf_counter() - start
        self._under_way -= 1
        self.peak = max(self.peak, self._process.memory_info().rss)
        return found


def _virtual(communicator: Communicator, experiment: Experiment, repeats: int) -> Row:
    from labkit.programs import EventLog
    from labkit.programs.actions import TimingModel
    from labkit.programs.virtual_runtime import VirtualRuntime

    strategy = ParameterServer(servers=1, synchronous=False)
    stage = compute_backend(communicator, experiment.replace(clock="virtual"), strategy)
    stage.hold(stage.roles.servers)
    # All workers share the graphs, which the first gradient and update compile before memory is
    # measured.
    first = stage.gradient(0, stage.roles.weights)
    stage.update(stage.roles.servers[0], first.values, 0.0)
    before = psutil.Process().memory_info().rss
    loops, ratios, grown = [], [], 0.0
    for number in range(1 + repeats):
        counted = Counted(stage)
        hosts = stage.roles.hosts
        programs = {n: strategy.program(stage.roles, n) for n in range(len(hosts))}
        timing_model = TimingModel(ComputeTime(seconds=0.01), {}, 0)
        event_log = EventLog(counted, stage.roles.steps)
        start = time.perf_counter()
        VirtualRuntime(programs, hosts, counted, event_log, timing_model).play()
        seconds = time.perf_counter() - start
        grown = max(grown, (counted.peak - before) / stage.roles.weights.nbytes)
        # The first repeat is slow, because it touches new memory pages, so its times are not
        # counted.
        if number:
            loops.append(seconds)
            ratios.append(seconds / counted.seconds)
    more = {"ratio": float(np.median(ratios)), "ratio_max": max(ratios), "copies": grown}
    more |= {"in_flight": counted.in_flight}
    return spread(loops) | more | {"bytes": stage.roles.weights.nbytes}


def _carry(communicator: Communicator, repeats: int) -> dict[str, Row]:
    """Time a push and a fetch of 4 MiB: in turn by two-sided and by one-sided MPI messages."""
    values = np.ones(2**20, np.float32)
    two, one = "two-sided push and fetch", "one-sided push and fetch"
    carriers: dict[str, AnyMailbox] = {
        two: communicator.mailbox(),
        one: communicator.eager_mailbox({(0, 1): values.nbytes, (1, 0): values.nbytes}),
    }
    found: dict[str, list[float]] = {name: [] for name in carriers}
    for number in range(1 + repeats):
        for name, carrier in carriers.items():
            seconds = [there_and_back(communicator, carrier, values) for _ in range(20)]
            # The first repeat is slow, because it touches new memory pages, so its times are not
            # counted.
            if number:
                found[name].append(float(np.median(seconds)))
    for carrier in carriers.values():
        carrier.close()
    rows = {name: spread(seconds) | {"bytes": values.nbytes} for name, seconds in found.items()}
    rows[one]["ratio"] = float(np.median(np.array(found[one]) / np.array(found[two])))
    return rows


def there_and_back(communicator: Communicator, mailbox: AnyMailbox, values: Vector) -> float:
    """Return the seconds of a message from rank 0 to rank 1 and a reply of equal size."""
    letters: list[Letter] = []
    patience = communicator.wait_policy
    communicator.barrier("the barrier before the next timed message")
    start = time.perf_counter()
    for sends in (0, 1):
        patience.start_wait()
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
    communicator.barrier("the barrier after a timed message")
    for letter in letters:
        mailbox.free(letter.route)
    return seconds


def _wall(
    communicator: Communicator, experiments: Mapping[str, Experiment], repeats: int
) -> dict[str, Row]:
    """Measure steps with servers, local steps, and (if all ranks have workers) a ring allreduce."""
    from labkit.programs import EventLog
    from labkit.programs.mpi_runtime import MpiRuntime

    strategies = {
        what: ParameterServer(**each.strategy.model_dump()) for what, each in experiments.items()
    }
    stages = {
        what: compute_backend(communicator, each, strategies[what])
        for what, each in experiments.items()
    }
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
        # Without the barrier, a fast rank could send messages to a slow rank. The slow rank may
        # still run the previous block of steps.
        communicator.barrier("a stretch with servers")
        own, strategy = stages[what], strategies[what]
        here = [n for n, place in enumerate(own.roles.hosts) if place == rank]
        programs = {n: strategy.program(own.roles, n) for n in here}
        event_log = EventLog(own, own.roles.steps)
        arguments = communicator, own, event_log, weights.dtype, strategy.serves_concurrently
        MpiRuntime(programs, own.roles.hosts, *arguments).play()

    kinds: dict[str, Step] = {"local": lambda: steps(exchange=False)}
    if communicator.size == stage.roles.workers:
        kinds["ring"] = lambda: steps(exchange=True)
    kinds |= {what: partial(serve, what) for what in experiments}
    label = "the barrier before the next timed part of a benchmark"
    taken = time_on_ranks(communicator, kinds, repeats, label=label)
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
@click.option(
    "--workers",
    default="16,64",
    show_default=True,
    callback=numbers,
    help="Numbers of workers that are simulated on the virtual clock.",
)
@click.option(
    "--ranks",
    default=2,
    show_default=True,
    help="Number of ranks for measurements in real time.",
)
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(workers: list[int], ranks: int, repeats: int, file: Path | None) -> None:
    """Measure the overhead of parameter servers on the virtual clock and on real ranks."""
    columns = {"what": "what", "workers": "workers", "clock": "clock"} | TIMES
    columns |= {"added_ms": "added ms", "ratio": "ratio", "copies": "copies of the weights"}
    columns |= {"in_flight": "gradients in flight"}
    show_rows(measure(workers, ranks, repeats), columns, file)
