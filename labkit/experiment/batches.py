"""The batch plan of an experiment: which training rows each rank uses in each step."""

from __future__ import annotations

import numpy as np

from labkit.common.rows import IID, BatchPlan
from labkit.experiment.experiment import Experiment


def owns_rows(experiment: Experiment) -> bool:
    """Return whether each rank has fixed training rows of its own, which no other rank reads."""
    return experiment.input_mode == "scatter" or experiment.data_partition != IID


def plan_of(
    experiment: Experiment,
    rows: int,
    shares: tuple[float, ...],
    labels: np.ndarray | None = None,
) -> BatchPlan:
    """Return the batch plan of an experiment: each rank's training rows in each step.

    Args:
        experiment: Experiment with batch size, seed, steps per epoch and data partition.
        rows: Number of rows of the data set.
        shares: For each rank, the relative size of its share of a batch.
        labels: Labels of the rows, which a partition by label needs; None if the labels are
            unknown.
    """
    return BatchPlan(
        rows,
        experiment.batch_size,
        tuple(shares),
        experiment.seed,
        experiment.steps_per_epoch,
        owned=owns_rows(experiment),
        shards=experiment.data_partition,
        labels=labels,
    )
