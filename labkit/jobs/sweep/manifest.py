"""The record of a sweep, stored as sweep.json in the folder that also contains the job folders."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.common.files import check_folder
from labkit.common.units import plural
from labkit.records import provenance, store

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.jobs.sweep.sweep_plan import SweepMember, SweepPlan

FILE = "sweep.json"
# The file `notebook.ipynb` is a copy of the user's notebook. All notebook runs of the sweep's last
# attempt execute the copy.
NOTEBOOK = "notebook.ipynb"
# A resumed sweep waits at most PATIENCE seconds until the notebook runs of the killed sweep end.
PATIENCE = 60.0


def create(root: Path, name: str, plan: SweepPlan) -> Path:
    """Create the sweep's folder `<root>/<name>`; append a number if the folder exists already."""
    folder = store.new_run_directory(root, name)
    record: store.Record = {"notebook": store.recorded_path(plan.notebook), "plan": plan.name}
    record |= {"members": member_records(plan), "search": plan.search and plan.search.to_json()}
    state: store.Record = {
        "state": "queued",
        "started": None,
        "ended": None,
        "jobs": None,
        "limit": None,
    }
    state |= {"retries": 0}
    slurm: store.Record = {"slurm": None, "elements": []}
    store.write_json(folder / FILE, record | state | slurm | store.this_process())
    return folder


def member_records(plan: SweepPlan) -> list[store.Record]:
    """Return one record per notebook run for sweep.json: folder, parameter values and repeat."""
    return [
        {"folder": member.folder, "values": member.values, "repeat": member.repeat}
        for member in plan.members
    ]


def read(folder: Path) -> store.Record:
    """Return a sweep's record; its state is "interrupted" if the sweep's process is dead.

    Raises:
        LabkitError: The record is missing, damaged or from a newer labkit version.
    """
    # Records that older labkit versions wrote may lack some fields, which get default values.
    defaults: store.Record = dict.fromkeys(("jobs", "limit", "search", "slurm"))
    defaults |= {"elements": [], "retries": 0}
    record = defaults | store.read_json(folder / FILE)
    members = record.get("members")
    if record.get("state") not in store.STATES or not isinstance(members, list):
        raise LabkitError(f"{folder.name}/{FILE} is not the record of a sweep")
    for member in members:
        member.setdefault("repeat", 0)
    if record["state"] in ("queued", "running") and not store.is_alive(record):
        record |= {"state": "interrupted"}
    return record


def update(folder: Path, **fields: JSON) -> None:
    """Change fields of a sweep's record, and store the id of this process in it."""
    store.write_json(folder / FILE, store.read_json(folder / FILE) | store.this_process() | fields)


def newest(root: Path, plan: SweepPlan) -> Path | None:
    """Return the folder of the newest sweep with the same plan, or None."""
    candidates = []
    for path in root.glob(f"*/{FILE}"):
        try:
            record = read(path.parent)
        except LabkitError:  # the command `labkit ls` reports the damaged record
            continue
        # A symbolic link to a sweep in another folder is ignored. To resume a linked sweep, the
        # user must name the sweep.
        if record.get("plan") == plan.name and not path.parent.is_symlink():
            candidates.append((str(record.get("started") or ""), path.parent))
    # The start time identifies the newest sweep. The sweep's number does not, because new sweeps
    # reuse the numbers of removed folders.
    return max(candidates)[1] if candidates else None


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock a sweep's folder, so that only this process executes the sweep's notebook runs.

    The processes of notebook runs also hold the lock on the folder. The sweep's folder stays locked
    while any notebook run of the sweep continues. The death of the sweep's process does not release
    the lock.

    Raises:
        LabkitError: Another process still executes a part of the sweep. A folder with a link or a
            special file also raises LabkitError.
    """
    # The lock applies to the sweep's folder, not to the file sweep.json. Each write replaces
    # sweep.json and would lose a lock on the file.
    descriptor = os.open(folder, os.O_RDONLY)
    begin = time.monotonic()
    try:
        while not _locked(descriptor):
            record = read(folder)
            if record["state"] != "interrupted":
                raise LabkitError(
                    f"{folder.name} is running (process {record['pid']}); `labkit stop` ends it"
                )
            if time.monotonic() - begin > PATIENCE:
                raise LabkitError(
                    f"{folder.name}: a notebook run of the killed sweep is still running; "
                    "`labkit stop` ends it"
                )
            time.sleep(0.1)
        check_folder(folder)
        yield
    finally:
        os.close(descriptor)


def has_completed(folder: Path, plan: SweepPlan, member: SweepMember) -> bool:
    """Return whether a notebook run completed with the same code and values."""
    status = status_of(folder / member.folder)
    return status.get("state") == "completed" and status.get("content") == plan.content(member)


def is_done(folder: Path, plan: SweepPlan, member: SweepMember) -> bool:
    """Return whether a notebook run completed with the same code, values, files and packages."""
    return reasons_to_repeat(folder, plan, member) == []


def reasons_to_repeat(folder: Path, plan: SweepPlan, member: SweepMember) -> list[str] | None:
    """Return what has changed since a notebook run completed; None if it has not completed."""
    if status_of(folder / member.folder).get("state") != "completed":
        return None
    if not has_completed(folder, plan, member):
        return ["the code of the notebook or of labkit has changed"]
    try:
        return provenance.changes(folder / member.folder, plan.notebook)
    except LabkitError as error:
        return [str(error)]


def repeated(folder: Path, plan: SweepPlan) -> list[str]:
    """Return lines that name the completed notebook runs whose inputs have changed, and why."""
    members_by_reason: dict[str, list[str]] = {}
    for member in plan.members:
        for reason in reasons_to_repeat(folder, plan, member) or ():
            members_by_reason.setdefault(reason, []).append(member.folder)
    return [
        f"{plural(len(names), 'completed notebook run')} out of date ({names[0]}"
        f"{', …' if len(names) > 1 else ''}): {reason}"
        for reason, names in members_by_reason.items()
    ]


def queue(folder: Path, plan: SweepPlan, member: SweepMember, **fields: JSON) -> Path:
    """Create a notebook run's job folder atomically; set an earlier attempt aside.

    Args:
        folder: Folder of the sweep.
        plan: Plan of the sweep.
        member: Notebook run whose job folder is created.
        fields: Further fields for the status of the job.
    """
    job = folder / member.folder
    if job.exists():
        store.set_aside(job)
    # The new job folder gets its visible name last. Readers therefore never see an incomplete job.
    temporary = folder / f".{secrets.token_hex(4)}.new"
    temporary.mkdir()
    store.mark_queued(
        temporary, plan.notebook, member.values, content=plan.content(member), **fields
    )
    return temporary.rename(job)


def save_notebook(folder: Path, plan: SweepPlan) -> Path:
    """Save a copy of the notebook in the sweep's folder, because users may edit the original."""
    return store.write_atomically(folder / NOTEBOOK, plan.text)


def tidy(folder: Path) -> None:
    """Remove the incomplete job folders that a killed sweep has left."""
    for path in folder.glob(".*.new"):
        # Sweeps give names like `.*.new` only to folders. A file with a name like `.*.new` is
        # therefore not from labkit.
        if path.is_dir():
            shutil.rmtree(path)


def states(
    folder: Path,
    record: store.Record,
    present_status_of: Callable[[store.Record], store.Record] = lambda status: status,
) -> Counter[str]:
    """Count a sweep's notebook runs by state; those not yet started count as "queued".

    Args:
        folder: Folder of the sweep.
        record: Record of the sweep.
        present_status_of: Function that replaces a recorded status, which may be out of date, by
            the current status.
    """
    statuses = (status_of(folder / member["folder"]) for member in record["members"])
    return Counter(
        present_status_of(status)["state"] if status else "queued" for status in statuses
    )


def status_of(job: Path) -> store.Record:
    """Return a job's status, or an empty record if the status is unreadable."""
    try:
        return store.read_status(job)
    except LabkitError:
        return {}


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
