"""What a calibration says: α, β and γ of each level, and where each figure is from."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from labkit.common.units import bytes_text
from labkit.forecast.calibration import Calibration, Source
from labkit.forecast.calibration_store import differences
from labkit.schedules import ALLREDUCE
from labkit.simulate import Fit, Measurement, calibrate

LEVELS = ("memory", "host", "link")


def fits(calibration: Calibration) -> dict[str, Fit]:
    r"""Latency, seconds a byte and adding a byte, by level: "memory", "host" and "link".

    The least squares of `labkit.simulate.calibrate` over all allreduces that were measured on a
    level and have a closed form; "link" is the emulated network of the calibration as it was in
    truth. Shared memory has no rounds: its figures are of the ring that would take as long. What
    the MPI library sends, and how, nobody knows: it is not among them. A level with less than two
    measurements is left out.
    """
    found = {}
    for level in LEVELS:
        own = [
            Measurement(
                collective.nbytes,
                collective.seconds.median,
                collective.algorithm if collective.algorithm in ALLREDUCE else "ring",
                collective.workers,
            )
            for collective in calibration.collectives
            if collective.level == level
            and (collective.algorithm in ALLREDUCE or level == "memory")
        ]
        if len(own) > 1:
            found[level] = calibrate(own)
    return found


def sources(calibration: Calibration) -> list[Source]:
    """What is known by it, and how: measured or fitted, here or elsewhere, at which points."""
    by = origin(calibration)
    rows = []
    for model in calibration.models:
        name = f"{_name(model.model['model'])} on {_name(model.model['dataset'])}"
        steps = model.steps
        points = (
            f"rows {_listed(e.rows for e in steps)}; threads {_listed(e.threads for e in steps)}; "
            f"{_listed(e.together for e in steps)} ranks at once; "
            f"{min(e.forward.count for e in steps)} repeats"
        )
        rows.append(Source(f"steps of {name}", f"{by}: {points}"))
        if model.read:
            rows.append(Source(f"batches of {name}", f"{by}, read: rows {_listed(model.read)}"))
    codecs = sorted(calibration.codecs, key=lambda each: str(each.compressor))
    for compressor, own in groupby(codecs, lambda each: each.compressor):
        sizes = ", ".join(bytes_text(each.nbytes) for each in own)
        fields = ", ".join(f"{k}={v}" for k, v in compressor.items() if k != "name")
        rows.append(Source(f"codec {compressor['name']}({fields})", f"{by}: gradients of {sizes}"))
    for level, fit in fits(calibration).items():
        off = f"off by {100 * fit.error:.0f} % in the median"
        rows.append(Source(f"α, β, γ of {level}", f"fitted to {fit.count} allreduces {by}; {off}"))
    for what in sorted({overhead.what for overhead in calibration.overheads}):
        ranks = _listed(e.workers for e in calibration.overheads if e.what == what)
        rows.append(Source(f"overhead {what}", f"{by}: {ranks} ranks"))
    for name in sorted({str(way.strategy["name"]) for way in calibration.ways}):
        ways = [way for way in calibration.ways if way.strategy["name"] == name]
        points = f"{len(ways)} of them, {min(len(way.runs) for way in ways)} runs each"
        rows.append(Source(f"whole steps of {name}", f"{by}: {points}"))
    return rows


def origin(calibration: Calibration) -> str:
    """Where and when it was measured: here, with these versions, or elsewhere."""
    where = "here"
    if differences(calibration):
        where = f"elsewhere ({calibration.machine.get('cpu', 'an unknown machine')})"
    return f"measured {where}, {calibration.made[:10]}"


def _name(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value["callable"]) if isinstance(value, dict) else "arrays"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
