"""What ranks tell while they train: files in the run's directory, which any process may read.

A line is a kind and a record: `doing` says what the ranks are at, `plan` how many steps an epoch
has, `step` is a row of the history, `epoch` the metrics after an epoch, `fault` what the death of
ranks has cost that spares have replaced.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.common.canonical_json import is_number
from labkit.common.safe_files import UnsafeFile, open_file, read_file, replace_file
from labkit.common.safe_json import NotPlain, read_plain_json
from labkit.records import store
from labkit.records.store import Record

PRUNED = "pruned"  # why a search asks a run to end: it promises less than others
FOLDER = "live"  # in the run's directory, while it runs
STOP = "stop"  # there, once someone wants training to end
SUBMITTER = "submitter.json"  # there, by which ranks know it for the one that was meant
MOST_NEW = 2**26  # bytes of a rank that are read at once
Told = tuple[str, Record]
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _is_told(kind: Any, record: Any) -> bool:
    """Return whether this is a kind, and a record that has what its readers take for granted."""
    if not isinstance(kind, str) or not isinstance(record, dict):
        return False
    given = {name: record[name] for name in ("step", "rank", "epoch") if name in record}
    places = all(is_number(value) and abs(value) < 2**53 for value in given.values())
    return places and ("step" in given or kind not in ("step", "epoch"))


def make_stream(folder: Path, submitter: Record) -> None:
    """Make the folder of a stream, for a process that submits a run."""
    folder.mkdir()
    store.write_atomically(folder / SUBMITTER, json.dumps(submitter))


def sees(folder: Path, submitter: Record) -> bool:
    """Whether this host has the very folder of a stream, not another one of its name, or none."""
    try:
        return bool(json.loads(read_file(folder / SUBMITTER, root=folder.parent)) == submitter)
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
            with os.fdopen(open_file(self._path, _APPEND, self._folder.parent), "a") as file:
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
        self._is_odd = False

    def read(self) -> list[Told]:
        """What has come since the last call, rank by rank; nothing once the folder is gone."""
        told: list[Told] = []
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with suppress(FileNotFoundError, UnsafeFile):
                told += filter(None, map(self._record, self._new(path).splitlines()))
        return told

    def _new(self, path: Path) -> bytes:
        """Return the lines of a file that have come since the last call, MOST_NEW bytes at most."""
        with os.fdopen(open_file(path, root=self.folder.parent), "rb") as file:
            # Only what is new is read: a long run has many rows, and is looked at twice a second.
            file.seek(self._places.get(path, 0))
            content = file.read(MOST_NEW)
            whole, end, _ = content.rpartition(b"\n")  # a line may be half written
            if not end and len(content) == MOST_NEW:  # no line of labkit's is as long
                end = content
        self._places[path] = self._places.get(path, 0) + len(whole) + len(end)
        return whole

    def _record(self, line: bytes) -> Told | None:
        """Return what a line tells; None, with one warning for all, where it is odd."""
        try:
            told = read_plain_json(line, strict=False)
            if isinstance(told, list) and len(told) == 2 and _is_told(*told):
                return told[0], told[1]
        except NotPlain:
            pass
        if not self._is_odd:
            self._is_odd = True
            warnings.warn(
                f"{self.folder.parent.name}/{FOLDER} has odd lines: left out", stacklevel=3
            )
        return None

    def stop(self, why: str = "") -> None:
        """Ask the ranks to end training after the same step."""
        with suppress(FileNotFoundError):  # it has ended
            replace_file(self.folder / STOP, why.encode(), self.folder.parent)

    def wants_stop(self) -> bool:
        """Whether somebody wants training to end."""
        return (self.folder / STOP).exists()

    def asked_to_prune(self) -> bool:
        """Whether that was asked because the run promises less than others."""
        with suppress(FileNotFoundError):
            return read_file(self.folder / STOP, root=self.folder.parent) == PRUNED.encode()
        return False
