"""A trained model answers batches by replicas, stages and slices, timed over emulated networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from labkit.cluster.cluster import Cluster
from labkit.cluster.prediction import ask, check_rows
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.paths import usable_cores
from labkit.network import Network
from labkit.records.analysis.serving_runs import TOLERANCE, Served, served
from labkit.records.run import Run
from labkit.strategies import AllReduce, Pipeline, Strategy, TensorParallel
from labkit.worker import serving

OWN = "this machine's own"
WAYS: Mapping[str, Strategy] = MappingProxyType(
    {"replicas": AllReduce(), "stages": Pipeline(), "slices": TensorParallel()}
)


def serve(
    cluster: Cluster,
    run: Run | Path | str,
    x: np.ndarray,
    ways: Mapping[str, Strategy] = WAYS,
    networks: Sequence[str | Network | None] = (None,),
    batch_sizes: Sequence[int] = (1, 256),
    repeats: int = 30,
    streams: int = 5,
    under_way: int = 8,
    workers: int | None = None,
) -> Served:
    """How soon and how fast ranks answer rows that come to rank 0, which wants the answers back.

    Latency is the time from a batch, alone, to its answer. Throughput is of a stream of batches
    that lie ready at rank 0, each of which goes to the ranks while they compute the one before:
    replicas take whole batches in turn, stages have as many under way as there are ranks, slices
    all work on the same one. Beside them rank 0 answers alone.

    Args:
        cluster: the ranks.
        run: completed, or a .keras file.
        x: rows (rows, …) of the model's one input.
        ways: strategies by the names that they have here, see `Strategy.serving`.
        networks: to emulate; None: the machine's own.
        batch_sizes: rows of a batch.
        repeats, streams: batches alone, and streams, that are timed in each case.
        under_way: batches of a stream.
        workers: ranks that take part; None: all.

    Raises:
        InvalidInput: a number below 1, fewer than two ranks, a way that cannot divide this model.
        LabkitError: answers are not those of one process.
    """
    numbers = {"repeats": repeats, "streams": streams, "under_way": under_way}
    for name, value in numbers.items():
        if value < 1:
            raise InvalidInput(f"{name}={value} is impossible; give a whole number from 1")
    count = cluster.workers if workers is None else workers
    if count < 2:
        raise InvalidInput("one rank has nobody to share with; use Cluster(workers=2) or more")
    for size in batch_sizes:
        check_rows(x, size)
    known = {
        OWN if network is None else str(network): Network.parse(network) for network in networks
    }
    if not batch_sizes or not known or not ways:
        raise InvalidInput("nothing to measure: give batch_sizes, networks and ways")
    # Each is asked, so that what it refuses is refused before any rank loads the model.
    first, *_ = [ask(run, strategy, count, cluster.workers) for strategy in ways.values()]
    model = first.model(cluster.how.is_local)
    asked = serving.ServingSpec(
        model, x, dict(ways), known, batch_sizes, repeats, streams, under_way
    )
    found = cluster.call(serving.serve, asked, ranks=count)
    told = found[0]
    allowed = TOLERANCE * told.precision * told.largest
    for way, far in told.differences.items():
        if not far <= allowed:
            raise LabkitError(
                f"{way} answer otherwise than one process: by {far:.3g}, where rounding makes "
                f"{allowed:.3g} at most; no time of wrong answers is shown"
            )
    return served(
        told.times,
        [each.weights_bytes for each in found],
        told.differences,
        allowed,
        count,
        cluster.threads,
        usable_cores(),
        under_way,
    )
