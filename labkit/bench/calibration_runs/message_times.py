"""Measurements of compressors, overheads, and allreduces within a host and on a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.bench.collectives import timed_calls
from labkit.bench.compression import in_this_process, named, without_fields
from labkit.bench.servers import there_and_back
from labkit.bench.timing import STEPS, Row, Step, time_on_ranks
from labkit.cluster import Cluster
from labkit.common.canonical_json import JSON, digest
from labkit.communicator import Communicator
from labkit.compression import Compressor, parse
from labkit.experiment import Experiment
from labkit.forecast import CodecCost, CollectiveCost, Overhead, Spread
from labkit.network import Network
from labkit.simulate import simulate

if TYPE_CHECKING:
    from labkit.exchange import Exchange

LEVELS = {"shared_memory": "memory", "ring": "host", "butterfly": "host", "mpi": "host"}
LINK = "1GbE"  # The constant LINK names the preset of the emulated network.
MEETINGS = 200
SMALL, LARGE = 64, 2**22  # The constants SMALL and LARGE are message sizes in bytes.
# The constant PARCELS is the number of small gradient buckets in an exchange. The timed exchange of
# the buckets overlaps with other work.
PARCELS = 5
Shapes: TypeAlias = Sequence[tuple[int, ...]]


def collectives(
    cluster: Cluster, ranks: int, sizes: list[int], repeats: int
) -> list[CollectiveCost]:
    """Measure allreduces in shared memory, by messages within a host, and on an emulated link."""
    found = []
    for network, algorithms in ((None, [*LEVELS]), (LINK, ["ring", "butterfly"])):
        arguments = algorithms, sizes, repeats
        for case in cluster.call(timed_calls, *arguments, ranks=ranks, network=network)[0]:
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
    """Return the seconds by which emulation lengthens each round of a ring allreduce."""
    found = []
    for cost in costs:
        if cost.network is None or cost.algorithm != "ring":
            continue
        network, rounds = Network.named(cost.network), 2 * (cost.workers - 1)
        simulated = simulate(cost.algorithm, cost.workers, cost.nbytes, network).seconds
        low, median, high = (
            max(0.0, each - simulated) / rounds
            for each in (cost.seconds.low, cost.seconds.median, cost.seconds.high)
        )
        spread = Spread(median=median, low=low, high=high, count=cost.seconds.count)
        each = cost.nbytes // cost.workers
        found.append(Overhead(what="emulated", workers=cost.workers, nbytes=each, seconds=spread))
    return found


def overheads(
    communicator: Communicator, gradients: Sequence[Shapes], repeats: int
) -> list[Overhead]:
    """Measure barriers, and the times of gradient buckets and server messages (on ranks)."""
    found = [
        ("meeting", 0, _meetings(communicator, repeats)),
        *_buckets(communicator, gradients, repeats),
    ]
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
            communicator.barrier("a barrier timed by the calibration")
        found.append((clock.now() - start) / MEETINGS)
    return found


def _buckets(
    communicator: Communicator, gradients: Sequence[Shapes], repeats: int
) -> Iterator[tuple[str, int, list[float]]]:
    """Measure the time that gradient exchange adds to a step, apart from the allreduce itself."""
    import tensorflow as tf

    from labkit.exchange import Exchange

    def step(shapes: Shapes, exchange: Exchange | None = None) -> Step:
        variables = [tf.Variable(tf.ones(shape)) for shape in shapes]
        names = [f"gradient {number}" for number in range(len(shapes))]

        def call() -> list[tf.Tensor]:
            own = [each + 1.0 for each in variables]
            means = own if exchange is None else exchange.mean(own, 1, names)
            return [tf.reshape(each, [-1])[0] for each in means if each is not None]

        traced = tf.function(call)
        return lambda: [each.numpy() for each in traced()]

    several = ((SMALL // 4,),) * PARCELS
    # With eager=True, a separate thread exchanges the buckets even without a free core. The
    # measurement thus includes the cost of the separate thread.
    one = Exchange(communicator, "shared_memory", "overlap", LARGE, eager=True)
    apart = Exchange(communicator, "shared_memory", "overlap", SMALL, eager=True)
    exchanges = {"local": None, "one": one, "apart": apart}
    steps = {kind: step(several, exchange) for kind, exchange in exchanges.items()}
    sizes = {4 * sum(map(prod, shapes)): shapes for shapes in (several[:1], *gradients)}
    for nbytes, shapes in sizes.items():
        exchange = exchanges[f"{nbytes} exchanged"] = Exchange(communicator, "shared_memory")
        steps |= {f"{nbytes}": step(shapes), f"{nbytes} exchanged": step(shapes, exchange)}
    taken = time_on_ranks(communicator, steps, repeats).added
    own = {
        kind: np.array(taken[kind]) - (0.0 if exchange is None else _summing(exchange, repeats))
        for kind, exchange in (dict.fromkeys(steps) | exchanges).items()
    }
    yield "overlap", SMALL, _positive((own["apart"] - own["one"]) / (PARCELS - 1))
    for nbytes in sizes:
        yield "bucket", nbytes, _positive(own[f"{nbytes} exchanged"] - own[f"{nbytes}"])


def _summing(exchange: Exchange, repeats: int) -> float:
    """Return the median communication time of the last steps, in seconds per step."""
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
    """Measure the time of a message between two ranks as half of a round trip."""
    mailbox = communicator.mailbox()
    for nbytes in (SMALL, LARGE):
        values = np.ones(nbytes // 4, np.float32)
        seconds = [
            float(np.median([there_and_back(communicator, mailbox, values) for _ in range(20)])) / 2
            for _ in range(1 + repeats)
        ]
        # The first repeat is slow, because it touches new memory pages, so its times are not
        # counted.
        yield "message", nbytes, seconds[1:]
    mailbox.close()


def wanted(
    compressors: Sequence[Compressor | Mapping[str, JSON] | str] | None,
    experiments: Sequence[Experiment],
) -> list[Compressor]:
    """Return the compressors that the calibration measures."""
    found = without_fields() if compressors is None else [parse(each) for each in compressors]
    found += [own for each in experiments if (own := each.strategy.lossy) is not None]
    return list({digest(each.to_json()): each for each in found}.values())


def codecs(
    communicator: Communicator,
    compressors: Sequence[Compressor],
    sizes: Sequence[int],
    repeats: int,
) -> list[CodecCost]:
    """Measure how long each compressor encodes and decodes, or reduces, vectors of each size."""
    described = [each.to_json() for each in compressors]
    found = []
    for nbytes in sizes:
        communicator.barrier("the barrier before the next buffer size of a calibration")
        rows = in_this_process(described, nbytes // 4, repeats)
        for compressor in compressors:
            own = {row["what"]: row for row in rows if row["case"] == named(compressor)}
            found.append(_cost(compressor, own))
    return found


def _cost(compressor: Compressor, rows: dict[str | float | None, Row]) -> CodecCost:
    encode = rows.get("encode") or rows["reduce"]
    nothing = Spread(median=0.0, low=0.0, high=0.0)
    return CodecCost(
        compressor=compressor.to_json(),
        nbytes=4 * int(encode["elements"] or 0),
        encode=_spread(encode),
        decode=_spread(rows["decode"]) if "decode" in rows else nothing,
        payload=int(encode["bytes"] or 0),
    )


def _spread(row: Row) -> Spread:
    low, median, high = (float(row[name] or 0) / 1e3 for name in ("p5_ms", "median_ms", "p95_ms"))
    return Spread(median=median, low=low, high=high, count=int(row["repeats"] or 1))
