"""Checks of this machine: cores, user, loopback, memory, disk, data sets and left-over clusters."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from labkit import datasets
from labkit.cli.doctor.diagnosis import Diagnosis
from labkit.cluster import fork_client, leftovers
from labkit.cluster.lease import WARM
from labkit.common.files import cache_folder, runtime_folder, usable_cores
from labkit.common.machine import LOOPBACK_FIX, without_loopback
from labkit.records import store

# The constants MEMORY, DISK and SHARED are minimum free spaces in GiB. Below the minimum free
# space, a run of two ranks may fail.
MEMORY, DISK, SHARED = 2.0, 1.0, 0.25
# Ranks on one host store their gradient buckets in the in-memory file system /dev/shm.
SHARED_MEMORY = Path("/dev/shm")


def cores() -> Iterator[Diagnosis]:
    """Report the number of usable cores, on which the threads of all ranks run."""
    usable = usable_cores()
    total = psutil.cpu_count() or usable
    suffix = f" of {total}" if total > usable else ""
    text = (
        f"cores: {usable}{suffix}; if ranks x threads exceed this number, ranks share cores "
        "and runs print a warning"
    )
    yield Diagnosis("ok", text)


def root() -> Iterator[Diagnosis]:
    """Report whether the user is root; Open MPI then needs two environment variables."""
    if os.name == "posix" and os.geteuid() == 0:
        allow = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        yield Diagnosis(
            "ok",
            f"root: labkit lets its own ranks run as root; for other mpiexec commands: {allow}",
        )
    else:
        yield Diagnosis("ok", "root: you are an ordinary user; Open MPI needs no setting")


def loopback() -> Iterator[Diagnosis]:
    """Check the loopback address, through which processes of this machine connect to each other."""
    if problem := without_loopback():
        yield Diagnosis("broken", f"loopback: {problem}", f"{LOOPBACK_FIX}  # as root")
    else:
        yield Diagnosis("ok", "loopback: 127.0.0.1 is available")


def data() -> Iterator[Diagnosis]:
    """Report the data sets that are available, and those that must be downloaded first."""
    folder = os.environ.get("LABKIT_DATA")
    if folder and not Path(folder).is_dir():
        yield Diagnosis(
            "broken", f"data: LABKIT_DATA={folder} is not an existing folder", "unset LABKIT_DATA"
        )
        return
    absent = [name for name in datasets.DATASETS if datasets.available(name) is not None]
    here = ", ".join(name for name in datasets.DATASETS if name not in absent)
    yield Diagnosis(
        "ok", f"data: data sets that are built in or stored in {folder or 'data/'}: {here}"
    )
    if absent:
        what = f"data: data sets that are downloaded on first use: {', '.join(absent)}"
        yield Diagnosis(
            "note",
            what,
            "on a machine without internet access: labkit examples notebooks  # and "
            "store the files that notebooks/DATA.md lists, or export LABKIT_DATA=…",
        )


def memory() -> Iterator[Diagnosis]:
    """Check the free memory, and the free shared memory (ranks store gradients there)."""
    free = psutil.virtual_memory().available
    yield _room(
        "memory", free, MEMORY, "ps -Ao pid,rss,args | sort -rnk2 | head  # and end large processes"
    )
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        fix = f"mount -o remount,size=2G {SHARED_MEMORY}  # docker run --shm-size=2g"
        yield _room("shared memory", free, SHARED, fix)


def disk() -> Iterator[Diagnosis]:
    """Check free space and write permission for runs, caches and cluster files.

    The free space of each file system is reported once.
    """
    places = {
        "runs": Path(os.environ.get("LABKIT_RUNS", ".")),
        "caches": cache_folder("gate"),
        "clusters": runtime_folder("clusters"),
        "temporary files": Path(tempfile.gettempdir()),
    }
    systems: dict[int, list[str]] = {}
    for what, folder in places.items():
        # If a folder does not exist yet, its nearest existing parent determines the file system.
        existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
        places[what] = existing
        # Folders are grouped by device, because several folders often share one file system.
        systems.setdefault(existing.stat().st_dev, []).append(what)
        if not os.access(existing, os.W_OK):
            fix = f"chmod u+w {shlex.quote(str(existing))}  # or work in another folder"
            yield Diagnosis(
                "broken",
                f"disk: you have no permission to write to {existing}, which is needed for {what}",
                fix,
            )
    for names in systems.values():
        free = shutil.disk_usage(places[names[0]]).free
        fix = f"du -sh {shlex.quote(str(places[names[0]].resolve()))}/*  # and delete large files"
        yield _room(f"disk, {', '.join(names)}", free, DISK, fix)


def _room(what: str, free: float, least: float, fix: str) -> Diagnosis:
    gib = free / 2**30
    text = f"{what}: {gib:.1f} GiB free"
    if gib >= least:
        return Diagnosis("ok", text)
    return Diagnosis("note", f"{text}; a run of two ranks needs {least:g} GiB", fix)


def clusters() -> Iterator[Diagnosis]:
    """Report this user's running clusters, and leftover processes and folders."""
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
    """Yield the processes and sweeps that use a cluster; each of them has a lease file.

    The name of a lease file is the process id or the sweep that holds the lease. The function does
    not check whether a lease file is locked. If this process has locked a lease file, closing the
    file again would release the lock.
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
    """Return the pids of this user's engines and controllers: one list per cluster lock file."""
    pids: dict[Path, list[int]] = {}
    for process in psutil.process_iter():
        try:
            # labkit searches all processes, because no file lists the engines of a cluster whose
            # supervising process has died.
            if {"labkit.cluster.engine", fork_client.__file__} & {*process.cmdline()}:
                keeper = Path(process.environ()["LABKIT_KEEPER"])
                pids.setdefault(keeper, []).append(process.pid)
        except (psutil.Error, KeyError):  # the process has ended, or another user owns it
            continue
    return pids
