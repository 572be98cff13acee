"""An engine or controller process that ends itself when the keeper of its cluster is gone.

python -m labkit.cluster.engine engine|controller [arguments of ipyparallel]
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from labkit.cluster.lease import KEEPER, Lock
from labkit.cluster.where import answer

LOOK_EVERY = 1.0  # seconds


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


if __name__ == "__main__":
    role = sys.argv.pop(1)
    keeper = Path(os.environ[KEEPER])
    # Before ipyparallel is imported, which starts threads: they inherit the blocked signal.
    if role == "engine":
        answer(keeper.parent)
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

        Engine.launch_instance()
