"""The cost of each part of a training step, as the difference of two measured step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.forecast import Spread, StepCost

KINDS = ("forward", "gradient", "updated", "fit")


def cost(
    rows: int, threads: int, ranks_at_once: int, seconds: Mapping[str, Sequence[float]]
) -> StepCost:
    """Return the cost of each part of a step, as the difference between two kinds of steps.

    Each kind of step does the same work as the previous kind, and one further part of the training
    step. The medians of all parts add up to the median time of the whole training step. The spread
    of a part's cost is how much the difference of the two step times varies over the rounds of
    measurement.
    """
    names = ("forward", "backward", "update", "other")
    before, floor, found = np.zeros(len(seconds["fit"])), 0.0, {}
    for name, kind in zip(names, KINDS, strict=True):
        now = np.asarray(seconds[kind])
        # A step cannot take less time than a step with less work, so a negative difference is
        # noise.
        median = max(floor, float(np.median(now)))
        low, mid, high = np.quantile(now - before, (0.05, 0.5, 0.95))
        part = median - floor
        found[name] = Spread(
            median=part,
            low=max(0.0, part + float(low - mid)),
            high=part + float(high - mid),
            count=len(now),
        )
        before, floor = now, median
    return StepCost(rows=rows, threads=threads, together=ranks_at_once, **found)
