"""What ranks tell while they train: files in the run's directory, which any process may read.

A line is a kind and a record: `doing` says what the ranks are at, `plan` how many steps an epoch
has, `step` is a row of the history, `epoch` the metrics after an epoch, `fault` what the death of
ranks has cost that spares have replaced.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from labkit.records import store
from labkit.records.store import Record

PRUNED = "pruned"  # why a search asks a run to end: it promises less than others
FOLDER = "live"  # in the run's directory, while it runs
STOP = "stop"  # there, once someone wants training to end
SUBMITTER = "submitter.json"  # there, by which ranks know it for the one that was meant
Told = tuple[str, Record]


def make_stream(folder: Path, submitter: Record) -> None:
    """Make the folder of a stream, for a process that submits a run."""
    folder.mkdir()
    (folder / SUBMITTER).write_text(json.dumps(submitter))


def sees(folder: Path, submitter: Record) -> bool:
    """Whether this host has the very folder of a stream, not another one of its name, or none."""
    try:
        return bool(json.loads((folder / SUBMITTER).read_text()) == submitter)
    except OSError:
        return False


def lines(kind: str, records: Sequence[Record]) -> str:
    """Records of a kind, as they stand in the file of a rank."""
    return "".join(json.dumps([kind, record], default=float) + "\n" for record in records)


class Writer:
    """One rank's side.

    Args:
        folder: of the stream.
        rank: whose file it is.
        submitter: the process that will write the record, see `store.this_process`, and its
            `host`.
    """

    def __init__(self, folder: Path, rank: int, submitter: Record) -> None:
        self._folder, self._submitter = folder, submitter
        self._path = folder / f"rank{rank}.jsonl"
        self._lost = False

    def write(self, kind: str, records: Sequence[Record]) -> None:
        """Append records of a kind; nothing more once that has failed."""
        self.append(lines(kind, records))

    def append(self, told: str) -> None:
        """The same of lines."""
        if self._lost:
            return
        # Lost until the write has succeeded: whatever ends it, nothing follows half a line.
        self._lost = True
        # Training goes on unwatched: a run that was given up has no folder any more, and a full
        # disk may have cut a line, which readers take for one that is not yet whole.
        with suppress(OSError):
            with self._path.open("a") as file:
                file.write(told)
            self._lost = False

    def stop_asked(self) -> bool:
        """Whether someone wants training to end, or nobody is left who would keep its result."""
        return (self._folder / STOP).exists() or self._is_abandoned()

    def _is_abandoned(self) -> bool:
        # On another host the number of a process says nothing.
        here = self._submitter.get("host") == socket.gethostname()
        return here and not store.is_alive(self._submitter)


class Reader:
    """The side of those who watch; each has a place of its own in every file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[Path, int] = {}

    def read(self) -> list[Told]:
        """What has come since the last call, rank by rank; nothing once the folder is gone."""
        told: list[Told] = []
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with suppress(FileNotFoundError), path.open("rb") as file:
                # Only what is new is read: a long run has many rows, and is looked at twice a
                # second.
                file.seek(self._places.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")  # a line may be half written
                self._places[path] = self._places.get(path, 0) + len(whole) + len(end)
                told += [(kind, record) for kind, record in map(json.loads, whole.splitlines())]
        return told

    def stop(self, why: str = "") -> None:
        """Ask the ranks to end training after the same step."""
        with suppress(FileNotFoundError):  # it has ended
            (self.folder / STOP).write_text(why)

    def wants_stop(self) -> bool:
        """Whether somebody wants training to end."""
        return (self.folder / STOP).exists()

    def asked_to_prune(self) -> bool:
        """Whether that was asked because the run promises less than others."""
        with suppress(FileNotFoundError):
            return (self.folder / STOP).read_text() == PRUNED
        return False
