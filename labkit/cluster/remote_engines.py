"""Engines of a cluster that another machine has started, for use while the cluster is running."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

from labkit.cluster.launch import ClusterState
from labkit.cluster.local_engines import Connection
from labkit.cluster.start import Start
from labkit.common.canonical_json import digest
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.paths import fingerprint, runtime_folder
from labkit.hosts.connection import is_reachable
from labkit.records.endings import End

REACHED = 5.0  # maximum seconds of an attempt to connect
ASK_EVERY = 2.0  # minimum seconds between two connection tests
UNREACHED = 30.0  # seconds without a connection after which the engines count as ended


class RemoteEngines:
    """Engines of another machine's cluster; they run while that machine holds a lease.

    Calls from different processes of this machine run one after another. Only one machine at a time
    may use the ranks, because labkit does not coordinate calls from several machines.

    Args:
        file: The file `cluster.attach_file`, or a copy of this file; it contains the keys of the
            cluster.

    Raises:
        InvalidInput: The file is invalid, was written by another version of labkit, or can be
            modified by other users.
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
        # Engines reply with pickles, which can execute code. An attacker who can modify the attach
        # file could redirect this process to engines whose pickles execute malicious code.
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
        if self.how.is_local:  # the pids of the other machine would be mistaken for local pids
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
        """If the controller does not answer, return why the engines count as ended; else None."""
        now = time.monotonic()
        if now - self._queried_at > ASK_EVERY:
            address = self._connection["location"], int(self._connection["registration"])
            self._queried_at = now
            self._answered = now if is_reachable(address, REACHED) else self._answered
        if now - self._answered < UNREACHED:  # a network link may recover
            return None
        return End(
            "the cluster's controller does not answer: it has ended, or this machine has no "
            "route to its host"
        )

    def attach_file(self) -> Path:
        """Raise LabkitError, because only the machine that started the cluster has the file."""
        raise LabkitError(
            f"cluster {self.name} was started on another machine: copy the attach file from "
            "that machine"
        )
