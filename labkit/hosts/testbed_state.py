"""The state file of a testbed, and functions that start and end testbeds."""

from __future__ import annotations

import ctypes.util
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypedDict, cast

from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.files import bytecode_variables, runtime_folder
from labkit.common.quantities import bits_of
from labkit.records import store

NAMES = "abcdefgh"  # The name of each host of a testbed is a single letter.
# The machine that starts a testbed is the testbed's login node, and has the name `login`.
LOGIN = "login"
# The host `control` runs the Slurm controller slurmctld and the network switch.
CONTROL = "control"
MOST_CORES = 1024


@dataclass(frozen=True)
class TestbedPlan:
    """The validated parameters of `labkit.testbed`.

    Raises:
        InvalidInput: A value is invalid.
    """

    nodes: int = 2
    cores: int = 2
    bandwidth: str = "1Gb/s"
    slurm: bool = True

    def __post_init__(self) -> None:
        for field, least, most in (("nodes", 2, len(NAMES)), ("cores", 1, MOST_CORES)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise InvalidInput(
                    f"{field}={short(value)} is impossible; "
                    f"give a whole number from {least} to {most}"
                )
        if not isinstance(self.slurm, bool):
            raise InvalidInput(f"slurm={short(self.slurm)} is impossible; give True or False")
        bits_of(self.bandwidth, "bandwidth")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the virtual hosts: "a", "b", …"""
        return tuple(NAMES[: self.nodes])

    @property
    def rate(self) -> int:
        """The bandwidth of a link in bits/s."""
        return bits_of(self.bandwidth, "bandwidth")


def addresses(plan: TestbedPlan, number: int) -> dict[str, str]:
    """Return the IPv4 addresses of all hosts, of `control` and of the login node, by name.

    Args:
        plan: Parameters of the testbed.
        number: Third byte of the network 198.18.N.0/24, from 0 to 255; RFC 2544 reserves
            198.18.0.0/15 for network tests.
    """
    places = {name: place for place, name in enumerate(plan.hosts, 1)} | {CONTROL: 253, LOGIN: 254}
    return {name: f"198.18.{number}.{place}" for name, place in places.items()}


COMMANDS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    "mount": "mount",
}
SLURM = dict.fromkeys(("slurmctld", "slurmd", "srun", "sinfo"), "slurm-wlm")
# The PMIx library joins all tasks of `srun --mpi=pmix` in one MPI_COMM_WORLD.
PMIX = "libpmix.so.2"
# The system folders /usr/sbin and /sbin are often missing in PATH, even for root.
SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def require(slurm: bool) -> None:
    """Raise an error if this machine cannot run a testbed.

    Args:
        slurm: Whether the testbed runs Slurm.

    Raises:
        LabkitError: A requirement is missing; the message says what to install or do.
    """
    if sys.platform != "linux":
        raise LabkitError(
            f"a testbed needs Linux namespaces, but this system is {sys.platform}; "
            "use a Linux machine, a virtual machine, or a container with --privileged"
        )
    absent = {name: package for name, package in _wanted(slurm).items() if not find_command(name)}
    if slurm and not _has_pmix():
        absent[PMIX] = "libpmix2"
    if absent:
        without = "; or start a testbed without Slurm (slurm=False, --no-slurm)" if slurm else ""
        raise LabkitError(
            f"a testbed needs {', '.join(absent)}, which this machine does not have; on Debian "
            f"and Ubuntu, run apt-get install {' '.join(dict.fromkeys(absent.values()))}{without}"
        )
    if os.geteuid() != 0:
        raise LabkitError(
            f"a testbed needs root to create namespaces, but this is user {os.geteuid()}; "
            "start it with sudo, or as root in a container or virtual machine of your own"
        )


def find_command(command: str) -> str | None:
    """Return the path of a command in PATH or in the system folders; None if it is missing."""
    return shutil.which(command) or shutil.which(command, path=os.pathsep.join(SYSTEM))


def _wanted(slurm: bool) -> dict[str, str]:
    return COMMANDS | (SLURM if slurm else {})


def pmix_folders() -> list[Path]:
    """Return the folders in which Debian's Slurm searches for Debian's PMIx library."""
    return sorted(path.parent for path in Path("/usr/lib").glob(f"*/pmix2/lib/{PMIX}"))


def _has_pmix() -> bool:
    # `find_library` finds the PMIx library without loading it. A loaded library would conflict with
    # the PMIx of Open MPI's Python package.
    return bool(pmix_folders()) or ctypes.util.find_library("pmix") == PMIX


# The folder of a testbed contains the scripts `agent` and `login`, the Slurm configuration, and a
# record.
AGENT, LOGIN_COMMAND = "agent", "login"
SLURM_CONF = "slurm.conf"
RECORD = "testbed.json"
LAST = 60.0  # The constant LAST is the maximum number of seconds until a testbed has ended.
UP = "up"  # The command `labkit testbed up` starts a testbed with the name `up`.


class TestbedState(TypedDict):
    """The record of a running testbed, which its supervisor process writes."""

    plan: dict[str, Any]
    # The entry `control` is the id of a process in the namespaces of the host `control`.
    control: int
    # The entry `hosts` maps each host name to the id of a process in the host's namespaces.
    hosts: dict[str, int]
    addresses: dict[str, str]
    home: str  # Commands on the testbed start in the folder `home` by default.
    runtime: str  # The entry `runtime` is the value of XDG_RUNTIME_DIR on each host.
    pid: int
    process_started: float
    since_boot: float


def folder_of(name: str) -> Path:
    """Return the folder of the testbed with the name `name`."""
    return runtime_folder("testbed") / name


def read_state(folder: Path) -> TestbedState | None:
    """Return the state of the testbed in `folder`, or None if the testbed is not running."""
    record = _read_record(folder)
    return cast("TestbedState", record) if "hosts" in record and store.is_alive(record) else None


def _read_record(folder: Path) -> store.Record:
    """Return a testbed's record; while the testbed starts, it describes only the supervisor."""
    try:
        # The function ignores the schema version of the record. Each version of labkit must be able
        # to end testbeds of other versions.
        record: store.Record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return {}
    return record


def start(
    folder: Path, plan: TestbedPlan, parent: bool
) -> tuple[TestbedState, subprocess.Popen[str]]:
    """Start a testbed and wait until it is ready; return its state and its supervisor process.

    Args:
        folder: Folder of the testbed.
        plan: Parameters of the testbed.
        parent: Whether the testbed ends when this process ends.

    Raises:
        LabkitError: The testbed cannot start; the message says why, and what to do.
    """
    require(plan.slurm)
    with tempfile.TemporaryFile("w+") as errors:
        supervisor = _start_supervisor(folder, plan, parent, errors)
        try:
            # The assertion tells the type checker that stdout is a pipe.
            assert supervisor.stdout is not None
            line = supervisor.stdout.readline()
        # After an exception, such as an interrupt, no caller waits for the testbed. The code
        # therefore terminates the testbed's supervisor process.
        except BaseException:
            supervisor.terminate()
            supervisor.wait()
            raise
        answer = json.loads(line) if line else {"ready": False, "message": _last_line(errors)}
    if not answer["ready"]:
        # The supervisor process ends after it has removed all files of the testbed.
        supervisor.wait()
        raise LabkitError(answer["message"])
    record = read_state(folder)
    if record is None:
        raise LabkitError("the testbed has ended right after its start")
    return record, supervisor


def _start_supervisor(
    folder: Path, plan: TestbedPlan, parent: bool, errors: IO[str]
) -> subprocess.Popen[str]:
    shape = json.dumps(asdict(plan))
    words = [sys.executable, "-P", "-m", "labkit.hosts.supervisor", str(folder), shape]
    # A pidfd still identifies a process after its end, when another process may have the same
    # process id.
    descriptors = [os.pidfd_open(os.getpid())] if parent else []
    try:
        return subprocess.Popen(
            [*words, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | bytecode_variables(),
            pass_fds=descriptors,
            # Ctrl-C must interrupt only a notebook cell or a command, not the testbed.
            start_new_session=True,
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def claim_folder(folder: Path) -> None:
    """Create the folder of a testbed atomically, with a record of the process that owns it.

    Raises:
        LabkitError: Another testbed owns the folder.
    """
    temporary = _new_folder(folder.parent.name)
    store.write_json(temporary / RECORD, {"schema": store.SCHEMA, **store.this_process()})
    try:
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary)
        if error.errno != errno.ENOTEMPTY:
            raise
        raise LabkitError(
            "a testbed is running or starting; end it with labkit testbed down, or wait for its end"
        ) from None


def _new_folder(name: str, tries: int = 100) -> Path:
    try:
        return Path(tempfile.mkdtemp(dir=runtime_folder(name)))
    except FileNotFoundError:  # a testbed that ended just now removed the empty parent folder
        if not tries:
            raise
        return _new_folder(name, tries - 1)


def remove(folder: Path) -> None:
    """Remove the folder of a testbed that has ended, and empty parent folders."""
    # The function ignores errors, because the testbed's host `control` may remove the same files at
    # the same time.
    shutil.rmtree(folder, ignore_errors=True)
    for parent in (folder.parent, folder.parent.parent):
        with suppress(OSError):
            parent.rmdir()


def remove_stale(folder: Path) -> None:
    """Remove a testbed's folder, unless the testbed's supervisor is running."""
    if not store.is_alive(_read_record(folder)):
        remove(folder)


def end(folder: Path) -> bool:
    """End the testbed in `folder`, wait for its end, and return whether there was a testbed."""
    record, existed = _read_record(folder), folder.exists()
    if store.is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record["pid"], signal.SIGTERM)
        limit = time.monotonic() + LAST
        while store.is_alive(record):
            if time.monotonic() > limit:
                raise LabkitError(
                    f"the testbed has not ended after {LAST:.0f} s; "
                    f"end its supervisor, which is process {record['pid']}"
                )
            time.sleep(0.05)
    # The testbed's folder still exists if the supervisor process and the host `control` were
    # killed.
    remove(folder)
    return existed


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().splitlines() if line.strip()]
    return f"the testbed did not start: {lines[-1] if lines else 'no error message'}"
