"""The stored calibration of a machine: its location, and whether it is still valid."""

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
    """Return a model's new cost, with old costs of steps and reads that were not measured again."""
    steps = _last([*old.steps, *new.steps], lambda e: (e.rows, e.threads, e.together))
    return new.model_copy(update={"steps": steps, "read": old.read | new.read})


def _last(
    elements: Iterable[T],
    key: Callable[[T], Hashable],
    join: Callable[[T, T], T] = lambda old, new: new,
) -> tuple[T, ...]:
    """Return the last element per key; `join` merges it with the key's earlier elements."""
    last_by_key: dict[Hashable, T] = {}
    for element in elements:
        name = key(element)
        last_by_key[name] = join(last_by_key[name], element) if name in last_by_key else element
    return tuple(last_by_key.values())
