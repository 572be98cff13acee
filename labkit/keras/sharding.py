"""A rank's part of the data."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.seam import Batch, rows_of


def shard(
    dataset: tf.data.Dataset, communicator: Communicator, capacities: Sequence[float] | None = None
) -> tf.data.Dataset:
    """This rank's part of every global batch.

    All ranks must see the same global batches: give `shuffle` a seed. A part may have no rows;
    every rank then still takes the same number of steps.

    Args:
        dataset: batches of the global size.
        communicator: the ranks.
        capacities: a rank's share of each batch; default: equal.
    """
    shares = capacities or [1.0] * communicator.size
    if len(shares) != communicator.size or min(shares) <= 0:
        raise InvalidInput(
            f"capacities={list(shares)}: give {communicator.size} numbers above 0, one a rank"
        )
    # The boundary of every rank for every size, by the same arithmetic as `plan.cut`.
    cumulative = np.concatenate([[0.0], np.cumsum(shares)]) / np.sum(shares)

    def own_part(*batch: tf.Tensor) -> Batch:
        rows = tf.cast(rows_of(batch), tf.float64)
        first, last = (
            tf.cast(tf.floor(rows * cumulative[communicator.rank + side] + 1e-9), tf.int64)
            for side in (0, 1)
        )
        part: tuple[tf.Tensor, ...] = keras.tree.map_structure(lambda x: x[first:last], batch)
        return part if len(part) > 1 else part[0]

    return dataset.map(own_part, num_parallel_calls=1).prefetch(2)
