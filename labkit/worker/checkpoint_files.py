"""Checkpoint files: write them, read them, and restore the state of a rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.files import make_folder
from labkit.communicator import Communicator
from labkit.records import checkpoints, store, stream
from labkit.records.checkpoints import CheckpointContext, Resume
from labkit.records.tensor_boxes import (
    CheckpointState,
    RankFile,
    TensorBox,
    assemble,
    rank_file,
    write,
)
from labkit.strategies import TrainingState
from labkit.worker.local_state import LocalVariable
from labkit.worker.recorder import Position, Recorder

if TYPE_CHECKING:
    from labkit.worker.rank_state import RankState


LOOK_EVERY = 0.01  # A rank polls every `LOOK_EVERY` seconds for the files of other ranks.
# Once per `LOOKS` polls, a rank reads from a shared file whether another process has resumed the
# run.
LOOKS = 50


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
    """A thread that writes this rank's file; on rank 0, it then publishes the files of all ranks.

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
            # The call raises an error if another rank has failed.
            self._communicator.board.raise_failures()
        self.check()

    def stop_waiting(self) -> None:
        """After a failure, make the thread stop waiting for the files of other ranks."""
        self._given_up.set()

    def _write(self, copied: StateCopy) -> None:
        try:
            rank, owner = self._communicator.rank, self._context.owner or {}
            # If the run's owner is killed, the old ranks may still write a checkpoint. The folder's
            # name therefore contains the process id of the run's owner.
            half = f"{copied.taken}.{owner.get('pid', 'half')}"
            folder = Path(self._context.folder) / half
            make_folder(folder, Path(self._context.folder).parent)
            written = write(rank_file(folder, rank), copied.all_pieces, copied.told)
            store.write_json(_sum(folder, rank), written)
            if rank == 0:
                self._seal(folder, copied.manifest)
        except BaseException as error:
            # The method `check` raises the error later, in the training thread.
            self._error = error

    def _seal(self, folder: Path, manifest: Mapping[str, JSON]) -> None:
        sums = [_sum(folder, rank) for rank in range(self._communicator.size)]
        polls = 0
        while not all(path.exists() for path in sums):
            polls += 1
            # A process that resumes the run removes unpublished checkpoint files. The loop ends if
            # another process now owns the run. Another process may have removed the awaited files.
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
    from labkit import __version__

    return {"labkit": __version__, **{name: version(name) for name in ("keras", "numpy")}}


def _sum(folder: Path, rank: int) -> Path:
    """Return the path of the checksum file, whose existence marks a rank's file as complete."""
    return folder / f"rank{rank}.json"


# `_RESET` describes the state that is reset if the number of ranks changes. The keys of `_RESET`
# are prefixes of variable names.
_RESET = {
    "weights": "random states",
    "remembers": "states of compressors and exchanges, except residuals",
    "slots": "rank-local optimizer states",
    "metrics": "metrics of the interrupted epoch",
}


class StateRestorer:
    """Restores a training to the position at which a checkpoint was saved.

    Args:
        session: Training session of this rank.
        state_to_resume: State that this rank needs in order to resume training.
        local_variables: Weights and optimizer variables of this rank.
        recorder: Recorder of history rows. The rows are restored if `goes_on`.
        resume: Checkpoint that is restored.
        goes_on: Whether the run's record continues the record of the interrupted run.

    Attributes:
        alone: Mapping from names of variables that differ between ranks to their values. The values
            are assigned when training begins.
        numbers: Numeric attributes of each user callback, which are assigned when training begins.
        dropped: Descriptions of state that cannot be restored and is therefore reset.

    Raises:
        InvalidInput: If the checkpoint lacks weights of the model, or has them in another shape.
    """

    def __init__(
        self,
        session: RankState,
        state_to_resume: TrainingState,
        local_variables: Sequence[LocalVariable],
        recorder: Recorder,
        resume: Resume,
        goes_on: bool,
    ) -> None:
        self._session, self._state, self._local_variables, self._recorder = (
            session,
            state_to_resume,
            local_variables,
            recorder,
        )
        self._manifest, self._same, self._goes_on = resume.manifest, resume.same, goes_on
        self.alone: dict[str, np.ndarray] = {}
        self.numbers: list[dict[str, float]] = []
        self.dropped = set[str]()
        files, folder = resume.files, Path(resume.folder)
        state = (
            CheckpointState(files)
            if files
            else CheckpointState.from_folder(folder, resume.manifest["ranks"])
        )
        self._put_weights(state)
        state_to_resume.release()
        for item in local_variables:
            if not item.is_local and not item.name.startswith("weights/"):
                self._put(state, item)
        if resume.same:
            self._put_own(state)
        else:
            self._divide(state)
        self._go_on()
        if session.communicator.rank == 0:
            notes = [*resume.notes, *(f"reset: {item}" for item in sorted(self.dropped))]
            print("; ".join([f"resuming from step {resume.step}", *notes]))

    def _put(self, state: CheckpointState, local: LocalVariable) -> None:
        # A run with several optimizers may resume from a run with one optimizer, or vice versa.
        names = local.name, local.name.partition("#")[0], local.name.replace("rate/", "optimizer/")
        for name in names:
            if (pieces := state.tensor(name)) and pieces[0].whole == local.whole:
                local.variable.assign(assemble(pieces, local.corner, tuple(local.variable.shape)))
                return
        self.dropped.add(f"{local.name}, which is not in the checkpoint")

    def _put_weights(self, state: CheckpointState) -> None:
        """Restore the whole model's weights on each rank, even from a divided model's parts."""
        for variable in self._session.model.variables:
            if (
                not variable.trainable and "float" not in variable.dtype
            ):  # An integer variable that is not trainable holds the state of a random generator.
                continue
            value, shape = state.full_tensor(f"weights/{variable.path}"), tuple(variable.shape)
            if value is None or value.shape != shape:
                checkpoint_weight = "none" if value is None else f"one of shape {list(value.shape)}"
                raise InvalidInput(
                    f"the model has a weight {variable.path} of shape {list(shape)}, the "
                    f"checkpoint has {checkpoint_weight}; resume with the model of the checkpoint"
                )
            variable.assign(value)

    def _put_own(self, state: CheckpointState) -> None:
        rank = state.ranks.get(self._session.communicator.rank)
        # A rank without saved state replaces a failed rank, whose local state is lost.
        if rank is None:
            self._take_over(next(iter(state.ranks.values())))
            return
        local_arrays = rank.local_tensors()
        self.alone = {
            local.name: local_arrays[local.name]
            for local in self._local_variables
            if local.is_local
        }
        for what, remember in self._state.remembers.items():
            remember.load_state_dict(_without_prefix(f"remembers/{what}/", local_arrays))
        metrics = _without_prefix("metrics/", local_arrays)
        self._session.progress.metrics = [metrics[str(number)] for number in range(len(metrics))]
        details: dict[str, Any] = rank.record
        self._session.progress.losses = [(loss, count) for loss, count in details["losses"]]
        self.numbers = details["callbacks"]
        if self._goes_on:
            columns = {
                name: column.tolist()
                for name, column in _without_prefix("rows/", local_arrays).items()
            }
            values = zip(*columns.values(), strict=True)
            self._recorder.rows = [dict(zip(columns, row, strict=True)) for row in values]
            self._recorder.epochs = details["epochs"]

    def _take_over(self, other: RankFile) -> None:
        """Restore another replica's state, without its residuals and metric states."""
        details: dict[str, Any] = other.record
        self._recorder.epochs = list(details["epochs"])
        arrays = {
            name: np.zeros_like(values) if "/residual/" in name else values
            for name, values in other.local_tensors().items()
        }
        for what, remember in self._state.remembers.items():
            remember.load_state_dict(_without_prefix(f"remembers/{what}/", arrays))
        metrics = _without_prefix(
            "metrics/", arrays
        )  # A new rank's metrics start from zero, because metrics are summed over all ranks.
        known = [np.zeros_like(metrics[str(number)]) for number in range(len(metrics))]
        self._session.progress.metrics = known

    def _divide(self, state: CheckpointState) -> None:
        """Restore local state on a different number of ranks; only residuals can be restored.

        Residuals are sent in later steps, where they become part of a mean over the ranks. If n
        ranks resume the training of m ranks, the residuals are scaled. The new residuals must add
        up to n/m times the sum of the old residuals. Scaled residuals have the same mean over the
        ranks, so no gradient is lost.
        """
        experiment = self._manifest["experiment"]
        arrays_of_ranks = [rank.local_tensors() for rank in state.ranks.values()]
        names = {
            name for arrays in arrays_of_ranks for name in arrays if not name.startswith("rows/")
        }
        exchange = self._state.remembers.get("exchange")
        residuals = {name for name in names if name.startswith("remembers/exchange/residual/")}
        if (
            exchange is not None
            and experiment["strategy"] == self._session.experiment.strategy.to_json()
        ):
            names -= residuals
            scale = self._session.communicator.size / len(arrays_of_ranks)
            if self._session.communicator.rank == 0:
                sums = {
                    name: _total([arrays[name] for arrays in arrays_of_ranks], scale)
                    for name in residuals
                }
                exchange.load_state_dict(_without_prefix("remembers/exchange/", sums))
        elif residuals:
            self.dropped.add("residuals of another exchange")
        float_names = {
            arrays.name for arrays in self._local_variables if "float" in arrays.variable.dtype
        }
        self.dropped |= {
            text for kind, text in _RESET.items()
            if any(n.startswith(f"{kind}/") and n not in float_names for n in names - residuals)
        }  # fmt: skip

    def _go_on(self) -> None:
        manifest, progress = self._manifest, self._session.progress
        steps = self._session.feed.steps
        progress.position, progress.taken = Position(*manifest["position"]), manifest["taken"]
        if not self._same and progress.position.step == manifest["steps"]:
            # If the number of ranks has changed, the metrics at the end of the interrupted epoch
            # are unavailable.
            progress.position = Position(progress.position.epoch + 1)
        if steps != manifest["steps"] and progress.position.step:
            self.dropped.add("the interrupted epoch: the number of steps per epoch has changed")
            progress.position = Position(progress.position.epoch)
            progress.metrics, progress.losses = [], []
        self._recorder.begin = progress.taken - len(self._recorder.rows)


def _total(values: Sequence[np.ndarray], scale: float) -> np.ndarray:
    return (scale * np.sum(values, axis=0, dtype=np.float64)).astype(values[0].dtype)


def _without_prefix(start: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with a prefix, and remove the prefix from the names."""
    return {name.removeprefix(start): v for name, v in arrays.items() if name.startswith(start)}
