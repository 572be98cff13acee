"""Live messages of an active run, in files of its directory that any process may read.

Each line of a message file is one message, which consists of a kind and a record. A message of kind
`doing` contains the current activity of the ranks. A message of kind `plan` contains the steps per
epoch. A message of kind `step` contains a row of the history. A message of kind `epoch` contains
the metrics after an epoch. A message of kind `fault` contains the costs of rank failures. Spare
ranks replace the failed ranks.
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

from labkit.common.canonical_json import NotPlain, is_number, read_plain_json
from labkit.common.files import UnsafeFile, open_file, read_file, replace_file
from labkit.records import store
from labkit.records.store import Record

# The stop file contains the text "pruned" if a hyperparameter search ends the run.
PRUNED = "pruned"
FOLDER = "live"  # The subfolder `live` of a run's folder exists while the run is active.
STOP = "stop"  # The file `stop` in a run's folder `live` asks the ranks to end training.
# The file `submitter.json` in a run's folder `live` identifies the process that submitted the run.
SUBMITTER = "submitter.json"
MAX_READ_BYTES = 2**26
Message = tuple[str, Record]
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _is_message(kind: Any, record: Any) -> bool:
    """Return whether a message has a valid kind, and a record with valid numbers."""
    if not isinstance(kind, str) or not isinstance(record, dict):
        return False
    numbers = {name: record[name] for name in ("step", "rank", "epoch") if name in record}
    valid = all(is_number(value) and abs(value) < 2**53 for value in numbers.values())
    return valid and ("step" in numbers or kind not in ("step", "epoch"))


def make_stream(folder: Path, submitter: Record) -> None:
    """Create the folder of a run's messages, with a file that identifies the submitting process."""
    folder.mkdir()
    store.write_atomically(folder / SUBMITTER, json.dumps(submitter))


def is_shared(folder: Path, submitter: Record) -> bool:
    """Return whether this host sees the submitter's folder, and no local one of that path."""
    try:
        return bool(json.loads(read_file(folder / SUBMITTER, root=folder.parent)) == submitter)
    except OSError:
        return False


def encode_lines(kind: str, records: Sequence[Record]) -> str:
    """Return records of one kind as lines for a rank's message file."""
    return "".join(json.dumps([kind, record], default=float) + "\n" for record in records)


class StreamWriter:
    """The writer of one rank's message file in the folder of live messages.

    Args:
        folder: Folder of the run's live messages.
        rank: Number of the rank that writes messages to the file.
        submitter: Identity of the process that submitted the run, and that will write its records.
            The identity of the submitter contains the fields of `store.this_process`, and `host`.
    """

    def __init__(self, folder: Path, rank: int, submitter: Record) -> None:
        self._folder, self._submitter = folder, submitter
        self._path = folder / f"rank{rank}.jsonl"
        self._failed = False

    def write(self, kind: str, records: Sequence[Record]) -> None:
        """Append messages of one kind to the file, unless an earlier write has failed."""
        self.append(encode_lines(kind, records))

    def append(self, text: str) -> None:
        """Append lines to the message file, unless an earlier write has failed."""
        if self._failed:
            return
        # The flag `_failed` stays set after an incomplete write, so that no message follows a
        # partial line.
        self._failed = True
        # If a message cannot be written, training continues without messages. A write fails if the
        # folder of an abandoned run was removed, or if the disk is full. A full disk may truncate a
        # line, which readers then treat as incomplete.
        with suppress(OSError):
            with os.fdopen(open_file(self._path, _APPEND, self._folder.parent), "a") as file:
                file.write(text)
            self._failed = False

    def stop_asked(self) -> bool:
        """Return whether a user or a search requests a stop, or the submitter is dead."""
        return (self._folder / STOP).exists() or self._is_abandoned()

    def _is_abandoned(self) -> bool:
        # The submitter's process number has a meaning only on the submitter's host.
        here = self._submitter.get("host") == socket.gethostname()
        return here and not store.is_alive(self._submitter)


class StreamReader:
    """A reader of a run's live messages, which remembers its position in each rank's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._positions: dict[Path, int] = {}
        self._has_warned = False

    def read(self) -> list[Message]:
        """Return the messages since the last call, rank by rank; none if the folder is gone."""
        messages: list[Message] = []
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with suppress(FileNotFoundError, UnsafeFile):
                messages += filter(None, map(self._record, self._new(path).splitlines()))
        return messages

    def _new(self, path: Path) -> bytes:
        """Return the new complete lines since the last call, at most MAX_READ_BYTES in total."""
        with os.fdopen(open_file(path, root=self.folder.parent), "rb") as file:
            # Each call reads only new lines, because long message files are read twice per second.
            file.seek(self._positions.get(path, 0))
            content = file.read(MAX_READ_BYTES)
            # If the last line is incomplete, the next call reads the line again.
            complete_lines, newline, _ = content.rpartition(b"\n")
            if (
                not newline and len(content) == MAX_READ_BYTES
            ):  # skips a line of MAX_READ_BYTES, which labkit cannot have written
                newline = content
        self._positions[path] = self._positions.get(path, 0) + len(complete_lines) + len(newline)
        return complete_lines

    def _record(self, line: bytes) -> Message | None:
        """Return the message in a line, or None if it is invalid; warn about the first such
        line.
        """
        try:
            message = read_plain_json(line, strict=False)
            if isinstance(message, list) and len(message) == 2 and _is_message(*message):
                return message[0], message[1]
        except NotPlain:
            pass
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.folder.parent.name}/{FOLDER} has invalid lines, which are skipped",
                stacklevel=3,
            )
        return None

    def stop(self, reason: str = "") -> None:
        """Ask all ranks to end the training after the same step."""
        # A run's message folder is missing after the run has ended.
        with suppress(FileNotFoundError):
            replace_file(self.folder / STOP, reason.encode(), self.folder.parent)

    def is_stop_requested(self) -> bool:
        """Return whether a user or a search has requested that training end."""
        return (self.folder / STOP).exists()

    def is_prune_requested(self) -> bool:
        """Return whether a search has requested the run's end, because other trials are better."""
        with suppress(FileNotFoundError):
            return read_file(self.folder / STOP, root=self.folder.parent) == PRUNED.encode()
        return False
