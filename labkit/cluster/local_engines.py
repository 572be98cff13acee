"""Engines that this machine keeps: started by whoever comes first, ended with the last lease."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, TypeAlias

from labkit.cluster import launch
from labkit.cluster.lease import Lease, hold, locked, take, wait_until_free
from labkit.cluster.start import Start
from labkit.common.capacity import check_ranks
from labkit.common.errors import LabkitError
from labkit.common.paths import fingerprint
from labkit.records.endings import End

Connection: TypeAlias = dict[str, Any]  # what a client must know, keys included
ATTACH = "attach.json"  # in a cluster's folder


class LocalEngines:
    """The engines of one cluster, of which this process may hold a lease.

    Args:
        folder: where the cluster's files are.
        name: of the cluster.
        how: how they start.
        oversubscribe: start more of them than this machine has cores or free memory for.
    """

    def __init__(self, folder: Path, name: str, how: Start, oversubscribe: bool = False) -> None:
        self.folder, self.name, self.how = folder, name, how
        self.oversubscribe, self._fits = oversubscribe, False
        self._lease: Lease | None = None

    def start(self) -> Connection:
        """Take a lease, and start the engines where they are not up; how to connect.

        Raises:
            InvalidInput: this machine is too small for them, or they would be open to others.
            LabkitError: they did not start.
        """
        self.folder.mkdir(exist_ok=True, mode=0o700)
        # One at a time: two who find no engines would both start some.
        with locked(self.folder / "start.lock", f"cluster {self.name} is being started or ended"):
            # Before the engines are looked for: a keeper that is about to end sees it, and stays.
            self._lease = Lease(self.folder)
            hold(self.folder)
            take(self.folder)
            if self.how_ended() is not None:
                # Once: a run whose engines have ended goes on, however busy the machine is.
                if not self._fits:
                    check_ranks(self.how.ranks_here, self.oversubscribe)
                self.how.check_hosts()
                launch.launch(self.folder, self.how)
            self._fits = True
        return self._connection()

    def let_go(self) -> None:
        """Give the lease back; the engines end with the last one."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def end(self) -> None:
        """End the engines for all who use them."""
        pid = self.state()["pid"]
        if pid is not None and self.how_ended() is None:
            os.kill(pid, signal.SIGTERM)
            # The next start wants the keeper's place, and its lock is the last that it gives up.
            wait_until_free(self.folder / "keeper.lock", 90)

    def state(self) -> launch.State:
        """What the keeper says."""
        return launch.state(self.folder)

    def how_ended(self) -> End | None:
        """How they have ended; None while they are up."""
        return launch.end(self.folder)

    def attach_file(self) -> Path:
        """Write what another machine needs to use them.

        Raises:
            LabkitError: it could not, as they listen to this machine alone.
        """
        if self.how.is_local:
            raise LabkitError(
                "a cluster of this machine listens on loopback: no other machine reaches it; "
                "start it on hosts: Cluster(hosts=[…]) or Cluster(nodes=…)"
            )
        told = {
            "name": self.name,
            "how": self.how.to_json(),
            "state": self.state(),
            "connection": self._connection(),
            "fingerprint": fingerprint(),
        }
        path = self.folder / ATTACH
        # Nobody else may read it at any moment: keys are in it.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(told, file)
        return path

    def _connection(self) -> Connection:
        file = self.folder / "profile" / "security" / "ipcontroller-labkit-client.json"
        connection: Connection = json.loads(file.read_text())
        return connection
