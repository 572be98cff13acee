"""Warm engines: a cluster that was started in advance and has imported the modules of training.

    python -m labkit.cluster.warm FOLDER START SECONDS

The prestart process holds a lease on a cluster with warm engines. The cluster has the default name
for the given launch options. The first `Cluster` with the same launch options claims the warm
engines. A `Cluster` holds the start lock while it claims warm engines. The `Cluster` ends the
prestart process's lease and acquires its own lease. The claimed cluster then belongs to the process
that has claimed it, and ends with that process. Because the claimed cluster ends with its process,
no process sees the state of another process. The prestart process warms the next cluster only after
the claimed cluster and its users have ended. The start of the next cluster then does not disturb
the users' measurements.
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
from labkit.cluster.lease import (
    KEEPER,
    SHAPING,
    WARM,
    Lease,
    Lock,
    absolute,
    default_name,
    folder_of,
    is_held,
    locked,
    wait_until_free,
)
from labkit.cluster.start import Start
from labkit.common import imports
from labkit.common.errors import LabkitError
from labkit.common.files import bytecode_variables, runtime_folder
from labkit.common.machine import check_ranks
from labkit.common.units import plural
from labkit.records import store
from labkit.records.endings import terminate

if TYPE_CHECKING:
    import ipyparallel

# The files warm.lock and warm.json are in the folder of a cluster.
LOCK, FILE = "warm.lock", "warm.json"
POLL_INTERVAL = 0.25  # seconds
ENDS = 90.0  # labkit waits at most 90 s (ENDS) for the end of a cluster.
# Warm engines inherit environment variables with a prefix in `CARRIED` from the terminal in which
# `labkit prestart` runs. A process that claims warm engines gives the engines its own environment
# variables. The variables of the claiming process replace the inherited variables of the engines.
CARRIED = ("PATH", "HOME", "USER", "TMP", "TEMP", "XDG_", "LABKIT_", "PYTHON", "PWD")


class WarmStatus(TypedDict):
    """The status of engines that a process keeps warm."""

    # The state of warm engines is "warming", "warm", or "used" after a process has claimed the
    # engines.
    state: str
    workers: int
    threads: int
    pid: int  # `pid` is the id of the process that keeps the engines warm.
    seconds: float  # `seconds` is the time that the last start of engines took.
    bytes: int  # `bytes` is the total unique memory (USS) of all processes of the cluster.
    idle: float  # `idle` is the time in seconds after which unused engines end.
    since: float  # `since` is the Unix time at which the status was written.


class WarmPool(NamedTuple):
    """Keeps engines warm for clusters with the same launch options.

    Attributes:
        folder: Folder of the cluster.
        how: Launch options of the ranks.
        idle: Seconds after which unused engines end.
    """

    folder: Path
    how: Start
    idle: float

    def run(self) -> None:
        """Warm one cluster after another, until no process claims one for `idle` seconds."""
        while self._keep_warm() and self._wait_for_users():
            pass

    def _keep_warm(self) -> bool:
        """Keep a cluster warm; return True if a process claims the cluster or already uses it."""
        lease = None
        try:
            with locked(self.folder / "start.lock"):
                if launch.is_up(self.folder):
                    return True
                check_ranks(self.how.ranks)
                self._write_status("warming")
                lease = Lease(self.folder, WARM)
                launch.launch(self.folder, self.how, warm=True)
                # The field `warm` of the cluster's state is None if another process has started the
                # engines.
                if launch.state(self.folder)["warm"] is None:
                    return True
            self._write_status("warm")
            end = time.monotonic() + self.idle
            while lease.path.exists() and time.monotonic() < end:
                if (how := launch.end(self.folder)) is not None:
                    raise LabkitError(f"the warm engines have ended: {how.message}")
                time.sleep(POLL_INTERVAL)
            return not lease.path.exists()
        finally:
            if lease is not None:
                self._release(lease)

    def _release(self, lease: Lease) -> None:
        """Release the lease; if the cluster is unclaimed, wait until the cluster has ended."""
        with locked(self.folder / "start.lock"):
            claimed = not lease.path.exists()
            lease.release()
        end = time.monotonic() + ENDS
        # The cluster's keeper process is a child of the prestart process. The keeper process ends
        # only after the cluster's engines.
        while not claimed and _wait_for_children() and time.monotonic() < end:
            claimed = bool(launch.leases(self.folder))

    def _wait_for_users(self) -> bool:
        """Wait until the cluster and its users have ended; return False after `idle` seconds."""
        self._write_status("used")
        users: set[int] = set()
        last = time.monotonic()
        while time.monotonic() - last < self.idle:
            users |= set(launch.leases(self.folder))
            if is_held(self.folder / "keeper.lock"):
                last = time.monotonic()
            elif not any(map(psutil.pid_exists, users)):
                return True
            time.sleep(POLL_INTERVAL)
        return False

    def _write_status(self, state: str) -> None:
        record = launch.state(self.folder)
        status = WarmStatus(
            state=state,
            workers=self.how.workers,
            threads=self.how.threads,
            pid=os.getpid(),
            seconds=(record["warm"] or 0.0) if state == WARM else 0.0,
            bytes=memory(record["pid"]) if state == WARM and record["pid"] else 0,
            idle=self.idle,
            since=time.time(),
        )
        store.write_json(self.folder / FILE, status)


def start(launch_options: Start, idle: float) -> tuple[WarmStatus, bool]:
    """Keep engines warm in a process that continues after this process has ended.

    Args:
        launch_options: Launch options of the ranks.
        idle: Seconds after which unused engines end.

    Returns:
        The status of the engines, and whether they were already kept warm.

    Raises:
        InvalidInput: The machine is too small for the engines.
        LabkitError: The engines did not start.
    """
    folder = folder_of(default_name(launch_options))
    folder.mkdir(exist_ok=True, mode=0o700)
    if (status := read_status(folder)) is not None:
        return status, True
    check_ranks(launch_options.ranks)
    # The status file of an earlier process is no longer valid.
    (folder / FILE).unlink(missing_ok=True)
    with (folder / "warm.log").open("wb") as log:
        words = [sys.executable, "-P", "-m", "labkit.cluster.warm"]
        keeper = subprocess.Popen(
            [*words, str(folder), launch_options.to_json(), str(idle)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The working directory is the cluster's folder, because it contains no Python modules
            # that an import could find.
            cwd=folder,
            env=inherited(),
            start_new_session=True,
        )
    try:
        while (current := read_status(folder)) is None or current["state"] == "warming":
            if keeper.poll() is not None:
                raise LabkitError(launch.last_line(folder / "warm.log"))
            time.sleep(POLL_INTERVAL)
    except KeyboardInterrupt:
        keeper.terminate()
        keeper.wait()
        raise
    return current, False


def inherited() -> dict[str, str]:
    """Return the environment variables for processes that start in advance."""
    variables = {k: v for k, v in os.environ.items() if k.startswith((*SHAPING, *CARRIED))}
    return absolute(variables) | bytecode_variables()


def stop(workers: int | None = None, threads: int | None = None) -> list[WarmStatus]:
    """End the processes that keep engines warm; clusters already in use continue.

    Args:
        workers: Number of workers of the processes to end. None means any number.
        threads: Number of threads of the processes to end. None means any number.

    Returns:
        The last status of the engines of each ended process.

    Raises:
        LabkitError: A process that keeps engines warm does not end.
    """
    ended = []
    for folder in sorted(runtime_folder("clusters").glob("*")):
        status = read_status(folder)
        if status is None or workers not in (None, status["workers"]):
            continue
        if threads not in (None, status["threads"]):
            continue
        # The process that keeps engines warm may have ended in the meantime.
        with suppress(ProcessLookupError):
            os.kill(status["pid"], signal.SIGTERM)
        if not wait_until_free(folder / LOCK, ENDS):
            raise LabkitError(
                f"process {status['pid']}, which keeps engines warm, did not end after SIGTERM"
            )
        ended.append(status)
    return ended


def claim_warm_engines(folder: Path, client: ipyparallel.Client) -> None:
    """Give this process's environment to warm engines that no process has claimed."""
    mark = folder / launch.UNSETTLED
    if not mark.exists():
        return
    # Two processes may claim the engines at once. The second process waits for start.lock, and then
    # finds the engines claimed.
    with locked(folder / "start.lock"):
        if mark.exists():
            here = {"PWD": os.getcwd(), imports.VARIABLE: imports.extra_folders()}
            environment = os.environ | bytecode_variables() | here
            client[:].apply_sync(adopt_environment, os.getcwd(), environment)
            mark.unlink()
            record = launch.state(folder)
            engines = f"{plural(len(record['engines']), 'MPI engine')}, already warm"
            print(
                f"{engines} after a start of {record['warm'] or 0:.1f} s",
                file=sys.stderr,
                flush=True,
            )


def adopt_environment(folder: str, environment: Mapping[str, str]) -> None:
    """Change this engine's working directory and environment to those of the claiming process."""
    os.chdir(folder)
    variables = {**environment, KEEPER: os.environ[KEEPER]}
    for name in [n for n in os.environ if n.startswith(CARRIED) and n not in variables]:
        # The variable comes from the terminal of `labkit prestart`, not from the claiming process.
        del os.environ[name]
    for name, value in variables.items():
        # Environment variables that mpiexec, ipykernel or TensorFlow have set in the engine keep
        # their values.
        if name not in os.environ or name.startswith(CARRIED):
            os.environ[name] = value
    imports.append_inherited()


def read_status(folder: Path) -> WarmStatus | None:
    """Return the status of the warm cluster in `folder`; None if no process keeps it warm."""
    if not (folder / LOCK).exists() or not is_held(folder / LOCK):
        return None
    try:
        status: WarmStatus = json.loads((folder / FILE).read_text())
    except FileNotFoundError:  # The process that keeps engines warm has not written its status yet.
        return None
    return status


def _wait_for_children() -> list[psutil.Process]:
    """Wait a short time, and return the child processes that are still running."""
    running: list[psutil.Process] = psutil.wait_procs(psutil.Process().children(), POLL_INTERVAL)[1]
    return running


def memory(keeper: int) -> int:
    """Return the unique memory in bytes of this process, a keeper process and its descendants."""
    total = psutil.Process().memory_full_info().uss
    # Engines that a process has claimed may already have ended.
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(keeper)
        for process in (started, *started.children(recursive=True)):
            total += process.memory_full_info().uss
    return int(total)


def main(folder: Path, launch_options: Start, idle: float) -> None:
    """Keep engines warm until they are unused for `idle` seconds, or until SIGTERM arrives."""
    lock, end = Lock(folder / LOCK), time.monotonic() + 2
    while not lock.acquire():  # A process that only tests the lock holds the lock for a short time.
        if time.monotonic() > end:
            raise SystemExit(
                "another process already keeps engines with these numbers of ranks and threads warm"
            )
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, terminate)
    try:
        WarmPool(folder, launch_options, idle).run()
    except LabkitError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:  # `terminate` raises this exception on SIGTERM
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Start.from_json(sys.argv[2]), float(sys.argv[3]))
