"""End what runs in a folder of runs: sweeps and jobs that labkit started, nothing else."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from labkit.common.errors import LabkitError
from labkit.jobs.elements import ELSEWHERE, cancel, queued
from labkit.jobs.listing import find
from labkit.jobs.sweep import manifest
from labkit.records import registry, store

PATIENCE = 80.0  # seconds: a cell has half of that to clean up before its kernel is killed


def stop(root: Path, say: Callable[[str], None]) -> list[Path]:
    """Ask every running sweep and job at and below root to end; those that have not ended.

    A sweep ends its own members. Runs of a notebook that is open in JupyterLab are left alone: the
    process that works on them is the notebook's. What ends is what this user's registry names for a
    folder; what a record there names is left alone.

    Raises:
        LabkitError: there is no such folder.
    """
    jobs, sweeps = find(root)
    heard: list[str] = []

    def tell(line: str) -> None:
        heard.append(line)
        say(line)

    told, left = _tell_to_end(sweeps, manifest.FILE, tell)
    # A member that was told itself would look to its sweep like one that failed.
    alone = [job for job in jobs if not any(sweep in job.parents for sweep in told)]
    elements = queued(alone, tell)
    others, refused = _tell_to_end(alone, "status.json", tell)
    told |= others
    left += refused
    if elements:
        try:
            left += cancel(elements, tell)
        except LabkitError as error:  # Slurm does not answer: the processes here end all the same
            tell(str(error))
            left += elements.values()
    left += _wait(told, tell)
    if not heard:
        say(f"nothing runs in {root}")
    return left


def _tell_to_end(
    paths: Iterable[Path], name: str, say: Callable[[str], None]
) -> tuple[dict[Path, store.Record], list[Path]]:
    """Send SIGTERM to the registered process of each folder; those told, and those refused.

    Args:
        paths: folders of jobs or sweeps.
        name: of the records that say whether these run.
        say: is told of each that claims to run and is not ended.
    """
    told, refused = {}, []
    for path in sorted(paths):
        process = registry.process(path)
        if process is None:
            # Of one whose process is not here, `labkit ls` says that it is interrupted.
            if (claimed := _claim(path / name)) and store.is_alive(claimed):
                say(f"{path} {ELSEWHERE}")
            continue
        if not store.is_alive(process):
            continue
        try:
            psutil.Process(process["pid"]).send_signal(signal.SIGTERM)
        except psutil.NoSuchProcess:  # it has just ended
            continue
        except psutil.AccessDenied:
            say(f"{path}: the system does not let this user end process {process['pid']}")
            refused.append(path)
            continue
        told[path] = process
    return told, refused


def _claim(path: Path) -> store.Record | None:
    """The record of a job or sweep that says that it runs, in a process and not in Slurm."""
    try:
        record = store.read_json(path)
    except LabkitError:  # `labkit ls` says what is wrong with it
        return None
    return record if record.get("state") == "running" and "element" not in record else None


def _wait(told: dict[Path, store.Record], say: Callable[[str], None]) -> list[Path]:
    """Wait for processes that were told to end; the folders of those that do not."""
    end = time.monotonic() + PATIENCE
    while told:
        for path, process in list(told.items()):
            if not store.is_alive(process):
                say(f"stopped: {path}")
                del told[path]
        if time.monotonic() > end:
            break
        # Polled: these are no children of this process, so that nothing announces their end.
        time.sleep(0.1)
    for path, process in told.items():
        say(f"{path} does not end; its process is {process['pid']}")
    return [*told]
