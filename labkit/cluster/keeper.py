"""The keeper of one cluster: starts controller and engines, and ends them with the last lease.

    python -m labkit.cluster.keeper FOLDER WORKERS THREADS

It is the parent of everything that a cluster starts, so nothing is left when it has ended;
engines and controller also end by themselves when it is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, MPIEngineSetLauncher

from labkit.cluster.lease import Lock, is_wanted, locked
from labkit.common.errors import LabkitError
from labkit.communicator import launcher
from labkit.records import store

LOOK_EVERY = 0.5  # seconds
CONTROLLER_LOG = "controller.log"
BEAT = 0.5  # seconds between two heartbeats: an engine is registered with its second
GIVEN_UP = 30.0  # seconds without a heartbeat after which an engine counts as gone
TRIES = 5  # to start: ports that were free when they were chosen may be taken a moment later


class Controller(LocalControllerLauncher):
    """The controller, under watch."""

    # Lists, as the traits that they stand for.
    controller_cmd = [sys.executable, "-m", "labkit.cluster.engine", "controller"]  # noqa: RUF012

    def _output_file_default(self) -> str:
        # Beside the keeper's: one for all tries, each of which begins it anew.
        return str(Path(self.profile_dir).parent / CONTROLLER_LOG)

    def get_output(self, remove: bool = False) -> str:
        """What it said; kept, since a controller that has ended is asked why."""
        return str(super().get_output(remove=False))


class Engines(MPIEngineSetLauncher):
    """All ranks under one mpiexec, each an engine under watch."""

    mpi_cmd = launcher.mpiexec()
    engine_cmd = [sys.executable, "-m", "labkit.cluster.engine", "engine"]  # noqa: RUF012
    engine_args = ["--IPEngine.enable_nanny=False"]  # noqa: RUF012 - the keeper watches


class _PortTaken(LabkitError):
    """Another program has taken a port that the controller had chosen."""


class Keeper:
    """Holds one cluster.

    Args:
        folder: where the cluster's files are.
        workers: ranks.
        threads: TensorFlow's threads in each.
    """

    def __init__(self, folder: Path, workers: int, threads: int) -> None:
        self.folder, self.workers, self.threads = folder, workers, threads
        self.cluster: ipp.Cluster = None  # until it is started
        self.engines: list[int] = []  # their ids, in rank order

    def start(self) -> None:
        """Start controller and engines; write cluster.json when all engines have registered."""
        # Of this process, and so of all that it starts: threads are settled when TensorFlow is
        # imported.
        os.environ.update(launcher.environment(self.threads))
        os.environ["LABKIT_KEEPER"] = str(self.folder / "keeper.lock")
        for left in reversed(range(TRIES)):
            try:
                self._start()
                break
            except Exception:
                if not self._port_taken() or not left:
                    raise
                self.stop()

    def _start(self) -> None:
        # A launcher appends to its log: what an earlier try has said would be taken for this one's.
        (self.folder / CONTROLLER_LOG).unlink(missing_ok=True)
        self.cluster = ipp.Cluster(
            n=self.workers,
            controller=Controller,
            engines=Engines,
            cluster_id="labkit",
            profile_dir=str(self.folder / "profile"),
            controller_args=[
                # Its database of tasks keeps every result; ours go straight to the client.
                "--nodb",
                f"--HeartMonitor.period={round(1e3 * BEAT)}",
                f"--HeartMonitor.max_heartmonitor_misses={round(GIVEN_UP / BEAT)}",
            ],
            delay=0,
            load_profile=False,
            shutdown_atexit=False,  # the keeper ends its children itself
            log_level=logging.WARNING,
        )
        self.cluster.start_cluster_sync()
        client = self.cluster.connect_client_sync()
        while len(client.ids) < self.workers:
            if self.engines_ended():
                raise LabkitError(f"mpiexec ended: {self._said()}")
            if self._port_taken():
                raise _PortTaken("a port of the controller is taken")
            time.sleep(0.05)
        if self._port_taken():  # by a part that registers nobody: calls would never come back
            raise _PortTaken("a port of the controller is taken")
        # Asked once, while the engines are idle: who attaches later may find them at work.
        ranks = client[:].apply_sync(_world_rank)
        self.engines = [engine for _, engine in sorted(zip(ranks, client.ids, strict=True))]
        client.close()
        self.say("ready")

    def keep(self) -> str:
        """Wait until nobody wants the cluster any more, or its engines have ended; say which."""
        last_wanted = time.monotonic()
        while True:
            time.sleep(LOOK_EVERY)
            if self.engines_ended():
                return "the engines have ended"
            if is_wanted(self.folder):
                last_wanted = time.monotonic()
            # Twice: a cell that makes its cluster anew lets go of one lease before it takes the
            # next.
            elif time.monotonic() - last_wanted > 2 * LOOK_EVERY:
                return "nobody holds a lease"

    def engines_ended(self) -> bool:
        """Whether mpiexec is gone."""
        return self.cluster.engine_set is None or self.cluster.engine_set.poll() is not None

    def _port_taken(self) -> bool:
        """Whether the controller, or a part of it, has found its port taken."""
        log = self.folder / CONTROLLER_LOG
        return log.exists() and "Address already in use" in log.read_text(errors="replace")

    def _said(self) -> str:
        lines = self.cluster.engine_set.get_output().splitlines()
        told = [line.strip() for line in lines if line.strip(" -")]
        return " ".join(told)[-500:] or "it said nothing"

    def say(self, state: str, message: str = "") -> None:
        """Write cluster.json."""
        shape = {"workers": self.workers, "threads": self.threads, "engines": self.engines}
        said = {"state": state, "message": message, **shape, "pid": os.getpid()}
        store.write_json(self.folder / "cluster.json", said)

    def stop(self) -> None:
        """End every process that this one has started."""
        # Recursive, and asked before any has ended: the children of one that is gone have another
        # parent.
        children = psutil.Process().children(recursive=True)
        for child in children:
            _signal(child, signal.SIGTERM)
        _, alive = psutil.wait_procs(children, timeout=2)
        for child in alive:
            _signal(child, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=2)


def _world_rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def main(folder: Path, workers: int, threads: int) -> None:
    """Keep a cluster until nobody wants it."""
    lock = Lock(folder / "keeper.lock")
    # Who asks whether it is held holds it for a moment.
    tries = 0
    while not lock.acquire():
        tries += 1
        if tries > 40:
            raise SystemExit("this cluster has a keeper already")
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keeper = Keeper(folder, workers, threads)

    def end(message: str) -> None:
        # Whoever is impatient must not interrupt the tidying up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keeper.say("ended", message)
        keeper.stop()
        lock.release()

    keeper.say("starting")
    try:
        keeper.start()
    except BaseException as error:  # the process that starts us waits, and holds the start lock
        end(f"{type(error).__name__}: {error}")
        raise
    try:
        while True:
            message = keeper.keep()
            # Under the start lock: who has come in the meantime keeps the cluster up, and who
            # comes now waits, and then starts a cluster of their own.
            with locked(folder / "start.lock"):
                if keeper.engines_ended() or not is_wanted(folder):
                    return end(message)
    except BaseException as error:
        with locked(folder / "start.lock"):
            end("stopped" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
