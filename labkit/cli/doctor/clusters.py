"""Checks of running clusters, of processes that use them, and of leftovers of ended clusters."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.cli.doctor.diagnosis import Diagnosis
from labkit.cluster.lease import WARM
from labkit.common.paths import runtime_folder
from labkit.records import store


def clusters() -> Iterator[Diagnosis]:
    """Report this user's running clusters, and leftover processes and folders."""
    from labkit.cluster import leftovers

    up, engines = leftovers(), _engines()
    count = 0
    for folder in sorted(runtime_folder("clusters").glob("*")):
        working = engines.get(folder / "keeper.lock", [])
        for finding in _cluster_findings(folder, folder.name in up, working):
            count += 1
            yield finding
    if not count:
        yield Diagnosis(
            "ok", "clusters: no cluster is running, and none has left processes or files"
        )


def _cluster_findings(folder: Path, up: bool, engines: list[int]) -> Iterator[Diagnosis]:
    path = folder / "cluster.json"
    record = store.read_json(path) if path.exists() else {"state": "ended"}
    name = f"clusters: {folder.name}"
    holders = list(_holders(folder))
    for pid in filter(_is_stopped, engines):
        yield Diagnosis(
            "note",
            f"{name}: process {pid} of the cluster is stopped by a signal",
            f"kill -CONT {pid}",
        )
    if up and holders:
        yield Diagnosis(
            "ok",
            f"{name}: running, in use by {', '.join(holders)}; the cluster ends when no "
            "process uses it",
        )
    elif up:
        what = f"{name}: running, but no process uses it; the cluster ends by itself within seconds"
        yield Diagnosis("note", what, f"kill {shlex.quote(str(record.get('pid', '')))}")
    elif engines:
        what = (
            f"{name}: {len(engines)} processes still run, although the cluster's parent "
            "process has ended"
        )
        yield Diagnosis("note", what, f"kill -9 {' '.join(map(str, engines))}")
    elif record["state"] != "ended":
        what = (
            f"{name}: the cluster's parent process was killed; no process of the cluster is running"
        )
        yield Diagnosis("note", what, f"rm -r {shlex.quote(str(folder))}")


def _holders(folder: Path) -> Iterator[str]:
    """Yield the processes and sweeps that hold leases on a cluster (its holders).

    The name of a lease file is the process id or the sweep that holds the lease. The locks of lease
    files are not tested, because closing a lease file would also release a lock of this process on
    the file.
    """
    for lease in sorted((folder / "leases").glob("*")):
        pid, _, rest = lease.name.partition("-")
        if not rest:
            yield "a sweep"
        elif pid == WARM:
            yield "labkit prestart (for the next cluster)"
        elif psutil.pid_exists(int(pid)):
            yield f"process {pid}"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _engines() -> dict[Path, list[int]]:
    """Return the pids of this user's engines and controllers, by their cluster's lock file."""
    pids: dict[Path, list[int]] = {}
    for process in psutil.process_iter():
        try:
            # The search reads the commands and environments of all processes, because no file lists
            # an engine after the death of its cluster's supervising process.
            if "labkit.cluster.engine" in process.cmdline():
                keeper = Path(process.environ()["LABKIT_KEEPER"])
                pids.setdefault(keeper, []).append(process.pid)
        except (psutil.Error, KeyError):  # the process has ended, or another user owns it
            continue
    return pids
