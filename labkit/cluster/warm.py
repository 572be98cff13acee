"""Warm engines: a cluster that has imported what training needs, and waits for its one user.

    python -m labkit.cluster.warm FOLDER START SECONDS

The process of this module holds a lease on the cluster of the usual name for a shape. The first
`Cluster(workers=…)` that comes ends this lease as it takes its own, under the start lock. From
there on the cluster is as if its user had started it, and ends with the user: nobody finds what
another has left. The next one is warmed when the cluster and those who used it have ended, so that
it disturbs nothing that they measure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import psutil

from labkit.cluster import launch
from labkit.cluster.cluster_name import SHAPING, absolute, folder_of, usual_name
from labkit.cluster.lease import KEEPER, WARM, Lease, Lock, is_held, locked, wait_until_free
from labkit.cluster.start import Start
from labkit.common import imports
from labkit.common.capacity import check_ranks
from labkit.common.errors import LabkitError
from labkit.common.paths import bytecode_variables, runtime_folder
from labkit.common.units import plural
from labkit.records import store
from labkit.records.endings import terminate

if TYPE_CHECKING:
    import ipyparallel

LOCK, FILE = "warm.lock", "warm.json"  # in a cluster's folder
LOOK_EVERY = 0.25  # seconds
ENDS = 90.0  # seconds in which a cluster has ended
# All that warm engines have of a terminal; their user brings the rest.
CARRIED = ("PATH", "HOME", "USER", "TMP", "TEMP", "XDG_", "LABKIT_", "PYTHON", "PWD")


class Standing(TypedDict):
    """What is said of engines that are kept warm."""

    state: str  # warming, warm, or used: others have such a cluster
    workers: int
    threads: int
    pid: int  # of who keeps them
    seconds: float  # that the last start took
    bytes: int  # of memory that its processes have alone
    idle: float  # seconds after which they end without a user
    since: float  # the epoch's seconds


class Pool(NamedTuple):
    """Who keeps the engines of one shape warm.

    Attributes:
        folder: of the cluster.
        how: its ranks start.
        idle: seconds after which it ends, without a user.
    """

    folder: Path
    how: Start
    idle: float

    def keep(self) -> None:
        """Warm one cluster after the other, until one of them finds no user."""
        while self._stand() and self._wait_for_users():
            pass

    def _stand(self) -> bool:
        """Keep a cluster warm; whether it has found a user, or its user was there before."""
        lease = None
        try:
            with locked(self.folder / "start.lock"):
                if launch.is_up(self.folder):
                    return True
                check_ranks(self.how.ranks)
                self._say("warming")
                lease = Lease(self.folder, WARM)
                launch.launch(self.folder, self.how, warm=True)
                if launch.state(self.folder)["warm"] is None:  # a user's start, given up
                    return True
            self._say("warm")
            end = time.monotonic() + self.idle
            while lease.path.exists() and time.monotonic() < end:
                if (how := launch.end(self.folder)) is not None:
                    raise LabkitError(f"the warm engines have ended: {how.message}")
                time.sleep(LOOK_EVERY)
            return not lease.path.exists()
        finally:
            if lease is not None:
                self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        """Give the lease back, and see the end of a cluster that nobody has taken."""
        with locked(self.folder / "start.lock"):
            taken = not lease.path.exists()
            lease.release()
        end = time.monotonic() + ENDS
        # Its keeper, a child of this process, is the last of it.
        while not taken and _wait_for_children() and time.monotonic() < end:
            taken = bool(launch.leases(self.folder))

    def _wait_for_users(self) -> bool:
        """Wait for the end of the cluster and of those who have used it; False: for too long."""
        self._say("used")
        users: set[int] = set()
        last = time.monotonic()
        while time.monotonic() - last < self.idle:
            users |= set(launch.leases(self.folder))
            if is_held(self.folder / "keeper.lock"):
                last = time.monotonic()
            elif not any(map(psutil.pid_exists, users)):
                return True
            time.sleep(LOOK_EVERY)
        return False

    def _say(self, state: str) -> None:
        said = launch.state(self.folder)
        told = Standing(
            state=state,
            workers=self.how.workers,
            threads=self.how.threads,
            pid=os.getpid(),
            seconds=(said["warm"] or 0.0) if state == WARM else 0.0,
            bytes=memory(said["pid"]) if state == WARM and said["pid"] else 0,
            idle=self.idle,
            since=time.time(),
        )
        store.write_json(self.folder / FILE, told)


def start(how: Start, idle: float) -> tuple[Standing, bool]:
    """Keep engines of this shape warm, from a process that outlives this one.

    Args:
        how: they start.
        idle: seconds after which they end, without a user.

    Returns:
        what is said of them, and whether they were kept already.

    Raises:
        InvalidInput: this machine is too small for them.
        LabkitError: they did not start.
    """
    folder = folder_of(usual_name(how))
    folder.mkdir(exist_ok=True, mode=0o700)
    if (there := standing(folder)) is not None:
        return there, True
    check_ranks(how.ranks)
    (folder / FILE).unlink(missing_ok=True)  # an earlier one's
    with (folder / "warm.log").open("wb") as log:
        words = [sys.executable, "-P", "-m", "labkit.cluster.warm"]
        keeper = subprocess.Popen(
            [*words, str(folder), how.to_json(), str(idle)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,  # where no module of anybody's lies
            env=inherited(),
            start_new_session=True,
        )
    try:
        while (said := standing(folder)) is None or said["state"] == "warming":
            if keeper.poll() is not None:
                raise LabkitError(launch.last_line(folder / "warm.log"))
            time.sleep(LOOK_EVERY)
    except KeyboardInterrupt:
        keeper.terminate()
        keeper.wait()
        raise
    return said, False


def inherited() -> dict[str, str]:
    """The variables of who starts engines for others: those that shape engines, and few more."""
    own = {k: v for k, v in os.environ.items() if k.startswith((*SHAPING, *CARRIED))}
    return absolute(own) | bytecode_variables()


def stop(workers: int | None = None, threads: int | None = None) -> list[Standing]:
    """End those who keep engines warm, of this shape or all; clusters in use go on.

    Returns:
        what was said of each.

    Raises:
        LabkitError: one does not end.
    """
    ended = []
    for folder in sorted(runtime_folder("clusters").glob("*")):
        said = standing(folder)
        if said is None or workers not in (None, said["workers"]):
            continue
        if threads not in (None, said["threads"]):
            continue
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(said["pid"], signal.SIGTERM)
        if not wait_until_free(folder / LOCK, ENDS):
            raise LabkitError(f"process {said['pid']}, which keeps engines warm, does not end")
        ended.append(said)
    return ended


def take_over(folder: Path, client: ipyparallel.Client) -> None:
    """Let warm engines be as this process would have started them, where nobody has used them."""
    mark = folder / launch.UNSETTLED
    if not mark.exists():
        return
    with locked(folder / "start.lock"):  # who comes at the same moment waits, and uses them then
        if mark.exists():
            here = {"PWD": os.getcwd(), imports.VARIABLE: imports.folder()}
            own = os.environ | bytecode_variables() | here
            client[:].apply_sync(settle, os.getcwd(), own)
            mark.unlink()
            said = launch.state(folder)
            told = f"{plural(len(said['engines']), 'MPI engine')}, kept warm since a start of"
            print(f"{told} {said['warm'] or 0:.1f} s", file=sys.stderr, flush=True)


def settle(folder: str, environment: Mapping[str, str]) -> None:
    """Be, on a warm engine, where and with what who takes it would have started it."""
    os.chdir(folder)
    own = {**environment, KEEPER: os.environ[KEEPER]}
    for name in [each for each in os.environ if each.startswith(CARRIED) and each not in own]:
        del os.environ[name]  # another terminal's
    for name, value in own.items():
        # All else that is there has been set since: by mpiexec, ipykernel, TensorFlow.
        if name not in os.environ or name.startswith(CARRIED):
            os.environ[name] = value
    imports.add_inherited()


def standing(folder: Path) -> Standing | None:
    """What is said of the cluster of this folder by who keeps it warm; None: nobody does."""
    if not (folder / LOCK).exists() or not is_held(folder / LOCK):
        return None
    try:
        said: Standing = json.loads((folder / FILE).read_text())
    except FileNotFoundError:  # it has just come
        return None
    return said


def _wait_for_children() -> list[psutil.Process]:
    """Those that go on after a moment."""
    left: list[psutil.Process] = psutil.wait_procs(psutil.Process().children(), LOOK_EVERY)[1]
    return left


def memory(keeper: int) -> int:
    """Bytes that would be free without this process, a keeper, and those that it has started."""
    found = psutil.Process().memory_full_info().uss
    with suppress(psutil.NoSuchProcess):  # somebody has taken them, and they have ended
        started = psutil.Process(keeper)
        for each in (started, *started.children(recursive=True)):
            found += each.memory_full_info().uss
    return int(found)


def main(folder: Path, how: Start, idle: float) -> None:
    """Keep engines warm until they are not wanted for too long, or SIGTERM."""
    lock, end = Lock(folder / LOCK), time.monotonic() + 2
    while not lock.acquire():  # who asks whether it is held holds it for a moment
        if time.monotonic() > end:
            raise SystemExit("engines of this shape are being warmed already")
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, terminate)
    try:
        Pool(folder, how, idle).keep()
    except LabkitError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:  # what `terminate` raises
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Start.of_json(sys.argv[2]), float(sys.argv[3]))
