"""What a step waits for its data: what reading takes longer than the step before it hides.

Data sets read ahead, so that a batch is read while ranks train on the one before. Steps are
calibrated on batches that lie ready: nothing of this is in their own parts.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.forecast.calibration import Source, Spread
from labkit.forecast.query import Query, StepForecast
from labkit.forecast.time_distributions import NOTHING, beyond, by_bytes


def fed(asked: Query, taken: StepForecast) -> StepForecast:
    """The same, where a step takes no less time than reading a batch: the rest is its `read`."""
    if asked.virtual:
        return taken
    reading = read(asked, taken.rows)
    late = max(0.0, reading.median - taken.seconds)
    whole = taken.seconds + late
    spread = zip(taken.spread, (reading.low, reading.high), strict=True)
    low, high = (max(of * taken.seconds, each) / whole if whole else 1.0 for of, each in spread)
    known = asked.model.read
    far = beyond(taken.rows, known)
    how = f"measured{far and far + ' rows'}; hidden by the step before, as far as that lasts"
    singles = {"step_low": reading.low, "step_high": reading.high}
    source = Source("read", how if known else "not measured: counted as nothing")
    return replace(
        taken,
        parts={**taken.parts, "read": late},
        spread=(low, high),
        sources=(*taken.sources, source),
        more={k: max(v, singles.get(k, v)) for k, v in taken.more.items()},
    )


def of_one(asked: Query, rows: float) -> float:
    """Seconds of one rank's own step on so many rows, nobody beside it, with what it waits for."""
    own = asked.alone(rows)
    return own if asked.virtual else max(own, read(asked, rows).median)


def read(asked: Query, rows: float) -> Spread:
    """What reading so many rows takes: on the line between batches that were measured."""
    known = asked.model.read
    return by_bytes(known.items(), rows) if known else NOTHING
