"""End what runs in a folder of runs: sweeps and jobs that labkit started, nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.jobs.elements import cancel, queued
from labkit.jobs.listing import find
from labkit.jobs.sweep import roster
from labkit.records import store

PATIENCE = 80.0  # seconds: a cell has half of that to clean up before its kernel is killed


def stop(root: Path, say: Callable[[str], None]) -> list[Path]:
    """Ask every running sweep and job at and below root to end; those that have not ended.

    A sweep ends its own members. Runs of a notebook that is open in JupyterLab are left alone: the
    process that works on them is the notebook's.

    Raises:
        LabkitError: there is no such folder.
    """
    jobs, sweeps = find(root)
    asked = _ask(sweeps, roster.read)
    # A member that was told itself would look to its sweep like one that failed.
    alone = [job for job in jobs if not any(sweep in job.parents for sweep in asked)]
    elements = queued(alone)
    asked |= _ask(alone, store.read_status)
    if not asked and not elements:
        say(f"nothing runs in {root}")
    left = cancel(elements, say) if elements else []
    end = time.monotonic() + PATIENCE
    while asked:
        for path, status in list(asked.items()):
            if not store.is_alive(status):
                say(f"stopped: {path}")
                del asked[path]
        if time.monotonic() > end:
            break
        # Polled: these are no children of this process, so that nothing announces their end.
        time.sleep(0.1)
    for path, status in asked.items():
        say(f"{path} does not end; its process is {status['pid']}")
    return [*left, *asked]


def _ask(paths: Iterable[Path], read: Callable[[Path], store.Record]) -> dict[Path, store.Record]:
    """Send SIGTERM to the process of each record that says "running"; those that got it."""
    asked = {}
    for path in sorted(paths):
        try:
            status = read(path)
        except LabkitError:  # `labkit ls` says what is wrong with it
            continue
        if "element" in status:  # its process, if it has one, is a node's
            continue
        # Alive: the very process that wrote the record, not a later one under its number.
        if status["state"] == "running" and store.is_alive(status):
            try:
                os.kill(int(status["pid"]), signal.SIGTERM)
            except PermissionError as error:
                raise LabkitError(f"{path} is run by another user, who can stop it") from error
            except ProcessLookupError:  # it has just ended
                continue
            asked[path] = status
    return asked
