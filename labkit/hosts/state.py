"""What is known of a testbed to other processes, and how one is started and ended."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypedDict, cast

from labkit.common.errors import LabkitError
from labkit.common.paths import bytecode_variables, runtime_folder
from labkit.hosts.plan import Plan
from labkit.hosts.requirements import require
from labkit.records import store

AGENT, LOGIN_COMMAND = "agent", "login"  # files in a testbed's folder
SLURM_CONF = "slurm.conf"
RECORD = "testbed.json"
LAST = 60.0  # seconds that a testbed may take to end
UP = "up"  # the name of the one that a command has left running


class State(TypedDict):
    """What its holder says of a testbed that is up."""

    plan: dict[str, Any]  # the fields of its Plan
    control: int  # a process in the control's namespaces
    hosts: dict[str, int]  # a process in those of each host
    addresses: dict[str, str]
    home: str  # where commands begin, if nothing else is said
    runtime: str  # XDG_RUNTIME_DIR of each host
    pid: int  # of the holder
    process_started: float
    since_boot: float


def folder_of(name: str) -> Path:
    """Where the files of a testbed are."""
    return runtime_folder("testbed") / name


def state(folder: Path) -> State | None:
    """What is said of the testbed of this folder; None where none is up."""
    said = _said(folder)
    return cast("State", said) if "hosts" in said and store.is_alive(said) else None


def _said(folder: Path) -> store.Record:
    """Its record; of one that is being started, who starts it."""
    try:
        # No schema is asked for: what outlives its labkit is ended by the next one.
        said: store.Record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return {}
    return said


def start(folder: Path, plan: Plan, parent: bool) -> tuple[State, subprocess.Popen[str]]:
    """Start a testbed and wait for it: what its holder says, and the holder.

    Args:
        parent: whether it ends with this process.

    Raises:
        LabkitError: it cannot be; the message says why, and what to do.
    """
    require(plan.slurm)
    with tempfile.TemporaryFile("w+") as said:
        holder = _holder(folder, plan, parent, said)
        try:
            assert holder.stdout is not None  # for the type checker: a pipe was asked for
            line = holder.stdout.readline()
        except BaseException:  # nobody waits for it any more
            holder.terminate()
            holder.wait()
            raise
        answer = json.loads(line) if line else {"ready": False, "message": _last_line(said)}
    if not answer["ready"]:
        holder.wait()  # until nothing is left of it
        raise LabkitError(answer["message"])
    found = state(folder)
    if found is None:
        raise LabkitError("the testbed has ended as soon as it was up")
    return found, holder


def _holder(folder: Path, plan: Plan, parent: bool, said: IO[str]) -> subprocess.Popen[str]:
    told = json.dumps(asdict(plan))
    words = [sys.executable, "-P", "-m", "labkit.hosts.supervisor", str(folder), told]
    # This process by a descriptor: its number may be another's when it has ended.
    own = [os.pidfd_open(os.getpid())] if parent else []
    try:
        return subprocess.Popen(
            [*words, *map(str, own)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=os.environ | bytecode_variables(),
            pass_fds=own,
            start_new_session=True,  # Ctrl-C is meant for a cell or a command, not for the hosts
        )
    finally:
        for descriptor in own:
            os.close(descriptor)


def take(folder: Path) -> None:
    """Make the folder of a testbed, which says from its first moment whose it is.

    Raises:
        LabkitError: it is another one's.
    """
    made = _new_folder(folder.parent.name)
    store.write_json(made / RECORD, {"schema": store.SCHEMA, **store.this_process()})
    try:
        made.rename(folder)
    except OSError as error:
        shutil.rmtree(made)
        if error.errno != errno.ENOTEMPTY:
            raise
        raise LabkitError(
            "a testbed is up, or just being started: wait for it, or end it: labkit testbed down"
        ) from None


def _new_folder(name: str, tries: int = 100) -> Path:
    try:
        return Path(tempfile.mkdtemp(dir=runtime_folder(name)))
    except FileNotFoundError:  # another testbed, which ends, has just removed what was empty
        if not tries:
            raise
        return _new_folder(name, tries - 1)


def remove(folder: Path) -> None:
    """Remove the folder of a testbed that has ended, and those above in which nothing else is."""
    shutil.rmtree(folder, ignore_errors=True)  # the control may do the same
    for each in (folder.parent, folder.parent.parent):
        with suppress(OSError):
            each.rmdir()


def forget(folder: Path) -> None:
    """Remove what a testbed has left whose holder was killed; one that is there stays."""
    if not store.is_alive(_said(folder)):
        remove(folder)


def end(folder: Path) -> bool:
    """End the testbed of this folder, and wait until nothing is left; whether there was one."""
    said, was = _said(folder), folder.exists()
    if store.is_alive(said):
        with suppress(ProcessLookupError):
            os.kill(said["pid"], signal.SIGTERM)
        limit = time.monotonic() + LAST
        while store.is_alive(said):
            if time.monotonic() > limit:
                raise LabkitError(
                    f"the testbed has not ended after {LAST:.0f} s: "
                    f"its holder is process {said['pid']}"
                )
            time.sleep(0.05)
    remove(folder)  # where its holder was killed, with its control
    return was


def _last_line(said: IO[str]) -> str:
    said.seek(0)
    lines = [line for line in said.read().splitlines() if line.strip()]
    return f"the testbed did not start: {lines[-1] if lines else 'its holder said nothing'}"
