"""A thread that writes the state of a rank into a checkpoint while training continues."""

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
from labkit.records.pieces import TensorBox, rank_file, write

LOOK_EVERY = 0.01  # seconds between two polls
LOOKS = 50  # polls between two checks of the run's owner; each check reads a shared file


class StateCopy(NamedTuple):
    """A copy of a rank's state after a step: tensors, history rows, details and manifest."""

    taken: int
    pieces: Sequence[TensorBox]
    rows: Sequence[Mapping[str, float]]
    told: Mapping[str, JSON]
    manifest: Mapping[str, JSON]

    @property
    def all_pieces(self) -> list[TensorBox]:
        """All tensors to save, including one array per column of the history rows."""
        columns = self.rows[0] if self.rows else ()
        rows = [
            TensorBox.local(f"rows/{name}", np.array([row[name] for row in self.rows]))
            for name in columns
        ]
        return [*self.pieces, *rows]


class CheckpointWriter:
    """A thread that writes one rank's file; on rank 0 it also publishes the files of all ranks.

    Args:
        communicator: Communicator of the ranks that write.
        checkpoint_context: Folder of checkpoints, and the process that owns the run.

    Raises:
        InvalidInput: This host does not share the run's folder.
    """

    def __init__(self, communicator: Communicator, checkpoint_context: CheckpointContext) -> None:
        self._communicator, self._context = communicator, checkpoint_context
        self._given_up, self._thread = threading.Event(), threading.Thread()
        self._error: BaseException | None = None
        if not self.is_owner():
            raise InvalidInput(
                f"host {socket.gethostname()} does not have the run's folder, in which ranks save "
                "checkpoints; work in a folder that all hosts share, or without checkpoints"
            )

    def is_owner(self) -> bool:
        """Return whether this host has the run's folder, and no other process resumed the run."""
        live, owner = Path(self._context.folder).parent / stream.FOLDER, self._context.owner
        return owner is None or stream.is_shared(live, owner)

    def is_writing(self) -> bool:
        """Return whether the last checkpoint is still being written."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise the error that has ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def begin(self, copied: StateCopy) -> None:
        """Start to write a checkpoint; the previous checkpoint must be complete."""
        work = lambda: self._write(copied)  # noqa: E731
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current checkpoint is written."""
        while self.is_writing():
            self._thread.join(LOOK_EVERY)
            self._communicator.board.raise_failures()  # raises if another rank has failed
        self.check()

    def stop_waiting(self) -> None:
        """Let the thread stop waiting for other ranks' files, after a failure."""
        self._given_up.set()

    def _write(self, copied: StateCopy) -> None:
        try:
            rank, owner = self._communicator.rank, self._context.owner or {}
            # The folder's name contains the owner's process id, because ranks of a killed owner may
            # still write the same step.
            half = f"{copied.taken}.{owner.get('pid', 'half')}"
            folder = Path(self._context.folder) / half
            make_folder(folder, Path(self._context.folder).parent)
            written = write(rank_file(folder, rank), copied.all_pieces, copied.told)
            store.write_json(_sum(folder, rank), written)
            if rank == 0:
                self._seal(folder, copied.manifest)
        except BaseException as error:
            self._error = error  # `check` raises this error in the training thread

    def _seal(self, folder: Path, manifest: Mapping[str, JSON]) -> None:
        sums = [_sum(folder, rank) for rank in range(self._communicator.size)]
        polls = 0
        while not all(path.exists() for path in sums):
            polls += 1
            # If another process resumes the run, it removes unpublished files, and this loop would
            # wait for them forever.
            taken_up = polls % LOOKS == 0 and not self.is_owner()
            if self._given_up.wait(LOOK_EVERY) or taken_up:
                return
        if not self.is_owner():
            return
        files = {f"{path.stem}.npz": store.read_json(path) for path in sums}
        for path in sums:
            path.unlink()
        checkpoints.publish(folder, {**manifest, "files": files})
        assert self._context.checkpoint is not None
        checkpoints.remove_old(folder.parent, self._context.checkpoint.max_to_keep)


def versions() -> dict[str, JSON]:
    """Return the versions of the packages on which a saved state depends."""
    return {name: importlib.metadata.version(name) for name in ("labkit", "keras", "numpy")}


def _sum(folder: Path, rank: int) -> Path:
    """Return the path of the checksum file, which marks a rank's file as complete."""
    return folder / f"rank{rank}.json"
