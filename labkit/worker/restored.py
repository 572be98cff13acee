"""Puts back what a checkpoint holds of a training, on the same ranks or on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.records.checkpoints import Resume
from labkit.records.pieces import Rank, State, assembled
from labkit.strategies import TrainingState
from labkit.worker.local_state import LocalVariable
from labkit.worker.progress import Position
from labkit.worker.recorder import Recorder

if TYPE_CHECKING:
    from labkit.worker.session import TrainingSession

# What ranks had alone, and other ranks begin anew, by how its names begin.
_ANEW = {
    "weights": "random states",
    "remembers": "what compressors and exchanges remember, but for residuals",
    "slots": "optimizer states that ranks had alone",
    "metrics": "metrics of the epoch that had been begun",
}


class Restored:
    """A training that stands where a checkpoint has it.

    Args:
        session: what is trained.
        kept: what this rank needs to go on.
        held: its variables.
        recorder: its rows go on, where they are in its record.
        resume: the checkpoint.
        goes_on: whether they are.

    Attributes:
        alone: values of variables that each rank has alone, by name, for when training begins.
        numbers: of the user's callbacks, alike.
        dropped: what begins anew, in words.

    Raises:
        InvalidInput: the model has other weights.
    """

    def __init__(
        self,
        session: TrainingSession,
        kept: TrainingState,
        held: Sequence[LocalVariable],
        recorder: Recorder,
        resume: Resume,
        goes_on: bool,
    ) -> None:
        self._session, self._kept, self._held, self._recorder = session, kept, held, recorder
        self._manifest, self._same, self._goes_on = resume.manifest, resume.same, goes_on
        self.alone: dict[str, np.ndarray] = {}
        self.numbers: list[dict[str, float]] = []
        self.dropped = set[str]()
        files, folder = resume.files, Path(resume.folder)
        state = State(files) if files else State.of(folder, resume.manifest["ranks"])
        self._put_weights(state)
        kept.release()
        for each in held:
            if not each.own and not each.name.startswith("weights/"):
                self._put(state, each)
        if resume.same:
            self._put_own(state)
        else:
            self._divide(state)
        self._go_on()
        if session.communicator.rank == 0:
            notes = [*resume.notes, *(f"begun anew: {each}" for each in sorted(self.dropped))]
            print("; ".join([f"goes on from step {resume.step}", *notes]))

    def _put(self, state: State, held: LocalVariable) -> None:
        # Several optimizers may take the place of one, or one that of several.
        names = held.name, held.name.partition("#")[0], held.name.replace("rate/", "optimizer/")
        for name in names:
            if (found := state.tensor(name)) and found[0].whole == held.whole:
                held.variable.assign(assembled(found, held.corner, tuple(held.variable.shape)))
                return
        self.dropped.add(f"{held.name}, of which there is none")

    def _put_weights(self, state: State) -> None:
        """Those of the whole model, on every rank, however they were cut."""
        for variable in self._session.model.variables:
            if not variable.trainable and "float" not in variable.dtype:  # a random state
                continue
            value, shape = state.whole(f"weights/{variable.path}"), tuple(variable.shape)
            if value is None or value.shape != shape:
                found = "none" if value is None else f"one of shape {list(value.shape)}"
                raise InvalidInput(
                    f"the model has a weight {variable.path} of shape {list(shape)}, the "
                    f"checkpoint has {found}; resume with the model that was trained"
                )
            variable.assign(value)

    def _put_own(self, state: State) -> None:
        rank = state.ranks.get(self._session.communicator.rank)
        if rank is None:  # it takes the place of one that is gone, who alone has known it
            self._take_over(next(iter(state.ranks.values())))
            return
        own = rank.own()
        self.alone = {each.name: own[each.name] for each in self._held if each.own}
        for what, remember in self._kept.remembers.items():
            remember.recall(_below(f"remembers/{what}/", own))
        metrics = _below("metrics/", own)
        self._session.progress.metrics = [metrics[str(number)] for number in range(len(metrics))]
        told: dict[str, Any] = rank.told
        self._session.progress.losses = [(loss, count) for loss, count in told["losses"]]
        self.numbers = told["callbacks"]
        if self._goes_on:
            columns = {name: each.tolist() for name, each in _below("rows/", own).items()}
            values = zip(*columns.values(), strict=True)
            self._recorder.rows = [dict(zip(columns, row, strict=True)) for row in values]
            self._recorder.epochs = told["epochs"]

    def _take_over(self, other: Rank) -> None:
        """What another replica knows, without what it alone has."""
        told: dict[str, Any] = other.told
        self._recorder.epochs = list(told["epochs"])
        own = {
            name: np.zeros_like(values) if "/residual/" in name else values
            for name, values in other.own().items()
        }
        for what, remember in self._kept.remembers.items():
            remember.recall(_below(f"remembers/{what}/", own))
        metrics = _below("metrics/", own)  # all have as many, which they add up
        known = [np.zeros_like(metrics[str(number)]) for number in range(len(metrics))]
        self._session.progress.metrics = known

    def _divide(self, state: State) -> None:
        """What ranks had alone, for others: residuals are rank 0's, all else begins anew.

        What is sent and what waits is of the mean over the ranks: n ranks that bring
        \\(\\frac{n}{m} \\sum_r e_r\\) for the residuals of m lose nothing.
        """
        experiment = self._manifest["experiment"]
        alone = [rank.own() for rank in state.ranks.values()]
        left = {name for each in alone for name in each if not name.startswith("rows/")}
        exchange = self._kept.remembers.get("exchange")
        residuals = {name for name in left if name.startswith("remembers/exchange/residual/")}
        if (
            exchange is not None
            and experiment["strategy"] == self._session.experiment.strategy.to_json()
        ):
            left -= residuals
            scale = self._session.communicator.size / len(alone)
            if self._session.communicator.rank == 0:
                sums = {name: _total([each[name] for each in alone], scale) for name in residuals}
                exchange.recall(_below("remembers/exchange/", sums))
        elif residuals:
            self.dropped.add("residuals of another exchange")
        held = {each.name for each in self._held if "float" in each.variable.dtype}
        self.dropped |= {
            said for kind, said in _ANEW.items()
            if any(n.startswith(f"{kind}/") and n not in held for n in left - residuals)
        }  # fmt: skip

    def _go_on(self) -> None:
        manifest, progress = self._manifest, self._session.progress
        steps = self._session.feed.steps
        progress.position, progress.taken = Position(*manifest["position"]), manifest["taken"]
        if not self._same and progress.position.step == manifest["steps"]:
            # Nobody has the metrics of the epoch, at whose end training stands.
            progress.position = Position(progress.position.epoch + 1)
        if steps != manifest["steps"] and progress.position.step:
            self.dropped.add("the epoch that had been begun: epochs have other steps")
            progress.position = Position(progress.position.epoch)
            progress.metrics, progress.losses = [], []
        self._recorder.begin = progress.taken - len(self._recorder.rows)


def _total(values: Sequence[np.ndarray], scale: float) -> np.ndarray:
    return (scale * np.sum(values, axis=0, dtype=np.float64)).astype(values[0].dtype)


def _below(start: str, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What begins so, without it."""
    return {name.removeprefix(start): v for name, v in found.items() if name.startswith(start)}
