"""Engine and controller processes, which exit when the keeper process of their cluster has ended.

    python -m labkit.cluster.engine engine|guest|controller [arguments of ipyparallel]
    python -m labkit.cluster.engine command WORDS...

A guest is an engine on another host. A guest cannot see the lock file of the keeper process. A
guest exits when it cannot reach the controller, because the controller ends when the keeper process
ends. The role `command` is a process on the host of the keeper process. A process with the role
`command` starts guests through ssh or Slurm.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import SupportsIndex

from labkit.cluster.code_objects import intern_calls
from labkit.cluster.lease import KEEPER, Lock
from labkit.cluster.stack_probe import start_reporting
from labkit.cluster.start import JOB
from labkit.common import imports
from labkit.common.locks import release_start_slot, start_semaphore
from labkit.hosts.host_list import is_reachable
from labkit.worker.source_bundle import FOLDER

POLL_INTERVAL = 1.0  # seconds
# The environment variable IPP_CONNECTION_INFO contains the address and the keys of ipyparallel's
# controller.
CONNECTION = "IPP_CONNECTION_INFO"
# The constant ENDS is the time in seconds that mpiexec or srun may take to end its processes.
ENDS = 30.0
# A guest is an engine that may run on another host. A guest waits UNREACHED seconds for the
# controller, because a link may recover.
UNREACHED = 30.0
PROFILE = "IPP_PROFILE_DIR"
ENGINE_COMMAND = [sys.executable, "-P", "-m", "labkit.cluster.engine"]
THROTTLED_COMMAND = [sys.executable, "-P", "-m", "labkit.common.locks", "labkit.cluster.engine"]
# The shell command `_TIDIES` waits until an engine process ends, and then removes the engine's
# folders.
_TIDIES = '(while kill -0 "$0"; do sleep 1; done; rm -rf "$@") >&- 2>&- &'


class SafePath(list[str]):
    """A `sys.path` without the working directory, which ipyparallel would insert first."""

    def insert(self, index: SupportsIndex, place: str) -> None:
        """Insert a folder, except for "", which stands for the working directory."""
        if place:
            super().insert(index, place)

    def __reduce__(self) -> tuple[type[list[str]], tuple[list[str]]]:
        """Pickle as a plain list, because other processes cannot import the class `SafePath`."""
        return list, ([*self],)


def command(words: Sequence[str], is_local: bool) -> tuple[list[str], list[str]]:
    """Return two commands: one starts the ranks, and the other is the command of each rank."""
    if is_local:
        return [*words], [*THROTTLED_COMMAND, "engine"]
    # Engines on several hosts do not get the variable LABKIT_KEEPER. The supervising process uses
    # LABKIT_KEEPER to find processes on its own host.
    return [*ENGINE_COMMAND, "command", *words], ["env", "-u", KEEPER, *ENGINE_COMMAND, "guest"]


def watch(lock_path: Path, with_group: bool) -> None:
    """Kill this process (and its group) when the cluster's keeper process releases its lock."""

    def poll() -> None:
        lock = Lock(lock_path)
        # A lock is more reliable than messages, because the operating system releases it when the
        # supervising process ends.
        while lock.is_held():
            time.sleep(POLL_INTERVAL)
        if with_group:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        # The process ends by `os._exit`, because a rank inside an MPI call would not react to an
        # exception.
        os._exit(1)

    threading.Thread(target=poll, name="labkit-lease", daemon=True).start()


def watch_controller() -> None:
    """Exit and cancel this process's Slurm job, if the controller is unreachable for long."""
    info = json.loads(os.environ[CONNECTION])
    address = info["location"], int(info["registration"])

    def poll() -> None:
        reached_at = time.monotonic()
        while time.monotonic() - reached_at < UNREACHED:
            if is_reachable(address, UNREACHED):
                reached_at = time.monotonic()
            time.sleep(5 * POLL_INTERVAL)
        if JOB in os.environ:
            subprocess.run(["scancel", "--quiet", os.environ["SLURM_JOB_ID"]], check=False)
        os._exit(1)

    threading.Thread(target=poll, name="labkit-visit", daemon=True).start()


class ImportsInWaves(MetaPathFinder):
    """An import hook that limits how many ranks import a module at a time.

    Args:
        module: Name of a module whose import takes long and uses all cores.
        keeper: Path of the lock file of the cluster's keeper process.
    """

    def __init__(self, module: str, keeper: Path) -> None:
        self.module, self.keeper = module, keeper

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader waits if `name` is `module`; None for all other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == self.module else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def wait_and_execute(module: ModuleType) -> None:
            with start_semaphore(self.keeper):
                execute(module)

        # The import hook changes only this loader object, not the class of the loader.
        vars(spec.loader)["exec_module"] = wait_and_execute
        return spec


def run_command(words: Sequence[str], keeper: Path) -> int:
    """Run the command that starts the guests until it or the keeper ends; return its exit code."""
    child = subprocess.Popen(words)

    def end(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    lock = Lock(keeper)
    while (code := child.poll()) is None and lock.is_held():
        time.sleep(POLL_INTERVAL / 5)
    if code is not None:
        return code
    # The code calls `terminate` only once, because a second signal would make mpiexec skip its
    # cleanup.
    child.terminate()
    try:
        return child.wait(ENDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def run(role: str) -> None:
    """Run an engine, a guest or a controller in this process until it ends."""
    sys.path = SafePath(sys.path)
    if role == "guest":
        watch_controller()
    else:
        keeper = Path(os.environ[KEEPER])
        # Threads inherit blocked signals, so `start_reporting` is called before ipyparallel starts
        # threads.
        if role == "engine":
            start_reporting(keeper.parent)
            sys.meta_path.insert(0, ImportsInWaves("tensorflow", keeper))
        # ipyparallel's controller leads a process group that contains its scheduler processes.
        watch(keeper, with_group=role == "controller")
    if role == "controller":
        # Each process that the controller forks watches the supervising process's lock in its own
        # thread. A forked process inherits no threads, and the leader of its process group may be
        # killed earlier.
        os.register_at_fork(after_in_child=lambda: watch(keeper, with_group=False))
        sys.argv[0] = "ipcontroller"
        from ipyparallel.controller.app import main

        main()
    else:
        from ipyparallel.engine.app import IPEngine

        class Engine(IPEngine):
            """An engine like ipyparallel's, except that SIGTERM ends its process."""

            def init_signal(self) -> None:
                """Handle SIGINT, which interrupts cells; keep the default action of SIGTERM."""
                signal.signal(signal.SIGINT, self._signal_sigint)

            def start(self) -> None:
                """Release this process's start slot, and register the engine."""
                release_start_slot()
                super().start()

        if role == "guest":
            # ipyparallel's engine needs a profile folder only while it starts; the function
            # `_collect_rank_info` removes the folder.
            os.environ[PROFILE] = tempfile.mkdtemp(prefix="labkit-")
            os.environ[FOLDER] = f"{os.environ[PROFILE]}-work"
            ends = [str(os.getpid()), os.environ[PROFILE], os.environ[FOLDER]]
            subprocess.run(["sh", "-c", _TIDIES, *ends], start_new_session=True, check=True)
        intern_calls()
        # `%%px` cells can import modules from the inherited folders before the first call.
        imports.append_inherited()
        Engine.launch_instance()


if __name__ == "__main__":
    role = sys.argv.pop(1)
    if role == "command":
        code = run_command(sys.argv[1:], Path(os.environ[KEEPER]))
        # The process ends by the signal that ended its child process. The supervising process can
        # thus report why the child process ended.
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        raise SystemExit(code)
    run(role)
