"""Training steps of one rank, taken apart, while others compute beside it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.bench.calibration_runs.parts import KINDS
from labkit.common.errors import InvalidInput
from labkit.communicator import Clock, Communicator
from labkit.experiment import Experiment
from labkit.worker.feed import read
from labkit.worker.recorder import Recorder
from labkit.worker.session import TrainingSession

if TYPE_CHECKING:
    from labkit.worker.feed import Feed

WARM = 5  # whole steps, of which the first one is traced
TURN = 0.2  # s
LENGTHS = (10, 5, 2, 1)  # steps of a turn of one kind: the most that fit into its seconds
LEAST, MOST = 3, 50  # turns
BATCHES, AHEAD = 20, 2  # read to see what that takes, behind those that lay ready


class Found(NamedTuple):
    """What a rank has seen of a model at one number of rows.

    Attributes:
        steps: by the ranks that computed at once: seconds of the slowest, by kind, a median a turn.
        read: s to read a batch, while nothing else is done.
        session: that has trained, for what else its model tells.
    """

    steps: dict[int, dict[str, list[float]]]
    read: float
    session: TrainingSession


def measured(
    communicator: Communicator,
    experiment: Experiment,
    rows: int,
    seconds: float,
    exchanges: bool = False,
) -> Found:
    """Train as `AllReduce` does, each rank alone, with 1, 2, … ranks at once, in turns.

    Between the steps of `fit` the same model's pass forward, its gradients and its updates are
    taken by themselves. Each step begins on all ranks that compute at once; the others wait.

    Args:
        communicator: all ranks that may compute at once.
        experiment: of one worker.
        rows: of the batch of a rank.
        seconds: after which no further turns begin.
        exchanges: let all ranks train together instead, only by `fit`.
    """
    size = communicator.size
    parts = [communicator.split(int(communicator.rank >= n)) for n in range(1, size + 1)]
    alone = communicator.split(communicator.rank)
    try:
        own = communicator if exchanges else alone
        circles = {size: parts[-1]} if exchanges else dict(enumerate(parts, start=1))
        source = read(experiment, own)
        fields: dict[str, Any] = {"workers": own.size, "batch_size": own.size * rows}
        if not callable(source.train):
            # Whole batches only, as many as turns may take; they end the training.
            steps = max(1, source.rows(own) // fields["batch_size"])
            most = WARM + MOST * len(circles) * LENGTHS[0] + 2
            fields |= {"steps": steps, "epochs": -(-most // steps)}
        session = TrainingSession(experiment.replace(**fields), own, source)
        session.feed.validation = None
        read_s = _read_seconds(session.feed)
        recorder = session.recorder = Recorder(own, lambda kind, records: None, lambda: False)
        kinds = KINDS[-1:] if exchanges else KINDS
        turns = Turns(communicator, circles, session, kinds, seconds, read_s)
        session.callbacks = [turns, recorder]
        session.experiment.strategy.train(session)
        return Found(turns.steps, read_s, session)
    finally:
        for part in [*parts, alone]:
            part.close()


class Supply:
    """Lets batches lie ready: what a step waits for them depends on what else the step does.

    Args:
        clock: by which it waits.
        read_s: s to read a batch.
    """

    def __init__(self, clock: Clock, read_s: float) -> None:
        self._clock, self._read_s, self._since = clock, read_s, clock.now()

    def wait(self) -> None:
        """Before a batch is taken: twice as long as reading it, so that those ahead become more."""
        self._clock.sleep(max(0.0, self._since + 2 * self._read_s - self._clock.now()))
        self._since = self._clock.now()


class Turns(keras.callbacks.Callback):
    """Lets kinds of steps take turns, between those of `fit` that the recorder behind it times."""

    def __init__(
        self,
        communicator: Communicator,
        circles: Mapping[int, Communicator],
        session: TrainingSession,
        kinds: Sequence[str],
        seconds: float,
        read_s: float,
    ) -> None:
        super().__init__()
        self._communicator, self._circles, self._seconds = communicator, circles, seconds
        self._supply = Supply(communicator.clock, read_s)
        assert session.recorder is not None
        self._session, self._recorder, self._kinds = session, session.recorder, kinds
        self._script = self._plan()
        self.steps: dict[int, dict[str, list[float]]] = {
            count: {kind: [] for kind in kinds} for count in circles
        }

    def set_model(self, model: keras.Model) -> None:
        """Trace the parts before anything else is put around the model."""
        super().set_model(model)
        batch, asked = next(iter(self._session.feed.train)), self._session.experiment
        wanted, given = asked.batch_size // asked.workers, len(keras.tree.flatten(batch)[0])
        if given != wanted:
            raise InvalidInput(
                f"a batch of {wanted} rows was asked for, and the data give {given}; calibrate "
                "smaller batches, or more rows"
            )
        self._parts = (
            {} if len(self._kinds) == 1 else parts(model, self._session.optimizer(), batch)
        )
        for part in self._parts.values():
            part()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Do what comes before the next step of `fit`; end the training behind the last one."""
        if next(self._script, "the end") == "the end":
            self.model.stop_training = True

    def _plan(self) -> Iterator[None]:
        """Everything in order; yields where a step of `fit` is to be taken."""
        for _ in range(WARM):
            yield
        slowest = self._communicator.allgather(self._recorder.rows[-1]["seconds"])
        length = next((n for n in LENGTHS if n * max(slowest) <= TURN), 1)
        begin = self._communicator.clock.now()
        for number in range(MOST):
            for count in list(self._circles)[:: -1 if number % 2 else 1]:
                own: dict[str, list[float]] = {kind: [] for kind in self._kinds}
                if self._communicator.rank < count:
                    circle = self._circles[count]
                    for kind in self._kinds[:: -1 if number % 2 else 1]:
                        for _ in range(length):
                            own[kind].append((yield from self._step(kind, circle)))
                told = self._communicator.allgather(own)[:count]
                for kind in self._kinds:
                    # A step lasts as long as on its slowest rank.
                    most = np.max([each[kind] for each in told], axis=0)
                    self.steps[count][kind].append(float(np.median(most)))
            taken = self._communicator.allgather(self._communicator.clock.now() - begin)
            if number + 1 >= LEAST and max(taken) > self._seconds:
                return

    def _step(self, kind: str, circle: Communicator) -> Generator[None, None, float]:
        """Seconds of a step of one kind, that of `fit` on a batch that lies ready."""
        if kind == "fit":
            self._supply.wait()
        circle.meet("the next step of a calibration")
        if kind == "fit":
            yield
            return self._recorder.rows[-1]["seconds"]
        return self._timed(self._parts[kind])

    def _timed(self, part: Callable[[], object]) -> float:
        clock = self._communicator.clock
        start = clock.now()
        part()
        return clock.now() - start


def parts(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, batch: Any
) -> dict[str, Callable[[], object]]:
    """The kinds of steps beside `fit`, each compiled by itself, on one batch."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    variables = model.trainable_variables
    optimizer.build(variables)

    def loss() -> tf.Tensor:
        return model.compute_loss(x, y, model(x, training=True), weight, training=True)

    def gradients() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, variables)

    def updated() -> tf.Tensor:
        value, found = gradients()
        optimizer.apply(found, variables)
        return value

    made = {"forward": loss, "gradient": gradients, "updated": updated}
    traced = {kind: tf.function(function) for kind, function in made.items()}

    def waited(function: Callable[[], Any]) -> Callable[[], object]:
        return lambda: keras.tree.flatten(function())[0].numpy()

    return {kind: waited(function) for kind, function in traced.items()}


def _read_seconds(feed: Feed) -> float:
    """Seconds of reading a batch, in the mean of some: that many a second is what steps get."""
    from labkit.communicator.clock import WALL

    found = []
    for _ in zip(range(BATCHES), feed.train.repeat(), strict=False):
        found.append(WALL.now())
    return (found[-1] - found[AHEAD]) / (BATCHES - 1 - AHEAD)
