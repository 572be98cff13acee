"""The holder of one testbed: makes it, and ends it with whoever asked for it.

    python -m labkit.hosts.supervisor FOLDER PLAN [PARENT]

All hosts lie in one namespace of processes, of which the first process is the control's: when that
ends, everything has ended. It ends with the holder, and the holder with its parent, however these
end. The folder is removed by the holder, or by the control where the holder was killed.
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
from labkit.hosts.host_namespaces import Space
from labkit.hosts.plan import CONTROL, LOGIN, Plan, addresses
from labkit.hosts.slurm import Slurm, pmix
from labkit.hosts.state import AGENT, LOGIN_COMMAND, RECORD, SLURM_CONF, State, remove, take
from labkit.records import store
from labkit.records.endings import terminate

LOOK_EVERY = 0.5  # seconds
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
USERS = Path("/run/user")  # of which a folder is somebody's XDG_RUNTIME_DIR
# Variables that name folders which all hosts see, as they would on a cluster's file system.
SHARED = ("LABKIT_DATA", "LABKIT_CACHE", "PYTHONPYCACHEPREFIX")


class Holder:
    """Holds one testbed.

    Args:
        folder: where its files are; all hosts see it.
        plan: what it is to be.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.control: Space | None = None
        self.number: int | None = None  # of its network
        self.slurm: Slurm | None = None
        self._others: list[Space] = []
        self._binds = [(str(folder / "hosts"), "/etc/hosts")]

    def start(self) -> State:
        """Make all of it; how it stands."""
        (self.folder / "hosts").touch()  # of which all hosts see what is written below
        if self.plan.slurm:
            self._binds += pmix(self.folder / "pmix")
        self.control = Space(self._specification(CONTROL))
        self.control.wait()
        self._others = [
            Space(self._specification(name), self.control.pid) for name in self.plan.hosts
        ]
        for host in self._others:
            host.wait()
        pids = {host.name: host.pid for host in self._others}
        self.number = switch.claim(self.control.pid)
        place = addresses(self.plan, self.number)
        switch.join(self.plan, self.number, self.control.pid, pids)
        (self.folder / "hosts").write_text(_names(place))
        self._write_commands(pids, place)
        if self.plan.slurm:
            self.slurm = Slurm(self.folder, self.plan, place)
            self.slurm.start(self.control.pid, pids)
            self.slurm.wait()
        me = store.this_process()
        return State(
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

    def keep(self) -> None:
        """Wait until the control has ended."""
        assert self.control is not None  # for the type checker: it is started
        while not self.control.has_ended():
            time.sleep(LOOK_EVERY)
            for daemon in self.slurm.daemons if self.slurm else ():
                daemon.poll()  # one that has ended is a fault of a host, which goes on

    def stop(self) -> None:
        """End every process of it, and remove what it has made."""
        if self.control is not None:
            self.control.end()
        for host in self._others:
            host.end()
        for daemon in self.slurm.daemons if self.slurm else ():
            daemon.wait()
        if self.number is not None:
            switch.release(self.number)
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
    """Folders of which each host has its own: those that hold what lives as long as a process."""
    given = [os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "LABKIT_RUNTIME")]
    return _folders("/tmp", "/dev/shm", USERS, *filter(None, given))


def _shared(folder: Path) -> list[Path]:
    """Folders that all hosts see, wherever they lie: the testbed's, Python, labkit, the work."""
    repository = Path(labkit.__file__).parents[1]
    given = [os.environ[name] for name in SHARED if os.environ.get(name)]
    found = _folders(folder, sys.prefix, sys.base_prefix, repository, Path.cwd(), *given)
    private = _private()
    # /tmp itself, where somebody works there, stays each host's own.
    return [path for path in found if path not in private]


def _runtime() -> Path:
    root = USERS if USERS.is_dir() else Path("/tmp/runtime")
    return root / str(os.getuid())


def _folders(*places: str | Path) -> list[Path]:
    """Those that are there, each once, as no link leads to them."""
    paths = [Path(place).resolve() for place in places]
    return [*dict.fromkeys(path for path in paths if path.is_dir())]


def _names(place: dict[str, str]) -> str:
    """The text of /etc/hosts."""
    own = os.uname().nodename  # by which ranks find the program that started them
    lines = [f"{address} {name}" for name, address in place.items() if name != LOGIN]
    return "\n".join(["127.0.0.1 localhost", *lines, f"{place[LOGIN]} {LOGIN} {own}", ""])


def _say(**said: object) -> None:
    """Answer the parent, which waits for one line."""
    print(json.dumps(said), flush=True)
    # It may have ended by the time that anything else is said.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _obey(parent: int) -> None:
    """End this process when its parent has ended, also while hosts are just being started."""
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path, plan: Plan, parent: int | None) -> None:
    """Hold a testbed until its parent, or somebody by a signal, ends it.

    Args:
        parent: a descriptor of that process; None: nobody's end is that of the testbed.
    """
    for number in ENDS:
        signal.signal(number, terminate)
    if parent is not None:
        threading.Thread(target=_obey, args=(parent,), daemon=True).start()
    try:
        take(folder)
    except LabkitError as error:
        return _say(ready=False, message=str(error))
    holder = Holder(folder, plan)
    try:
        store.write_json(folder / RECORD, {"schema": store.SCHEMA, **holder.start()})
        _say(ready=True)
        holder.keep()
    except LabkitError as error:
        _say(ready=False, message=str(error))
    finally:
        # Whoever is impatient must not interrupt the tidying up.
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        holder.stop()


def _main(words: Sequence[str]) -> None:
    folder, plan, *parent = words
    main(Path(folder), Plan(**json.loads(plan)), int(parent[0]) if parent else None)


if __name__ == "__main__":
    _main(sys.argv[1:])
