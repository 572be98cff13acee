"""What is kept of a sweep: sweep.json in its folder, and each member's own job beside it."""

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
from labkit.common.safe_files import check_folder, make_folder
from labkit.records import store

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.jobs.sweep.plan import Member, Plan

FILE = "sweep.json"
NOTEBOOK = "notebook.ipynb"  # as all members of the last attempt execute it
EARLIER = ".earlier"  # where what a new attempt replaces is kept; a hidden folder is not searched
PATIENCE = 60.0  # seconds that members of a killed sweep get to end


def create(root: Path, name: str, plan: Plan) -> Path:
    """Make the sweep's folder `<root>/<name>`, with a number where the name is taken."""
    folder = store.new_run_directory(root, name)
    record: store.Record = {"notebook": store.shown_path(plan.notebook), "plan": plan.name}
    record |= {"members": listed(plan), "search": plan.search and plan.search.to_json()}
    state = {"state": "queued", "started": None, "ended": None, "jobs": None, "limit": None}
    slurm: store.Record = {"slurm": None, "elements": []}
    store.write_json(folder / FILE, record | state | slurm | store.this_process())
    return folder


def listed(plan: Plan) -> list[store.Record]:
    """The members as the record has them."""
    return [
        {"folder": member.folder, "values": member.values, "repeat": member.repeat}
        for member in plan.members
    ]


def read(folder: Path) -> store.Record:
    """The record; a "running" sweep whose process is gone reads as "interrupted".

    Raises:
        LabkitError: missing, broken or newer; one line.
    """
    # Records written before a sweep had these fields lack them.
    known: store.Record = dict.fromkeys(("jobs", "limit", "search", "slurm")) | {"elements": []}
    record = known | store.read_json(folder / FILE)
    members = record.get("members")
    if record.get("state") not in store.STATES or not isinstance(members, list):
        raise LabkitError(f"{folder.name}/{FILE} is not the record of a sweep")
    for member in members:
        member.setdefault("repeat", 0)
    if record["state"] in ("queued", "running") and not store.is_alive(record):
        record |= {"state": "interrupted"}
    return record


def update(folder: Path, **fields: JSON) -> None:
    """Change fields of the record, and say that this process did so."""
    store.write_json(folder / FILE, store.read_json(folder / FILE) | store.this_process() | fields)


def newest(root: Path, plan: Plan) -> Path | None:
    """The folder of the last sweep that asked for the same."""
    found = []
    for path in root.glob(f"*/{FILE}"):
        try:
            record = read(path.parent)
        except LabkitError:  # `labkit ls` says what is wrong with it
            continue
        # A sweep that a link leads to is another folder's: it is named to be resumed.
        if record.get("plan") == plan.name and not path.parent.is_symlink():
            found.append((str(record.get("started") or ""), path.parent))
    # By the time of its start, for folders' numbers say nothing once one was removed.
    return max(found)[1] if found else None


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Be the one process that runs this sweep's members.

    The lock is on the folder. Forked members inherit it, so that it is held as long as one of them
    lives, whatever has become of the sweep.

    Raises:
        LabkitError: another process runs it, or a member of a killed one does not end; or in the
            folder is a link, or what else is neither file nor folder.
    """
    # Not on sweep.json: each write of it is a new file under the old name, which no lock would
    # hold.
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
                    f"{folder.name}: a member of the sweep that was killed is still running; "
                    "`labkit stop` ends it"
                )
            time.sleep(0.1)
        check_folder(folder)
        yield
    finally:
        os.close(descriptor)


def is_done(folder: Path, plan: Plan, member: Member) -> bool:
    """Whether the member completed, from this notebook, these values and this labkit."""
    status = status_of(folder / member.folder)
    return status.get("state") == "completed" and status.get("content") == plan.content(member)


def queue(folder: Path, plan: Plan, member: Member, **fields: JSON) -> Path:
    """Make the member's job, whole or not at all; an earlier attempt is kept in EARLIER.

    Args:
        fields: further ones of its status.
    """
    job = folder / member.folder
    if job.exists():
        kept = folder / EARLIER / f"{job.name}.{secrets.token_hex(4)}"
        make_folder(kept.parent, folder)
        # Renamed, not removed: a failed attempt may be the only trace of why.
        job.rename(kept)
    # Made under a hidden name and renamed: who lists the folder meanwhile sees no half of a job.
    fresh = folder / f".{secrets.token_hex(4)}.new"
    fresh.mkdir()
    store.queue(fresh, plan.notebook, member.values, content=plan.content(member), **fields)
    return fresh.rename(job)


def keep(folder: Path, plan: Plan) -> Path:
    """Write the notebook beside the members: it may be edited while they run."""
    return store.write_atomically(folder / NOTEBOOK, plan.text)


def tidy(folder: Path) -> None:
    """Remove what a killed sweep was just making."""
    for path in folder.glob(".*.new"):
        if path.is_dir():  # a file of that name is nothing of a sweep's
            shutil.rmtree(path)


def states(
    folder: Path,
    record: store.Record,
    seen: Callable[[store.Record], store.Record] = lambda status: status,
) -> Counter[str]:
    """How many members are in which state; those that have not been started are "queued".

    Args:
        seen: a member's status as it is, of what its record says.
    """
    found = (status_of(folder / member["folder"]) for member in record["members"])
    return Counter(seen(each)["state"] if each else "queued" for each in found)


def status_of(job: Path) -> store.Record:
    """A job's status; nothing where it has none that can be read: it has not completed then."""
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
