"""How the engines of a cluster come up: a keeper is started, and says how they stand."""

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
from labkit.records.endings import End, described

QUIET = 60.0  # seconds between two lines of a log about what is waited for
START_LIMIT = 300.0  # seconds, also on a machine that is busy
# In a cluster's folder: what is asked for after its end.
OUTLIVE = ("last-run", "warm.log")
UNSETTLED = "unsettled"  # in a cluster's folder: its engines were warmed, and nobody has used them
REFUSED = "refused: "  # begins the message of a keeper to which no further try would help


class NotStarted(LabkitError):
    """The engines did not start, which may go better the next time."""


class State(TypedDict):
    """What a keeper says of its cluster."""

    state: str  # starting, ready or ended
    message: str
    rank: int | None  # whose end was that of the cluster
    signal: str  # by which it ended, or ""
    workers: int
    threads: int
    engines: list[int]  # their ids, in rank order
    hosts: list[str]  # of the ranks
    dead: list[int]  # ranks of this machine whose processes have ended, where others outlive them
    how: str  # a Start
    pid: int | None  # of the keeper
    warm: float | None  # seconds that the start took, where it imported all that training needs


def state(folder: Path) -> State:
    """What the keeper of this folder's cluster has said last."""
    try:
        # No schema is asked for: keeper and reader are of one labkit, whose name holds its
        # fingerprint.
        said: State = json.loads((folder / "cluster.json").read_text())
    except FileNotFoundError:
        return State(
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
    return said


def is_up(folder: Path) -> bool:
    """Whether the engines are there, and somebody keeps them."""
    return end(folder) is None


def end(folder: Path) -> End | None:
    """How this folder's cluster has ended; None while it is up.

    Its keeper says so. Of one that is gone without a word, the lock tells.
    """
    kept = is_held(folder / "keeper.lock")
    said = state(folder)  # after the lock: a keeper lets go of it when all is said
    if said["state"] == "ended":
        return End(said["message"], said["rank"], said["signal"])
    if not kept:
        return described("the keeper of the engines", -signal.SIGKILL)
    return None if said["state"] == "ready" else End("the engines are just being started")


def launch(folder: Path, how: Start, warm: bool = False) -> None:
    """Have a keeper start engines and wait for them; a queued job says what it waits for.

    Args:
        folder: of the cluster.
        how: its ranks start.
        warm: they have imported what training needs before they are ready.

    Raises:
        NotStarted: the engines did not start; the message ends with what they said.
        InvalidInput: the keeper refuses to start them, as it would again.
        LabkitError: those of an earlier cluster do not end.
    """
    if how.is_local:
        require_loopback()
    path = folder / "keeper.lock"
    if is_held(path):
        # A start that another has given up goes on for who has come since. A keeper that is just
        # ending must be through before its place is taken.
        if _wait(folder, how, lambda: is_held(path)):
            return
        if is_held(path):
            raise LabkitError(f"cluster {folder.name!r} is ending but does not end")
    # What they say is of an earlier cluster, which may have been "ready".
    for earlier in ("cluster.json", UNSETTLED):
        (folder / earlier).unlink(missing_ok=True)
    with (folder / "keeper.log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "labkit.cluster.keeper", str(folder)]
        keeper = subprocess.Popen(
            [*command, how.to_json(), *([WARM] if warm else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ
            | bytecode_variables()
            | utf8_variables()
            | {imports.VARIABLE: imports.folder()},
            start_new_session=True,  # Ctrl-C in a terminal is not meant for the engines
        )
    # A keeper whose start was given up a moment ago may have been quicker to take the lock.
    if not _wait(folder, how, lambda: keeper.poll() is None or is_held(path)):
        told = state(folder)["message"] or last_line(folder / "keeper.log")
        failure = InvalidInput if told.startswith(REFUSED) else NotStarted
        raise failure(f"the engines did not start: {told.removeprefix(REFUSED)}")


def _wait(folder: Path, how: Start, goes_on: Callable[[], bool]) -> bool:
    """Wait for engines while their start goes on, and not too long; whether they are up."""
    begin, shown = time.monotonic(), _Ticker(f"starting {plural(how.ranks, 'MPI engine')}")
    while (said := state(folder))["state"] != "ready":
        waits_for = said["message"] if said["state"] == "starting" else ""
        if waits_for:  # in a queue, as long as it takes
            begin = time.monotonic()
        shown.tick(waits_for)
        # The keeper's own end is seen at once, instead of after the limit.
        if not goes_on() or time.monotonic() - begin > START_LIMIT:
            return False
        time.sleep(0.05)
    shown.done()
    return True


def clear(folder: Path) -> None:
    """Remove the files of a cluster that has ended, connections with their keys among them.

    Locks stay, since another process may be about to take them. All files stay where a process
    still claims the cluster: they say how it has ended.
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


def card_of(name: str, folder: Path, how: Start, connected: bool) -> str:
    """A cluster as HTML: whether it is up, how large it is, and who holds it.

    The machine has no name here: what a notebook shows is passed on.
    """
    import psutil

    cores = psutil.cpu_count(logical=True) or 1
    free = psutil.virtual_memory().available / 2**30
    said = state(folder)
    up = said["state"] == "ready"
    ended = f"{said['state']}{': ' if said['message'] else ''}{scrub(said['message'])}"
    crowded = ", more than there are cores" if how.workers * how.threads > cores else ""
    here = f"this machine: {cores} cores, {free:.1f} GiB of memory free"
    hosts = plural(len(set(said["hosts"])), "host") if up else how.launcher
    return card(
        f"Cluster {name}",
        pairs(
            {
                "engines": f"up{', taken warm' if said['warm'] else ''}" if up else ended,
                "this object": "connected" if connected else "closed",
                "ranks": f"{how.workers} of {how.threads} threads{crowded if how.is_local else ''}",
                "host": here if how.is_local else f"{hosts}, ranks placed by {how.place}",
                "held by": _holders(leases(folder)) if up else "nobody",
            }
        ),
    )


def _holders(processes: list[int]) -> str:
    told = [f"process {pid}" + (" (this one)" if pid == os.getpid() else "") for pid in processes]
    return f"{', '.join(told) or 'a sweep'}; it ends with the last one"


def leases(folder: Path) -> list[int]:
    """The processes that hold this folder's cluster, as numbers; a sweep's hold has none.

    Read from names: to look at a lock from inside its own process would give it away.
    """
    names = [path.name.partition("-")[0] for path in (folder / "leases").glob("*-*")]
    return sorted({int(name) for name in names if name.isdecimal()})


class _Ticker:
    """Says what is going on while nothing else does: in a terminal by the second."""

    def __init__(self, what: str) -> None:
        self.what, self.begin = what, time.monotonic()
        self.visible, self.told, self.told_at = sys.stderr.isatty(), "", -QUIET
        # In a log, one line: what is rewritten there would stand as many.
        if not self.visible:
            print(what, end=" … ", file=sys.stderr, flush=True)

    def tick(self, waits_for: str = "") -> None:
        now = time.monotonic()
        # Estimates change by the second; a log is to be read.
        if waits_for != self.told and now - self.told_at > (1 if self.visible else QUIET):
            self.told, self.told_at = waits_for, now
            print(f"\n{waits_for or 'it goes on'}", end=" … ", file=sys.stderr, flush=True)
        if self.visible:
            seconds = time.monotonic() - self.begin
            print(f"\r{self.what} … {seconds:.0f} s ", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        seconds = time.monotonic() - self.begin
        lead = f"\r{self.what} … " if self.visible else ""
        print(f"{lead}ready after {seconds:.1f} s", file=sys.stderr, flush=True)


def last_line(path: Path) -> str:
    """What a log ends with."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
