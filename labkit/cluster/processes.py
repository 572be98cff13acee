"""Detection of dead and suspended processes of a cluster, and a function that ends all of them."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from labkit.cluster.lease import KEEPER
from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.endings import End, describe_exit

EXITED = (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
# The environment variable PRTE_MCA_prte_local_tmpdir_base sets the parent folder of mpiexec's
# session folders.
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
# The names of Open MPI's shared-memory files contain the text `/sm_segment.`.
SEGMENT = "/sm_segment."
STOPPED = 30.0  # If a signal suspends a process for more than 30 s (STOPPED), the cluster ends.


class ProcessWatch:
    """Detects ended and suspended processes, even if this process is not their parent.

    Args:
        named: Process ids by name of the process.
    """

    def __init__(self, named: Mapping[str, int]) -> None:
        self._watched = {name: psutil.Process(pid) for name, pid in named.items()}
        parts = self._watched["the controller"].children()
        self._parts = {f"child process {n} of the controller": part for n, part in enumerate(parts)}
        # `_still` maps the name of each process to the seconds for which the process has been
        # suspended.
        self._still: dict[str, float] = {}

    def end(self, seconds: float) -> End | None:
        """Return an `End` if a watched process has ended or is suspended.

        The launchers and the method `dead` report when any other process ends. Return None if all
        watched processes run normally.

        Args:
            seconds: Seconds since the last call of this method.
        """
        for name, process in (self._watched | self._parts).items():
            is_still = _status(process) == psutil.STATUS_STOPPED
            # `end` adds up the seconds between its calls. A clock would also count time in which
            # the watching process is suspended.
            self._still[name] = self._still.get(name, 0) + seconds if is_still else 0
            if self._still[name] > STOPPED:
                return describe_exit(name, -signal.SIGSTOP)
        ended = [name for name, part in self._parts.items() if has_exited(part)]
        return End(f"{ended[0]} has ended") if ended else None

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        named = ((name.split(), process) for name, process in self._watched.items())
        return [int(w[1]) for w, process in named if w[0] == "rank" and has_exited(process)]


def has_exited(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not reaped it."""
    return _status(process) in EXITED


def end_all(lock: Path) -> None:
    """End all processes started by this keeper process or by an earlier one with the same lock.

    Open MPI's files are also removed, because mpiexec does not remove its files when SIGKILL ends
    it.
    """
    files: set[Path] = set()
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        end, signaled = time.monotonic() + seconds, set[psutil.Process]()
        # The search for processes is repeated, because a process that is just starting may appear
        # later.
        while (processes := _started(lock)) and time.monotonic() < end:
            for process in processes:
                files |= _files(process)
                # Each process receives only one SIGTERM, because a second SIGTERM makes mpiexec
                # skip its cleanup.
                if process not in signaled:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
            signaled.update(processes)
            psutil.wait_procs(processes, timeout=0.5)
    for path in files:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _files(process: psutil.Process) -> set[Path]:
    """Return mpiexec's session folder, and the shared-memory files that a process maps."""
    base = os.environ.get(SESSIONS) or tempfile.gettempdir()
    paths = {Path(base) / f"ompi.{process.pid}"}
    maps = Path(f"/proc/{process.pid}/maps")  # /proc/PID/maps exists only on Linux
    with suppress(OSError):  # The file cannot be read if its process has ended.
        lines = maps.read_text().splitlines()
        paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if SEGMENT in line}
    return paths


def _started(lock: Path) -> list[psutil.Process]:
    processes = set(psutil.Process().children(recursive=True))
    # The environment variable LABKIT_KEEPER also identifies orphans, which are no longer
    # descendants of the keeper process.
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # The process may have ended, or may belong to another user.
            if process.environ().get(KEEPER) == str(lock):
                processes.add(process)
    return [process for process in processes if process.pid != os.getpid()]


def _status(process: psutil.Process) -> str | None:
    with suppress(psutil.NoSuchProcess):
        return str(process.status())
    return None


SHARED = Path("/dev/shm")
SEGMENT_BYTES = 16 << 20  # Open MPI needs 16 MiB of shared memory per rank.
# labkit expects the gradient buckets to need 256 MiB of shared memory in total.
BUCKETS = 256 << 20
# Each shared-memory component of Open MPI has its own variable for the folder of its files.
FOLDERS = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "OMPI_MCA_osc_rdma_backing_directory",
    "OMPI_MCA_shmem_mmap_backing_file_base_dir",
)
RELOCATES = "OMPI_MCA_shmem_mmap_relocate_backing_file"


def backing_variables(ranks: int, places: Sequence[Path], shared: Path = SHARED) -> dict[str, str]:
    """Return variables that replace a too small /dev/shm by another folder; {} if it is large.

    Args:
        ranks: Number of ranks that share memory.
        places: Alternative folders in order of preference.
        shared: Path of /dev/shm.

    Raises:
        InvalidInput: No folder has enough free space. A rank that runs out of shared memory would
            die of SIGBUS during a step.
    """
    required = ranks * SEGMENT_BYTES + BUCKETS
    if not shared.is_dir() or any(name in os.environ for name in FOLDERS):
        # Either the system has no /dev/shm, or the user has chosen a folder for shared-memory
        # files.
        return {}
    free = {place: shutil.disk_usage(place).free for place in (shared, *places)}
    path = next((place for place, size in free.items() if size >= required), None)
    if path is None:
        sizes = ", ".join(f"{place} has {size >> 20} MiB free" for place, size in free.items())
        raise InvalidInput(
            f"{ranks} ranks share {required >> 20} MiB of memory through files, but {sizes}; "
            f"make the file system larger: mount -o remount,size=2G {shared}  # docker run "
            "--shm-size=2g"
        )
    if path == shared:
        return {}
    return dict.fromkeys(FOLDERS, str(path)) | {RELOCATES: "-1"}


LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_PIDFD_GETFD = 438  # The system call pidfd_getfd(2) has the number 438 on all common architectures.
_ATTACH_FILTER = 26  # The socket option SO_ATTACH_FILTER has the number 26, see socket(7).
# The BPF program `_DROP` has one instruction, which drops each packet.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
_LOOK = 5e-3  # While labkit waits for a child process, it checks the process every 5 ms (_LOOK).
# After a stop signal, labkit waits until all threads of the process stop. The wait for a process to
# stop lasts at most 1 s (_STOP).
_STOP = 1.0


class Listener(NamedTuple):
    """A TCP socket on which a process listens.

    Attributes:
        descriptor: File descriptor of the socket in the process that listens.
        address, port: Local address and port of the socket.
    """

    descriptor: int
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach the socket."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


def listeners(process: psutil.Process) -> list[Listener]:
    """Return all listening TCP sockets of a process."""
    return [
        Listener(connection.fd, connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def exposed_listeners(process: psutil.Process) -> list[Listener]:
    """Return those listening sockets of a process that other machines can reach."""
    return [listener for listener in listeners(process) if not listener.is_local]


def confine(process: psutil.Process, patience: float = 0.0, drop_packets: bool = False) -> bool:
    """Rebind a child process's exposed listening sockets to loopback, at the same ports.

    Open MPI's daemon always listens on every network interface. The child process is stopped while
    its sockets are rebound.

    Args:
        process: The child process.
        patience: Maximum seconds to wait for the child's first listening socket.
        drop_packets: Whether the sockets drop all packets, even packets from this machine.

    Returns: Whether the child process had a listening socket that other machines could reach.

    Raises:
        LabkitError: The operating system does not permit the change.
    """
    end = time.monotonic() + patience
    while not exposed_listeners(process):
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK)
    try:
        with _stopped(process):
            handle = os.pidfd_open(process.pid)
            try:
                for listener in exposed_listeners(process):
                    _rebind(handle, listener, drop_packets)
            finally:
                os.close(handle)
        return True
    # On systems other than Linux, `pidfd_open` does not exist.
    except (AttributeError, OSError) as error:
        raise LabkitError(
            f"the listening sockets of process {process.pid} cannot be restricted to loopback: "
            f"{error}"
        ) from None


@contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    """Stop a process inside the context, because its threads could fail while sockets change."""
    process.suspend()
    try:
        end = time.monotonic() + _STOP
        while not _is_still(process.pid) and time.monotonic() < end:
            time.sleep(_LOOK)
        yield
    finally:
        process.resume()


def _is_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped."""
    tasks = Path(f"/proc/{pid}/task")
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
    return all(state in "Tt" for state in states)


def _rebind(handle: int, listener: Listener, drop_packets: bool) -> None:
    """Shut down a listening socket, and let it listen again on loopback.

    On Linux, `shutdown` unbinds a listening socket. The call of `shutdown` also affects the process
    that owns the socket, because both processes share the socket. The socket is not closed, because
    a closed socket would wake its owner repeatedly.
    """
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(
        _PIDFD_GETFD, handle, listener.descriptor, 0
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=descriptor) as shared:
        shared.shutdown(socket.SHUT_RDWR)
        if drop_packets:
            program = ctypes.create_string_buffer(_DROP)
            argument = struct.pack("HP", 1, ctypes.addressof(program))
            shared.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, argument)
        shared.bind((LOOPBACK[shared.family], listener.port))
        shared.listen(socket.SOMAXCONN)
