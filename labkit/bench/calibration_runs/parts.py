"""The times of a step's parts, as differences between kinds of steps of growing extent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.forecast import Spread, StepCost

KINDS = ("forward", "gradient", "updated", "fit")


def cost(
    rows: int, threads: int, ranks_at_once: int, seconds: Mapping[str, Sequence[float]]
) -> StepCost:
    """Return the cost of each part: the difference of two consecutive kinds of steps.

    Each kind extends the previous kind by one part. The medians of all parts add up to the median
    of the whole step. The spread of a part is the spread of the differences over turns.
    """
    names = ("forward", "backward", "update", "other")
    before, floor, found = np.zeros(len(seconds["fit"])), 0.0, {}
    for name, kind in zip(names, KINDS, strict=True):
        now = np.asarray(seconds[kind])
        # A kind cannot be faster than the kind that it extends, so a negative difference is noise.
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
