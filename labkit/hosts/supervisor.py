"""The supervisor process of one testbed, which creates and ends the testbed.

    python -m labkit.hosts.supervisor FOLDER PLAN [PARENT]

The host `control` is a virtual host for Slurm's controller and the network switch. All other hosts
are inside the PID namespace of the host `control`. All processes of the testbed end with the first
process of `control`, because the kernel then kills all processes of its PID namespace. The host
`control` ends with the supervisor, and the supervisor with its parent process, even after a crash.
The supervisor removes the testbed's folder; if the supervisor was killed, the host `control`
removes it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import labkit
from labkit.common.errors import LabkitError
from labkit.hosts import scripts, switch
from labkit.hosts.host_init import Specification
from labkit.hosts.host_namespaces import HostNamespaces
from labkit.hosts.slurm import Slurm, pmix
from labkit.hosts.testbed_plan import CONTROL, LOGIN, TestbedPlan, addresses
from labkit.hosts.testbed_state import (
    AGENT,
    LOGIN_COMMAND,
    RECORD,
    SLURM_CONF,
    TestbedState,
    claim_folder,
    remove,
)
from labkit.records import store
from labkit.records.endings import terminate

POLL_INTERVAL = 0.5  # seconds
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
USERS = Path("/run/user")  # folder with the XDG_RUNTIME_DIR of each user
# The environment variables in `SHARED` contain paths of folders that all hosts share, like the
# shared file system of a cluster.
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
        self.number: int | None = None  # number N of the testbed's network 198.18.N.0/24
        self.slurm: Slurm | None = None
        self._hosts: list[HostNamespaces] = []
        self._binds = [(str(folder / "hosts"), "/etc/hosts")]

    def start(self) -> TestbedState:
        """Create the testbed and return a record of its state."""
        # The file is mounted at /etc/hosts of all hosts; the method writes the file's text later.
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
        # for the type checker: `start` has created the host `control`
        assert self.control is not None
        while not self.control.has_ended():
            time.sleep(POLL_INTERVAL)
            for daemon in self.slurm.daemons if self.slurm else ():
                daemon.poll()  # reaps an ended Slurm daemon; the daemon's host continues without it

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
    # If the working folder is /tmp itself, it is not shared, because each host has its own /tmp.
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
    hostname = os.uname().nodename  # ranks connect to mpiexec by the host name of this machine
    lines = [f"{address} {name}" for name, address in place.items() if name != LOGIN]
    return "\n".join(["127.0.0.1 localhost", *lines, f"{place[LOGIN]} {LOGIN} {hostname}", ""])


def _answer_parent(**answer: object) -> None:
    """Write the line of JSON that the parent process reads, then discard further output."""
    print(json.dumps(answer), flush=True)
    # Later output is discarded, because the parent may have closed the reading end of the pipe.
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
        parent: A pidfd of the parent process; None: the testbed continues after the end of its
            parent.
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
