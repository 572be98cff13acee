"""Write forecasts with checksums before any setting runs, and load or make their calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path

import numpy as np

from labkit.bench.calibration_runs import calibrate
from labkit.bench.timing import Row, head
from labkit.common.terminal import say
from labkit.forecast import Calibration
from labkit.forecast.calibration_store import merged
from tests.acceptance.forecasts.settings import ROWS, STEPS, Setting, calibrated

SECONDS = 2.5  # forecast duration of each run, seconds
CORES = 2  # number of cores; for more ranks, the calibration is quick


def known(chosen: list[Setting], path: Path | None, rows: Path | None) -> Calibration:
    """Load a calibration from `path`, or from beside the file of rows, or calibrate now."""
    beside = rows.with_suffix(".calibration.json") if rows is not None else None
    if path is not None or (beside is not None and beside.is_file()):
        return Calibration.load(path or beside or Path())
    wanted, parts = calibrated(chosen), []
    # The quick calibration of many ranks comes first; the precise calibration of few ranks then
    # replaces its values.
    for own in (
        [each for each in wanted if each.workers > CORES],
        [each for each in wanted if each.workers <= CORES],
    ):
        if own:
            most = max(each.workers for each in own)
            parts.append(
                calibrate(own, most, ROWS, (1,), [], most > CORES, keep=False, progress=_told)
            )
    found = reduce(merged, parts)
    if beside is not None:
        found.save(beside)
    return found


def _told(line: str) -> None:
    say(line, err=True)


def forecasts(chosen: Sequence[Setting], calibration: Calibration, first: int = 0) -> Iterator[Row]:
    """Yield a row "forecast" per setting, beginning at index `first`; `seal` is its checksum."""
    for number, setting in enumerate(chosen[first:], first):
        yield _forecast(number, setting, calibration)


def _forecast(number: int, setting: Setting, calibration: Calibration) -> Row:
    experiment, name = setting.experiment, str(setting.network) if setting.network else None
    emulated = True if setting.hosts else None  # two hosts, but all ranks share one machine's cores
    found = experiment.forecast(network=setting.hosts, calibration=calibration, emulated=emulated)
    steps = int(np.clip(SECONDS / found.seconds, *STEPS))
    row = head("forecasts", setting.case, "forecast", experiment.workers, name, number=number)
    row |= {"asked": experiment.hash8, "calibration": calibration.hash8, "steps": steps}
    row |= {"predicted_ms": 1e3 * found.seconds, "known_by": found.sources[-1].how}
    row |= {f"{end}_ms": 1e3 * s for end, s in zip(("low", "high"), found.interval, strict=True)}
    row |= {f"{part}_part_ms": 1e3 * seconds for part, seconds in found.step.parts.items()}
    return row | {"seal": seal(row)}


def seal(row: Row) -> str:
    """Return a checksum of a forecast's content: sixteen hexadecimal digits."""
    text = json.dumps({k: v for k, v in row.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
