"""Keeps the state of a rank's training while it goes on, and puts it back."""

from __future__ import annotations

import importlib.metadata
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput
from labkit.records import checkpoints, store, stream
from labkit.records.checkpoints import Keeping
from labkit.records.pieces import Corner, Piece, State, assembled, file_of, write
from labkit.strategies import Kept
from labkit.worker.progress import Position
from labkit.worker.recorder import Recorder

if TYPE_CHECKING:
    from labkit.worker.session import TrainingSession

AHEAD = 2  # steps from rank 0's wish to what is kept: no rank is further ahead of it
LOOK_EVERY = 0.01  # seconds
# What ranks had alone, and other ranks begin anew, by how its names begin.
_ANEW = {
    "weights": "random states",
    "remembers": "what compressors and exchanges remember, but for residuals",
    "slots": "optimizer states that ranks had alone",
    "metrics": "metrics of the epoch that had been begun",
}


class Held(NamedTuple):
    """A variable, the tensor that it is a box of, and whether other ranks may hold another."""

    name: str
    variable: keras.Variable
    whole: tuple[int, ...]
    corner: Corner
    own: bool

    def piece(self) -> Piece:
        """A copy of it."""
        return Piece(self.name, np.array(self.variable.numpy()), self.whole, self.corner, self.own)


class Keeper(keras.callbacks.Callback):
    """Comes last: what all others have done in a step belongs to what is kept after it.

    Rank 0 says after which step; all ranks copy what they hold then, and write it in a thread. Of
    what several hold alike each writes a share. Rank 0 says that a checkpoint is whole when all
    files are there.

    Args:
        session: what is trained.
        keeping: where and how often, and with what it begins.
        kept: what this rank needs to go on.
        recorder: its rows go on.
    """

    def __init__(
        self, session: TrainingSession, keeping: Keeping, kept: Kept, recorder: Recorder
    ) -> None:
        super().__init__()
        self._session, self._keeping, self._kept = session, keeping, kept
        self._recorder, self._progress = recorder, session.progress
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._given_up, self._thread = threading.Event(), threading.Thread()
        self._error: BaseException | None = None
        if not is_ours(keeping):
            raise InvalidInput(
                f"host {socket.gethostname()} does not see the run's folder, where ranks keep "
                "their state; work in a folder that all hosts share, or without checkpoints"
            )
        self._asked, self._taken_at = -1, self._clock.now()
        self._costs: list[float] = []
        self._skipped, self._dropped = 0, set[str]()
        self._alone: dict[str, np.ndarray] = {}  # values of `own` variables, by name
        self._numbers: list[dict[str, float]] = []  # of the user's callbacks
        for optimizer, variables in kept.optimizers:
            if variables and not optimizer.built:
                optimizer.build(list(variables))
        self._held = [*self._weights(), *self._slots()]
        if keeping.resume is not None:
            self._restore(State(Path(keeping.resume.folder), keeping.resume.manifest["ranks"]))

    # --- when --------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """What each rank has alone: others that begin a training may have made it alike."""
        for each in self._held:
            if each.own and each.name in self._alone:
                each.variable.assign(self._alone[each.name])
        for callback, numbers in zip(self._session.callbacks[1:], self._numbers, strict=False):
            vars(callback).update(numbers)

    def on_train_end(self, logs: Any = None) -> None:
        """To Keras, an epoch that was begun and those behind it are two trainings."""
        self._alone = {each.name: each.piece().values for each in self._held if each.own}
        self._numbers = self._of_callbacks()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep what there is now, if it is time, or if somebody wants training to end."""
        if self._keeping.checkpoint is None:
            return
        step, board = self._progress.taken - 1, self._communicator.board
        if self._error is not None:
            raise self._error
        if board.asked_to_stop(step):
            self._wait()
            self._take()
        elif board.asked_to_keep(step):
            self._take()
        elif self._communicator.rank == 0 and self._is_due(step):
            if self._thread.is_alive():
                self._skipped += 1
            else:
                self._asked = step + AHEAD
                board.keep_after(self._asked)

    def _is_due(self, step: int) -> bool:
        assert self._keeping.checkpoint is not None
        if step < self._asked:
            return False
        if self._keeping.checkpoint.steps is not None:
            return (step + 1 + AHEAD) % self._keeping.checkpoint.steps == 0
        now, interval = self._clock.now(), self._interval()
        if now - self._taken_at < interval:
            return False
        self._taken_at = now
        return True

    def _interval(self) -> float:
        assert self._keeping.checkpoint is not None
        cost = float(np.median(self._costs)) if self._costs else None
        return self._keeping.checkpoint.interval(cost)

    # --- what --------------------------------------------------------------------------------

    def _weights(self) -> Iterator[Held]:
        pairs = {id(pair.own): pair for pair in self._kept.pairs}
        for variable in self._kept.variables:
            pair = pairs.get(id(variable))
            whole = variable if pair is None else pair.whole
            shape = tuple(whole.shape)
            corner = (0,) * len(shape) if pair is None else pair.corner
            own = not variable.trainable
            yield Held(f"weights/{whole.path}", variable, shape, corner, own)

    def _slots(self) -> Iterator[Held]:
        """Those of each variable by its name in the whole model."""
        of = {each.variable.path: each for each in self._weights()}
        seen: dict[str, int] = {}
        for optimizer, variables in self._kept.optimizers:
            if not variables:  # another one applies; callbacks look at this one's rate
                if isinstance(optimizer._learning_rate, keras.Variable):
                    yield Held("rate/learning_rate", optimizer._learning_rate, (), (), False)
                continue
            flat = {v.path.replace("/", "_"): of[v.path] for v in variables}
            for slot in optimizer.variables:
                fit = [path for path in flat if slot.name.startswith(f"{path}_")]
                if not fit:
                    name = f"optimizer/{slot.name}"
                    seen[name] = number = seen.get(name, 0) + 1
                    shape = tuple(slot.shape)
                    place = shape, (0,) * len(shape)
                    yield Held(name if number == 1 else f"{name}#{number}", slot, *place, False)
                    continue
                path = max(fit, key=len)
                held, kind = flat[path], slot.name[len(path) + 1 :]
                name, shape = held.name.replace("weights", "slots", 1), tuple(slot.shape)
                own = kind == "gradient_accumulator"
                if shape == tuple(held.variable.shape):
                    yield Held(f"{name}/{kind}", slot, held.whole, held.corner, own)
                else:  # of rows or columns, which nobody can cut otherwise
                    cut = held.whole != tuple(held.variable.shape)
                    yield Held(f"{name}/{kind}", slot, shape, (0,) * len(shape), own or cut)

    def _take(self) -> None:
        """Copy what this rank writes of the state; the rest goes on beside training."""
        start, readers = self._clock.now(), self._session.readers
        self._kept.settle()
        pieces = [
            each.piece()
            for number, each in enumerate(self._held)
            if each.own or number % readers.size == readers.rank
        ]
        for what, each in self._kept.remembers.items():
            for name, values in each.remembered().items():
                pieces.append(Piece.alone(f"remembers/{what}/{name}", np.array(values)))
        for number, variable in enumerate(self.model.metrics_variables):
            pieces.append(Piece.alone(f"metrics/{number}", np.array(variable.numpy())))
        rows = list(self._recorder.rows)
        told: dict[str, JSON] = {
            "epochs": list(self._recorder.epochs),
            "losses": list(self._progress.losses),
            "callbacks": self._of_callbacks(),
        }
        folder, manifest = Path(self._keeping.folder) / f"{self._progress.taken}", self._manifest()
        self._taken_at = self._clock.now()
        self._costs.append(self._taken_at - start)
        work = lambda: self._write(folder, pieces, rows, told, manifest)  # noqa: E731
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _manifest(self) -> dict[str, JSON]:
        experiment, progress = self._session.experiment, self._progress
        return {
            "taken": progress.taken,
            "position": list(progress.position),
            "steps": self._session.feed.steps,
            "ranks": self._communicator.size,
            "experiment": experiment.to_json(),
            "chosen": dict(self._session.chosen),
            "versions": versions(),
        }

    def _of_callbacks(self) -> list[dict[str, float]]:
        return [
            {k: v for k, v in vars(each).items() if isinstance(v, int | float) and k[0] != "_"}
            for each in self._session.callbacks[1:]
        ]

    # --- beside training ---------------------------------------------------------------------

    def _write(
        self,
        folder: Path,
        pieces: list[Piece],
        rows: Sequence[Mapping[str, float]],
        told: Mapping[str, JSON],
        manifest: dict[str, JSON],
    ) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            rank = self._communicator.rank
            for name in rows[0] if rows else ():
                pieces.append(Piece.alone(f"rows/{name}", np.array([row[name] for row in rows])))
            store.write_json(_sum(folder, rank), write(file_of(folder, rank), pieces, told))
            if rank == 0:
                self._seal(folder, manifest)
        except BaseException as error:
            self._error = error  # raised in the training, at its next step

    def _seal(self, folder: Path, manifest: dict[str, JSON]) -> None:
        sums = [_sum(folder, rank) for rank in range(self._communicator.size)]
        while not all(each.exists() for each in sums):
            if self._given_up.wait(LOOK_EVERY):
                return
        if not is_ours(self._keeping):
            return
        files = {f"{each.stem}.npz": store.read_json(each) for each in sums}
        checkpoints.seal(folder, manifest | {"files": files})
        for each in sums:
            each.unlink()
        assert self._keeping.checkpoint is not None
        checkpoints.forget(folder.parent, self._keeping.checkpoint.keep)

    def _wait(self) -> None:
        while self._thread.is_alive():
            self._thread.join(LOOK_EVERY)
            self._communicator.board.check()  # a rank that has failed writes no more
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for what is being written."""
        self._wait()

    def give_up(self) -> None:
        """Wait for nobody any more."""
        self._given_up.set()

    def summary(self) -> dict[str, JSON]:
        """What there is to say of it, for the record."""
        found: dict[str, JSON] = {"begun_anew": sorted(self._dropped)} if self._dropped else {}
        if self._keeping.checkpoint is None:
            return found
        every = self._keeping.checkpoint.steps
        return found | {
            "taken": len(self._costs),
            "skipped": self._skipped,
            "copy_seconds": float(np.median(self._costs)) if self._costs else None,
            "interval_seconds": self._interval() if every is None else None,
            "interval_steps": every,
        }

    # --- back --------------------------------------------------------------------------------

    def _restore(self, state: State) -> None:
        assert self._keeping.resume is not None
        resume, manifest = self._keeping.resume, self._keeping.resume.manifest
        self._put_weights(state)
        self._kept.release()
        for each in self._held:
            if not each.own and not each.name.startswith("weights/"):
                self._put(state, each)
        if resume.same:
            self._put_own(state)
        else:
            self._divide(state)
        self._go_on(manifest)
        if self._communicator.rank == 0:
            notes = [*resume.notes, *(f"begun anew: {each}" for each in sorted(self._dropped))]
            print("; ".join([f"goes on from step {resume.step}", *notes]))

    def _put(self, state: State, held: Held) -> None:
        # Several optimizers may take the place of one, or one that of several.
        names = held.name, held.name.partition("#")[0], held.name.replace("rate/", "optimizer/")
        for name in names:
            if (found := state.tensor(name)) and found[0].whole == held.whole:
                held.variable.assign(assembled(found, held.corner, tuple(held.variable.shape)))
                return
        self._dropped.add(f"{held.name}, of which there is none")

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
        rank = state.ranks[self._communicator.rank]
        own = rank.own()
        self._alone = {each.name: own[each.name] for each in self._held if each.own}
        for what, each in self._kept.remembers.items():
            each.recall(_below(f"remembers/{what}/", own))
        metrics = _below("metrics/", own)
        self._progress.metrics = [metrics[str(number)] for number in range(len(metrics))]
        told: dict[str, Any] = rank.told
        self._progress.losses = [(loss, count) for loss, count in told["losses"]]
        self._numbers = told["callbacks"]
        if self._keeping.goes_on:
            columns = {name: each.tolist() for name, each in _below("rows/", own).items()}
            values = zip(*columns.values(), strict=True)
            self._recorder.rows = [dict(zip(columns, row, strict=True)) for row in values]
            self._recorder.epochs = told["epochs"]

    def _divide(self, state: State) -> None:
        """What ranks had alone, for others: residuals are rank 0's, all else begins anew.

        What is sent and what waits is of the mean over the ranks: n ranks that bring
        \\(\\frac{n}{m} \\sum_r e_r\\) for the residuals of m lose nothing.
        """
        assert self._keeping.resume is not None
        experiment = self._keeping.resume.manifest["experiment"]
        alone = [rank.own() for rank in state.ranks]
        left = {name for each in alone for name in each if not name.startswith("rows/")}
        exchange = self._kept.remembers.get("exchange")
        residuals = {name for name in left if name.startswith("remembers/exchange/residual/")}
        if exchange is not None and experiment["strategy"] == _strategy(self._session):
            left -= residuals
            scale = self._communicator.size / len(alone)
            if self._communicator.rank == 0:
                sums = {name: _total([each[name] for each in alone], scale) for name in residuals}
                exchange.recall(_below("remembers/exchange/", sums))
        elif residuals:
            self._dropped.add("residuals of another exchange")
        held = {each.name for each in self._held if "float" in each.variable.dtype}
        self._dropped |= {
            said for kind, said in _ANEW.items()
            if any(n.startswith(f"{kind}/") and n not in held for n in left - residuals)
        }  # fmt: skip

    def _go_on(self, manifest: Mapping[str, Any]) -> None:
        steps, progress = self._session.feed.steps, self._progress
        progress.position, progress.taken = Position(*manifest["position"]), manifest["taken"]
        if steps != manifest["steps"] and progress.position.step:
            self._dropped.add("the epoch that had been begun: epochs have other steps")
            progress.position = Position(progress.position.epoch)
            progress.metrics, progress.losses = [], []
        self._recorder.begin = progress.taken - len(self._recorder.rows)


def is_ours(keeping: Keeping) -> bool:
    """Whether the folder is here, and nobody else has taken up the run."""
    live, owner = Path(keeping.folder).parent / stream.FOLDER, keeping.owner
    return owner is None or stream.sees(live, owner)


def versions() -> dict[str, JSON]:
    """Of what a state depends on."""
    return {name: importlib.metadata.version(name) for name in ("labkit", "keras", "numpy")}


def _total(values: Sequence[np.ndarray], scale: float) -> np.ndarray:
    return (scale * np.sum(values, axis=0, dtype=np.float64)).astype(values[0].dtype)


def _strategy(session: TrainingSession) -> JSON:
    return session.experiment.strategy.to_json()


def _below(start: str, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What begins so, without it."""
    return {name.removeprefix(start): v for name, v in found.items() if name.startswith(start)}


def _sum(folder: Path, rank: int) -> Path:
    """Where a rank says that its file is whole, until the checkpoint is."""
    return folder / f"rank{rank}.json"
