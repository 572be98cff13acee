"""The keeper process of a cluster, which starts and ends the cluster's controller and engines.

    python -m labkit.cluster.keeper FOLDER START [warm]

The keeper process ends the cluster when no process holds a lease on the cluster. The keeper process
is the parent of all processes of the cluster. When the keeper process has ended, no process of the
cluster is left. Engines and controller also exit by themselves when the keeper process is killed.
The keeper process records which process has ended and why. Calls on the ranks can thus report the
cause.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, MPIEngineSetLauncher

from labkit.cluster import fork_server
from labkit.cluster.engine import CONNECTION, command
from labkit.cluster.launch import REFUSED, START_LIMIT, UNSETTLED, clear
from labkit.cluster.lease import KEEPER, WARM, Lock, is_wanted, locked
from labkit.cluster.processes import (
    SESSIONS,
    ProcessWatch,
    backing_variables,
    confine,
    end_all,
    has_exited,
)
from labkit.cluster.start import RankInfo, Start
from labkit.common.errors import InvalidInput, LabkitError
from labkit.hosts.queue import ASK_EVERY, SlurmJob
from labkit.records import store
from labkit.records.endings import End, Terminated, describe_exit, ended_rank, ended_step, lost_host

T = TypeVar("T")

POLL_INTERVAL = 0.5  # seconds
CONTROLLER_LOG = "controller.log"
# The constant BEAT is the time in seconds between heartbeats; an engine registers at its second
# heartbeat.
BEAT = 0.5
# The constant GIVEN_UP is the time in seconds without a heartbeat after which an engine counts as
# lost.
GIVEN_UP = 60.0
# The constant TRIES is the maximum number of start attempts. An attempt fails if another program
# takes its port.
TRIES = 5
# The constant DEAF is the error text that mpiexec prints if session files exist under its process
# id. Session files remain when mpiexec is killed, and a later mpiexec may get the same process id.
DEAF = "listener thread failed to start"
NOTHING = "no output"
GIVEN_UP_START = "the start was abandoned, because no process waits for the engines"
# The constant DONE is the time in seconds until Slurm must have finished or cancelled a job.
DONE = 10.0
OPEN = (
    "mpiexec listens on every network interface without encryption or a key, so anyone who "
    "reaches this machine may start programs as you; on a network that you trust, give "
    "Cluster(trusted_network=True) or set LABKIT_TRUSTED_NETWORK=1; in a container, allow "
    "pidfd_getfd (docker run --cap-add SYS_PTRACE)"
)
# labkit waits LISTENS seconds for mpiexec's listening socket, because mpiexec may have no such
# socket.
LISTENS = 1.0
FEW = 5  # The constant FEW is the maximum number of nodes that an error message lists.
# Before mpiexec exits with code 213, it prints the cause. On a busy machine, the output of mpiexec
# may be lost.
UNHEARD = f"mpiexec ended with code 213: {NOTHING}"


class _Child:
    """Base class of launchers, which learns how the child process ended."""

    _popen_process: subprocess.Popen[bytes]

    def _start_waiting(self) -> None:
        # The method does nothing, because ipyparallel's `_start_waiting` would lose the signal that
        # ended the child process.
        pass

    def poll(self) -> int | None:
        """Return the exit code, the negative signal number, or None while the process runs."""
        return self._popen_process.poll()


class Controller(_Child, LocalControllerLauncher):
    """The controller process of ipyparallel; it ends when the cluster's keeper process ends."""

    # The command is a mutable list, because it replaces a trait of ipyparallel of type list.
    controller_cmd = [sys.executable, "-P", "-m", "labkit.cluster.engine", "controller"]  # noqa: RUF012

    def _output_file_default(self) -> str:
        # The controller's log is in the cluster's folder, and each attempt to start replaces it.
        return str(Path(self.profile_dir).parent / CONTROLLER_LOG)

    def get_output(self, remove: bool = False) -> str:
        """Return the output without removing the log file; error messages quote the file."""
        return str(super().get_output(remove=False))


class Engines(_Child, MPIEngineSetLauncher):
    """The engines of all ranks, started by mpiexec or srun; they end when the keeper ends."""

    engine_args = [f"--IPEngine.max_heartbeat_misses={round(GIVEN_UP / BEAT)}"]  # noqa: RUF012


class _TransientError(LabkitError):
    """An error that another attempt may avoid, such as a port that another program has taken."""


class ClusterKeeper:
    """Starts, watches and ends the processes of one cluster.

    Args:
        folder: Folder with the cluster's files.
        how: Launch options of the ranks.
        warms: Whether the ranks import the modules for training before they count as ready.
    """

    def __init__(self, folder: Path, how: Start, warms: bool = False) -> None:
        self.folder, self.how, self.warms = folder, how, warms
        # The folder `sessions` contains mpiexec's session files, which remain if mpiexec is killed.
        self.sessions = folder / "mpiexec"
        # The attribute `warm` is the time in seconds that a warm start took; see
        # `launch.ClusterState`.
        self.warm: float | None = None
        self.ranks = how.ranks
        self.cluster: ipp.Cluster = None  # The method `_start` sets the attribute `cluster`.
        # The list `engines` contains ipyparallel's engine ids in rank order.
        self.engines: list[int] = []
        self.hosts: list[str] = []
        # The list `dead` contains the dead ranks of this machine; see `launch.ClusterState`.
        self.dead: list[int] = []
        self._watch: ProcessWatch | None = None
        # `_starting` contains the rank processes that the keeper process has seen below mpiexec
        # while the cluster starts.
        self._starting: set[psutil.Process] = set()
        self._counted = 0.0  # `_counted` is the time of the last search for new rank processes.
        # The keeper process finds its Slurm job by the job name in the file `job`. The keeper
        # process may not know the number of its Slurm job. The job number is lost with a killed
        # Slurm command or keeper process.
        name = folder / "job"
        if not name.exists():
            # The job name contains no commas or other special characters. Slurm splits lists of job
            # names at commas.
            label = re.sub("[^A-Za-z0-9_.-]", "_", folder.name)
            name.write_text(f"labkit-{label}-{secrets.token_hex(4)}")
        self._job = name.read_text()
        # `is_given_up` becomes True if no process waits for the cluster's start any longer.
        # `is_given_up` also becomes True if the start takes too long.
        self.is_given_up = False
        self.waits = False  # `waits` is True while the Slurm job of the ranks is in the queue.
        self._queried_at = time.monotonic()

    def start(self) -> None:
        """Start the controller and the engines, and write cluster.json when all are registered."""
        # The keeper process itself sets the environment variables of the ranks. The ranks inherit
        # the environment of the keeper process. TensorFlow reads its environment variables on
        # import.
        variables = self.how.environment(self._job)
        os.environ.update(variables)
        self.sessions.mkdir(mode=0o700, exist_ok=True)
        # Daemons of mpiexec on other hosts cannot use the folder `sessions`, which only the local
        # mpiexec can use.
        if self.how.is_local:
            os.environ[SESSIONS] = str(self.sessions)
            os.environ.update(backing_variables(self.ranks, [self.sessions]))
        os.environ[KEEPER] = str(self.folder / "keeper.lock")
        Engines.mpi_cmd, Engines.engine_cmd = command(
            self.how.command(self._job, [*variables, CONNECTION]), self.how.is_local
        )
        if self.how.is_local and fork_server.is_usable():
            Engines.engine_cmd = [*fork_server.CLIENT, str(fork_server.start())]
        self._address = self.how.address()
        # ipyparallel's nanny process sends interrupts to an engine on another host; engines on this
        # host need no nanny.
        Engines.engine_args.append(f"--IPEngine.enable_nanny={not self.how.is_local}")
        for remaining in reversed(range(TRIES)):
            try:
                self._start()
                break
            except InvalidInput:  # another attempt would fail for the same reason
                raise
            except Exception as error:
                if (why := self._transient_cause(error)) is None:
                    if problem := self.how.trouble():
                        raise LabkitError(f"{problem} ({error})") from error
                    raise
                if not remaining:
                    raise _TransientError(f"{why}, in each of {TRIES} attempts to start") from error
                self.stop()

    def _start(self) -> None:
        # ipyparallel's launcher appends to its log, so the log of an earlier attempt is removed.
        (self.folder / CONTROLLER_LOG).unlink(missing_ok=True)
        # The folder `profile` may contain connection files of a killed controller, which are no
        # longer valid.
        shutil.rmtree(self.folder / "profile", ignore_errors=True)
        # Each start attempt creates the folder of mpiexec's session files again. After a failed
        # attempt, `stop` removes the folder of session files.
        self.sessions.mkdir(mode=0o700, exist_ok=True)
        self.cluster = ipp.Cluster(
            n=self.ranks,
            controller=Controller,
            engines=Engines,
            cluster_id="labkit",
            profile_dir=str(self.folder / "profile"),
            controller_ip=self._address,
            # Engines receive the controller's connection keys through an environment variable, not
            # through a file.
            send_engines_connection_env=True,
            controller_args=[
                # Without CurveZMQ's encryption, every user of this machine could read the output of
                # ranks.
                "--IPController.enable_curve=True",
                f"--IPController.location={self._address}",
                # The option --nodb disables ipyparallel's task database, which would store every
                # result although no client reads stored results.
                "--nodb",
                f"--HeartMonitor.period={round(1e3 * BEAT)}",
                f"--HeartMonitor.max_heartmonitor_misses={round(GIVEN_UP / BEAT)}",
            ],
            delay=0,
            load_profile=False,
            # The keeper process ends its child processes itself, so ipyparallel need not end them
            # at exit.
            shutdown_atexit=False,
            log_level=logging.WARNING,
        )
        started_at = time.monotonic()
        self._starting.clear()
        self.cluster.start_cluster_sync()
        confined = self._confine(LISTENS)
        client = self.cluster.connect_client_sync()
        while len(client.ids) < self.ranks:
            self._check_start()
            # mpiexec may open its listening socket only after the first call of `_confine`.
            confined = confined or self._confine()
            time.sleep(0.05)
        # The ranks may have opened further sockets since the last call of `_confine`.
        self._confine()
        # The ranks report their host and process id during the start. A later client may find the
        # ranks busy.
        replies = self._call_all(client, _collect_rank_info, not self.how.is_local)
        if self.warms:
            # The function `prepare` is pickled by name, so each engine imports the function's
            # module.
            from labkit.worker.work import prepare

            self._call_all(client, prepare)
            (self.folder / UNSETTLED).touch()
            self.warm = time.monotonic() - started_at
        ranks = sorted(
            (RankInfo(*reply), engine) for reply, engine in zip(replies, client.ids, strict=True)
        )
        client.close()
        self.how.check_world([info for info, _ in ranks])
        self.engines = [engine for _, engine in ranks]
        self.hosts = [info.host for info, _ in ranks]
        named = {"the controller": self.cluster.controller.pid, "mpiexec": self._mpiexec().pid}
        if self.how.is_local:
            named |= {f"rank {info.rank}": info.pid for info, _ in ranks}
        self._watch = ProcessWatch(named)
        self.write_state("ready")

    def _call_all(
        self, client: ipp.Client, function: Callable[..., T], *arguments: object
    ) -> list[T]:
        """Call a function on all engines during the start, and return the results."""
        call = client[:].apply_async(function, *arguments)
        while not call.ready():
            self._check_start()
            time.sleep(0.05)
        self._check_start()
        return list(call.get())

    def _mpiexec(self) -> psutil.Process:
        """Return the process of mpiexec or srun; with several hosts, it is a helper's child."""
        process = psutil.Process(self.cluster.engine_set.pid)
        return process if self.how.is_local else process.children()[0]

    def _confine(self, patience: float = 0.0) -> bool:
        """Bind the sockets of the local mpiexec to loopback; return whether it has a socket.

        Args:
            patience: Maximum seconds to wait for mpiexec's first socket.

        Raises:
            InvalidInput: The sockets cannot be bound, and the network is not trusted.
        """
        if not self.how.is_local or self.how.trusted_network:
            return True
        try:
            mpiexec = self._mpiexec()
            # If all ranks are on one host, no daemon connects to mpiexec. For ranks on one host,
            # labkit may drop all packets to mpiexec's sockets.
            confined = confine(mpiexec, patience, drop_packets=True)
            # Descendants of mpiexec may also listen on TCP sockets. Descendants of mpiexec are the
            # ranks, and the real mpiexec below a wrapper script.
            for process in mpiexec.children(recursive=True):
                confine(process)
            return confined
        except psutil.NoSuchProcess:
            return False  # If mpiexec has ended, `_check_start` reports the cause.
        except (LabkitError, psutil.AccessDenied) as error:
            self._check_start()
            raise InvalidInput(f"{error}; {OPEN}") from None

    def _check_start(self) -> None:
        """Raise an error if the start has failed; if a Slurm job waits in the queue, record why."""
        # `_check_start` also tests the flag `is_given_up`, because the exception that the signal
        # handler raises may be lost. Python ignores an exception that a signal handler raises while
        # a finalizer runs.
        if self.is_given_up:
            raise SystemExit(GIVEN_UP_START)
        if (end := self.end()) is not None:
            raise LabkitError(f"{end.message}: {self._output()}")
        if self._has_lost_rank():
            raise LabkitError(f"a rank died before all ranks were ready: {self._output()}")
        # The controller's log also shows failures of the controller's child processes, after which
        # no engine can register.
        if self._port_taken():
            raise _TransientError("another program uses a port of the ipyparallel controller")
        if self.how.queues and time.monotonic() - self._queried_at > (
            ASK_EVERY if self.waits else 1
        ):
            self._queried_at = time.monotonic()
            try:
                reasons = self._queue_reasons()
            # Slurm's commands fail while Slurm restarts, but the Slurm job stays in the queue.
            except LabkitError as error:
                reasons = [str(error)]
            self.write_state("starting", End("; ".join(reasons)))

    def _has_lost_rank(self) -> bool:
        """Return whether a rank died during the start; a fault-tolerant mpiexec does not tell."""
        now = time.monotonic()
        if self.how.is_local and self.how.fault_tolerant and now - self._counted > POLL_INTERVAL:
            self._counted = now
            # If mpiexec has ended, the method `end` reports the cause.
            with suppress(psutil.Error):
                self._starting |= set(filter(_is_rank, self._mpiexec().children()))
        return any(map(has_exited, self._starting))

    def _queue_reasons(self) -> list[str]:
        """Return the reasons why the Slurm job is still queued, or [] if it has started."""
        queue = self.how.queue()
        waiting = [job for job in queue.jobs(name=self._job) if job.is_pending]
        self.waits = bool(waiting)
        reasons = [queue.with_position(job).summary for job in waiting]
        return [*reasons, *self._unavailable_nodes()] if reasons else []

    def _unavailable_nodes(self) -> list[str]:
        """Return up to `FEW` unavailable nodes with their reasons; a job may wait for them."""
        nodes = self.how.queue().nodes(self.how.partition)
        return [node.trouble for node in nodes if node.trouble][:FEW]

    def wait(self) -> End:
        """Wait until no process uses the cluster or one of its processes ends; return the cause."""
        last_wanted = time.monotonic()
        while True:
            time.sleep(POLL_INTERVAL)
            if (end := self.end()) is not None:
                return end
            dead = self._watch.dead() if self._watch and self.how.fault_tolerant else []
            if dead != self.dead:
                self.dead = dead
                self.write_state("ready")
            if is_wanted(self.folder):
                last_wanted = time.monotonic()
            # The cluster ends only if the keeper process has found no lease during two poll
            # intervals. When a notebook cell recreates its cluster, the old lease ends first. The
            # new lease on the cluster begins later.
            elif time.monotonic() - last_wanted > 2 * POLL_INTERVAL:
                return End("no process uses the cluster")

    def end(self) -> End | None:
        """Return which process has ended the cluster and how, or None while all are running."""
        mpiexec, controller = self.cluster.engine_set, self.cluster.controller
        if mpiexec is not None and (code := mpiexec.poll()) is not None:
            # mpiexec ends when a rank fails, and its output names the first rank that failed.
            output = mpiexec.get_output()
            return (
                self._end_of_job()
                or lost_host(output)
                or ended_rank(output)
                or ended_step(output)
                or self._end_of_all(code)
                or describe_exit("mpiexec", code)
            )
        if controller is not None and (code := controller.poll()) is not None:
            return describe_exit("the controller", code)
        return self._watch.end(POLL_INTERVAL) if self._watch else None

    def _end_of_all(self, code: int) -> End | None:
        """Return why a fault-tolerant mpiexec has ended: it exits with 0 if all ranks have died."""
        if code or not self.how.fault_tolerant:
            return None
        return End("all ranks have died", self.dead[0] if self.dead else 0)

    def _end_of_job(self) -> End | None:
        """Return why Slurm has ended the job of the ranks, or None if Slurm names no cause."""
        if not self.how.queues:
            return None
        try:
            job = self._ended_job()
            if job is None or not job.cause:
                return None
            # Unavailable nodes may have ended the job or prevented its start.
            nodes = self._unavailable_nodes() if self.waits or job.state == "NODE_FAIL" else []
        except LabkitError as error:
            return End(
                "the Slurm job of the ranks has ended, but Slurm does not report the cause: "
                f"{error}"
            )
        return End("; ".join([job.cause, *nodes]))

    def _ended_job(self) -> SlurmJob | None:
        """Return the ranks' job when it has ended, or after a timeout; None if it is unknown."""
        end = time.monotonic() + DONE
        while True:
            jobs = self.how.queue().jobs(name=self._job)
            # Only the last Slurm job with this name counts. Earlier Slurm jobs belong to failed
            # attempts to start the cluster.
            if not jobs or jobs[-1].has_ended or time.monotonic() > end:
                return jobs[-1] if jobs else None
            time.sleep(POLL_INTERVAL)

    def _transient_cause(self, error: Exception) -> str | None:
        """Return why another attempt to start may succeed, or None if it would fail, too."""
        if self._port_taken():
            return "another program uses a port of the ipyparallel controller"
        if DEAF in str(error):
            return f"mpiexec's {DEAF}"
        return UNHEARD if UNHEARD in str(error) else None

    def _port_taken(self) -> bool:
        """Return whether the controller's log reports that one of its ports is in use."""
        log = self.folder / CONTROLLER_LOG
        return log.exists() and "Address already in use" in log.read_text(errors="replace")

    def _output(self) -> str:
        lines = self.cluster.engine_set.get_output().splitlines()
        texts = [line.strip() for line in lines if line.strip(" -")]
        return " ".join(texts)[-500:] or NOTHING

    def write_state(self, state: str, end: End | None = None) -> None:
        """Write the cluster's state to cluster.json, see `launch.ClusterState`."""
        shape = {"workers": self.how.workers, "threads": self.how.threads, "engines": self.engines}
        facts = {
            **(end or End())._asdict(),
            **shape,
            "hosts": self.hosts,
            "dead": self.dead,
            "pid": os.getpid(),
            "warm": self.warm,
        }
        record = {"state": state, "how": self.how.to_json(), **facts}
        store.write_json(self.folder / "cluster.json", record)

    def stop(self) -> None:
        """End every process of this cluster, including orphans."""
        if self.how.queues and self.how.launch_command == "srun":
            # On SIGTERM, srun kills its ranks at once. If labkit cancels the Slurm job before it
            # ends srun, the ranks have time for cleanup.
            self._cancel()
            end = time.monotonic() + DONE
            while self._is_started() and time.monotonic() < end:
                time.sleep(POLL_INTERVAL / 5)
        end_all(self.folder / "keeper.lock")
        shutil.rmtree(self.sessions, ignore_errors=True)
        # The Slurm job may still exist if its salloc or srun command was killed.
        if self.how.queues:
            self._cancel()

    def _is_started(self) -> bool:
        engines = self.cluster and self.cluster.engine_set
        return engines is not None and engines.poll() is None

    def _cancel(self) -> None:
        try:
            self.how.queue().cancel(name=self._job)
        # The cancellation of the Slurm job may fail. The engines cancel their Slurm job when they
        # lose the connection to the controller.
        except LabkitError as error:
            print(f"the Slurm job of the ranks could not be cancelled: {error}", file=sys.stderr)


def _is_rank(child: psutil.Process) -> bool:
    """Return whether a child of mpiexec is a rank, and not a process of a wrapper script."""
    words: list[str] = Engines.engine_cmd
    with suppress(psutil.Error):
        return child.cmdline()[: len(words)] == words
    return False


def _collect_rank_info(is_guest: bool) -> tuple[int, int, int, str]:
    """Wait at a barrier, unlink shared-memory files, and return (rank, size, pid, host).

    An unlinked shared-memory file disappears when the last process that maps it ends, even by a
    crash. A guest (an engine on another host) also removes its profile folder. Only the start of a
    guest needs the profile folder.
    """
    import os
    import shutil
    import socket
    from contextlib import suppress
    from pathlib import Path

    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    # The file /proc/self/maps exists only on Linux; on other systems, mpiexec itself removes the
    # shared-memory files.
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        if "/sm_segment." in line:
            # Another rank may already have removed the shared-memory file.
            with suppress(FileNotFoundError):
                os.unlink(line.split(maxsplit=5)[5])
    if is_guest:
        shutil.rmtree(os.environ["IPP_PROFILE_DIR"], ignore_errors=True)
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, os.getpid(), socket.gethostname()


def _watch_start(keeper: ClusterKeeper, started: threading.Event) -> None:
    """Interrupt the start if no process waits for the engines, or if the start takes too long."""
    end = time.monotonic() + START_LIMIT
    while not started.wait(POLL_INTERVAL):
        # The time limit START_LIMIT does not include the waiting time in Slurm's queue.
        if keeper.waits:
            end = time.monotonic() + START_LIMIT
        if not is_wanted(keeper.folder) or time.monotonic() > end:
            keeper.is_given_up = True
            os.kill(os.getpid(), signal.SIGALRM)
            return


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGALRM:
        raise SystemExit(GIVEN_UP_START)
    raise Terminated(signal.Signals(number).name)


def main(folder: Path, launch_options: Start, warms: bool) -> None:
    """Run the keeper process of a cluster until no process needs the cluster."""
    lock = Lock(folder / "keeper.lock")
    # A process that only tests the lock holds the lock for a moment. The keeper process therefore
    # tries repeatedly to acquire the lock.
    tries = 0
    while not lock.acquire():
        tries += 1
        # The 400 attempts to acquire the lock take 20 s, which is enough on a busy machine.
        if tries > 400:
            raise SystemExit("this cluster already has a running parent process (keeper)")
        time.sleep(0.05)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _terminated)
    keeper = ClusterKeeper(folder, launch_options, warms)
    # `stop` also ends processes and removes files that a killed keeper process has left.
    keeper.stop()

    def end(how: End) -> None:
        # The keeper process ignores further signals during the cleanup, because a signal must not
        # interrupt the cleanup.
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        keeper.write_state("ended", how)
        keeper.stop()
        lock.release()

    keeper.write_state("starting")
    started = threading.Event()
    threading.Thread(target=_watch_start, args=(keeper, started), daemon=True).start()
    try:
        keeper.start()
        started.set()
    # The cleanup after a failed start needs no start lock. The process that waits for the start
    # holds the start lock.
    except BaseException as error:
        end(_end_of(error))
        clear(folder)
        raise
    try:
        while True:
            ended = keeper.wait()
            # If a process acquires a lease before the keeper process acquires the start lock, the
            # cluster continues. A process that requests the cluster later waits for the start lock,
            # and then starts a new cluster.
            with locked(folder / "start.lock"):
                if keeper.end() is not None or not is_wanted(folder):
                    end(ended)
                    break
    except BaseException as error:
        with locked(folder / "start.lock"):
            end(_end_of(error))
        raise
    finally:
        clear(folder)


def _end_of(error: BaseException) -> End:
    if isinstance(error, Terminated):
        return End(f"the parent process of the engines was ended by {error}", signal=str(error))
    if isinstance(error, InvalidInput):
        return End(REFUSED + str(error))
    return End(str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Start.from_json(sys.argv[2]), sys.argv[3:] == [WARM])
