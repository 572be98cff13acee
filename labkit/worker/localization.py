"""Search for the first step, layer and rank where training on ranks differs from one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch
from labkit.experiment.experiment import Experiment
from labkit.records.run_metrics import FirstDifference
from labkit.schedules import ALLREDUCE
from labkit.schedules.interpreter import execute
from labkit.worker import reference
from labkit.worker.feed import DataSource
from labkit.worker.gradient_log import LocalGradients, StepLog

if TYPE_CHECKING:
    from labkit.exchange import Exchange
    from labkit.worker.gradient_log import LoggingSession

Flat = dict[str, np.ndarray]  # `Flat` maps variable paths to flat arrays.


class ComparisonInputs(NamedTuple):
    """The inputs of a comparison: a logging session, a short experiment, and its data source."""

    ranks: LoggingSession
    short: Experiment
    source: DataSource


class ValueMismatch(NamedTuple):
    """The name of a wrong variable, with the expected and actual value of its worst entry."""

    layer: str
    expected: float
    actual: float


class ReplayedStep(NamedTuple):
    """The gradients and new weights of a step in one process; empty after its last step."""

    number: int
    applied: Flat
    weights: Flat


def locate(sides: ComparisonInputs, communicator: Communicator) -> FirstDifference | None:
    """Train again, and find where the ranks differ from one process.

    In the first step that differs, labkit compares each operation of the ranks. The expected values
    come from one process, or from NumPy and the values of all ranks. labkit compares the gradients
    of each rank, and their mean over ranks. labkit also compares the weights after the optimizer.
    The mean is compared per bucket and per round of the allreduce.

    Returns:
        The step, layer, rank and operation of the first difference. The result is None if no logged
        value differs, for example because an error did not recur.
    """
    ranks = sides.ranks
    track = ranks.applied
    # The assertion tells the type checker that the caller has created a `StepLog`.
    assert isinstance(track, StepLog)
    first = {
        v.path: v.numpy().reshape(-1).astype(np.float64) for v in ranks.model.trainable_variables
    }
    sides.short.strategy.train(ranks)
    collected = {v.path: v.numpy().reshape(-1) for v in ranks.model.trainable_variables}
    search = _Search(ranks, track, communicator)
    place = None
    reference_log = StepLog()
    if communicator.rank == 0:
        reference.log_steps(
            sides.short, sides.source, ranks.readers.size, ranks, reference_log.watch
        )
    start = communicator.broadcast_object(first, label="the first weights")
    if ranks.local_gradients is not None and (
        mismatches := search.first(start, ranks.local_gradients.first)
    ):
        place = search.make_place(0, "initial weights", mismatches)
    last, common_steps = start, search.count(reference_log)
    for number in range(common_steps):
        step = communicator.broadcast_object(
            _step(reference_log, number), label="a step of one process"
        )
        place = place or search.first_difference(step, last)
        if place is not None:
            break
        last = step.weights
    total = max(map(len, reference_log.steps.values()), default=0)
    end = _step(reference_log, total - 1).weights if reference_log.is_complete and total else None
    total, end = communicator.broadcast_object(
        (total, end), label="the final weights of one process"
    )
    if not place and end and (mismatches := search.first(end, collected, only=0)):
        # If the ranks have logged fewer steps than the reference process, the ranks lack an
        # optimizer step. If the ranks have logged all steps, the error is in the collection of the
        # final weights.
        lacks = common_steps < total
        place = search.make_place(
            min(common_steps, total - 1), "optimizer" if lacks else "collection", mismatches
        )
        place["rank"] = None if lacks else 0
    ranks.close()
    return place


def _step(reference_log: StepLog, number: int) -> ReplayedStep:
    updates = {
        name: steps[number] for name, steps in reference_log.steps.items() if number < len(steps)
    }
    applied = {name: update.applied for name, update in updates.items()}
    return ReplayedStep(number, applied, {name: update.weight for name, update in updates.items()})


class _Search:
    """Step-by-step comparisons of all ranks with one process; all ranks get the same results."""

    def __init__(self, ranks: LoggingSession, track: StepLog, communicator: Communicator) -> None:
        self._ranks, self._track, self._communicator = ranks, track, communicator
        dtypes = {variable.dtype for variable in ranks.model.trainable_variables}
        self._tolerance = reference.TOLERANCE["float64" if dtypes == {"float64"} else "float32"]

    def count(self, reference_log: StepLog) -> int:
        """Return the number of steps that are in the logs of all ranks and of the one process."""
        logs = (
            self._track.steps
            if self._communicator.rank
            else self._track.steps | reference_log.steps
        )
        lengths = [len(steps) for steps in logs.values()]
        counts = self._communicator.allgather(min(lengths, default=0), "the number of logged steps")
        return min((count for count in counts if count), default=0)

    def first(
        self, expected: Flat, actual: Flat, only: int | None = None
    ) -> list[ValueMismatch | None]:
        """Return for each rank its first wrong variable; return [] if all ranks are right."""
        is_compared = only is None or self._communicator.rank == only
        return self._gather_mismatches(self._mismatch(expected, actual) if is_compared else None)

    def first_difference(self, step: ReplayedStep, before: Flat) -> FirstDifference | None:
        """Return the first operation of a step whose result differs from one process, or None."""
        updates = {n: s[step.number] for n, s in self._track.steps.items() if step.number < len(s)}
        applied = {name: update.applied for name, update in updates.items()}
        if mismatches := self._gather_mismatches(self._mismatch(step.applied, applied)):
            return self._locate_before_optimizer(step, before, applied, mismatches)
        weights = {name: update.weight for name, update in updates.items()}
        if mismatches := self._gather_mismatches(self._mismatch(step.weights, weights)):
            return self.make_place(step.number, "optimizer", mismatches)
        return None

    def make_place(
        self,
        step: int,
        operation: str,
        mismatches: list[ValueMismatch | None],
        bucket: int | None = None,
        number: int | None = None,
    ) -> FirstDifference:
        """Derive step, layer, rank and operation of an error from the mismatches of all ranks."""
        wrong = [rank for rank, mismatch in enumerate(mismatches) if mismatch is not None]
        worst = mismatches[wrong[0]]
        assert worst is not None
        has_layer = self._communicator.allgather(
            worst.layer in self._track.steps, "whether a rank has the layer"
        )
        # The result names the first wrong rank in two cases. In the first case, another rank with
        # the layer is right. In the second case, only one rank has the layer.
        wrong_rank = wrong[0] if len(wrong) < sum(has_layer) or sum(has_layer) == 1 else None
        return FirstDifference(
            step=step,
            layer=worst.layer,
            rank=wrong_rank,
            operation=operation,
            bucket=bucket,
            round=number,
            expected=worst.expected,
            found=worst.actual,
        )

    def _locate_before_optimizer(
        self,
        step: ReplayedStep,
        before: Flat,
        applied: Flat,
        mismatches: list[ValueMismatch | None],
    ) -> FirstDifference:
        """Find whether an applied gradient is wrong before or after the mean over ranks."""
        local_log = (
            self._ranks.local_gradients.steps if self._ranks.local_gradients is not None else []
        )
        local = local_log[step.number] if len(local_log) > step.number else None
        lengths = local and [(name, len(gradient)) for name, gradient in local.gradients.items()]
        shapes = self._communicator.allgather(lengths, "the lengths of gradients")
        # Lists of gradients differ between ranks if the ranks hold different variables, as in
        # pipelines.
        if local is None or not shapes[0] or shapes != [shapes[0]] * len(shapes):
            return self.make_place(step.number, "gradient", mismatches)
        total = float(self._communicator.allreduce_small(np.array([local.rows]), "rows")[0]) or 1.0
        share = local.rows / total
        means = {
            name: self._communicator.allreduce_small(share * gradient, "gradients")
            for name, gradient in local.gradients.items()
        }
        if wrong := self._gather_mismatches(self._mismatch(step.applied, means)):
            return self._locate_gradient(step, before, local, share, wrong)
        wrong = self._gather_mismatches(self._mismatch(means, applied)) or mismatches
        return self._locate_mean(step, local, share, wrong)

    def _locate_gradient(
        self,
        step: ReplayedStep,
        before: Flat,
        local_gradients: LocalGradients,
        share: float,
        mismatches: list[ValueMismatch | None],
    ) -> FirstDifference:
        """Find the cause of wrong gradients: a rank computes wrongly, or its batch is wrong.

        Every rank computes the gradients of the batches of all ranks again. A rank adds up its
        gradients over all batches. A rank computes correctly if the sum equals the gradient of one
        process. A rank that computes correctly can identify the ranks whose gradients are wrong.
        """
        local_log = self._ranks.local_gradients
        batch = (
            local_log.batches[step.number]
            if local_log and len(local_log.batches) > step.number
            else None
        )
        inputs = self._communicator.allgather(
            (batch, local_gradients, share), "the batches of the ranks"
        )
        if any(batch is None for batch, *_ in inputs):
            return self.make_place(step.number, "gradient", mismatches)
        assign_weights(self._ranks.model, before)
        recomputed = [gradient(self._ranks.model, batch) for batch, *_ in inputs]
        sums = {
            name: sum(
                recomputed_gradients[name] * part
                for recomputed_gradients, (*_, part) in zip(recomputed, inputs, strict=True)
            )
            for name in step.applied
            if all(name in recomputed_gradients for recomputed_gradients in recomputed)
        }
        is_right = self._mismatch(step.applied, sums) is None
        rank_mismatches = [
            self._mismatch(g, local_gradients.gradients)
            for g, (_, local_gradients, _) in zip(recomputed, inputs, strict=True)
        ]
        judgements = self._communicator.allgather(
            (is_right, rank_mismatches), "the recomputed gradients"
        )
        trusted = next(
            (rank_mismatches for is_right, rank_mismatches in judgements if is_right), None
        )
        if trusted is not None and any(trusted):
            return self.make_place(step.number, "gradient", trusted)
        # If all ranks confirm the gradients of all batches, the batches themselves must be wrong.
        all_agree = trusted is None and not any(
            recomputed_gradients
            for _, rank_mismatches in judgements
            for recomputed_gradients in rank_mismatches
        )
        return self.make_place(step.number, "batch" if all_agree else "gradient", mismatches)

    def _locate_mean(
        self,
        step: ReplayedStep,
        local_gradients: LocalGradients,
        share: float,
        mismatches: list[ValueMismatch | None],
    ) -> FirstDifference:
        """Find the cause of a wrong mean: a schedule round, the reduction, or bucket packing."""
        exchange: Exchange | None = getattr(self._ranks.model.optimizer, "exchange", None)
        layer = next(mismatch.layer for mismatch in mismatches if mismatch is not None)
        if exchange is None or (bucket := exchange.bucket_of(layer)) < 0:
            return self.make_place(step.number, "mean", mismatches)
        algorithm = exchange.choice.algorithm
        names = [name for name in exchange.names_in(bucket) if name in local_gradients.gradients]
        local = {name: local_gradients.gradients[name] for name in names}
        flat = np.concatenate(list(local.values()))
        buffers = np.array(self._communicator.allgather(share * flat, "the summed gradients"))
        for number, expected, actual in self._rounds(buffers, algorithm):
            if wrong := self._gather_mismatches(
                self._mismatch(_split(expected, local), _split(actual, local))
            ):
                return self.make_place(step.number, "round", wrong, bucket, number)
        self._communicator.mean(flat, local_gradients.rows, algorithm, "a repeated mean")
        mean = _split(buffers.sum(axis=0), local)
        if wrong := self._gather_mismatches(self._mismatch(mean, _split(flat, local))):
            return self.make_place(step.number, "mean", wrong, bucket)
        return self.make_place(step.number, "bucket", mismatches, bucket)

    def _rounds(
        self, buffers: np.ndarray, algorithm: str
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each allreduce round's number, and this rank's expected and actual buffer."""
        schedule, rank = ALLREDUCE.get(algorithm), self._communicator.rank
        if schedule is None or schedule.layout == "hosts" or not self._communicator.on_one_host:
            return
        current = buffers[rank]
        buffers_by_round = self._communicator.allreduce_in_rounds(current.copy(), algorithm)
        expected_rounds = execute(schedule(self._communicator.size), buffers)
        for number, (_, values) in enumerate(expected_rounds, 1):
            # If a rank does nothing in a round, no buffer is recorded for the rank in that round.
            current = buffers_by_round.get(number, current)
            yield number, values[rank], current

    def _mismatch(self, expected: Flat, actual: Flat) -> ValueMismatch | None:
        """Return the first wrong variable in the order of backpropagation, with its values."""
        largest = max(
            (float(np.abs(values).max(initial=0)) for values in expected.values()), default=0
        )
        allowed = self._tolerance * max(1.0, largest)
        for name in reversed(expected):
            expected_values, actual_values = expected[name], actual.get(name)
            if actual_values is None or len(actual_values) != len(
                expected_values
            ):  # A rank may hold no part, or only a part, of a variable.
                continue
            difference = np.abs(actual_values - expected_values)
            if not (difference <= allowed).all():  # A difference that is NaN counts as wrong.
                worst = int(np.argmax(difference))
                return ValueMismatch(
                    name, float(expected_values[worst]), float(actual_values[worst])
                )
        return None

    def _gather_mismatches(self, mismatch: ValueMismatch | None) -> list[ValueMismatch | None]:
        """Return the mismatches of all ranks; an empty list if no rank has one (collective)."""
        mismatches = self._communicator.allgather(mismatch, "the mismatches")
        return mismatches if any(mismatch is not None for mismatch in mismatches) else []


def assign_weights(model: keras.Model, weights: Flat) -> None:
    """Assign weights, given as flat arrays by variable path, to a model's trainable variables."""
    for variable in model.trainable_variables:
        variable.assign(weights[variable.path].reshape(variable.shape))


def gradient(model: keras.Model, batch: Batch) -> Flat:
    """Return the gradient of a batch's mean loss as flat arrays by variable path."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), sample_weight)
    gradients = tape.gradient(loss, [gradient.value for gradient in model.trainable_variables])
    return {
        variable.path: tf.convert_to_tensor(gradient).numpy().reshape(-1).astype(np.float64)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True)
        if gradient is not None
    }


def _split(flat: np.ndarray, like: Flat) -> Flat:
    """Split a flat buffer into named arrays; names and lengths are those of `like`."""
    edges = np.cumsum([len(values) for values in like.values()])[:-1]
    return dict(zip(like, np.split(flat, edges), strict=True))
