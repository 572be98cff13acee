"""What messages take on this machine: allreduces by level, and what labkit adds around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from labkit.bench.collectives import timed_calls
from labkit.bench.servers import there_and_back
from labkit.bench.turns import STEPS, Step, take
from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.forecast import CollectiveCost, Overhead, Spread
from labkit.network import Network
from labkit.simulate import simulate

if TYPE_CHECKING:
    from labkit.exchange import Exchange

LEVELS = {"shared_memory": "memory", "ring": "host", "butterfly": "host", "mpi": "host"}
LINK = "1GbE"  # is emulated
MEETINGS = 200
SMALL, LARGE = 64, 2**22  # bytes
PARCELS = 5  # small buckets of an exchange that overlaps


def collectives(
    cluster: Cluster, ranks: int, sizes: list[int], repeats: int
) -> list[CollectiveCost]:
    """Allreduces in shared memory, by MPI within the host, and on an emulated link."""
    found = []
    for network, algorithms in ((None, [*LEVELS]), (LINK, ["ring", "butterfly"])):
        cases = cluster.call(timed_calls, algorithms, sizes, repeats, ranks=ranks, network=network)[
            0
        ]
        for case in cases:
            cost = CollectiveCost(
                level="link" if network else LEVELS[case.algorithm],
                algorithm=case.algorithm,
                network=network,
                workers=ranks,
                nbytes=case.nbytes,
                seconds=Spread.of(np.concatenate(case.seconds).tolist()),
            )
            found.append(cost)
    return found


def emulated(costs: list[CollectiveCost]) -> list[Overhead]:
    """What a round of the ring takes longer on the emulated network than that network says."""
    found = []
    for cost in costs:
        if cost.network is None or cost.algorithm != "ring":
            continue
        network, rounds = Network.named(cost.network), 2 * (cost.workers - 1)
        said = simulate(cost.algorithm, cost.workers, cost.nbytes, network).seconds
        low, median, high = (
            max(0.0, each - said) / rounds
            for each in (cost.seconds.low, cost.seconds.median, cost.seconds.high)
        )
        spread = Spread(median=median, low=low, high=high, count=cost.seconds.count)
        each = cost.nbytes // cost.workers
        found.append(Overhead(what="emulated", workers=cost.workers, nbytes=each, seconds=spread))
    return found


def overheads(communicator: Communicator, repeats: int) -> list[Overhead]:
    """On each rank: meetings, buckets of the exchange, messages of programs."""
    found = [("meeting", 0, _meetings(communicator, repeats)), *_buckets(communicator, repeats)]
    if communicator.size == 2:
        found += _messages(communicator, repeats)
    return [
        Overhead(what=what, workers=communicator.size, nbytes=nbytes, seconds=Spread.of(seconds))
        for what, nbytes, seconds in found
    ]


def _meetings(communicator: Communicator, repeats: int) -> list[float]:
    clock, found = communicator.clock, []
    for _ in range(repeats):
        start = clock.now()
        for _ in range(MEETINGS):
            communicator.meet("a meeting that is timed")
        found.append((clock.now() - start) / MEETINGS)
    return found


def _buckets(communicator: Communicator, repeats: int) -> Iterator[tuple[str, int, list[float]]]:
    """What an exchange adds to a step that does nothing, less the time in which it sums."""
    import tensorflow as tf

    from labkit.exchange import Exchange

    def step(exchange: Exchange | None, nbytes: int, count: int = 1) -> Step:
        given = [tf.Variable(tf.ones(nbytes // 4)) for _ in range(count)]
        names = [f"gradient {number}" for number in range(count)]

        def call() -> list[tf.Tensor]:
            gradients = [each + 1.0 for each in given]
            means = gradients if exchange is None else exchange.mean(gradients, 1, names)
            return [each[0] for each in means if each is not None]

        traced = tf.function(call)
        return lambda: [each.numpy() for each in traced()]

    kinds = {
        "small": (Exchange(communicator, "shared_memory"), SMALL, 1),
        "large": (Exchange(communicator, "shared_memory"), LARGE, 1),
        "one": (Exchange(communicator, "shared_memory", "overlap", SMALL), SMALL, 1),
        "several": (Exchange(communicator, "shared_memory", "overlap", SMALL), SMALL, PARCELS),
    }
    steps = {kind: step(*given) for kind, given in kinds.items()}
    bare = {"local": step(None, SMALL), "local large": step(None, LARGE)}
    taken = take(
        bare | steps,
        lambda: communicator.meet("the next step of a benchmark"),
        lambda own: np.array(communicator.allgather(own)),
        repeats,
    ).added
    sums = {kind: _summing(exchange, repeats) for kind, (exchange, *_) in kinds.items()}
    own = {kind: np.array(taken[kind]) - sums[kind] for kind in kinds}
    yield "bucket", SMALL, _positive(own["small"])
    yield "bucket", LARGE, _positive(own["large"] - np.array(taken["local large"]))
    yield "overlap", SMALL, _positive((own["several"] - own["one"]) / (PARCELS - 1))


def _summing(exchange: Exchange, repeats: int) -> float:
    """Seconds of a step in which it exchanged: the median of the last ones."""
    taken = [
        stop - start
        for kind, _, _, start, stop in exchange.timeline.events
        if kind == "communicate"
    ]
    buckets = len(exchange.buckets)
    last = np.array(taken[-repeats * STEPS * buckets :]).reshape(-1, buckets)
    return float(np.median(last.sum(axis=1)))


def _positive(seconds: np.ndarray) -> list[float]:
    return [max(0.0, float(each)) for each in seconds]


def _messages(communicator: Communicator, repeats: int) -> Iterator[tuple[str, int, list[float]]]:
    """Half of there and back, by mailbox."""
    mailbox = communicator.mailbox()
    for nbytes in (SMALL, LARGE):
        values = np.ones(nbytes // 4, np.float32)
        seconds = [
            float(np.median([there_and_back(communicator, mailbox, values) for _ in range(20)])) / 2
            for _ in range(1 + repeats)
        ]
        yield "message", nbytes, seconds[1:]  # the first ones touch their memory
    mailbox.close()
