"""The content of a calibration: fitted costs (α, β, γ) by level, and the origin of each value."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from labkit.common.units import bytes_text
from labkit.forecast.calibration import Calibration, Provenance
from labkit.forecast.calibration_store import differences
from labkit.schedules import ALLREDUCE
from labkit.simulate import Fit, Measurement, calibrate

LEVELS = ("memory", "host", "link")


def fits(calibration: Calibration) -> dict[str, Fit]:
    r"""Return the fitted latency, seconds per byte and seconds per added byte, for each level.

    The levels are "memory" (shared memory), "host" (MPI within a host) and "link" (between hosts or
    emulated). `labkit.simulate.calibrate` fits all measured allreduces of a level that have a
    closed form, by least squares. The level "link" is the emulated network of the calibration, as
    it was measured. Shared memory has no communication rounds, so its fitted costs are those of a
    ring that takes the same time. The MPI library's own algorithm is omitted at the levels "host"
    and "link", because the algorithm is unknown. A level with fewer than two measurements is
    omitted.
    """
    fits_by_level = {}
    for level in LEVELS:
        measurements = [
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
        if len(measurements) > 1:
            fits_by_level[level] = calibrate(measurements)
    return fits_by_level


def sources(calibration: Calibration) -> list[Provenance]:
    """Return the origin and settings of all measured and fitted values of a calibration."""
    measured_at = origin(calibration)
    rows = []
    for model in calibration.models:
        name = f"{_name(model.model['model'])} on {_name(model.model['dataset'])}"
        steps = model.steps
        points = (
            f"rows {_listed(e.rows for e in steps)}; threads {_listed(e.threads for e in steps)}; "
            f"{_listed(e.together for e in steps)} ranks at the same time; "
            f"{min(e.forward.count for e in steps)} repeats"
        )
        rows.append(Provenance(f"steps of {name}", f"{measured_at}: {points}"))
        if model.read:
            rows.append(
                Provenance(
                    f"batches of {name}", f"{measured_at}, reading: rows {_listed(model.read)}"
                )
            )
    codecs = sorted(calibration.codecs, key=lambda codec: str(codec.compressor))
    for compressor, costs in groupby(codecs, lambda codec: codec.compressor):
        sizes = ", ".join(bytes_text(codec.nbytes) for codec in costs)
        fields = ", ".join(f"{k}={v}" for k, v in compressor.items() if k != "name")
        rows.append(
            Provenance(
                f"codec {compressor['name']}({fields})", f"{measured_at}: gradients of {sizes}"
            )
        )
    for level, fit in fits(calibration).items():
        error_note = f"median error {100 * fit.error:.0f} %"
        rows.append(
            Provenance(
                f"α, β, γ of {level}",
                f"fitted to {fit.count} allreduces {measured_at}; {error_note}",
            )
        )
    for what in sorted({overhead.what for overhead in calibration.overheads}):
        ranks = _listed(e.workers for e in calibration.overheads if e.what == what)
        rows.append(Provenance(f"overhead {what}", f"{measured_at}: {ranks} ranks"))
    for name in sorted({str(way.strategy["name"]) for way in calibration.ways}):
        ways = [way for way in calibration.ways if way.strategy["name"] == name]
        points = f"{len(ways)} settings, {min(len(way.runs) for way in ways)} runs each"
        rows.append(Provenance(f"whole steps of {name}", f"{measured_at}: {points}"))
    return rows


def origin(calibration: Calibration) -> str:
    """Return where and when a calibration was measured, such as `measured here, 2026-01-31`."""
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
