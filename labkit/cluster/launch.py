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
from labkit.common.files import bytecode_variables
from labkit.common.html import card, pairs
from labkit.common.machine import require_loopback
from labkit.common.privacy import scrub
from labkit.common.terminal import utf8_variables
from labkit.common.units import plural
from labkit.records.endings import End, describe_exit

QUIET = 60.0  # In a log, lines about the same wait are at least 60 s (QUIET) apart.
# A cluster has 300 s (START_LIMIT) to start, which is enough on a busy machine.
START_LIMIT = 300.0
# The files in `OUTLIVE` remain in a cluster's folder after the cluster's end.
OUTLIVE = ("last-run", "warm.log")
# The file `unsettled` in a cluster's folder marks unclaimed engines. The command `labkit prestart`
# starts engines before a process claims the engines.
UNSETTLED = "unsettled"
# The prefix "refused: " marks a refusal in the message of a keeper process. After a refusal,
# another attempt to start the cluster would also fail.
REFUSED = "refused: "


class NotStarted(LabkitError):
    """Raised when the engines did not start; a further attempt may succeed."""


class ClusterState(TypedDict):
    """The state of a cluster, as its keeper process writes it to cluster.json."""

    state: str  # The state of a cluster is "starting", "ready" or "ended".
    message: str
    rank: int | None  # `rank` is the rank whose failure has ended the cluster, or None.
    signal: str  # `signal` is the name of the signal that has ended the cluster, or "".
    workers: int
    threads: int
    engines: list[int]  # `engines` contains the id of each rank's engine, in rank order.
    hosts: list[str]
    # `dead` lists the ranks of this machine that have died; only a fault-tolerant cluster continues
    # without them.
    dead: list[int]
    how: str  # `how` contains the launch options (class `Start`) as JSON text.
    pid: int | None  # `pid` is the id of the keeper process, which starts and ends the cluster.
    # `warm` is the number of seconds that the start of warm engines took. If the engines are not
    # warm, `warm` is None.
    warm: float | None


def state(folder: Path) -> ClusterState:
    """Return the cluster state that the keeper process has last written to `folder`."""
    try:
        # `state` does not check the schema version of cluster.json. Only the same version of labkit
        # can have written the file cluster.json. The name of the cluster's folder contains a hash
        # of labkit's source.
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
    """Return how the cluster in `folder` has ended, or None while it is running.

    When a cluster ends, its keeper process writes the cause into the state (cluster.json). A free
    lock without a recorded cause means that the keeper process was killed.
    """
    has_keeper = is_held(folder / "keeper.lock")
    # `end` reads the state after it tests the lock. A keeper process writes the state before it
    # releases the lock.
    record = state(folder)
    if record["state"] == "ended":
        return End(record["message"], record["rank"], record["signal"])
    if not has_keeper:
        return describe_exit("the parent process of the engines", -signal.SIGKILL)
    return None if record["state"] == "ready" else End("the engines are starting")


def launch(folder: Path, launch_options: Start, warm: bool = False) -> None:
    """Start a keeper process and wait for the engines; print why a Slurm job is queued.

    Args:
        folder: Folder of the cluster.
        launch_options: Launch options of the ranks.
        warm: Whether the ranks import the modules for training before they count as ready.

    Raises:
        NotStarted: The engines did not start; the message ends with their output.
        InvalidInput: The launch options are rejected, so another attempt would fail, too.
        LabkitError: The engines of an earlier cluster do not end in time.
    """
    imports.require("train")
    if launch_options.is_local:
        require_loopback()
    path = folder / "keeper.lock"
    if is_held(path):
        # Another process may have begun to start the cluster and then stopped waiting. The function
        # `launch` waits for the start that the other process began. If the keeper process is ending
        # its cluster, `launch` waits until the keeper process has ended.
        if _wait(folder, launch_options, lambda: is_held(path)):
            return
        if is_held(path):
            raise LabkitError(
                f"cluster {folder.name!r} was told to end, but it is still running; end its "
                "processes, or give another name"
            )
    # Files of an earlier cluster are removed, because they may contain the state "ready".
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
            # A process in a new session does not receive the terminal's Ctrl-C, which would end the
            # engines.
            start_new_session=True,
        )
    # If an earlier keeper process holds the lock, the new keeper process exits. The function
    # `launch` then waits for the earlier keeper process.
    if not _wait(folder, launch_options, lambda: keeper.poll() is None or is_held(path)):
        reason = state(folder)["message"] or last_line(folder / "keeper.log")
        failure = InvalidInput if reason.startswith(REFUSED) else NotStarted
        raise failure(f"the engines did not start: {reason.removeprefix(REFUSED)}")


def _wait(folder: Path, how: Start, continues: Callable[[], bool]) -> bool:
    """Wait for engines until `continues()` is false, or START_LIMIT; return whether they run."""
    begin, ticker = time.monotonic(), _Ticker(f"starting {plural(how.ranks, 'MPI engine')}")
    while (record := state(folder))["state"] != "ready":
        waits_for = record["message"] if record["state"] == "starting" else ""
        # The time limit START_LIMIT does not include the waiting time in Slurm's queue.
        if waits_for:
            begin = time.monotonic()
        ticker.tick(waits_for)
        # `continues` returns False when the keeper process has ended. The function `_wait` then
        # returns before the time limit START_LIMIT.
        if not continues() or time.monotonic() - begin > START_LIMIT:
            return False
        time.sleep(0.05)
    ticker.done()
    return True


def clear(folder: Path) -> None:
    """Remove the files of an ended cluster, including the connection files with its keys.

    Lock files are not removed, because another process may be about to acquire a lock. The files
    record how the cluster has ended. The files of an ended cluster remain until no process uses the
    cluster.
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
    """Return an HTML summary of a cluster: its state, its size, and the holders of its leases.

    The HTML omits the host name, because notebooks are published.
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
    """Return the pids of the processes that hold leases on a cluster, without sweeps.

    The function reads the process ids from file names. A process that closes a lock file would
    release its own lock.
    """
    names = [path.name.partition("-")[0] for path in (folder / "leases").glob("*-*")]
    return sorted({int(name) for name in names if name.isdecimal()})


class _Ticker:
    """Prints on stderr what a process waits for: repeatedly in a terminal, rarely in a log."""

    def __init__(self, label: str) -> None:
        self.label, self.begin = label, time.monotonic()
        self.visible, self.reason, self.printed_at = sys.stderr.isatty(), "", -QUIET
        # A log shows each update of a line as another line. In a log, labkit therefore prints the
        # label only once.
        if not self.visible:
            print(label, end=" … ", file=sys.stderr, flush=True)

    def tick(self, waits_for: str = "") -> None:
        now = time.monotonic()
        # A log gets few lines about Slurm's estimate of the waiting time, because the estimate
        # changes often.
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
    """Return the last nonblank line of a log, or "no output" without one."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
