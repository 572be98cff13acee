"""Where a run first differs from one process: the step, the layer, the rank and the operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch
from labkit.experiment.experiment import Experiment
from labkit.records.result import Place
from labkit.schedules import ALLREDUCE
from labkit.schedules.interpreter import execute
from labkit.worker import reference
from labkit.worker.feed import Source
from labkit.worker.session import TrainingSession
from labkit.worker.step_log import Given, StepLog

if TYPE_CHECKING:
    from labkit.exchange import Exchange
    from labkit.worker.equivalence import Watched

Flat = dict[str, np.ndarray]  # by variable


class Sides(NamedTuple):
    """What is played again: the session of this rank, which writes all down, and of what."""

    ranks: Watched
    short: Experiment
    source: Source


class Apart(NamedTuple):
    """A variable that is not what it should be: the element that is furthest off."""

    layer: str
    expected: float
    found: float


class Step(NamedTuple):
    """What one process does in a step; None where it has come to its end."""

    number: int
    applied: Flat
    weights: Flat


def locate(sides: Sides, communicator: Communicator) -> Place | None:
    """Train both sides once more, with a look after each step: where they differ (collective).

    In the first step that differs, each operation is held against what one process has, or what
    NumPy makes of the ranks' own values: gradients before the mean, the mean (bucket by bucket,
    and by a schedule round by round), the weights after the optimizer.

    None where nothing that was written down differs, such as of what does not happen again.
    """
    ranks = sides.ranks
    track = ranks.applied
    assert isinstance(track, StepLog)  # as whoever asks has made it
    first = {
        v.path: v.numpy().reshape(-1).astype(np.float64) for v in ranks.model.trainable_variables
    }
    sides.short.strategy.train(ranks)
    collected = {v.path: v.numpy().reshape(-1) for v in ranks.model.trainable_variables}
    search = _Search(ranks, track, communicator)
    found = None
    one = StepLog()
    if communicator.rank == 0:
        plain = TrainingSession.optimizer(ranks)
        reference.track(sides.short, sides.source, ranks.readers.size, one.watch(plain))
    start = communicator.share(first, what="the first weights")
    if ranks.own is not None and (apart := search.first(start, ranks.own.first)):
        found = search.placed(0, "initial weights", apart)
    last, kept = start, search.count(one)
    for number in range(kept):
        step = communicator.share(_step(one, number), what="a step of one process")
        found = found or search.look(step, last)
        if found is not None:
            break
        last = step.weights
    total = max(map(len, one.steps.values()), default=0)
    end = _step(one, total - 1).weights if one.whole and total else None
    total, end = communicator.share((total, end), what="the end of one process")
    if not found and end and (apart := search.first(end, collected, only=0)):
        # Ranks that have not taken all steps lack one; else nothing but its collection is left.
        lacks = kept < total
        found = search.placed(min(kept, total - 1), "optimizer" if lacks else "collection", apart)
        found["rank"] = None if lacks else 0
    ranks.close()
    return found


def _step(one: StepLog, number: int) -> Step:
    done = {name: steps[number] for name, steps in one.steps.items() if number < len(steps)}
    applied = {name: each.applied for name, each in done.items()}
    return Step(number, applied, {name: each.weight for name, each in done.items()})


class _Search:
    """Looks of all ranks at one step after the other; each is collective, with the same answer."""

    def __init__(self, ranks: Watched, track: StepLog, communicator: Communicator) -> None:
        self._ranks, self._track, self._communicator = ranks, track, communicator
        kept = {variable.dtype for variable in ranks.model.trainable_variables}
        self._tolerance = reference.TOLERANCE["float64" if kept == {"float64"} else "float32"]

    def count(self, one: StepLog) -> int:
        """Steps that all have written down."""
        own = self._track.steps if self._communicator.rank else self._track.steps | one.steps
        lengths = [len(steps) for steps in own.values()]
        told = self._communicator.allgather(min(lengths, default=0), "the steps that are kept")
        return min((each for each in told if each), default=0)

    def first(self, expected: Flat, found: Flat, only: int | None = None) -> list[Apart | None]:
        """By rank, what differs of it, if anything does on any; else nothing."""
        looks = only is None or self._communicator.rank == only
        return self._everyones(self._apart(expected, found) if looks else None)

    def look(self, step: Step, before: Flat) -> Place | None:
        """The operation of a step by which ranks first differ from one process."""
        done = {n: s[step.number] for n, s in self._track.steps.items() if step.number < len(s)}
        applied = {name: each.applied for name, each in done.items()}
        if apart := self._everyones(self._apart(step.applied, applied)):
            return self._before(step, before, applied, apart)
        weights = {name: each.weight for name, each in done.items()}
        if apart := self._everyones(self._apart(step.weights, weights)):
            return self.placed(step.number, "optimizer", apart)
        return None

    def placed(
        self,
        step: int,
        operation: str,
        apart: list[Apart | None],
        bucket: int | None = None,
        number: int | None = None,
    ) -> Place:
        """A place of what differs on each rank."""
        wrong = [rank for rank, each in enumerate(apart) if each is not None]
        worst = apart[wrong[0]]
        assert worst is not None  # as the list says
        told = self._communicator.allgather(worst.layer in self._track.steps, "who has a layer")
        # Who alone differs of those that have it is to blame.
        whose = wrong[0] if len(wrong) < sum(told) or sum(told) == 1 else None
        return Place(
            step=step,
            layer=worst.layer,
            rank=whose,
            operation=operation,
            bucket=bucket,
            round=number,
            expected=worst.expected,
            found=worst.found,
        )

    def _before(self, step: Step, before: Flat, applied: Flat, apart: list[Apart | None]) -> Place:
        """What was applied differs: whether the gradients do, or their mean."""
        own = self._ranks.own.steps if self._ranks.own is not None else []
        given = own[step.number] if len(own) > step.number else None
        there = given and [(name, len(each)) for name, each in given.gradients.items()]
        shapes = self._communicator.allgather(there, "whose gradients are known")
        if given is None or not shapes[0] or shapes != [shapes[0]] * len(shapes):  # as of stages
            return self.placed(step.number, "gradient", apart)
        total = float(self._communicator.tally(np.array([given.rows]), "rows")[0]) or 1.0
        share = given.rows / total
        means = {
            name: self._communicator.tally(share * gradient, "gradients")
            for name, gradient in given.gradients.items()
        }
        if wrong := self._everyones(self._apart(step.applied, means)):
            return self._of_gradient(step, before, given, share, wrong)
        wrong = self._everyones(self._apart(means, applied)) or apart
        return self._of_mean(step, given, share, wrong)

    def _of_gradient(
        self, step: Step, before: Flat, given: Given, share: float, apart: list[Apart | None]
    ) -> Place:
        """The gradients are wrong: by whom computed, or of which rows.

        Every rank computes those of all once more. Who comes to what one process has is right,
        and tells who is not.
        """
        own = self._ranks.own
        batch = own.batches[step.number] if own and len(own.batches) > step.number else None
        everyones = self._communicator.allgather((batch, given, share), "whose batch is which")
        if any(batch is None for batch, *_ in everyones):
            return self.placed(step.number, "gradient", apart)
        put(self._ranks.model, before)
        anew = [gradient(self._ranks.model, batch) for batch, *_ in everyones]
        sums = {
            name: sum(each[name] * part for each, (*_, part) in zip(anew, everyones, strict=True))
            for name in step.applied
            if all(name in each for each in anew)
        }
        is_right = self._apart(step.applied, sums) is None
        seen = [
            self._apart(g, given.gradients)
            for g, (_, given, _) in zip(anew, everyones, strict=True)
        ]
        told = self._communicator.allgather((is_right, seen), "who computes what is right")
        judged = next((seen for is_right, seen in told if is_right), None)
        if judged is not None and any(judged):
            return self.placed(step.number, "gradient", judged)
        # All compute the same of what they are fed, and it is not what one process has.
        alike = judged is None and not any(each for _, seen in told for each in seen)
        return self.placed(step.number, "batch" if alike else "gradient", apart)

    def _of_mean(self, step: Step, given: Given, share: float, apart: list[Apart | None]) -> Place:
        """The mean is wrong: summed so, or packed and read so."""
        exchange: Exchange | None = getattr(self._ranks.model.optimizer, "exchange", None)
        layer = next(each.layer for each in apart if each is not None)
        if exchange is None or (bucket := exchange.bucket_of(layer)) < 0:
            return self.placed(step.number, "mean", apart)
        algorithm = exchange.choice.algorithm
        names = [name for name in exchange.names_in(bucket) if name in given.gradients]
        own = {name: given.gradients[name] for name in names}
        flat = np.concatenate(list(own.values()))
        everyones = np.array(self._communicator.allgather(share * flat, "what is summed"))
        for number, expected, found in self._rounds(everyones, algorithm):
            if wrong := self._everyones(self._apart(_split(expected, own), _split(found, own))):
                return self.placed(step.number, "round", wrong, bucket, number)
        self._communicator.mean(flat, given.rows, algorithm, "a mean that is taken again")
        mean = _split(everyones.sum(axis=0), own)
        if wrong := self._everyones(self._apart(mean, _split(flat, own))):
            return self.placed(step.number, "mean", wrong, bucket)
        return self.placed(step.number, "bucket", apart, bucket)

    def _rounds(
        self, everyones: np.ndarray, algorithm: str
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """After each round of a schedule, what this rank should have by NumPy, and what it has."""
        schedule, rank = ALLREDUCE.get(algorithm), self._communicator.rank
        if schedule is None or schedule.layout == "hosts" or not self._communicator.on_one_host:
            return
        now = everyones[rank]
        seen = self._communicator.in_rounds(now.copy(), algorithm)
        played = execute(schedule(self._communicator.size), everyones)
        for number, (_, values) in enumerate(played, 1):
            now = seen.get(number, now)  # it has nothing to do in some
            yield number, values[rank], now

    def _apart(self, expected: Flat, found: Flat) -> Apart | None:
        """The first variable that differs, in the order of backpropagation."""
        largest = max((float(np.abs(each).max(initial=0)) for each in expected.values()), default=0)
        allowed = self._tolerance * max(1.0, largest)
        for name in reversed(expected):
            theirs, ours = expected[name], found.get(name)
            if ours is None or len(ours) != len(theirs):  # of a part of it, held elsewhere
                continue
            off = np.abs(ours - theirs)
            if not (off <= allowed).all():  # also where it is not a number
                worst = int(np.argmax(off))
                return Apart(name, float(theirs[worst]), float(ours[worst]))
        return None

    def _everyones(self, apart: Apart | None) -> list[Apart | None]:
        """By rank, what differs of it; empty where nothing does on any."""
        found = self._communicator.allgather(apart, "what differs")
        return found if any(each is not None for each in found) else []


def put(model: keras.Model, weights: Flat) -> None:
    """Give a model these weights."""
    for variable in model.trainable_variables:
        variable.assign(weights[variable.path].reshape(variable.shape))


def gradient(model: keras.Model, batch: Batch) -> Flat:
    """That of the mean loss of a batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), sample_weight)
    found = tape.gradient(loss, [each.value for each in model.trainable_variables])
    return {
        variable.path: tf.convert_to_tensor(each).numpy().reshape(-1).astype(np.float64)
        for variable, each in zip(model.trainable_variables, found, strict=True)
        if each is not None
    }


def _split(flat: np.ndarray, like: Flat) -> Flat:
    """Parts of a buffer by name."""
    edges = np.cumsum([len(each) for each in like.values()])[:-1]
    return dict(zip(like, np.split(flat, edges), strict=True))
