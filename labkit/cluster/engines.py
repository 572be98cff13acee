"""Engines of a cluster: those of this machine, and those of other machines."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

from labkit.cluster import launch
from labkit.cluster.launch import ClusterState
from labkit.cluster.lease import Lease, link_hold, locked, release_warm_lease, wait_until_free
from labkit.cluster.start import Start
from labkit.common.canonical_json import digest
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import fingerprint, runtime_folder
from labkit.common.machine import check_ranks
from labkit.hosts.host_list import is_reachable
from labkit.records.endings import End

# A `Connection` is ipyparallel's connection info, which includes secret keys.
Connection: TypeAlias = dict[str, Any]
# Other machines connect to a cluster with the file attach.json from the cluster's folder.
ATTACH = "attach.json"


class LocalEngines:
    """The engines of one cluster of this machine, on which this process may hold a lease.

    Args:
        folder: Folder with the cluster's files.
        name: Name of the cluster.
        how: Launch options of the ranks.
        oversubscribe: Whether the number of ranks may exceed the limits that cores and free memory
            set.
    """

    def __init__(self, folder: Path, name: str, how: Start, oversubscribe: bool = False) -> None:
        self.folder, self.name, self.how = folder, name, how
        self.oversubscribe, self._fits = oversubscribe, False
        self._lease: Lease | None = None

    def start(self) -> Connection:
        """Acquire a lease, start the engines if necessary, and return the connection info.

        Raises:
            InvalidInput: The machine is too small, or the network is not trusted.
            LabkitError: The engines did not start.
        """
        self.folder.mkdir(exist_ok=True, mode=0o700)
        # Without the start lock, two processes that find no engines would both start engines.
        with locked(
            self.folder / "start.lock", f"another process is starting or ending cluster {self.name}"
        ):
            # This process acquires a lease on the cluster before it checks whether the engines have
            # ended. A lease on a cluster keeps the cluster's engines running. The supervising
            # process ends engines as unused if no process holds a lease.
            self._lease = Lease(self.folder)
            link_hold(self.folder)
            release_warm_lease(self.folder)
            if self.how_ended() is not None:
                # Cores and memory are checked only at the first start. A restart must not fail on a
                # busy machine.
                if not self._fits:
                    check_ranks(self.how.ranks_here, self.oversubscribe)
                self.how.check_hosts()
                launch.launch(self.folder, self.how)
            self._fits = True
        return self._connection()

    def release(self) -> None:
        """Release the lease; the engines end when no lease is left."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def end(self) -> None:
        """End the engines for all processes that use them."""
        pid = self.state()["pid"]
        if pid is not None and self.how_ended() is None:
            os.kill(pid, signal.SIGTERM)
            # The old supervising process releases its lock last, and a new supervising process
            # needs this lock to start.
            wait_until_free(self.folder / "keeper.lock", 90)

    def state(self) -> launch.ClusterState:
        """Return the cluster state that the cluster's keeper process has last written."""
        return launch.state(self.folder)

    def how_ended(self) -> End | None:
        """Return how the engines have ended, or None while they are running."""
        return launch.end(self.folder)

    def attach_file(self) -> Path:
        """Write the file with which another machine connects to the cluster, and return its path.

        Raises:
            LabkitError: The engines listen on loopback only, so no other machine can connect.
        """
        if self.how.is_local:
            raise LabkitError(
                "this cluster listens on loopback only, so no other machine reaches it; start a "
                "cluster on hosts: Cluster(hosts=[…]) or Cluster(nodes=…)"
            )
        record = {
            "name": self.name,
            "how": self.how.to_json(),
            "state": self.state(),
            "connection": self._connection(),
            "fingerprint": fingerprint(),
        }
        path = self.folder / ATTACH
        # The file is created with private permissions, because other users must not read the
        # cluster's keys.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(record, file)
        return path

    def _connection(self) -> Connection:
        file = self.folder / "profile" / "security" / "ipcontroller-labkit-client.json"
        connection: Connection = json.loads(file.read_text())
        return connection


REACHED = 5.0  # The constant REACHED is the maximum time in seconds of an attempt to connect.
# The constant ASK_EVERY is the minimum time in seconds between two connection tests.
ASK_EVERY = 2.0
# The constant UNREACHED is the time in seconds without a connection after which the engines count
# as ended.
UNREACHED = 30.0


class RemoteEngines:
    """Engines of another machine's cluster; they run while the other machine uses them.

    Calls from different processes of this machine run one after another. Only one machine at a time
    may use the ranks. Calls from several machines are not coordinated by labkit.

    Args:
        file: The file `cluster.attach_file`, or a copy of this file; it contains the keys of the
            cluster.

    Raises:
        InvalidInput: The file is invalid or comes from another version of labkit. The error also
            occurs if other users can modify the file.
    """

    def __init__(self, file: Path) -> None:
        try:
            status = file.stat()
            record = json.loads(file.read_text())
            self.how, self.name = Start.from_json(record["how"]), str(record["name"])
            self._state: ClusterState = record["state"]
            self._connection: Connection = record["connection"]
            made_by = record["fingerprint"]
        except FileNotFoundError:
            raise InvalidInput(
                f"the file {file.name} does not exist; give the path that "
                "cluster.attach_file returns, or a copy of that file"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(
                f"{file.name} is not an attach file; give the path that cluster.attach_file "
                "returns, or a copy of that file"
            ) from None
        # Engines reply with pickles, which can execute code. An attacker could redirect this
        # process by a modified attach file. Pickles from the attacker's engines could execute
        # malicious code.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise InvalidInput(
                f"other users may write {file.name}, and could redirect you to their engines; "
                f"give a file that only you can write: chmod 600 {file.name}"
            )
        if made_by != fingerprint():
            raise InvalidInput(
                f"{file.name} was written by another version of labkit; install the same version "
                "on both machines"
            )
        # A process of this machine could have the same pid as an engine of the other machine.
        if self.how.is_local:
            raise InvalidInput(
                f"{file.name} describes a cluster that listens on loopback only, so this machine "
                "cannot reach it; start a cluster on hosts: Cluster(hosts=[…]) or "
                "Cluster(nodes=…)"
            )
        key = digest([self.name, self._connection["curve_serverkey"]])[:8]
        self.folder = runtime_folder("visited") / key
        self._queried_at = self._answered = -math.inf

    def start(self) -> Connection:
        """Return ipyparallel's connection info of the running cluster.

        Raises:
            LabkitError: The controller of the cluster does not answer.
        """
        self.folder.mkdir(exist_ok=True, mode=0o700)
        if (how := self.how_ended()) is not None:
            raise LabkitError(f"this process cannot attach to cluster {self.name}: {how.message}")
        return self._connection

    def release(self) -> None:
        """Do nothing, because this process has acquired no lease on the cluster."""

    def end(self) -> None:
        """Print that only the machine that started the engines can restart them."""
        message = (
            f"cluster {self.name} runs on another machine: restart the cluster on that "
            "machine, then attach again"
        )
        print(message, file=sys.stderr, flush=True)

    def state(self) -> ClusterState:
        """Return the cluster's state at the time when the attach file was written."""
        return self._state

    def how_ended(self) -> End | None:
        """Return why the engines count as ended if the controller does not answer; else None."""
        now = time.monotonic()
        if now - self._queried_at > ASK_EVERY:
            address = self._connection["location"], int(self._connection["registration"])
            self._queried_at = now
            self._answered = now if is_reachable(address, REACHED) else self._answered
        # A short network failure does not count as the end of the engines.
        if now - self._answered < UNREACHED:
            return None
        return End(
            "the cluster's controller does not answer: it has ended, or this machine has no "
            "route to its host"
        )

    def attach_file(self) -> Path:
        """Raise LabkitError: only the machine that started the cluster has its attach file."""
        raise LabkitError(
            f"cluster {self.name} was started on another machine: copy the attach file from "
            "that machine"
        )
