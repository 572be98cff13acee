"""The live messages of a running run: files in its directory that any process may read.

Each line is one message: a kind and a record. A record of kind `doing` has the present activity of
the ranks. `plan` has the steps per epoch, `step` a row of the history, and `epoch` the metrics
after an epoch. `fault` has the cost of rank failures after which spare ranks took over.
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

PRUNED = "pruned"  # content of the stop file if a search ends a run that is worse than others
FOLDER = "live"  # subfolder of a run's directory while the run is active
STOP = "stop"  # file in this folder that requests the end of training
SUBMITTER = "submitter.json"  # file in this folder that identifies the submitting process
MAX_READ_BYTES = 2**26  # maximum bytes that one read takes from a rank's file
Message = tuple[str, Record]
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _is_message(kind: Any, record: Any) -> bool:
    """Return True if a message has a kind and a record with valid numbers."""
    if not isinstance(kind, str) or not isinstance(record, dict):
        return False
    numbers = {name: record[name] for name in ("step", "rank", "epoch") if name in record}
    valid = all(is_number(value) and abs(value) < 2**53 for value in numbers.values())
    return valid and ("step" in numbers or kind not in ("step", "epoch"))


def make_stream(folder: Path, submitter: Record) -> None:
    """Create a run's stream folder, with a file that identifies the submitting process."""
    folder.mkdir()
    store.write_atomically(folder / SUBMITTER, json.dumps(submitter))


def is_shared(folder: Path, submitter: Record) -> bool:
    """Return True if this host sees the submitter's folder, not another one of the same path."""
    try:
        return bool(json.loads(read_file(folder / SUBMITTER, root=folder.parent)) == submitter)
    except OSError:
        return False


def encode_lines(kind: str, records: Sequence[Record]) -> str:
    """Return records of one kind as message lines for a rank's file."""
    return "".join(json.dumps([kind, record], default=float) + "\n" for record in records)


class StreamWriter:
    """The writer of one rank's file in a stream.

    Args:
        folder: Folder of the stream.
        rank: Number of the rank that writes the file.
        submitter: Identity of the process that submitted the run and will write its records: the
            fields of `store.this_process`, and `host`.
    """

    def __init__(self, folder: Path, rank: int, submitter: Record) -> None:
        self._folder, self._submitter = folder, submitter
        self._path = folder / f"rank{rank}.jsonl"
        self._failed = False

    def write(self, kind: str, records: Sequence[Record]) -> None:
        """Append messages of one kind to the file; after a failed write, write nothing more."""
        self.append(encode_lines(kind, records))

    def append(self, text: str) -> None:
        """Append lines to the rank's file; after a failed write, write nothing more."""
        if self._failed:
            return
        # The flag is cleared only after a complete write, so that nothing follows a partial line.
        self._failed = True
        # Training continues without the stream: the folder of an abandoned run is removed, and a
        # full disk may truncate a line. Readers treat a truncated line as incomplete.
        with suppress(OSError):
            with os.fdopen(open_file(self._path, _APPEND, self._folder.parent), "a") as file:
                file.write(text)
            self._failed = False

    def stop_asked(self) -> bool:
        """Return True if a user or a search asks for a stop, or if the submitter is dead."""
        return (self._folder / STOP).exists() or self._is_abandoned()

    def _is_abandoned(self) -> bool:
        # On another host, the submitter's process number is meaningless.
        here = self._submitter.get("host") == socket.gethostname()
        return here and not store.is_alive(self._submitter)


class StreamReader:
    """A reader of a stream's messages; each reader has its own position in every rank's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._positions: dict[Path, int] = {}
        self._has_warned = False

    def read(self) -> list[Message]:
        """Return the messages since the last call, by rank; none after the folder is removed."""
        messages: list[Message] = []
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with suppress(FileNotFoundError, UnsafeFile):
                messages += filter(None, map(self._record, self._new(path).splitlines()))
        return messages

    def _new(self, path: Path) -> bytes:
        """Return a file's complete new lines since the last call, at most MAX_READ_BYTES."""
        with os.fdopen(open_file(path, root=self.folder.parent), "rb") as file:
            # Reading starts at the last position, because long files are read twice per second.
            file.seek(self._positions.get(path, 0))
            content = file.read(MAX_READ_BYTES)
            # The last line may be incomplete, and is then left for the next call.
            complete_lines, newline, _ = content.rpartition(b"\n")
            if (
                not newline and len(content) == MAX_READ_BYTES
            ):  # labkit writes no line of this length, so it is skipped
                newline = content
        self._positions[path] = self._positions.get(path, 0) + len(complete_lines) + len(newline)
        return complete_lines

    def _record(self, line: bytes) -> Message | None:
        """Return the message of a line, or None (with one warning per reader) if it is invalid."""
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
        """Request that all ranks end training, after a common step."""
        with suppress(FileNotFoundError):  # The run has ended, and its stream is removed.
            replace_file(self.folder / STOP, reason.encode(), self.folder.parent)

    def is_stop_requested(self) -> bool:
        """Return True if a user or a search has requested the end of training."""
        return (self.folder / STOP).exists()

    def is_prune_requested(self) -> bool:
        """Return True if a search has requested the run's end, because other trials are better."""
        with suppress(FileNotFoundError):
            return read_file(self.folder / STOP, root=self.folder.parent) == PRUNED.encode()
        return False
