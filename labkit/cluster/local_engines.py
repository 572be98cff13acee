"""Engines of clusters on this machine, from the first lease to the end of the last lease."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, TypeAlias

from labkit.cluster import launch
from labkit.cluster.lease import Lease, link_hold, locked, release_warm_lease, wait_until_free
from labkit.cluster.start import Start
from labkit.common.capacity import check_ranks
from labkit.common.errors import LabkitError
from labkit.common.paths import fingerprint
from labkit.records.endings import End

Connection: TypeAlias = dict[str, Any]  # ipyparallel's connection info, which includes keys
ATTACH = "attach.json"  # name of a file in a cluster's folder, with which other machines connect


class LocalEngines:
    """The engines of one cluster of this machine, on which this process may hold a lease.

    Args:
        folder: Folder with the cluster's files.
        name: Name of the cluster.
        how: Launch options of the ranks.
        oversubscribe: Whether the cluster may have more ranks than the cores or the free memory
            allow.
    """

    def __init__(self, folder: Path, name: str, how: Start, oversubscribe: bool = False) -> None:
        self.folder, self.name, self.how = folder, name, how
        self.oversubscribe, self._fits = oversubscribe, False
        self._lease: Lease | None = None

    def start(self) -> Connection:
        """Acquire a lease, start the engines unless they are running, and return the connection.

        Raises:
            InvalidInput: The machine is too small, or the network is not trusted.
            LabkitError: The engines did not start.
        """
        self.folder.mkdir(exist_ok=True, mode=0o700)
        # Without the start lock, two processes that find no engines would both start engines.
        with locked(
            self.folder / "start.lock", f"another process is starting or ending cluster {self.name}"
        ):
            # The lease is acquired before the engines are checked. A keeper process that is about
            # to end the cluster sees the lease.
            self._lease = Lease(self.folder)
            link_hold(self.folder)
            release_warm_lease(self.folder)
            if self.how_ended() is not None:
                # Cores and memory are checked only at the first start, because a restart must not
                # fail on a busy machine.
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
            # The old keeper process releases its lock last, and a new keeper process needs this
            # lock to start.
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
