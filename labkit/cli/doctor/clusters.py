"""Clusters that are up, who holds them, and what is left of those that nobody holds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.cli.doctor.diagnosis import Finding
from labkit.cluster.lease import WARM
from labkit.common.paths import runtime_folder
from labkit.records import store


def clusters() -> Iterator[Finding]:
    """Each cluster of this user that is up, or should not be."""
    from labkit.cluster import leftovers

    up, engines = leftovers(), _engines()
    found = 0
    for folder in sorted(runtime_folder("clusters").glob("*")):
        working = engines.get(folder / "keeper.lock", [])
        for finding in _of(folder, folder.name in up, working):
            found += 1
            yield finding
    if not found:
        yield Finding("ok", "clusters: none is up, none left over")


def _of(folder: Path, up: bool, engines: list[int]) -> Iterator[Finding]:
    path = folder / "cluster.json"
    record = store.read_json(path) if path.exists() else {"state": "ended"}
    name = f"clusters: {folder.name}"
    holders = list(_holders(folder))
    for pid in filter(_is_stopped, engines):
        yield Finding("note", f"{name}: process {pid} is stopped by a signal", f"kill -CONT {pid}")
    if up and holders:
        yield Finding("ok", f"{name}: up, held by {', '.join(holders)}; ends with the last of them")
    elif up:
        what = f"{name}: up, but what has held it is gone; it ends by itself within seconds, or:"
        yield Finding("note", what, f"kill {shlex.quote(str(record.get('pid', '')))}")
    elif engines:
        what = f"{name}: {len(engines)} processes have outlived the keeper"
        yield Finding("note", what, f"kill -9 {' '.join(map(str, engines))}")
    elif record["state"] != "ended":
        what = f"{name}: its keeper was killed; nothing of it runs"
        yield Finding("note", what, f"rm -r {shlex.quote(str(folder))}")


def _holders(folder: Path) -> Iterator[str]:
    """Processes and sweeps that hold a cluster.

    By name, not by lock: closing the file of a lease would end it if it were this process's own.
    """
    for lease in sorted((folder / "leases").glob("*")):
        pid, _, rest = lease.name.partition("-")
        if not rest:
            yield "a sweep"
        elif pid == WARM:
            yield "labkit warm, for who comes next"
        elif psutil.pid_exists(int(pid)):
            yield f"process {pid}"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _engines() -> dict[Path, list[int]]:
    """Engines and controllers of this user, by the lock of the keeper that they watch."""
    found: dict[Path, list[int]] = {}
    for process in psutil.process_iter():
        try:
            # By command and environment: an engine whose keeper is gone stands in no record.
            if "labkit.cluster.engine" in process.cmdline():
                keeper = Path(process.environ()["LABKIT_KEEPER"])
                found.setdefault(keeper, []).append(process.pid)
        except (psutil.Error, KeyError):  # ended meanwhile, or another user's
            continue
    return found
