"""A thread that writes a rank's state to a checkpoint file while training continues."""

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
from labkit.records.tensor_boxes import TensorBox, rank_file, write

LOOK_EVERY = 0.01  # seconds between two polls for the files of other ranks
LOOKS = 50  # polls between checks of the run's owner (a shared file)


class StateCopy(NamedTuple):
    """A copy of a rank's state after a step: tensors, history rows, details and a manifest."""

    taken: int
    pieces: Sequence[TensorBox]
    rows: Sequence[Mapping[str, float]]
    told: Mapping[str, JSON]
    manifest: Mapping[str, JSON]

    @property
    def all_pieces(self) -> list[TensorBox]:
        """All tensors to save; each column of the history rows is one array."""
        columns = self.rows[0] if self.rows else ()
        rows = [
            TensorBox.local(f"rows/{name}", np.array([row[name] for row in self.rows]))
            for name in columns
        ]
        return [*self.pieces, *rows]


class CheckpointWriter:
    """A thread that writes one file per rank; on rank 0 it then publishes the files of all ranks.

    Args:
        communicator: Communicator of the ranks that write checkpoint files.
        checkpoint_context: Folder for checkpoints, and the process that owns the run.

    Raises:
        InvalidInput: If this host does not share the run's folder.
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
        """Return whether the thread is still writing the last checkpoint."""
        return self._thread.is_alive()

    def check(self) -> None:
        """If an error has ended the thread, raise this error."""
        if self._error is not None:
            raise self._error

    def begin(self, copied: StateCopy) -> None:
        """Start to write a checkpoint; the previous one must be completely written."""
        work = lambda: self._write(copied)  # noqa: E731
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current checkpoint is completely written."""
        while self.is_writing():
            self._thread.join(LOOK_EVERY)
            self._communicator.board.raise_failures()  # raises an error if another rank has failed
        self.check()

    def stop_waiting(self) -> None:
        """After a failure, make the thread stop waiting for the files of other ranks."""
        self._given_up.set()

    def _write(self, copied: StateCopy) -> None:
        try:
            rank, owner = self._communicator.rank, self._context.owner or {}
            # The folder's name contains the owner's process id, because ranks of a killed owner may
            # still be writing the same step.
            half = f"{copied.taken}.{owner.get('pid', 'half')}"
            folder = Path(self._context.folder) / half
            make_folder(folder, Path(self._context.folder).parent)
            written = write(rank_file(folder, rank), copied.all_pieces, copied.told)
            store.write_json(_sum(folder, rank), written)
            if rank == 0:
                self._seal(folder, copied.manifest)
        except BaseException as error:
            self._error = error  # `check` raises this error later in the training thread

    def _seal(self, folder: Path, manifest: Mapping[str, JSON]) -> None:
        sums = [_sum(folder, rank) for rank in range(self._communicator.size)]
        polls = 0
        while not all(path.exists() for path in sums):
            polls += 1
            # If another process resumes the run, that process removes unpublished files. Without
            # the check of the owner, the loop would wait forever for files that another process has
            # removed.
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
    """Return the versions of those packages that affect a saved state."""
    return {name: importlib.metadata.version(name) for name in ("labkit", "keras", "numpy")}


def _sum(folder: Path, rank: int) -> Path:
    """Return the path of the checksum file, whose existence marks a rank's file as complete."""
    return folder / f"rank{rank}.json"
