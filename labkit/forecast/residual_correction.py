"""Whole steps that were measured, held against their own parts: what these do not see of a step.

Parts are measured apart; together they get in each other's way. What a whole step of the same way
to train took more than the forecast of its parts, there where it was measured, is added to the
forecast from parts elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from labkit.common.units import plural
from labkit.forecast.calibration import Source, WayCost, model_of
from labkit.forecast.input_stall import of_one, read
from labkit.forecast.query import COMPUTED, Query, StepForecast

BEYOND = 0.5  # of the way between the outermost points, so far a line goes on
NINE_IN_TEN = 0.9
MOST = 0.5  # of the parts, that a whole step may be shorter
Points = Sequence[tuple[float, float]]
_FOUND: dict[
    tuple[str, str, str], StepForecast
] = {}  # by all that they depend on: a play takes long


@dataclass(frozen=True)
class More:
    """What a whole step takes more than its parts.

    Attributes:
        seconds: may be below nothing.
        unsure: s by which it may be off, nine times in ten, beside what varies from run to run.
        how: it is known.
    """

    seconds: float
    unsure: float
    how: str


def as_whole(asked: Query, taken: StepForecast) -> StepForecast:
    """The forecast from parts, with what whole steps took more than theirs.

    Where the calibration has no such way computing takes as much more as that of one rank alone.
    Unchanged, but for a source that says so, where nobody has measured that.
    """
    if asked.virtual or asked.experiment.compute is not None:
        return taken
    found = _together(asked, taken) or _computed(asked, taken)
    if found is None:
        how = "the sum of its parts: no whole step was measured"
        return replace(taken, sources=(*taken.sources, Source("whole step", how)))
    whole, (low, high) = _longer(asked, taken.rows, _ready(taken), found), taken.spread
    more = whole - taken.seconds
    # Chances of their own: of the parts, of the line, and from one run to the next.
    ratio = _chance(asked.calibration.ways)
    below = math.hypot((1 - low) * taken.seconds, found.unsure, (1 - 1 / ratio) * whole)
    above = math.hypot((high - 1) * taken.seconds, found.unsure, (ratio - 1) * whole)
    return replace(
        taken,
        parts={**taken.parts, "whole": more},
        spread=(max(0.0, 1 - below / whole), 1 + above / whole),
        sources=(*taken.sources, Source("whole step", found.how)),
        more={k: v + more if k in ("step_low", "step_high") else v for k, v in taken.more.items()},
    )


def alone(asked: Query, rows: float) -> float:
    """Seconds of one rank's own step on so many rows, nobody beside it, as a whole."""
    found = _more_of_one(asked, rows)
    if asked.virtual or asked.experiment.compute is not None or found is None:
        return of_one(asked, rows)
    return _longer(asked, rows, asked.alone(rows), found)


def _longer(asked: Query, rows: float, seconds: float, more: More) -> float:
    """A step of parts that take so long without waiting for data; reading is hidden by all of it.

    Args:
        rows: that a rank reads for it.
    """
    return max(seconds + max(more.seconds, -MOST * seconds), read(asked, rows).median)


def _ready(taken: StepForecast) -> float:
    """Seconds without waiting for data."""
    return taken.seconds - taken.parts.get("read", 0.0)


def _more_of_one(asked: Query, rows: float) -> More | None:
    """On a line over the rows of a batch."""
    known = [each for each in _known(asked) if each.workers == 1]
    if not known:
        return None
    points = [(float(w.batch), w.seconds.median - asked.alone(w.batch)) for w in known]
    seconds, unsure = on_line(points, rows)
    return More(seconds, unsure, f"measured alone, on a line between batches ({_runs(known)})")


def _computed(asked: Query, taken: StepForecast) -> More | None:
    """As much more as one rank alone takes for these rows, by the share of it that is computed."""
    found = _more_of_one(asked, taken.rows)
    if found is None or asked.workers == 1:
        return found
    share = sum(taken.parts.get(name, 0.0) for name in COMPUTED) / asked.alone(taken.rows)
    how = f"what one rank alone takes more for what it computes, {found.how}"
    return More(share * found.seconds, share * found.unsure, how)


def _together(asked: Query, taken: StepForecast) -> More | None:
    """On a line over what the network takes of a step."""
    if not asked.emulated or asked.workers == 1:
        return None
    own = asked.experiment.strategy.to_json()
    ways = [each for each in _known(asked) if each.workers == asked.workers]
    known, how = [each for each in ways if each.strategy == own], "measured"
    if not known:
        known = [each for each in ways if _plain(each.strategy) == _plain(own)]
        how = "that of the same way with another compressor"
    if not known:
        return None
    batch = min(
        (w.batch for w in known), key=lambda n: abs(math.log(n / asked.experiment.batch_size))
    )
    known = [each for each in known if each.batch == batch]
    parts = [_parts(asked, each) for each in known]
    points = [
        (one.parts.get("wire", 0.0), way.seconds.median - one.seconds)
        for way, one in zip(known, parts, strict=True)
    ]
    seconds, unsure = on_line(points, taken.parts.get("wire", 0.0))
    on = " and ".join(sorted({each.network.name for each in known if each.network}))
    return More(seconds, unsure, f"{how}, on {on} with {batch} rows ({_runs(known)})")


def _known(asked: Query) -> list[WayCost]:
    wanted, threads = model_of(asked.experiment), asked.experiment.threads
    every = asked.calibration.ways
    return [each for each in every if each.model == wanted and each.threads == threads]


def _plain(strategy: dict[str, object]) -> dict[str, object]:
    """Without its compressor."""
    return {name: value for name, value in strategy.items() if name != "compressor"}


def _parts(asked: Query, way: WayCost) -> StepForecast:
    """The forecast from parts of what was measured as a whole; made once for a calibration."""
    key = asked.calibration.hash8, asked.experiment.hash8, way.model_dump_json()
    if key not in _FOUND:
        fields = {"strategy": way.strategy, "batch_size": way.batch, "network": way.network}
        experiment = asked.experiment.replace(**fields, capacities=None, slow={}, faults=())
        measured = replace(asked, experiment=experiment, network=way.network)
        _FOUND[key] = experiment.strategy.forecast(measured)
    return _FOUND[key]


def on_line(points: Points, at: float) -> tuple[float, float]:
    """Seconds at a place between points, or a little beyond them, and by how much they are unsure.

    What lies on a line is exact. The unsure part is half of the difference from the nearest point,
    and of what was found in its place; of a single place, the share by which it is another one.
    """
    own, found = np.array(sorted(points), float).T
    places, of = np.unique(own, return_inverse=True)
    seconds = np.bincount(of, found) / np.bincount(of)
    nearest = int(np.argmin(np.abs(places - at)))
    differ = float(np.ptp(found[of == nearest])) / 2
    if len(places) == 1:
        far = abs(at - places[0]) / max(at, places[0], 1e-300)
        return float(seconds[0]), differ + float(far * abs(seconds[0]))
    span = places[-1] - places[0]
    at = float(np.clip(at, places[0] - BEYOND * span, places[-1] + BEYOND * span))
    second = int(np.clip(np.searchsorted(places, at), 1, len(places) - 1))
    first = second - 1
    slope = (seconds[second] - seconds[first]) / (places[second] - places[first])
    there = float(seconds[first] + slope * (at - places[first]))
    return there, differ + abs(there - float(seconds[nearest])) / 2


def _chance(ways: Sequence[WayCost]) -> float:
    """By which factor two runs of one way differ at most, nine times in ten, of all ways."""
    pairs = [pair for way in ways for pair in combinations(way.runs, 2)]
    ratios = [max(pair) / min(pair) for pair in pairs]
    return float(np.quantile(ratios, NINE_IN_TEN)) if ratios else 1.0


def _runs(ways: Sequence[WayCost]) -> str:
    return plural(min(len(way.runs) for way in ways), "run")
