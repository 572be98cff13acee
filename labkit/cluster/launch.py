"""The start of a cluster's keeper process and engines, and the state that the keeper writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from labkit.cluster.lease import WARM, Lock, is_held, is_wanted
from labkit.cluster.start import Start
from labkit.common import imports
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.html import card, pairs
from labkit.common.machine import require_loopback
from labkit.common.paths import bytecode_variables
from labkit.common.privacy import scrub
from labkit.common.terminal import utf8_variables
from labkit.common.units import plural
from labkit.records.endings import End, describe_exit

QUIET = 60.0  # minimum seconds between two lines about the same wait in a log
START_LIMIT = 300.0  # seconds that a start may take, enough for a busy machine
# Files in a cluster's folder that remain after the cluster's end.
OUTLIVE = ("last-run", "warm.log")
UNSETTLED = "unsettled"  # file in a cluster's folder; marks warm engines as unclaimed
REFUSED = "refused: "  # prefix of a keeper's message; says that another attempt is useless


class NotStarted(LabkitError):
    """Raised when the engines did not start; a further attempt may succeed."""


class ClusterState(TypedDict):
    """The state of a cluster, as its keeper writes it to cluster.json."""

    state: str  # starting, ready or ended
    message: str
    rank: int | None  # rank whose end has ended the cluster; None if no rank has
    signal: str  # signal that has ended the cluster, or ""
    workers: int
    threads: int
    engines: list[int]  # engine ids in rank order
    hosts: list[str]  # host names of the ranks
    dead: list[int]  # dead ranks of this machine in a fault-tolerant cluster
    how: str  # a Start in JSON
    pid: int | None  # of the keeper
    warm: float | None  # seconds that the start of warm engines took; None for other engines


def state(folder: Path) -> ClusterState:
    """Return the state that the keeper process of this folder's cluster has written last."""
    try:
        # No schema version is checked, because the folder's name contains a hash of labkit's
        # source, so the same labkit has written the file.
        record: ClusterState = json.loads((folder / "cluster.json").read_text())
    except FileNotFoundError:
        return ClusterState(
            state="ended",
            message="",
            rank=None,
            signal="",
            workers=0,
            threads=0,
            engines=[],
            hosts=[],
            dead=[],
            how="",
            pid=None,
            warm=None,
        )
    return record


def is_up(folder: Path) -> bool:
    """Return whether the cluster's engines are ready and its keeper process is running."""
    return end(folder) is None


def end(folder: Path) -> End | None:
    """Return how this folder's cluster has ended, or None while it is up.

    The keeper process writes the end into the cluster's state. If the lock of the keeper is free
    without such an entry, the keeper was killed.
    """
    has_keeper = is_held(folder / "keeper.lock")
    record = state(folder)  # read after the lock, because a keeper writes before it releases it
    if record["state"] == "ended":
        return End(record["message"], record["rank"], record["signal"])
    if not has_keeper:
        return describe_exit("the parent process of the engines", -signal.SIGKILL)
    return None if record["state"] == "ready" else End("the engines are starting")


def launch(folder: Path, launch_options: Start, warm: bool = False) -> None:
    """Start a keeper process and wait until engines are ready; print why a Slurm job is queued.

    Args:
        folder: Folder of the cluster.
        launch_options: Launch options of the ranks.
        warm: Whether the ranks import the modules that training needs before they count as ready.

    Raises:
        NotStarted: The engines did not start; the message ends with their output.
        InvalidInput: The launch options are rejected, so another attempt would fail, too.
        LabkitError: The engines of an earlier cluster do not end.
    """
    if launch_options.is_local:
        require_loopback()
    path = folder / "keeper.lock"
    if is_held(path):
        # If another process has given up its start, that start continues for this process. A keeper
        # that is ending must finish first.
        if _wait(folder, launch_options, lambda: is_held(path)):
            return
        if is_held(path):
            raise LabkitError(
                f"cluster {folder.name!r} was told to end, but it is still running; end its "
                "processes, or give another name"
            )
    # Files of an earlier cluster are removed, because they may say "ready".
    for earlier in ("cluster.json", UNSETTLED):
        (folder / earlier).unlink(missing_ok=True)
    with (folder / "keeper.log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "labkit.cluster.keeper", str(folder)]
        keeper = subprocess.Popen(
            [*command, launch_options.to_json(), *([WARM] if warm else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ
            | bytecode_variables()
            | utf8_variables()
            | {imports.VARIABLE: imports.extra_folders()},
            start_new_session=True,  # Ctrl-C in a terminal must not end the engines
        )
    # This keeper may exit, because the keeper of a start that was given up has acquired the lock.
    if not _wait(folder, launch_options, lambda: keeper.poll() is None or is_held(path)):
        reason = state(folder)["message"] or last_line(folder / "keeper.log")
        failure = InvalidInput if reason.startswith(REFUSED) else NotStarted
        raise failure(f"the engines did not start: {reason.removeprefix(REFUSED)}")


def _wait(folder: Path, how: Start, continues: Callable[[], bool]) -> bool:
    """Wait for the engines while `continues()`, at most START_LIMIT; return whether they are up."""
    begin, ticker = time.monotonic(), _Ticker(f"starting {plural(how.ranks, 'MPI engine')}")
    while (record := state(folder))["state"] != "ready":
        waits_for = record["message"] if record["state"] == "starting" else ""
        if waits_for:  # time in Slurm's queue does not count towards START_LIMIT
            begin = time.monotonic()
        ticker.tick(waits_for)
        # The check avoids a wait for START_LIMIT after the end of the keeper process.
        if not continues() or time.monotonic() - begin > START_LIMIT:
            return False
        time.sleep(0.05)
    ticker.done()
    return True


def clear(folder: Path) -> None:
    """Remove the files of a cluster that has ended, including connection files with keys.

    Lock files stay, because another process may be about to acquire a lock. All files stay while a
    process holds a lease, because the files record how the cluster has ended.
    """
    start = Lock(folder / "start.lock")
    try:
        if not start.acquire() or is_wanted(folder) or is_held(folder / "keeper.lock"):
            return
        if (folder / "warm.lock").exists() and is_held(folder / "warm.lock"):
            return
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != ".lock" and path.name not in OUTLIVE:
                path.unlink(missing_ok=True)
    finally:
        start.release()


def card_of(name: str, folder: Path, launch_options: Start, connected: bool) -> str:
    """Return a cluster as HTML: its state, its size, and the processes that hold leases on it.

    The host name is omitted, because notebooks are published.
    """
    import psutil

    cores = psutil.cpu_count(logical=True) or 1
    free = psutil.virtual_memory().available / 2**30
    record = state(folder)
    up = record["state"] == "ready"
    ended = f"{record['state']}{': ' if record['message'] else ''}{scrub(record['message'])}"
    crowded = (
        ", more threads than cores"
        if launch_options.workers * launch_options.threads > cores
        else ""
    )
    ranks = f"{launch_options.workers} with {launch_options.threads} threads each"
    here = f"this machine: {cores} cores, {free:.1f} GiB of memory free"
    hosts = plural(len(set(record["hosts"])), "host") if up else launch_options.launcher
    return card(
        f"Cluster {name}",
        pairs(
            {
                "engines": f"up{', claimed warm' if record['warm'] else ''}" if up else ended,
                "this object": "connected" if connected else "closed",
                "ranks": ranks + (crowded if launch_options.is_local else ""),
                "host": here
                if launch_options.is_local
                else f"{hosts}, ranks placed by {launch_options.map_by}",
                "held by": _holders(leases(folder)) if up else "nobody",
            }
        ),
    )


def _holders(processes: list[int]) -> str:
    names = [f"process {pid}" + (" (this one)" if pid == os.getpid() else "") for pid in processes]
    return f"{', '.join(names) or 'a sweep'}; the cluster ends with the last of these processes"


def leases(folder: Path) -> list[int]:
    """Return the pids of the processes with a lease on this folder's cluster, without sweeps.

    The ids come from file names, because opening and closing a lock file would release this
    process's own lock.
    """
    names = [path.name.partition("-")[0] for path in (folder / "leases").glob("*-*")]
    return sorted({int(name) for name in names if name.isdecimal()})


class _Ticker:
    """Shows on stderr what a process waits for: continuously in a terminal, rarely in a log."""

    def __init__(self, label: str) -> None:
        self.label, self.begin = label, time.monotonic()
        self.visible, self.reason, self.printed_at = sys.stderr.isatty(), "", -QUIET
        # A log gets one line, because each rewrite of a line would appear as a further line.
        if not self.visible:
            print(label, end=" … ", file=sys.stderr, flush=True)

    def tick(self, waits_for: str = "") -> None:
        now = time.monotonic()
        # Slurm's estimate of a job's start changes often, which would fill a log.
        if waits_for != self.reason and now - self.printed_at > (1 if self.visible else QUIET):
            self.reason, self.printed_at = waits_for, now
            print(f"\n{waits_for or 'the start continues'}", end=" … ", file=sys.stderr, flush=True)
        if self.visible:
            seconds = time.monotonic() - self.begin
            print(f"\r{self.label} … {seconds:.0f} s ", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        seconds = time.monotonic() - self.begin
        lead = f"\r{self.label} … " if self.visible else ""
        print(f"{lead}ready after {seconds:.1f} s", file=sys.stderr, flush=True)


def last_line(path: Path) -> str:
    """Return the last line of a log that is not blank; "no output" if there is none."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
