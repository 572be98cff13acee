"""What it adds to a step that ranks train together, beside the exchange itself: a small model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.bench.calibrating.model import exchanged, look
from labkit.cluster import Cluster
from labkit.experiment import Experiment
from labkit.forecast import CollectiveCost, Overhead, Spread
from labkit.strategies import AllReduce

SHAPES = ((64, 8), (8,), (8, 10), (10,))  # of its weights
NBYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
ROWS = 16


def measured(
    cluster: Cluster,
    ranks: int,
    seconds: float,
    rounds: int,
    sums: Sequence[CollectiveCost],
    overheads: Sequence[Overhead],
) -> Overhead:
    """Steps together less those side by side, less the bucket and its sum: hooks, callbacks.

    Args:
        cluster: of the ranks.
        ranks: that train.
        seconds: of steps in each of the rounds.
        rounds: of both kinds, in turns.
        sums, overheads: of as many ranks.
    """
    asked = Experiment(
        model="mlp",
        model_options={"widths": [8]},
        dataset="digits",
        strategy=AllReduce(algorithm="shared_memory"),
        gate=False,
    )
    found = []
    for _ in range(rounds):
        alone = cluster.call(look, asked, ROWS, seconds, False, ranks=ranks)[0]
        both = cluster.call(exchanged, asked, ROWS, seconds, ranks=ranks)[0]
        found += [float(np.median(both)) - each for each in alone.steps[ranks]["fit"]]
    (pack,) = (e.seconds for e in overheads if e.what == "bucket" and e.nbytes == NBYTES)
    summed = min((e for e in sums if e.level == "memory"), key=lambda e: e.nbytes).seconds
    rest = np.array(found) - pack.median - summed.median
    return Overhead(what="replicas", workers=ranks, seconds=Spread.of(np.maximum(rest, 0).tolist()))
