"""Writes what a rank holds into a checkpoint, beside training."""

from __future__ import annotations

import importlib.metadata
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.safe_files import make_folder
from labkit.communicator import Communicator
from labkit.records import checkpoints, store, stream
from labkit.records.checkpoints import CheckpointContext
from labkit.records.pieces import Piece, file_of, write

LOOK_EVERY = 0.01  # seconds
LOOKS = 50  # after so many, whose the run is, which is a file that hosts share


class Copied(NamedTuple):
    """What a rank held after a step: pieces, rows of the record, and what else there is to say."""

    taken: int
    pieces: Sequence[Piece]
    rows: Sequence[Mapping[str, float]]
    told: Mapping[str, JSON]
    manifest: Mapping[str, JSON]

    @property
    def everything(self) -> list[Piece]:
        """The pieces, rows among them."""
        columns = self.rows[0] if self.rows else ()
        rows = [
            Piece.alone(f"rows/{name}", np.array([row[name] for row in self.rows]))
            for name in columns
        ]
        return [*self.pieces, *rows]


class Writing:
    """A thread that writes one rank's file; that of rank 0 waits for all, and seals.

    Args:
        communicator: the ranks that write.
        keeping: where, and whose the run is.

    Raises:
        InvalidInput: this host does not see the folder.
    """

    def __init__(self, communicator: Communicator, keeping: CheckpointContext) -> None:
        self._communicator, self._keeping = communicator, keeping
        self._given_up, self._thread = threading.Event(), threading.Thread()
        self._error: BaseException | None = None
        if not self.is_ours():
            raise InvalidInput(
                f"host {socket.gethostname()} does not see the run's folder, where ranks keep "
                "their state; work in a folder that all hosts share, or without checkpoints"
            )

    def is_ours(self) -> bool:
        """Whether the folder is here, and nobody else has taken up the run."""
        live, owner = Path(self._keeping.folder).parent / stream.FOLDER, self._keeping.owner
        return owner is None or stream.sees(live, owner)

    def goes_on(self) -> bool:
        """Whether the last one is still being written."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise what the thread met, in the training."""
        if self._error is not None:
            raise self._error

    def begin(self, copied: Copied) -> None:
        """Write it; the last one is written."""
        work = lambda: self._write(copied)  # noqa: E731
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for what is being written."""
        while self.goes_on():
            self._thread.join(LOOK_EVERY)
            self._communicator.board.check()  # a rank that has failed writes no more
        self.check()

    def give_up(self) -> None:
        """Wait for nobody any more."""
        self._given_up.set()

    def _write(self, copied: Copied) -> None:
        try:
            rank, owner = self._communicator.rank, self._keeping.owner or {}
            # Ranks of an owner that was killed may still write the same step.
            half = f"{copied.taken}.{owner.get('pid', 'half')}"
            folder = Path(self._keeping.folder) / half
            make_folder(folder, Path(self._keeping.folder).parent)
            written = write(file_of(folder, rank), copied.everything, copied.told)
            store.write_json(_sum(folder, rank), written)
            if rank == 0:
                self._seal(folder, copied.manifest)
        except BaseException as error:
            self._error = error  # raised in the training, at its next step

    def _seal(self, folder: Path, manifest: Mapping[str, JSON]) -> None:
        sums = [_sum(folder, rank) for rank in range(self._communicator.size)]
        polls = 0
        while not all(each.exists() for each in sums):
            polls += 1
            # Who takes up the run removes halves, this one's files perhaps: they never come then.
            taken_up = polls % LOOKS == 0 and not self.is_ours()
            if self._given_up.wait(LOOK_EVERY) or taken_up:
                return
        if not self.is_ours():
            return
        files = {f"{each.stem}.npz": store.read_json(each) for each in sums}
        for each in sums:
            each.unlink()
        checkpoints.seal(folder, {**manifest, "files": files})
        assert self._keeping.checkpoint is not None
        checkpoints.forget(folder.parent, self._keeping.checkpoint.keep)


def versions() -> dict[str, JSON]:
    """Of what a state depends on."""
    return {name: importlib.metadata.version(name) for name in ("labkit", "keras", "numpy")}


def _sum(folder: Path, rank: int) -> Path:
    """Where a rank says that its file is whole, until the checkpoint is."""
    return folder / f"rank{rank}.json"
