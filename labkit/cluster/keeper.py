"""The keeper of one cluster: starts controller and engines, and ends them with the last lease.

    python -m labkit.cluster.keeper FOLDER START [warm]

It is the parent of everything that a cluster starts, so nothing is left when it has ended;
engines and controller also end by themselves when it is killed. What ends, and by what, it writes
where the calls on the ranks look.
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

from labkit.cluster.backing import backing
from labkit.cluster.engine import CONNECTION, command
from labkit.cluster.launch import REFUSED, START_LIMIT, UNSETTLED, clear
from labkit.cluster.lease import KEEPER, WARM, Lock, is_wanted, locked
from labkit.cluster.listeners import confine
from labkit.cluster.processes import SESSIONS, Watch, end_all, is_gone
from labkit.cluster.start import Met, Start
from labkit.common.errors import InvalidInput, LabkitError
from labkit.hosts.queue import ASK_EVERY, Job
from labkit.records import store
from labkit.records.endings import End, Terminated, described, of_host, of_rank, of_step

T = TypeVar("T")

LOOK_EVERY = 0.5  # seconds
CONTROLLER_LOG = "controller.log"
BEAT = 0.5  # seconds between two heartbeats: an engine is registered with its second
GIVEN_UP = 60.0  # seconds without a heartbeat after which an engine counts as gone
TRIES = 5  # to start: ports that were free when they were chosen may be taken a moment later
# Said by an mpiexec that has the process number of one that was killed, which has left its files.
DEAF = "listener thread failed to start"
NOTHING = "it said nothing"
GIVEN_UP_START = "nobody waits for the engines any more"
DONE = 10.0  # seconds that Slurm gets to be through with a job that has ended
OPEN = (
    "mpiexec listens on every interface, without encryption or a key, and whoever reaches this "
    "machine may start programs as you: on a network that you trust, give "
    "Cluster(trusted_network=True) or set LABKIT_TRUSTED_NETWORK=1; in a container, let it use "
    "pidfd_getfd (docker run --cap-add SYS_PTRACE)"
)
LISTENS = 1.0  # seconds after which an mpiexec that does not listen is one that never does
FEW = 5  # nodes that are named
# By this code mpiexec means that it has said why. On a busy machine its words may be lost.
UNHEARD = f"mpiexec ended with code 213: {NOTHING}"


class _Child:
    """What both launchers start: a child that the keeper alone collects, so that it hears how."""

    _popen_process: subprocess.Popen[bytes]

    def _start_waiting(self) -> None:
        # ipyparallel would collect it in a thread, and tell whether it has ended, not by what.
        pass

    def poll(self) -> int | None:
        """Its exit code, or the negative of the signal; None while it runs."""
        return self._popen_process.poll()


class Controller(_Child, LocalControllerLauncher):
    """The controller, under watch."""

    # Lists, as the traits that they stand for.
    controller_cmd = [sys.executable, "-P", "-m", "labkit.cluster.engine", "controller"]  # noqa: RUF012

    def _output_file_default(self) -> str:
        # Beside the keeper's: one for all tries, each of which begins it anew.
        return str(Path(self.profile_dir).parent / CONTROLLER_LOG)

    def get_output(self, remove: bool = False) -> str:
        """What it said; kept, since a controller that has ended is asked why."""
        return str(super().get_output(remove=False))


class Engines(_Child, MPIEngineSetLauncher):
    """All ranks under one command, each an engine under watch; which command the keeper says."""

    engine_args = [f"--IPEngine.max_heartbeat_misses={round(GIVEN_UP / BEAT)}"]  # noqa: RUF012


class _Unlucky(LabkitError):
    """What may go better the next time, such as a port that another program was quicker to take."""


class Keeper:
    """Holds one cluster.

    Args:
        folder: where the cluster's files are.
        how: how its ranks start.
        warms: whether they import what training needs before they are ready.
    """

    def __init__(self, folder: Path, how: Start, warms: bool = False) -> None:
        self.folder, self.how, self.warms = folder, how, warms
        self.sessions = folder / "mpiexec"  # files of mpiexec, which it leaves where it is killed
        self.warm: float | None = None  # see `launch.State`
        self.ranks = how.ranks
        self.cluster: ipp.Cluster = None  # until it is started
        self.engines: list[int] = []  # their ids, in rank order
        self.hosts: list[str] = []  # of the ranks
        self.dead: list[int] = []  # ranks, see `launch.State`
        self._watch: Watch | None = None  # of its processes
        self._starting: set[psutil.Process] = set()  # ranks, as children of mpiexec
        self._counted = 0.0  # when these were, last
        # By which it is found, also where a command that queued it could not say its number, and
        # by a keeper that comes after one that was killed.
        name = folder / "job"
        if not name.exists():
            own = re.sub("[^A-Za-z0-9_.-]", "_", folder.name)  # a comma would make a list of it
            name.write_text(f"labkit-{own}-{secrets.token_hex(4)}")
        self._job = name.read_text()
        self.is_given_up = False  # nobody waits for the engines, or they take too long
        self.waits = False  # whether the job has not begun
        self._asked = time.monotonic()  # when Slurm was, last

    def start(self) -> None:
        """Start controller and engines; write cluster.json when all engines have registered."""
        # Of this process, and so of all that it starts: threads are settled when TensorFlow is
        # imported.
        own = self.how.environment(self._job)
        os.environ.update(own)
        self.sessions.mkdir(mode=0o700, exist_ok=True)
        if self.how.is_local:  # elsewhere daemons of other hosts would look for this folder
            os.environ[SESSIONS] = str(self.sessions)
            os.environ.update(backing(self.ranks, [self.sessions]))
        os.environ[KEEPER] = str(self.folder / "keeper.lock")
        Engines.mpi_cmd, Engines.engine_cmd = command(
            self.how.command(self._job, [*own, CONNECTION]), self.how.is_local
        )
        self._address = self.how.address()
        # A guest's process is interrupted by one beside it; those of this machine by us.
        Engines.engine_args.append(f"--IPEngine.enable_nanny={not self.how.is_local}")
        for left in reversed(range(TRIES)):
            try:
                self._start()
                break
            except InvalidInput:  # the same try would be refused again
                raise
            except Exception as error:
                if (why := self._luck(error)) is None:
                    if told := self.how.trouble():
                        raise LabkitError(f"{told} ({error})") from error
                    raise
                if not left:
                    raise _Unlucky(f"{why}, in each of {TRIES} tries") from error
                self.stop()

    def _start(self) -> None:
        # A launcher appends to its log: what an earlier try has said would be taken for this one's.
        (self.folder / CONTROLLER_LOG).unlink(missing_ok=True)
        # A controller that was killed has left where it could be reached: nobody answers there.
        shutil.rmtree(self.folder / "profile", ignore_errors=True)
        self.sessions.mkdir(mode=0o700, exist_ok=True)  # `stop` has removed it after each try
        self.cluster = ipp.Cluster(
            n=self.ranks,
            controller=Controller,
            engines=Engines,
            cluster_id="labkit",
            profile_dir=str(self.folder / "profile"),
            controller_ip=self._address,
            # The keys reach engines with what starts them, not through a file.
            send_engines_connection_env=True,
            controller_args=[
                # Without it every user of this machine could read what ranks print.
                "--IPController.enable_curve=True",
                f"--IPController.location={self._address}",
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
        begun = time.monotonic()
        self._starting.clear()
        self.cluster.start_cluster_sync()
        confined = self._confine(LISTENS)
        client = self.cluster.connect_client_sync()
        while len(client.ids) < self.ranks:
            self._look()
            confined = confined or self._confine()  # on a busy machine mpiexec may take longer
            time.sleep(0.05)
        self._confine()  # what ranks themselves have opened
        # Asked once, while the engines are idle: who attaches later may find them at work.
        met = self._ask(client, _meet, not self.how.is_local)
        if self.warms:
            from labkit.worker.work import prepare  # by name: engines import what it imports

            self._ask(client, prepare)
            (self.folder / UNSETTLED).touch()
            self.warm = time.monotonic() - begun
        ranks = sorted((Met(*told), engine) for told, engine in zip(met, client.ids, strict=True))
        client.close()
        self.how.check_world([told for told, _ in ranks])
        self.engines = [engine for _, engine in ranks]
        self.hosts = [told.host for told, _ in ranks]
        named = {"the controller": self.cluster.controller.pid, "mpiexec": self._mpiexec().pid}
        if self.how.is_local:
            named |= {f"rank {told.rank}": told.pid for told, _ in ranks}
        self._watch = Watch(named)
        self.say("ready")

    def _ask(self, client: ipp.Client, function: Callable[..., T], *arguments: object) -> list[T]:
        """What all engines answer, which nobody else works with yet."""
        asked = client[:].apply_async(function, *arguments)
        while not asked.ready():
            self._look()
            time.sleep(0.05)
        self._look()
        return list(asked.get())

    def _mpiexec(self) -> psutil.Process:
        """What starts the ranks, or has them started: itself, or under who ends it with us."""
        process = psutil.Process(self.cluster.engine_set.pid)
        return process if self.how.is_local else process.children()[0]

    def _confine(self, patience: float = 0.0) -> bool:
        """Let mpiexec of this machine listen on loopback alone; return whether it is bound there.

        Args:
            patience: seconds that it gets to begin with it.

        Raises:
            InvalidInput: it cannot be bound there, and nobody trusts the network.
        """
        if not self.how.is_local or self.how.trusted_network:
            return True
        try:
            mpiexec = self._mpiexec()
            # On one host no daemon calls back, and whoever else does is not to be heard.
            confined = confine(mpiexec, patience, deaf=True)
            # A site's mpiexec may be a script, and its ranks may speak by TCP.
            for process in mpiexec.children(recursive=True):
                confine(process)
            return confined
        except psutil.NoSuchProcess:
            return False  # `_look` tells how it has ended
        except (LabkitError, psutil.AccessDenied) as error:
            self._look()
            raise InvalidInput(f"{error}; {OPEN}") from None

    def _look(self) -> None:
        """Raise where waiting has become pointless; say what a queued job waits for."""
        if self.is_given_up:  # Python loses what a signal's handler raises amid a finalizer
            raise SystemExit(GIVEN_UP_START)
        if (end := self.end()) is not None:
            raise LabkitError(f"{end.message}: {self._said()}")
        if self._has_lost_rank():
            raise LabkitError(f"a rank has died before all were ready: {self._said()}")
        # Also by a part that registers nobody: calls would never come back.
        if self._port_taken():
            raise _Unlucky("a port of the controller is taken")
        if self.how.queues and time.monotonic() - self._asked > (ASK_EVERY if self.waits else 1):
            self._asked = time.monotonic()
            try:
                told = self._waits_for()
            except LabkitError as error:  # it may be restarted: who waits keeps its place
                told = [str(error)]
            self.say("starting", End("; ".join(told)))

    def _has_lost_rank(self) -> bool:
        """Whether a rank is gone whose mpiexec lets ranks die, and so says nothing of it."""
        now = time.monotonic()
        if self.how.is_local and self.how.fault_tolerant and now - self._counted > LOOK_EVERY:
            self._counted = now
            with suppress(psutil.Error):  # the next look tells how mpiexec has ended
                self._starting |= set(filter(_is_rank, self._mpiexec().children()))
        return any(map(is_gone, self._starting))

    def _waits_for(self) -> list[str]:
        """What a queued job waits for; nothing where it waits no more."""
        queue = self.how.queue()
        waiting = [job for job in queue.jobs(name=self._job) if job.waits]
        self.waits = bool(waiting)
        told = [queue.placed(job).told for job in waiting]
        return [*told, *self._unwell()] if told else []

    def _unwell(self) -> list[str]:
        """Some of the nodes that take no jobs: perhaps it waits for one of these."""
        nodes = self.how.queue().nodes(self.how.partition)
        return [node.trouble for node in nodes if node.trouble][:FEW]

    def keep(self) -> End:
        """Wait until nobody wants the cluster any more, or a part of it has ended; say which."""
        last_wanted = time.monotonic()
        while True:
            time.sleep(LOOK_EVERY)
            if (end := self.end()) is not None:
                return end
            dead = self._watch.dead() if self._watch and self.how.fault_tolerant else []
            if dead != self.dead:
                self.dead = dead
                self.say("ready")
            if is_wanted(self.folder):
                last_wanted = time.monotonic()
            # Twice: a cell that makes its cluster anew lets go of one lease before it takes the
            # next.
            elif time.monotonic() - last_wanted > 2 * LOOK_EVERY:
                return End("nobody holds a lease")

    def end(self) -> End | None:
        """What has ended the cluster, and by what; None while all its parts are there."""
        mpiexec, controller = self.cluster.engine_set, self.cluster.controller
        if mpiexec is not None and (code := mpiexec.poll()) is not None:
            # It ends because of its ranks, and names the first.
            said = mpiexec.get_output()
            return (
                self._end_of_job()
                or of_host(said)
                or of_rank(said)
                or of_step(said)
                or self._end_of_all(code)
                or described("mpiexec", code)
            )
        if controller is not None and (code := controller.poll()) is not None:
            return described("the controller", code)
        return self._watch.end(LOOK_EVERY) if self._watch else None

    def _end_of_all(self, code: int) -> End | None:
        """That all ranks have died, of which an mpiexec that lets some die says nothing."""
        if code or not self.how.fault_tolerant:
            return None
        return End("all ranks have died", self.dead[0] if self.dead else 0)

    def _end_of_job(self) -> End | None:
        """Why Slurm has ended the job, if it has."""
        if not self.how.queues:
            return None
        try:
            job = self._ended_job()
            if job is None or not job.cause:
                return None
            # A node that is gone has ended it, or has kept it from its start.
            told = self._unwell() if self.waits or job.state == "NODE_FAIL" else []
        except LabkitError as error:
            return End(f"the job of the ranks has ended, and why cannot be asked: {error}")
        return End("; ".join([job.cause, *told]))

    def _ended_job(self) -> Job | None:
        """The job, when Slurm has done with it, or takes long to: then it knows why."""
        end = time.monotonic() + DONE
        while True:
            jobs = self.how.queue().jobs(name=self._job)
            # Those before the last are of tries that had no luck.
            if not jobs or jobs[-1].has_ended or time.monotonic() > end:
                return jobs[-1] if jobs else None
            time.sleep(LOOK_EVERY)

    def _luck(self, error: Exception) -> str | None:
        """What was bad luck when it did not start; None: it would fail again."""
        if self._port_taken():
            return "a port of the controller is taken"
        if DEAF in str(error):
            return f"mpiexec's {DEAF}"
        return UNHEARD if UNHEARD in str(error) else None

    def _port_taken(self) -> bool:
        """Whether the controller, or a part of it, has found its port taken."""
        log = self.folder / CONTROLLER_LOG
        return log.exists() and "Address already in use" in log.read_text(errors="replace")

    def _said(self) -> str:
        lines = self.cluster.engine_set.get_output().splitlines()
        told = [line.strip() for line in lines if line.strip(" -")]
        return " ".join(told)[-500:] or NOTHING

    def say(self, state: str, end: End | None = None) -> None:
        """Write cluster.json."""
        shape = {"workers": self.how.workers, "threads": self.how.threads, "engines": self.engines}
        told = {
            **(end or End())._asdict(),
            **shape,
            "hosts": self.hosts,
            "dead": self.dead,
            "pid": os.getpid(),
            "warm": self.warm,
        }
        said = {"state": state, "how": self.how.to_json(), **told}
        store.write_json(self.folder / "cluster.json", said)

    def stop(self) -> None:
        """End every process of this cluster, whoever its parent is by now."""
        if self.how.queues and self.how.step == "srun":
            # Told to end, srun kills; a job that is cancelled gets time to tidy up.
            self._cancel()
            end = time.monotonic() + DONE
            while self._is_started() and time.monotonic() < end:
                time.sleep(LOOK_EVERY / 5)
        end_all(self.folder / "keeper.lock")
        shutil.rmtree(self.sessions, ignore_errors=True)
        if self.how.queues:  # also what is queued by a command that was killed
            self._cancel()

    def _is_started(self) -> bool:
        engines = self.cluster and self.cluster.engine_set
        return engines is not None and engines.poll() is None

    def _cancel(self) -> None:
        try:
            self.how.queue().cancel(name=self._job)
        except LabkitError as error:  # guests end the job themselves when they are alone
            print(f"the job of the ranks could not be cancelled: {error}", file=sys.stderr)


def _is_rank(child: psutil.Process) -> bool:
    """Whether this child of mpiexec is a rank; a site's script has others, which end."""
    words: list[str] = Engines.engine_cmd
    with suppress(psutil.Error):
        return child.cmdline()[: len(words)] == words
    return False


def _meet(is_guest: bool) -> tuple[int, int, int, str]:
    """The words of a `Met`, once all have come; shared memory then has no name any more.

    What has no name ends with the last process that has it, however that one ends. Nor has a
    guest a profile any more, which only its start wants.
    """
    import os
    import shutil
    import socket
    from contextlib import suppress
    from pathlib import Path

    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    maps = Path("/proc/self/maps")  # of Linux; elsewhere mpiexec takes its segments away
    for line in maps.read_text().splitlines() if maps.exists() else []:
        if "/sm_segment." in line:
            with suppress(FileNotFoundError):  # another rank has done it
                os.unlink(line.split(maxsplit=5)[5])
    if is_guest:
        shutil.rmtree(os.environ["IPP_PROFILE_DIR"], ignore_errors=True)
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, os.getpid(), socket.gethostname()


def _obey(keeper: Keeper, started: threading.Event) -> None:
    """End this process when nobody waits for its engines any more, or they take too long."""
    end = time.monotonic() + START_LIMIT
    while not started.wait(LOOK_EVERY):
        if keeper.waits:  # in Slurm's queue, which takes as long as it takes
            end = time.monotonic() + START_LIMIT
        if not is_wanted(keeper.folder) or time.monotonic() > end:
            keeper.is_given_up = True
            os.kill(os.getpid(), signal.SIGALRM)
            return


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGALRM:
        raise SystemExit(GIVEN_UP_START)
    raise Terminated(signal.Signals(number).name)


def main(folder: Path, how: Start, warms: bool) -> None:
    """Keep a cluster until nobody wants it."""
    lock = Lock(folder / "keeper.lock")
    # Who asks whether it is held holds it for a moment.
    tries = 0
    while not lock.acquire():
        tries += 1
        if tries > 400:  # 20 s, on a machine that is busy
            raise SystemExit("this cluster has a keeper already")
        time.sleep(0.05)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _terminated)
    keeper = Keeper(folder, how, warms)
    keeper.stop()  # what a keeper that was killed has left

    def end(how: End) -> None:
        # Whoever is impatient must not interrupt the tidying up.
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        keeper.say("ended", how)
        keeper.stop()
        lock.release()

    keeper.say("starting")
    started = threading.Event()
    threading.Thread(target=_obey, args=(keeper, started), daemon=True).start()
    try:
        keeper.start()
        started.set()
    except BaseException as error:  # the process that starts us waits, and holds the start lock
        end(_of_error(error))
        clear(folder)
        raise
    try:
        while True:
            ended = keeper.keep()
            # Under the start lock: who has come in the meantime keeps the cluster up, and who
            # comes now waits, and then starts a cluster of their own.
            with locked(folder / "start.lock"):
                if keeper.end() is not None or not is_wanted(folder):
                    end(ended)
                    break
    except BaseException as error:
        with locked(folder / "start.lock"):
            end(_of_error(error))
        raise
    finally:
        clear(folder)


def _of_error(error: BaseException) -> End:
    if isinstance(error, Terminated):
        return End(f"the keeper of the engines was ended by {error}", signal=str(error))
    if isinstance(error, InvalidInput):
        return End(REFUSED + str(error))
    return End(str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Start.of_json(sys.argv[2]), sys.argv[3:] == [WARM])
