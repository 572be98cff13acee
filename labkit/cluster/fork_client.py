"""A rank's process below mpiexec, which lets the fork server start the engine.

    python -I -S fork_client.py SERVER ARGUMENTS...

SERVER is the folder of the fork server's socket, and ARGUMENTS are those of the engine. The client
gives the engine its environment and streams, forwards signals to it, and ends as the engine ends.
Without a server, the client becomes an engine that imports all modules itself. The client imports
only a few modules of Python's library, because every millisecond counts for each rank.
"""

import json
import os
import resource
import select
import signal
import socket
import sys

SOCKET = "socket"
NUMBER = 8  # bytes of each number that client and server send
PLAIN = ["-m", "labkit.common.locks", "labkit.cluster.engine", "engine"]
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def connect(folder: str) -> socket.socket:
    """Connect to the server; the path through /proc is short, as addresses of sockets must be."""
    connection = socket.socket(socket.AF_UNIX)
    directory = os.open(folder, os.O_PATH)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.close(directory)
    return connection


def request(connection: socket.socket, arguments: list[str]) -> int:
    """Send this process's context and streams; return the engine's process id, 0 without one."""
    context = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(0o077),
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    }
    text = json.dumps(context).encode()
    socket.send_fds(connection, [len(text).to_bytes(NUMBER, "big")], [0, 1, 2])
    connection.sendall(text)
    return int.from_bytes(connection.recv(NUMBER), "big", signed=True)


def wait(connection: socket.socket, engine: int) -> int:
    """Wait until the engine ends; return its exit code, or its signal as a negative number."""
    # The descriptor reports the end of the engine even if the server has been killed.
    watched = os.pidfd_open(engine)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: signal.pidfd_send_signal(watched, number))
    select.select([connection.fileno(), watched], [], [])
    # The engine holds no copy of the connection, so that its end without a code means the server's.
    code = connection.recv(NUMBER)
    if not code:
        select.select([watched], [], [])
        return -signal.SIGKILL
    return int.from_bytes(code, "big", signed=True)


def main() -> None:
    folder, *arguments = sys.argv[1:]
    try:
        connection = connect(folder)
        engine = request(connection, arguments)
    except OSError:
        engine = 0
    if not engine:
        os.execv(sys.executable, [sys.executable, "-P", *PLAIN, *arguments])
    code = wait(connection, engine)
    if code < 0:
        # mpiexec names the signal that ended a rank.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
