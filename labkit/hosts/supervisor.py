"""The supervisor process of one testbed, which creates and ends the testbed.

    python -m labkit.hosts.supervisor FOLDER PLAN [PARENT]

The host `control` is a virtual host for Slurm's controller and the network switch. All other hosts
are inside the PID namespace of the host `control`. All processes of the testbed end with the first
process of `control`. The kernel then kills all processes of the PID namespace of `control`. The
host `control` ends when the supervisor ends. The supervisor ends when its parent process ends, even
by a crash. The supervisor removes the testbed's folder; if the supervisor was killed, the host
`control` removes it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import labkit
from labkit.common.errors import LabkitError
from labkit.hosts import scripts, switch
from labkit.hosts.host_namespaces import HostNamespaces, Specification, enter_command
from labkit.hosts.testbed_state import (
    AGENT,
    CONTROL,
    LOGIN,
    LOGIN_COMMAND,
    PMIX,
    RECORD,
    SLURM_CONF,
    TestbedPlan,
    TestbedState,
    addresses,
    claim_folder,
    find_command,
    pmix_folders,
    remove,
)
from labkit.records import store
from labkit.records.endings import terminate

# The Slurm daemons on each host keep their files in /tmp/slurm; each host has its own /tmp.
FOLDER = "/tmp/slurm"
LIMIT = 45.0  # All Slurm nodes must be ready within `LIMIT` seconds.
SLURM_POLL_INTERVAL = 0.1  # seconds

# Only root of the local machine reaches the testbed's network. Slurm in a testbed therefore needs
# no authentication by munge. Slurm's settings `linuxproc` and `task/none` are necessary, because
# the testbed's daemons have no cgroups of their own. With Slurm's setting `config_overrides`, a
# node may have more CPUs than the machine has cores.
_CONFIGURATION = """\
ClusterName=labkit
SlurmctldHost={control}({address})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
TmpFS=/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def configuration(plan: TestbedPlan, addresses: Mapping[str, str]) -> str:
    """Return the text of slurm.conf, which all hosts and the login node use."""
    nodes = [
        f"NodeName={name} NodeAddr={addresses[name]} CPUs={plan.cores} State=UNKNOWN"
        for name in plan.hosts
    ]
    return _CONFIGURATION.format(
        control=CONTROL, address=addresses[CONTROL], own=FOLDER, nodes="\n".join(nodes)
    )


def pmix(folder: Path) -> list[tuple[str, str]]:
    """Return the bind mounts through which Slurm finds Debian's PMIx library.

    Slurm's plugin opens the file `libpmix.so`, which only the library's development package
    contains. The package libpmix2 contains only `libpmix.so.2`, so `srun --mpi=pmix` would fail
    without mounts that contain `libpmix.so`.

    Args:
        folder: New folder, to which the library's folders are copied; each copy also contains
            `libpmix.so`.

    Returns:
        Pairs of a source path and the path at which it is mounted.
    """
    binds = []
    for number, place in enumerate(pmix_folders()):
        if not (place / "libpmix.so").exists():
            copy = folder / str(number)
            shutil.copytree(place, copy, symlinks=True)
            (copy / "libpmix.so").symlink_to(PMIX)
            binds.append((str(copy), str(place)))
    return binds


class Slurm:
    """The Slurm daemons of a testbed.

    Args:
        folder: Folder of the testbed, for slurm.conf and the daemons' log.
        plan: Parameters of the testbed.
        addresses: IPv4 addresses of the hosts and of the host `control`, by name.
    """

    def __init__(self, folder: Path, plan: TestbedPlan, addresses: Mapping[str, str]) -> None:
        self.configuration, self.plan = folder / SLURM_CONF, plan
        self.configuration.write_text(configuration(plan, addresses))
        self.log = folder / "slurm.log"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self, control: int, hosts: Mapping[str, int]) -> None:
        """Start slurmctld on `control`, and slurmd on each host; all end with the testbed.

        Args:
            control: Id of a process in the namespaces of the host `control`.
            hosts: For each host name, the id of a process in the host's namespaces.
        """
        self._start(control, "slurmctld", "-D")
        for name, pid in hosts.items():
            self._start(pid, "slurmd", "-D", "-N", name)

    def _start(self, pid: int, daemon: str, *options: str) -> None:
        words = [find_command(daemon) or daemon, *options, "-f", str(self.configuration)]
        # The script creates Slurm's folders on the host itself, because each host has its own /tmp.
        script = f'mkdir -p {FOLDER}/state {FOLDER}/spool && exec "$@"'
        with self.log.open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [*enter_command(pid), "sh", "-c", script, "sh", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def wait(self) -> None:
        """Wait until all Slurm nodes are ready for jobs.

        Raises:
            LabkitError: A daemon has ended, or a node is not ready within `LIMIT` seconds. The
                error message contains the last error of the log.
        """
        end = time.monotonic() + LIMIT
        while (states := self._states()) != ["idle"] * self.plan.nodes:
            ended = any(daemon.poll() is not None for daemon in self.daemons)
            if ended or time.monotonic() > end:
                raise LabkitError(
                    f"Slurm did not start: {'a daemon has ended' if ended else 'its nodes are'}"
                    f"{'' if ended else f' {states or 0} after {LIMIT:.0f} s'}: "
                    f"{self._last_error()}"
                )
            time.sleep(SLURM_POLL_INTERVAL)

    def _states(self) -> list[str]:
        result = subprocess.run(
            [find_command("sinfo") or "sinfo", "--noheader", "--Node", "--format=%T"],
            env=os.environ | {"SLURM_CONF": str(self.configuration)},
            capture_output=True,
            text=True,
        )
        return result.stdout.split()

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error" in line or "fatal" in line] or lines
        return errors[-1] if errors else "its log file is empty"


POLL_INTERVAL = 0.5  # seconds
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
USERS = Path("/run/user")  # The folder /run/user contains the XDG_RUNTIME_DIR of each user.
# The environment variables in `SHARED` contain paths of folders. All hosts share the folders, like
# the shared file system of a cluster.
SHARED = ("LABKIT_DATA", "LABKIT_CACHE", "PYTHONPYCACHEPREFIX")


class Supervisor:
    """The object that creates and ends one testbed.

    Args:
        folder: Folder of the testbed, which is the same on all hosts.
        plan: Parameters of the testbed.
    """

    def __init__(self, folder: Path, plan: TestbedPlan) -> None:
        self.folder, self.plan = folder, plan
        self.control: HostNamespaces | None = None
        # The network of a testbed is 198.18.N.0/24, where N is the attribute `number`.
        self.number: int | None = None
        self.slurm: Slurm | None = None
        self._hosts: list[HostNamespaces] = []
        self._binds = [(str(folder / "hosts"), "/etc/hosts")]

    def start(self) -> TestbedState:
        """Create the testbed and return a record of its state."""
        # The file `hosts` must exist before the hosts mount it at /etc/hosts; `start` writes its
        # text later.
        (self.folder / "hosts").touch()
        if self.plan.slurm:
            self._binds += pmix(self.folder / "pmix")
        self.control = HostNamespaces(self._specification(CONTROL))
        self.control.wait()
        self._hosts = [
            HostNamespaces(self._specification(name), self.control.pid) for name in self.plan.hosts
        ]
        for host in self._hosts:
            host.wait()
        pids = {host.name: host.pid for host in self._hosts}
        self.number = switch.claim_network(self.control.pid)
        place = addresses(self.plan, self.number)
        switch.connect_hosts(self.plan, self.number, self.control.pid, pids)
        (self.folder / "hosts").write_text(_names(place))
        self._write_commands(pids, place)
        if self.plan.slurm:
            self.slurm = Slurm(self.folder, self.plan, place)
            self.slurm.start(self.control.pid, pids)
            self.slurm.wait()
        me = store.this_process()
        return TestbedState(
            plan=asdict(self.plan),
            control=self.control.pid,
            hosts=pids,
            addresses=place,
            home=os.getcwd(),
            runtime=str(_runtime()),
            pid=me["pid"],
            process_started=me["process_started"],
            since_boot=me["since_boot"],
        )

    def wait(self) -> None:
        """Wait until the host `control`, and thus the testbed, has ended."""
        # The assertion tells the type checker that `start` has created the host `control`.
        assert self.control is not None
        while not self.control.has_ended():
            time.sleep(POLL_INTERVAL)
            for daemon in self.slurm.daemons if self.slurm else ():
                # The call of `poll` reaps a Slurm daemon that has ended; the daemon's host
                # continues.
                daemon.poll()

    def stop(self) -> None:
        """End every process of the testbed, and remove its links and files."""
        if self.control is not None:
            self.control.end()
        for host in self._hosts:
            host.end()
        for daemon in self.slurm.daemons if self.slurm else ():
            daemon.wait()
        if self.number is not None:
            switch.release_network(self.number)
        remove(self.folder)

    def _specification(self, name: str) -> Specification:
        return Specification(
            name=name,
            folder=str(self.folder),
            private=[*map(str, _private())],
            shared=[*map(str, _shared(self.folder))],
            runtime=str(_runtime()),
            binds=self._binds,
            tidies=name == CONTROL,
        )

    def _write_commands(self, pids: dict[str, int], place: dict[str, str]) -> None:
        agent = self.folder / AGENT
        configuration = str(self.folder / SLURM_CONF) if self.plan.slurm else None
        for path, text in (
            (agent, scripts.agent(pids, place, str(_runtime()))),
            (self.folder / LOGIN_COMMAND, scripts.login(self._binds, str(agent), configuration)),
        ):
            path.write_text(text)
            path.chmod(0o700)


def _private() -> list[Path]:
    """Return the paths of folders for runtime files; each host has its own folder at each path."""
    variables = [os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "LABKIT_RUNTIME")]
    return _folders("/tmp", "/dev/shm", USERS, *filter(None, variables))


def _shared(folder: Path) -> list[Path]:
    """Return the folders that all hosts share: the testbed's, Python's, labkit's and the user's."""
    repository = Path(labkit.__file__).parents[1]
    variables = [os.environ[name] for name in SHARED if os.environ.get(name)]
    folders = _folders(folder, sys.prefix, sys.base_prefix, repository, Path.cwd(), *variables)
    private = _private()
    # Each host has its own /tmp. The hosts do not share the working folder if it is /tmp itself.
    return [path for path in folders if path not in private]


def _runtime() -> Path:
    root = USERS if USERS.is_dir() else Path("/tmp/runtime")
    return root / str(os.getuid())


def _folders(*places: str | Path) -> list[Path]:
    """Return the folders that exist, with links resolved, and without duplicates."""
    paths = [Path(place).resolve() for place in places]
    return [*dict.fromkeys(path for path in paths if path.is_dir())]


def _names(place: dict[str, str]) -> str:
    """Return the text of /etc/hosts with the addresses of a testbed."""
    # MPI ranks connect to mpiexec by the host name of the machine, so /etc/hosts contains this host
    # name.
    hostname = os.uname().nodename
    lines = [f"{address} {name}" for name, address in place.items() if name != LOGIN]
    return "\n".join(["127.0.0.1 localhost", *lines, f"{place[LOGIN]} {LOGIN} {hostname}", ""])


def _answer_parent(**answer: object) -> None:
    """Write the line of JSON that the parent process reads, then discard further output."""
    print(json.dumps(answer), flush=True)
    # The process discards later output, because its parent may have closed the reading end of the
    # pipe.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end_with_parent(parent: int) -> None:
    """Terminate this process when its parent has ended, even while the hosts are starting."""
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path, plan: TestbedPlan, parent: int | None) -> None:
    """Run a testbed until the parent process ends, or until a signal ends this process.

    Args:
        folder: Folder of the testbed.
        plan: Parameters of the testbed.
        parent: A pidfd of the parent process. If None, the testbed continues after its parent ends.
    """
    for number in ENDS:
        signal.signal(number, terminate)
    if parent is not None:
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        claim_folder(folder)
    except LabkitError as error:
        return _answer_parent(ready=False, message=str(error))
    supervisor = Supervisor(folder, plan)
    try:
        store.write_json(folder / RECORD, {"schema": store.SCHEMA, **supervisor.start()})
        _answer_parent(ready=True)
        supervisor.wait()
    except LabkitError as error:
        _answer_parent(ready=False, message=str(error))
    finally:
        # A second signal must not interrupt the cleanup.
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        supervisor.stop()


def _main(words: Sequence[str]) -> None:
    folder, plan, *parent = words
    main(Path(folder), TestbedPlan(**json.loads(plan)), int(parent[0]) if parent else None)


if __name__ == "__main__":
    _main(sys.argv[1:])
