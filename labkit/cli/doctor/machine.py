"""What this machine has: cores, room, a user, data."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from labkit.cli.doctor.diagnosis import Finding
from labkit.common.paths import usable_cores

# GiB below which a run of two ranks is likely to fail.
MEMORY, DISK, SHARED = 2.0, 1.0, 0.25
SHARED_MEMORY = Path("/dev/shm")  # where ranks of one host keep the buckets of their gradients


def cores() -> Iterator[Finding]:
    """How many ranks x threads may work at the same time."""
    import psutil

    usable = usable_cores()
    there = psutil.cpu_count() or usable
    of = f" of {there}" if there > usable else ""
    text = f"cores: {usable}{of}; more ranks x threads than that take turns, and runs say so"
    yield Finding("ok", text)


def root() -> Iterator[Finding]:
    """Open MPI starts nothing for root unless told."""
    if os.name == "posix" and os.geteuid() == 0:
        allow = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        yield Finding("ok", f"root: labkit allows its ranks; for an mpiexec of your own: {allow}")
    else:
        yield Finding("ok", "root: an ordinary user, nothing to allow")


def data() -> Iterator[Finding]:
    """Which data sets are here."""
    from labkit import datasets

    folder = os.environ.get("LABKIT_DATA")
    if folder and not Path(folder).is_dir():
        yield Finding("broken", f"data: LABKIT_DATA={folder} is no folder", "unset LABKIT_DATA")
        return
    absent = [name for name in datasets.DATASETS if datasets.available(name) is not None]
    here = ", ".join(name for name in datasets.DATASETS if name not in absent)
    yield Finding("ok", f"data: in {folder or 'data/'} or built in: {here}")
    if absent:
        what = f"data: not here yet: {', '.join(absent)}; fetched when first used"
        yield Finding("note", what, "with no network: see data/README.md, or export LABKIT_DATA=…")


def memory() -> Iterator[Finding]:
    """Room for models, and for the gradients that ranks share."""
    import psutil

    free = psutil.virtual_memory().available
    yield _room("memory", free, MEMORY, "ps -Ao pid,rss,args | sort -rnk2 | head  # and end some")
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        fix = f"mount -o remount,size=2G {SHARED_MEMORY}  # docker run --shm-size=2g"
        yield _room("shared memory", free, SHARED, fix)


def disk() -> Iterator[Finding]:
    """Room for runs, caches and the files of running clusters, each file system once."""
    from labkit.common.paths import cache_folder, runtime_folder

    places = {
        "runs": Path(os.environ.get("LABKIT_RUNS", ".")),
        "caches": cache_folder("gate"),
        "clusters": runtime_folder("clusters"),
        "temporary files": Path(tempfile.gettempdir()),
    }
    systems: dict[int, list[str]] = {}
    for what, folder in places.items():
        # A folder that is still to be made will lie where its nearest parent does.
        there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
        places[what] = there
        # By device: several of these folders often lie on one disk, which is full or is not.
        systems.setdefault(there.stat().st_dev, []).append(what)
        if not os.access(there, os.W_OK):
            fix = f"chmod u+w {shlex.quote(str(there))}  # or work in a folder of your own"
            yield Finding("broken", f"disk: nothing can be written to {there}, for {what}", fix)
    for names in systems.values():
        free = shutil.disk_usage(places[names[0]]).free
        fix = f"du -sh {shlex.quote(str(places[names[0]].resolve()))}/*  # and free some"
        yield _room(f"disk, {', '.join(names)}", free, DISK, fix)


def _room(what: str, free: float, least: float, fix: str) -> Finding:
    gib = free / 2**30
    text = f"{what}: {gib:.1f} GiB free"
    if gib >= least:
        return Finding("ok", text)
    return Finding("note", f"{text}; a run of two ranks wants {least:g}", fix)
