"""Checkpoints of a run: their interval, their folders, and the test of their completeness."""

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

from labkit.common.canonical_json import JSON, SCHEMA
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import open_file
from labkit.common.quantities import parse_seconds
from labkit.common.quantity_fields import PositiveSeconds
from labkit.common.state import decoding
from labkit.common.validated import Checked
from labkit.records import store
from labkit.records.shape import rename_experiment
from labkit.records.store import Record

# A run stores its checkpoints in its subfolder `checkpoints`, in one folder per checkpoint, named
# by the step.
FOLDER = "checkpoints"
# In a notebook job, experiments resume from checkpoints if the environment variable LABKIT_RESUME
# is set.
RESUME_VARIABLE = "LABKIT_RESUME"
# The manifest is the last file that labkit writes to a checkpoint. A checkpoint without a manifest
# is therefore incomplete.
MANIFEST = "manifest.json"
# The constant DEFAULT_INTERVAL is the default time between checkpoints in seconds.
DEFAULT_INTERVAL = 30.0
ALLOWED_EVERY = "a number of steps, or a time such as '30s', '5min', '1h'"
MAX_RANKS = 2**20

Same: TypeAlias = Callable[[Record], bool]


class Checkpoint(Checked):
    r"""The settings of a run's checkpoints, from which training can resume after a failure.

    Each rank copies its state at the end of a training step. Each rank writes its own checkpoint
    file while training continues. A checkpoint is skipped if the previous checkpoint is not yet
    written. The number of skipped checkpoints is counted.

    The argument mtbf has the value M, and a checkpoint costs δ measured seconds. The interval is
    \(\tau = \sqrt{2 δ M} (1 + \frac13 \sqrt{δ/2M} + \frac19 \frac{δ}{2M}) - δ\). If the cost
    δ is at least 2M, the interval is M.

    Args:
        every: Number of training steps between checkpoints, or a time such as "30s", "5min", "1h";
            default: 30 s. With parameter servers or a virtual clock, `every` counts the steps of
            all workers together. If the interval is less than three training steps, some
            checkpoints are skipped. Specify either `every` or `mtbf`, not both.
        max_to_keep: Maximum number of checkpoints on disk, of which the newest are kept; default:
            2.
        mtbf: Mean time between failures in seconds, or a text such as "6h"; default: None. The mean
            time between failures determines the interval of checkpoints.

    Source: J. W. Young: A first order approximation to the optimum checkpoint interval, CACM 17(9),
    1974. J. T. Daly: A higher order estimate of the optimum checkpoint interval for restart dumps,
    2006, doi 10.1016/j.future.2004.11.016.
    """

    every: PositiveInt | str | None = Field(None, kw_only=False)
    max_to_keep: PositiveInt = 2
    mtbf: PositiveSeconds | None = None

    @field_validator("every")
    @classmethod
    def _every(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and (value.strip()[-1:].isdigit() or not _seconds(value)):
            # A text such as "30" is rejected, because it could mean 30 steps or 30 seconds.
            raise ValueError(f"every={value!r} is impossible; give {ALLOWED_EVERY}")
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.every is not None and self.mtbf is not None:
            raise InvalidInput(
                f"every={self.every!r} and mtbf={self.mtbf} both set the interval; give only one"
            )
        return self

    @property
    def steps(self) -> int | None:
        """Number of training steps between checkpoints, or None if the interval is a time."""
        return self.every if isinstance(self.every, int) else None

    def interval(self, cost: float | None) -> float:
        """Return the interval between checkpoints in seconds.

        Args:
            cost: Seconds by which one checkpoint delays training; None before the first checkpoint.
        """
        if self.mtbf is None:
            return _seconds(self.every) if isinstance(self.every, str) else DEFAULT_INTERVAL
        return 0.0 if cost is None else daly(cost, self.mtbf)


def daly(cost: float, failures: float) -> float:
    """Return Daly's optimal interval between checkpoints in seconds.

    Args:
        cost: Seconds by which one checkpoint delays training.
        failures: Mean time between failures in seconds.

    >>> round(daly(1.0, 3600.0), 2)
    84.19
    """
    if cost >= 2 * failures:
        return failures
    share = cost / (2 * failures)
    return math.sqrt(2 * cost * failures) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def _seconds(text: str) -> float:
    return parse_seconds(text, "every", ALLOWED_EVERY)


class Resume(NamedTuple):
    """A checkpoint, with the data that are needed to resume training from it.

    Attributes:
        folder: Folder of the checkpoint.
        manifest: The contents of the checkpoint's manifest file.
        same: True if training resumes with the same ranks and settings. With the same ranks and
            settings, each rank loads its own state.
        notes: Remarks for the user, for example the name of a newer checkpoint that is damaged.
        files: Contents of the state files in memory, with one entry per rank. The default None
            means that the files are on disk.
    """

    folder: str
    manifest: Record
    same: bool
    notes: tuple[str, ...] = ()
    files: Mapping[int, bytes] | None = None

    @property
    def step(self) -> int:
        """Number of steps completed at the checkpoint."""
        return int(self.manifest["taken"])


class CheckpointContext(NamedTuple):
    """The checkpoint settings that each rank receives, and the state from which it starts.

    Attributes:
        checkpoint: Settings of the checkpoints; None if the run writes no checkpoints.
        resume: Checkpoint from which training resumes; None if training starts at step 0.
        goes_on: True if this run adds to the record of an interrupted run, including its history
            rows.
        folder: Folder of the run's checkpoints.
        owner: Identity of the process that writes the record of the run. If the owner is killed,
            its ranks may run on briefly. The ranks of a killed owner must not change files of a new
            owner.
    """

    checkpoint: Checkpoint | None
    resume: Resume | None = None
    goes_on: bool = False
    folder: str = ""
    owner: Record | None = None


def publish(half: Path, manifest: Mapping[str, JSON]) -> None:
    """Write a checkpoint's manifest with a checksum, and rename the folder to the step number."""
    record = json.loads(json.dumps(manifest))
    store.write_json(half / MANIFEST, record | {"checksum": _checksum(record)})
    half.rename(half.parent / str(manifest["taken"]))


def _checksum(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Record:
    """Verify the checksums of a complete checkpoint, and return its manifest.

    Raises:
        LabkitError: If the checkpoint is damaged; the error message names the file.
    """
    record = store.read_json(folder / MANIFEST)
    record_body = {
        name: value for name, value in record.items() if name not in ("schema", "checksum")
    }
    if record.get("checksum") != _checksum(record_body):
        raise LabkitError(f"{folder.name}/{MANIFEST} is damaged: its checksum does not match")
    ranks, steps = record_body["ranks"], record_body["taken"]
    if not (0 < ranks <= MAX_RANKS and steps >= 0):
        raise LabkitError(
            f"{folder.name}/{MANIFEST} states {ranks:,} ranks and {steps:,} steps; allowed: 1 to "
            f"{MAX_RANKS:,} ranks, and 0 steps or more"
        )
    for name, file in record_body["files"].items():
        path = folder / name
        try:
            with os.fdopen(open_file(path, root=folder), "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise LabkitError(f"{folder.name}/{name} cannot be read: {error.strerror}") from error
        if digest != file["sha256"]:
            raise LabkitError(f"{folder.name}/{name} is damaged: its checksum does not match")
    # The manifest's checksum covers the original text, so outdated field names are replaced only
    # after the check.
    if record["schema"] < SCHEMA:
        record_body["experiment"] = rename_experiment(record_body["experiment"])
    return record_body


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints that have a manifest, newest first."""
    folders = [path.parent for path in (run / FOLDER).glob(f"*/{MANIFEST}")]
    # If a checkpoint's folder is a symbolic link, labkit neither resumes from the folder nor
    # removes it.
    whole = (folder for folder in folders if folder.name.isdecimal() and not folder.is_symlink())
    return sorted(whole, key=_step, reverse=True)


def newest_checkpoint(run: Path, same: Same) -> Resume | None:
    """Return the newest complete checkpoint of a run, or None if the run has none.

    Damaged checkpoints are skipped, and the attribute `notes` of the result names them.

    Args:
        run: Directory of the run.
        same: Function that tells whether a checkpoint has the current ranks and settings.

    Raises:
        LabkitError: If all checkpoints are damaged.
    """
    notes: list[str] = []
    for folder in complete_checkpoints(run):
        try:
            with decoding(f"{folder.name}/{MANIFEST}"):
                manifest = read_manifest(folder)
                resume = Resume(str(folder), manifest, same(manifest), tuple(notes))
        except LabkitError as error:
            notes.append(str(error))
            continue
        return resume
    if notes:
        raise LabkitError(
            f"{run.name}: {'; '.join(notes)}; no checkpoint is complete; start training again"
        )
    return None


def remove_old(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints in the parent of `folder`, except the `keep` newest."""
    for checkpoint in complete_checkpoints(folder.parent)[keep:]:
        # The manifest is removed first, because a checkpoint without a manifest counts as
        # incomplete.
        (checkpoint / MANIFEST).unlink()
        shutil.rmtree(checkpoint)


def remove_after(folder: Path, step: int) -> None:
    """Remove incomplete checkpoints, and all checkpoints of steps later than `step`.

    Errors are ignored, because a killed process may still write to a checkpoint that is being
    removed.
    """
    for entry in folder.iterdir():
        if entry.is_symlink():
            entry.unlink()
        elif not entry.name.isdecimal() or _step(entry) > step:
            (entry / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name)
