"""The calibration that a machine keeps: where it lies, and whether it still holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

from labkit.common.canonical_json import JSON, digest
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.machine import HARDWARE, installed, machine
from labkit.common.paths import cache_folder
from labkit.forecast.calibration import SCHEMA, Calibration, ModelCost, Outdated

T = TypeVar("T")
ANEW = "measure anew by `labkit calibrate`"


@cache
def this_machine() -> dict[str, JSON]:
    """Hardware and versions that decide what training takes, as a calibration keeps them.

    Asked once: they stay while this process runs.
    """
    return machine() | installed()


def place() -> Path:
    """The file of this machine's own calibration; machines that share a folder have one each."""
    own = machine()
    named = digest([SCHEMA, *(own[each] for each in HARDWARE)])[:8]
    return cache_folder("calibrations") / f"{named}.json"


def here() -> Calibration:
    """This machine's own calibration.

    Raises:
        InvalidInput: there is none yet.
        LabkitError: it is stale: the machine or a version has changed since.
    """
    if not place().is_file():
        raise InvalidInput(
            "nothing has been measured on this machine; run `labkit calibrate MODEL`, or read what "
            "another machine has written by `labkit calibrate -o FILE`"
        )
    found = Calibration.load(place())
    if changed := differences(found):
        raise LabkitError(f"this machine's calibration is stale: {'; '.join(changed)}; {ANEW}")
    return found


def earlier(path: Path) -> Calibration | None:
    """What a file has already; None: there is none, or another labkit has written it.

    Raises: InvalidInput, where it is no calibration.
    """
    try:
        return Calibration.load(path) if path.is_file() else None
    except Outdated:
        return None


def differences(calibration: Calibration) -> list[str]:
    """What of the machine or its versions was otherwise when it was made: name, then, now."""
    told = calibration.machine
    return [
        f"{name} was {told.get(name)}, is {now}"
        for name, now in this_machine().items()
        if told.get(name) != now
    ]


def merged(old: Calibration, new: Calibration) -> Calibration:
    """Both, on one machine with the same versions; what was measured twice is that of the new one.

    Raises: InvalidInput, where they are of two machines or versions.
    """
    if old.machine != new.machine:
        raise InvalidInput(f"two calibrations of other machines or versions do not add up; {ANEW}")
    models = _last([*old.models, *new.models], lambda each: digest(each.model), _with_steps)
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
    """The new one, with steps and batches of the old that were not measured anew."""
    steps = _last([*old.steps, *new.steps], lambda e: (e.rows, e.threads, e.together))
    return new.model_copy(update={"steps": steps, "read": old.read | new.read})


def _last(
    every: Iterable[T],
    key: Callable[[T], Hashable],
    join: Callable[[T, T], T] = lambda old, new: new,
) -> tuple[T, ...]:
    """Of those with one key the last, joined with those before it."""
    found: dict[Hashable, T] = {}
    for each in every:
        name = key(each)
        found[name] = join(found[name], each) if name in found else each
    return tuple(found.values())
