"""An engine or controller process that ends itself when the keeper of its cluster is gone.

    python -m labkit.cluster.engine engine|guest|controller [arguments of ipyparallel]
    python -m labkit.cluster.engine command WORDS...

A guest is an engine on another host, where no lock of the keeper's can be seen: it ends when it
cannot reach the controller any more, which ends with the keeper. `command` is on the keeper's host
and holds what starts guests.
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
from labkit.cluster.stack_probe import answer
from labkit.cluster.start import JOB
from labkit.common import imports
from labkit.common.semaphore import end_start, start_places
from labkit.hosts.connection import answers
from labkit.worker.source_bundle import FOLDER

LOOK_EVERY = 1.0  # seconds
CONNECTION = "IPP_CONNECTION_INFO"  # ipyparallel's: where the controller is, and its keys
ENDS = 30.0  # seconds that what starts guests gets to end them
UNREACHED = 30.0  # seconds without the controller after which a guest ends; a link may come back
PROFILE = "IPP_PROFILE_DIR"
OWN = [sys.executable, "-P", "-m", "labkit.cluster.engine"]
IN_WAVES = [sys.executable, "-P", "-m", "labkit.common.semaphore", "labkit.cluster.engine"]
# Beside a guest: takes its folders away when it has ended, however.
_TIDIES = '(while kill -0 "$0"; do sleep 1; done; rm -rf "$@") >&- 2>&- &'


class SafePath(list[str]):
    """`sys.path` without the current folder, which ipyparallel's programs would put first."""

    def insert(self, index: SupportsIndex, place: str) -> None:
        """Insert a folder that has a name."""
        if place:
            super().insert(index, place)

    def __reduce__(self) -> tuple[type[list[str]], tuple[list[str]]]:
        """Return a plain list to whoever asks a rank for its path: this module runs as __main__."""
        return list, ([*self],)


def command(words: Sequence[str], is_local: bool) -> tuple[list[str], list[str]]:
    """The words that start ranks, under watch, and those of each rank."""
    if is_local:
        return [*words], [*IN_WAVES, "engine"]
    # Without the keeper's name: by it the keeper finds processes of its own host.
    return [*OWN, "command", *words], ["env", "-u", KEEPER, *OWN, "guest"]


def watch(lock_path: Path, with_group: bool) -> None:
    """Kill this process (and its process group) as soon as nobody holds the keeper's lock."""

    def look() -> None:
        lock = Lock(lock_path)
        # The lock is the keeper's for as long as it lives: nothing has to be sent that could be
        # lost.
        while lock.is_held():
            time.sleep(LOOK_EVERY)
        if with_group:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        # At once: a rank that is inside MPI would never come to its end otherwise.
        os._exit(1)

    threading.Thread(target=look, name="labkit-lease", daemon=True).start()


def visit() -> None:
    """End this process, and the job that was queued for it, when the controller is gone."""
    told = json.loads(os.environ[CONNECTION])
    address = told["location"], int(told["registration"])

    def look() -> None:
        seen = time.monotonic()
        while time.monotonic() - seen < UNREACHED:
            if answers(address, UNREACHED):
                seen = time.monotonic()
            time.sleep(5 * LOOK_EVERY)
        if JOB in os.environ:
            subprocess.run(["scancel", "--quiet", os.environ["SLURM_JOB_ID"]], check=False)
        os._exit(1)

    threading.Thread(target=look, name="labkit-visit", daemon=True).start()


class ImportsInWaves(MetaPathFinder):
    """Let a limited number of ranks import a module at a time.

    Args:
        module: takes long to import, on all cores.
        keeper: the lock of the ranks' keeper.
    """

    def __init__(self, module: str, keeper: Path) -> None:
        self.module, self.keeper = module, keeper

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the usual spec of the module, which waits for its turn; None for others."""
        spec = PathFinder.find_spec(name, path, target) if name == self.module else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def wait_and_execute(module: ModuleType) -> None:
            with start_places(self.keeper):
                execute(module)

        # Set on this loader alone: every other method of it stays.
        vars(spec.loader)["exec_module"] = wait_and_execute
        return spec


def carry_out(words: Sequence[str], keeper: Path) -> int:
    """Run what starts guests, and end it with the keeper; its exit code."""
    child = subprocess.Popen(words)

    def end(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    lock = Lock(keeper)
    while (code := child.poll()) is None and lock.is_held():
        time.sleep(LOOK_EVERY / 5)
    if code is not None:
        return code
    child.terminate()  # once: told again, mpiexec would leave without tidying up
    try:
        return child.wait(ENDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


if __name__ == "__main__":
    role = sys.argv.pop(1)
    if role == "command":
        code = carry_out(sys.argv[1:], Path(os.environ[KEEPER]))
        if code < 0:  # by the same signal, so that the keeper hears of it
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        raise SystemExit(code)
    sys.path = SafePath(sys.path)
    if role == "guest":
        visit()
    else:
        keeper = Path(os.environ[KEEPER])
        # Before ipyparallel is imported, which starts threads: they inherit the blocked signal.
        if role == "engine":
            answer(keeper.parent)
            sys.meta_path.insert(0, ImportsInWaves("tensorflow", keeper))
        # The controller leads a group of its own, with its schedulers in it.
        watch(keeper, with_group=role == "controller")
    if role == "controller":
        # Forks have no threads of their own, and the one that leads their group may be killed, too.
        os.register_at_fork(after_in_child=lambda: watch(keeper, with_group=False))
        sys.argv[0] = "ipcontroller"
        from ipyparallel.controller.app import main

        main()
    else:
        from ipyparallel.engine.app import IPEngine

        class Engine(IPEngine):
            """ipyparallel's engine, which SIGTERM ends: its own would only stop answering."""

            def init_signal(self) -> None:
                """Let cells alone be interrupted; the keeper hears from mpiexec of any end."""
                signal.signal(signal.SIGINT, self._signal_sigint)

            def start(self) -> None:
                """Register, when all that takes long is imported: another rank may start."""
                end_start()
                super().start()

        if role == "guest":
            # Its start wants a profile, which the keeper takes away when all have come.
            os.environ[PROFILE] = tempfile.mkdtemp(prefix="labkit-")
            os.environ[FOLDER] = f"{os.environ[PROFILE]}-work"
            ends = [str(os.getpid()), os.environ[PROFILE], os.environ[FOLDER]]
            subprocess.run(["sh", "-c", _TIDIES, *ends], start_new_session=True, check=True)
        intern_calls()
        imports.add_inherited()  # `%%px` finds modules before any call comes
        Engine.launch_instance()
