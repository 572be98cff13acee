"""The parts of a step, from kinds of steps of which each does more than the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.forecast import Spread, StepCost

KINDS = ("forward", "gradient", "updated", "fit")


def cost(
    rows: int, threads: int, together: int, seconds: Mapping[str, Sequence[float]]
) -> StepCost:
    """Each kind less the one before.

    Medians add up to the whole step; the spread of a part is that of the differences by turn.
    """
    names = ("forward", "backward", "update", "other")
    before, floor, found = np.zeros(len(seconds["fit"])), 0.0, {}
    for name, kind in zip(names, KINDS, strict=True):
        now = np.asarray(seconds[kind])
        # No kind is faster than what it holds; where it seems so, the part is too small to see.
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
    return StepCost(rows=rows, threads=threads, together=together, **found)
