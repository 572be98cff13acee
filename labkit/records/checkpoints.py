"""Checkpoints: when one is due, where they lie in a run's folder, and which of them is whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

from pydantic import Field, PositiveInt, field_validator, model_validator

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.quantities import parse_seconds
from labkit.common.quantity_fields import PositiveSeconds
from labkit.common.safe_files import open_file
from labkit.common.state import decoding
from labkit.common.validated import Checked
from labkit.records import store
from labkit.records.store import Record

FOLDER = "checkpoints"  # in a run's directory; in it a folder for each, by its step
RESUMES = "LABKIT_RESUME"  # set where a job is run again: its experiments go on, or have completed
MANIFEST = "manifest.json"  # written last: without it a checkpoint is not whole
SECONDS = 30.0  # from one to the next, where nothing is said
ALLOWED = "steps, or a time such as '30s', '5min', '1h'"
RANKS = 2**20  # of a checkpoint, at most

Same: TypeAlias = Callable[[Record], bool]


class Checkpoint(Checked):
    r"""How often the state of a training is kept, so that it can be taken up again.

    Ranks copy their state at the end of a step and write it while training goes on, each a file of
    its own; one at a time: what is due before the last one is written is skipped, and counted.

    With a mean time M between failures and δ seconds that a checkpoint holds training up, measured
    as it goes, \(\tau = \sqrt{2 δ M} (1 + \frac13 \sqrt{δ/2M} + \frac19 \frac{δ}{2M}) - δ\), and M
    where δ is more than twice as long.

    Args:
        every: steps, of which some are skipped where they are fewer than three, and of programs
            those of all workers together; or a time such as "30s", "5min", "1h".
        keep: how many of the newest stay.
        failures: mean time between failures, s, or such as "6h": the interval follows from it.

    Source: J. W. Young: A first order approximation to the optimum checkpoint interval, CACM 17(9),
    1974; J. T. Daly: A higher order estimate of the optimum checkpoint interval for restart dumps,
    2006, doi 10.1016/j.future.2004.11.016.
    """

    every: PositiveInt | str | None = Field(None, kw_only=False)
    keep: PositiveInt = 2
    failures: PositiveSeconds | None = None

    @field_validator("every")
    @classmethod
    def _every(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and (value.strip()[-1:].isdigit() or not _seconds(value)):
            # A text without a unit might be steps.
            raise ValueError(f"every={value!r} is impossible; give {ALLOWED}")
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.every is not None and self.failures is not None:
            raise InvalidInput(
                f"every={self.every!r} and failures={self.failures} both say how often; give one"
            )
        return self

    @property
    def steps(self) -> int | None:
        """From one to the next; None where time counts."""
        return self.every if isinstance(self.every, int) else None

    def interval(self, cost: float | None) -> float:
        """Seconds from one to the next.

        Args:
            cost: s that one holds training up; None: there was none yet.
        """
        if self.failures is None:
            return _seconds(self.every) if isinstance(self.every, str) else SECONDS
        return 0.0 if cost is None else daly(cost, self.failures)


def daly(cost: float, failures: float) -> float:
    """The interval between checkpoints that loses least, s; arguments as of `Checkpoint`.

    >>> round(daly(1.0, 3600.0), 2)
    84.19
    """
    if cost >= 2 * failures:
        return failures
    share = cost / (2 * failures)
    return math.sqrt(2 * cost * failures) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def _seconds(text: str) -> float:
    return parse_seconds(text, "every", ALLOWED)


class Resume(NamedTuple):
    """A checkpoint from which a training goes on.

    Attributes:
        folder: of the checkpoint.
        manifest: what it says.
        same: the same ranks go on in the same way: each has its own again.
        notes: what there is to say of it, such as a newer one that is damaged.
        files: what its files hold, by rank, where they are no files but lie in memory.
    """

    folder: str
    manifest: Record
    same: bool
    notes: tuple[str, ...] = ()
    files: Mapping[int, bytes] | None = None

    @property
    def step(self) -> int:
        """Steps that had been taken."""
        return int(self.manifest["taken"])


class CheckpointContext(NamedTuple):
    """What ranks are told: where and how often they keep their state, and what they begin with.

    Attributes:
        checkpoint: how often; None: never.
        resume: what they begin with; None: at the begin.
        goes_on: the record is that of the interrupted run: its rows stand in it.
        folder: of the run's checkpoints.
        owner: the process that writes the record. Ranks whose owner was killed go on for a moment:
            they must not touch what another one has taken up meanwhile.
    """

    checkpoint: Checkpoint | None
    resume: Resume | None = None
    goes_on: bool = False
    folder: str = ""
    owner: Record | None = None


def seal(half: Path, manifest: Mapping[str, JSON]) -> None:
    """Say that a checkpoint is whole, with a checksum of what is said; its name is its step."""
    record = json.loads(json.dumps(manifest))
    store.write_json(half / MANIFEST, record | {"checksum": _checksum(record)})
    half.rename(half.parent / str(manifest["taken"]))


def _checksum(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Record:
    """What a whole checkpoint says of itself.

    Raises:
        LabkitError: it is damaged; the message names the file.
    """
    record = store.read_json(folder / MANIFEST)
    said = {name: value for name, value in record.items() if name not in ("schema", "checksum")}
    if record.get("checksum") != _checksum(said):
        raise LabkitError(f"{folder.name}/{MANIFEST} is damaged: its checksum is another one")
    ranks, steps = said["ranks"], said["taken"]
    if not (0 < ranks <= RANKS and steps >= 0):
        raise LabkitError(
            f"{folder.name}/{MANIFEST} is of {ranks:,} ranks after {steps:,} steps; allowed: 1 to "
            f"{RANKS:,} ranks, 0 steps or more"
        )
    for name, file in said["files"].items():
        path = folder / name
        try:
            with os.fdopen(open_file(path, root=folder), "rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise LabkitError(f"{folder.name}/{name} cannot be read: {error.strerror}") from error
        if found != file["sha256"]:
            raise LabkitError(f"{folder.name}/{name} is damaged: its checksum is another one")
    return said


def sealed(run: Path) -> list[Path]:
    """The checkpoints of a run that claim to be whole, newest first."""
    found = [path.parent for path in (run / FOLDER).glob(f"*/{MANIFEST}")]
    # What a link leads to is another folder's: it is neither resumed nor removed.
    whole = (each for each in found if each.name.isdecimal() and not each.is_symlink())
    return sorted(whole, key=_step, reverse=True)


def newest(run: Path, same: Same) -> Resume | None:
    """The newest whole checkpoint of a run; a damaged one gives way to the one before, and says so.

    Args:
        run: its directory.
        same: of what it says: whether the same ranks go on in the same way.

    Returns: None where there is none.

    Raises:
        LabkitError: all are damaged.
    """
    notes: list[str] = []
    for folder in sealed(run):
        try:
            with decoding(f"{folder.name}/{MANIFEST}"):
                manifest = read(folder)
                resume = Resume(str(folder), manifest, same(manifest), tuple(notes))
        except LabkitError as error:
            notes.append(str(error))
            continue
        return resume
    if notes:
        raise LabkitError(f"{run.name}: {'; '.join(notes)}; no checkpoint is whole: begin anew")
    return None


def forget(folder: Path, keep: int) -> None:
    """Remove all but the newest whole checkpoints of a folder."""
    for each in sealed(folder.parent)[keep:]:
        (each / MANIFEST).unlink()  # first: half of one is none
        shutil.rmtree(each)


def go_back(folder: Path, step: int) -> None:
    """Remove checkpoints after a step, and halves; who was killed may still write one of these."""
    for each in folder.iterdir():
        if each.is_symlink():
            each.unlink()
        elif not each.name.isdecimal() or _step(each) > step:
            (each / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(each, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name)
