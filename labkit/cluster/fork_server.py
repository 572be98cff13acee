"""A fork server: a process that has imported TensorFlow, and forks the engines of clusters.

    python -m labkit.cluster.fork_server FOLDER SECONDS

TensorFlow's import takes several seconds of processor time in each rank. The fork server imports
the modules of training once, starts neither threads nor TensorFlow's runtime nor MPI, and forks.
Engines share the memory of its modules. mpiexec starts a client for each rank
(`labkit.cluster.fork_client`), which sends the rank's environment and streams to the server.

The folder of a server depends on everything that its imports read, so that an engine finds the
modules as it would import them. A server without engines ends after `SECONDS` seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from labkit.cluster import fork_client
from labkit.cluster.fork_client import NUMBER, SOCKET
from labkit.cluster.lease import KEEPER, Lock, import_facts, is_held, locked
from labkit.common import reads
from labkit.common.canonical_json import digest
from labkit.common.files import runtime_folder
from labkit.communicator import mpi_library

# LABKIT_FORK is the idle time in seconds after which a server ends. Without it, or with 0, each
# rank imports TensorFlow itself.
VARIABLE = "LABKIT_FORK"
PID = "pid"
NAME = b"labkit-engine"  # the name of forked engines in lists of processes
PATIENCE = 10.0  # seconds in which a client sends its request
CLIENT = [sys.executable, "-I", "-S", fork_client.__file__]
_GPU = Path("/dev/nvidiactl")
_SET_NAME = 15  # the operation PR_SET_NAME of prctl(2)


def is_usable() -> bool:
    """Return whether this machine's ranks can be forked.

    MPICH's ranks inherit sockets from mpiexec, and a GPU's driver forbids forks. In a Slurm job,
    a forked rank would belong to the job of the server.
    """
    library = mpi_library.find()
    return (
        os.environ.get(VARIABLE, "0") != "0"
        and hasattr(os, "pidfd_open")
        and library is not None
        and library.is_open_mpi
        and "SLURM_JOB_ID" not in os.environ
        and not _GPU.exists()
    )


def start() -> Path:
    """Start a server for this process's environment unless one runs; return its folder."""
    folder = runtime_folder("fork") / digest(import_facts())[:12]
    folder.mkdir(exist_ok=True, mode=0o700)
    with locked(folder / "start.lock"):
        if not is_held(folder / "lock"):
            (folder / SOCKET).unlink(missing_ok=True)
            _start(folder)
    return folder


def _start(folder: Path) -> None:
    # A server belongs to no cluster, so that the end of a cluster does not end it.
    environment = {k: v for k, v in os.environ.items() if k != KEEPER}
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "labkit.cluster.fork_server",
                str(folder),
                os.environ[VARIABLE],
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            start_new_session=True,
            check=True,
        )


def stop() -> None:
    """End the fork servers of this user; the engines continue."""
    for folder in runtime_folder("fork").iterdir():
        if (folder / PID).exists() and is_held(folder / "lock"):
            os.kill(int((folder / PID).read_text()), signal.SIGTERM)


class ForkServer:
    """Forks an engine for each client, and tells the client how the engine ended.

    Args:
        folder: Folder of the server's socket.
        idle: Seconds without engines after which the server ends.
    """

    def __init__(self, folder: Path, idle: float) -> None:
        self._idle = idle
        self._selector = selectors.DefaultSelector()
        self._engines: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        os.chdir(folder)  # the address of a socket has at most 107 characters
        self._listener.bind(f".{SOCKET}")
        self._listener.listen(1024)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        os.rename(f".{SOCKET}", SOCKET)

    def run(self) -> None:
        """Serve clients until there has been no engine for the idle time."""
        used = time.monotonic()
        while self._engines or time.monotonic() - used < self._idle:
            for key, _ in self._selector.select(1.0):
                act: Callable[[], None] = key.data
                act()
                used = time.monotonic()
        os.unlink(SOCKET)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(PATIENCE)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        streams: list[int] = []
        try:
            if struct.unpack("3i", peer)[1] == os.getuid():
                self._fork(connection, streams)
        except (OSError, ValueError):
            traceback.print_exc()
        finally:
            for stream in streams:
                os.close(stream)
            if connection not in self._engines.values():
                connection.close()

    def _fork(self, connection: socket.socket, streams: list[int]) -> None:
        length, received, _, _ = socket.recv_fds(connection, NUMBER, 3)
        streams += received
        text = bytearray()
        while len(text) < int.from_bytes(length, "big"):
            if not (part := connection.recv(1 << 20)):
                return
            text += part
        context = json.loads(text)
        if (engine := os.fork()) == 0:
            self._selector.close()
            for descriptor in (self._listener, *self._engines.values(), connection):
                descriptor.close()
            _become_engine(context, streams)
        connection.sendall(engine.to_bytes(NUMBER, "big"))
        self._watch(engine, connection)

    def _watch(self, engine: int, connection: socket.socket) -> None:
        handle = os.pidfd_open(engine)
        self._engines[handle] = connection

        def end() -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
            for watched in (handle, connection):
                with contextlib.suppress(KeyError):  # The client has ended first.
                    self._selector.unregister(watched)
            with contextlib.suppress(OSError):
                connection.sendall(code.to_bytes(NUMBER, "big", signed=True))
            self._engines.pop(handle).close()
            os.close(handle)

        def kill() -> None:
            # The client has ended, because it sends nothing after its request. The engine must
            # end, too, even if it is suspended.
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            self._selector.unregister(connection)

        self._selector.register(handle, selectors.EVENT_READ, end)
        self._selector.register(connection, selectors.EVENT_READ, kill)


def _become_engine(context: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run an engine in this forked process, in the context of its client."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.setsid()
        _adopt(context)
        from labkit.cluster import engine

        sys.argv = ["labkit.cluster.engine", *context["arguments"]]
        engine.run("engine")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # `os._exit` skips the atexit functions, which end MPI and ipyparallel.
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _adopt(context: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(context["environment"])
    os.chdir(context["folder"])
    os.umask(context["umask"])
    os.sched_setaffinity(0, context["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, context["nice"])
    for name, values in context["limits"].items():
        with contextlib.suppress(ValueError, OSError):  # only root can raise a hard limit
            resource.setrlimit(getattr(resource, name), values)
    ctypes.CDLL(None).prctl(_SET_NAME, NAME)
    tempfile.tempdir = None
    reads.forget()
    # Otherwise, all ranks would draw the same random numbers.
    sys.modules["numpy.random"].seed()


def main(folder: Path, idle: float) -> None:
    """Import the modules of training, and serve clients."""
    # A keeper ends its descendants with its cluster. The server forks, so that it is none of them,
    # and its parent waits until the socket exists. Clients then wait for the end of the imports.
    ready, started = os.pipe()
    if os.fork():
        os.close(started)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    lock = Lock(folder / "lock")
    lock.acquire(wait=True)
    (folder / PID).write_text(f"{os.getpid()}")
    server = ForkServer(folder, idle)
    os.close(started)
    import ipyparallel.engine.app  # noqa: F401 - the engine imports it after the fork

    from labkit.worker.work import prepare

    prepare()
    gc.freeze()
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
