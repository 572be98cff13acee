"""Measurements of the parts of a training step while other ranks compute concurrently."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Clock, Communicator
from labkit.experiment import Experiment
from labkit.worker.feed import read
from labkit.worker.recorder import Recorder
from labkit.worker.session import TrainingSession

if TYPE_CHECKING:
    from labkit.worker.feed import Feed

# The constant WARM is the number of untimed steps at the start of `fit`. The first step of `fit`
# traces the graph.
WARM = 5
TURN = 0.2  # The constant TURN is the maximum time in seconds of one kind of step in a round.
# The constant LENGTHS contains the possible numbers of successive steps. The measurement uses the
# largest number of steps that fits into TURN seconds.
LENGTHS = (10, 5, 2, 1)
# The constants LEAST and MOST are the minimum and the maximum number of rounds.
LEAST, MOST = 3, 50
# The reading time is measured from batch number AHEAD to the last of BATCHES batches.
BATCHES, AHEAD = 20, 2


class StepTimes(NamedTuple):
    """The measurement of a model at one batch size.

    Attributes:
        steps: Seconds per step of the slowest rank, by concurrent ranks and step kind. Each kind of
            step has one median step time per round.
        read: Seconds to read a batch without concurrent work.
        session: The training session, for further measurements of its model.
    """

    steps: dict[int, dict[str, list[float]]]
    read: float
    session: TrainingSession


def measured(
    communicator: Communicator,
    experiment: Experiment,
    rows: int,
    seconds: float,
    kinds: Sequence[str],
    exchanges: bool = False,
) -> StepTimes:
    """Measure the step times of independent ranks, while 1, 2, … ranks compute concurrently.

    Each rank trains alone, as `AllReduce` with one worker does. The forward pass, the gradients and
    the updates of the same model are also timed, without `fit`. Each step starts after a barrier of
    the ranks that compute; all other ranks wait.

    Args:
        communicator: Communicator of all ranks that may compute concurrently.
        experiment: Experiment with one worker.
        rows: Number of rows in the batch of one rank.
        seconds: Seconds after which no further round of measurement begins.
        kinds: Kinds of steps to time. Each is a key of the dictionary that `parts` returns, or
            "fit".
        exchanges: Whether all ranks train jointly; then "fit" is the only kind.
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
            # The training has whole batches and enough epochs for all rounds of measurement. The
            # callback `Turns` ends the training after the last round.
            steps = max(1, source.rows(own) // fields["batch_size"])
            most = WARM + MOST * len(circles) * LENGTHS[0] + 2
            fields |= {"steps_per_epoch": steps, "epochs": -(-most // steps)}
        session = TrainingSession(experiment.replace(**fields), own, source)
        session.feed.validation = None
        read_s = _read_seconds(session.feed)
        recorder = session.recorder = Recorder(own, lambda kind, records: None, lambda: False)
        turns = Turns(communicator, circles, session, kinds, seconds, read_s)
        session.callbacks = [turns, recorder]
        session.experiment.strategy.train(session)
        return StepTimes(turns.steps, read_s, session)
    finally:
        for part in [*parts, alone]:
            part.close()


class Supply:
    """A pause before each step of `fit`, in which the input pipeline prefetches batches.

    Without the pause, the step time could include a wait for input. Without the pause, steps with
    much other work would wait less for input than steps with little work.

    Args:
        clock: Clock that measures the pause.
        read_s: Seconds to read one batch.
    """

    def __init__(self, clock: Clock, read_s: float) -> None:
        self._clock, self._read_s, self._since = clock, read_s, clock.now()

    def wait(self) -> None:
        """Wait until twice the time to read a batch has passed since the previous call."""
        self._clock.sleep(max(0.0, self._since + 2 * self._read_s - self._clock.now()))
        self._since = self._clock.now()


class Turns(keras.callbacks.Callback):
    """A Keras callback that runs and times other kinds of steps between the steps of `fit`.

    The next callback in the list, the recorder of the `TrainingSession`, times the steps of `fit`.
    """

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
        """Trace each kind of step except `fit`, before other callbacks wrap the Keras model."""
        super().set_model(model)
        batch, experiment = next(iter(self._session.feed.train)), self._session.experiment
        expected, rows = (
            experiment.batch_size // experiment.workers,
            len(keras.tree.flatten(batch)[0]),
        )
        if rows != expected:
            raise InvalidInput(
                f"a batch of a rank has {rows} rows instead of {expected}; calibrate smaller "
                "batches, or use a data set of more rows"
            )
        self._parts = (
            {} if len(self._kinds) == 1 else parts(model, self._session.optimizer(), batch)
        )
        for part in self._parts.values():
            part()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Measure other kinds of steps before a step of `fit`; end training after all rounds."""
        if next(self._script, "the end") == "the end":
            self.model.stop_training = True

    def _plan(self) -> Iterator[None]:
        """Run all rounds of measurement in order, and yield whenever `fit` must run a step."""
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
                rank_times = self._communicator.allgather(own)[:count]
                for kind in self._kinds:
                    most = np.max([each[kind] for each in rank_times], axis=0)
                    self.steps[count][kind].append(float(np.median(most)))
            taken = self._communicator.allgather(self._communicator.clock.now() - begin)
            if number + 1 >= LEAST and max(taken) > self._seconds:
                return

    def _step(self, kind: str, circle: Communicator) -> Generator[None, None, float]:
        """Return the seconds of one step of a kind; for `fit`, prefetch a batch before the step."""
        if kind == "fit":
            self._supply.wait()
        circle.barrier("the barrier before the next timed step of a calibration")
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
    """Return one compiled function per kind of step except "fit"; it runs a step on `batch`."""
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
    """Return the mean seconds to read one batch, which is the inverse of the input throughput."""
    from labkit.communicator.clock import WALL

    found = []
    for _ in zip(range(BATCHES), feed.train.repeat(), strict=False):
        found.append(WALL.now())
    return (found[-1] - found[AHEAD]) / (BATCHES - 1 - AHEAD)
