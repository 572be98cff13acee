"""The batches of an experiment: who computes on which rows, and when."""

from __future__ import annotations

import numpy as np

from labkit.common.data_partition import IID
from labkit.common.rows import Plan
from labkit.experiment.experiment import Experiment


def owns_rows(experiment: Experiment) -> bool:
    """Whether each rank has rows of its own, which others do not read."""
    return experiment.feed == "scatter" or experiment.shards != IID


def plan_of(
    experiment: Experiment,
    rows: int,
    shares: tuple[float, ...],
    labels: np.ndarray | None = None,
) -> Plan:
    """The batches of an experiment over arrays of so many rows, with these labels."""
    return Plan(
        rows,
        experiment.batch_size,
        tuple(shares),
        experiment.seed,
        experiment.steps,
        owned=owns_rows(experiment),
        shards=experiment.shards,
        labels=labels,
    )
