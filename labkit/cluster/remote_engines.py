"""Engines that another machine keeps, used from here for as long as they are up."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

from labkit.cluster.launch import State
from labkit.cluster.local_engines import Connection
from labkit.cluster.start import Start
from labkit.common.canonical_json import digest
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.paths import fingerprint, runtime_folder
from labkit.hosts.connection import answers
from labkit.records.endings import End

REACHED = 5.0  # seconds that an answer may take
ASK_EVERY = 2.0  # seconds
UNREACHED = 30.0  # seconds without an answer after which they count as ended, as for guests


class Visited:
    """Engines whose leases are another machine's; they end with those.

    Calls of this machine take turns. Nothing makes those of several machines do so: one of them
    works with the ranks at a time.

    Args:
        file: what the cluster wrote, `cluster.attach_file`, or a copy; it holds its keys.

    Raises:
        InvalidInput: it is no such file, of another labkit, or other users can write it.
    """

    def __init__(self, file: Path) -> None:
        try:
            status = file.stat()
            told = json.loads(file.read_text())
            self.how, self.name = Start.of_json(told["how"]), str(told["name"])
            self._state: State = told["state"]
            self._connection: Connection = told["connection"]
            made_by = told["fingerprint"]
        except FileNotFoundError:
            raise InvalidInput(f"there is no {file.name}; give cluster.attach_file") from None
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(
                f"{file.name} is not what a cluster wrote; give cluster.attach_file, or its copy"
            ) from None
        # Engines answer with pickles: whoever writes this file may run code here.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise InvalidInput(
                f"{file.name} may be written by other users, who could name engines of theirs; "
                f"give a file that only you can write: chmod 600 {file.name}"
            )
        if made_by != fingerprint():
            raise InvalidInput(
                f"{file.name} is of another labkit than this one; install the same on both machines"
            )
        if self.how.is_local:  # its processes would be taken for those of this machine
            raise InvalidInput(
                f"{file.name} is of a cluster that listens on its own machine alone; start one on "
                "hosts: Cluster(hosts=[…]) or Cluster(nodes=…)"
            )
        own = digest([self.name, self._connection["curve_serverkey"]])[:8]
        self.folder = runtime_folder("visited") / own
        self._asked = self._answered = -math.inf

    def start(self) -> Connection:
        """How to connect. Raises: LabkitError, where nobody answers any more."""
        self.folder.mkdir(exist_ok=True, mode=0o700)
        if (how := self.how_ended()) is not None:
            raise LabkitError(f"cluster {self.name} cannot be attached to: {how.message}")
        return self._connection

    def let_go(self) -> None:
        """Nothing is held."""

    def end(self) -> None:
        """Say who can: only the machine that started them starts them anew."""
        told = f"cluster {self.name} is another machine's: restart it there, then attach again"
        print(told, file=sys.stderr, flush=True)

    def state(self) -> State:
        """What their keeper said when all were there."""
        return self._state

    def how_ended(self) -> End | None:
        """How they have ended: their controller, which ends with them, does not answer."""
        now = time.monotonic()
        if now - self._asked > ASK_EVERY:
            address = self._connection["location"], int(self._connection["registration"])
            self._asked = now
            self._answered = now if answers(address, REACHED) else self._answered
        if now - self._answered < UNREACHED:  # a link may come back
            return None
        return End("its controller does not answer: it has ended, or no way leads there")

    def attach_file(self) -> Path:
        """Raises LabkitError: it is the file that this one was made from."""
        raise LabkitError(f"cluster {self.name} is another machine's: copy the file from there")
