"""The stored calibration of a machine: its location, and whether it is still valid."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from labkit.common.canonical_json import JSON, digest
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import cache_folder
from labkit.common.machine import HARDWARE, installed, machine
from labkit.common.units import bytes_text
from labkit.forecast.calibration import SCHEMA, Calibration, ModelCost, Outdated, Provenance
from labkit.schedules import ALLREDUCE
from labkit.simulate import Fit, Measurement, calibrate

T = TypeVar("T")
ANEW = "measure again with `labkit calibrate`"


@cache
def this_machine() -> dict[str, JSON]:
    """Return hardware and software versions that determine training times, for a calibration.

    The result is cached, because hardware and versions stay constant while the process runs.
    """
    return machine() | installed()


def place() -> Path:
    """Return the path of this machine's calibration file; its name depends on the hardware."""
    facts = machine()
    name = digest([SCHEMA, *(facts[field] for field in HARDWARE)])[:8]
    return cache_folder("calibrations") / f"{name}.json"


def local_calibration() -> Calibration:
    """Return the calibration of this machine.

    Raises:
        InvalidInput: No calibration exists yet.
        LabkitError: The calibration is stale: the hardware or a software version has changed.
    """
    if not place().is_file():
        raise InvalidInput(
            "nothing was measured on this machine; run `labkit calibrate MODEL` here, or read a "
            "file that `labkit calibrate -o FILE` has written on another machine"
        )
    calibration = Calibration.load(place())
    if changed := differences(calibration):
        raise LabkitError(f"this machine's calibration is stale: {'; '.join(changed)}; {ANEW}")
    return calibration


def earlier(path: Path) -> Calibration | None:
    """Return the calibration in a file; None if the file is missing or from another labkit version.

    Raises:
        InvalidInput: The file is not a calibration.
    """
    try:
        return Calibration.load(path) if path.is_file() else None
    except Outdated:
        return None


def differences(calibration: Calibration) -> list[str]:
    """Return a text per hardware or software version that changed since the calibration."""
    recorded = calibration.machine
    return [
        f"{name} was {recorded.get(name)}, is {now}"
        for name, now in this_machine().items()
        if recorded.get(name) != now
    ]


def merged(old: Calibration, new: Calibration) -> Calibration:
    """Merge two calibrations of the same machine and software; new values replace old values.

    Raises:
        InvalidInput: The calibrations are of different machines or software versions.
    """
    if old.machine != new.machine:
        raise InvalidInput(
            f"calibrations of different machines or software versions cannot be merged; {ANEW}"
        )
    models = _last([*old.models, *new.models], lambda cost: digest(cost.model), _with_steps)
    return Calibration(
        made=new.made,
        machine=new.machine,
        models=models,
        codecs=_last([*old.codecs, *new.codecs], lambda e: (digest(e.compressor), e.nbytes)),
        collectives=_last(
            [*old.collectives, *new.collectives],
            lambda e: (e.level, e.algorithm, e.network, e.workers, e.nbytes),
        ),
        overheads=_last([*old.overheads, *new.overheads], lambda e: (e.what, e.workers, e.nbytes)),
        ways=_last(
            [*old.ways, *new.ways], lambda e: digest(e.model_dump(mode="json", exclude={"runs"}))
        ),
    )


def _with_steps(old: ModelCost, new: ModelCost) -> ModelCost:
    """Return a model's new cost; steps and reads without a new measurement keep their old costs."""
    steps = _last([*old.steps, *new.steps], lambda e: (e.rows, e.threads, e.together))
    return new.model_copy(update={"steps": steps, "read": old.read | new.read})


def _last(
    elements: Iterable[T],
    key: Callable[[T], Hashable],
    join: Callable[[T, T], T] = lambda old, new: new,
) -> tuple[T, ...]:
    """Return one element per key; `join` merges an element with an earlier one of that key."""
    last_by_key: dict[Hashable, T] = {}
    for element in elements:
        name = key(element)
        last_by_key[name] = join(last_by_key[name], element) if name in last_by_key else element
    return tuple(last_by_key.values())


LEVELS = ("memory", "host", "link")


def fits(calibration: Calibration) -> dict[str, Fit]:
    r"""Return latency, seconds per sent byte and seconds per added byte, as fitted for each level.

    The levels are "memory" (shared memory), "host" (MPI within a host) and "link" (between hosts or
    emulated). `labkit.simulate.costs` fits all measured allreduces of a level that have a
    closed form, by least squares. The level "link" describes the emulated network on which the
    calibration was measured. Shared memory has no communication rounds, so its fitted costs
    describe a ring that takes the same time. The MPI library's own algorithm is omitted at the
    levels "host" and "link", because the algorithm is unknown. A level with fewer than two
    measurements is omitted.
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
