"""Predictions through stages: forward only, one micro-batch behind the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

import keras
import tensorflow as tf

from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.passing import Links, Posted


class Inference:
    """Sends micro-batches through the stages of a replica.

        rank 0   F0 F1 F2 F3
        rank 1      F0 F1 F2 F3
        rank 2         F0 F1 F2 F3

    A stage takes the next micro-batch while the one behind it works on the last one. Of several
    stages on a rank, the first one takes as many micro-batches as there are ranks, then the next
    one takes the same ones.

    Args:
        links: to the stages before and behind those of this rank.
        models: the stages of this rank, by their number.
        stages: how many there are on all ranks.
    """

    def __init__(self, links: Links, models: Mapping[int, keras.Model], stages: int) -> None:
        self._links, self._last = links, stages - 1
        self._ranks = links.communicator.size
        self._calls = {number: _compiled(models[number]) for number in sorted(models)}
        self._posted: deque[Posted] = deque()

    def __call__(self, batches: Iterable[Rows]) -> Iterator[tuple[tf.Tensor | None, float]]:
        """The output of each micro-batch, and what the own layers add to its loss.

        Args:
            batches: the same inputs (rows, …) on all ranks, with one row or more each.

        Yields:
            The output (rows, …) on the rank of the last stage, elsewhere None; a number.
        """
        left = iter(batches)
        # So many at a time keep all ranks busy: when the last of them has gone through a rank's
        # first stage, the first of them has come round to its next.
        while group := list(islice(left, self._ranks)):
            yield from self._pass_on(group)
        while self._posted:
            self._links.communicator.finish(self._posted.popleft())

    def _pass_on(self, group: list[Rows]) -> list[tuple[tf.Tensor | None, float]]:
        values = list(group)
        penalties = [0.0] * len(group)
        for stage, call in self._calls.items():
            for number, x in enumerate(group):
                if stage > 0 and stage - 1 not in self._calls:
                    values[number] = self._links.receive(stage, stage - 1, len(x))
                values[number], penalty = call(tf.convert_to_tensor(values[number]))
                penalties[number] += float(penalty)
                if stage < self._last and stage + 1 not in self._calls:
                    self._post(values[number], stage)
        if self._last not in self._calls:
            return [(None, penalty) for penalty in penalties]
        return list(zip(values, penalties, strict=True))

    def _post(self, value: tf.Tensor, stage: int) -> None:
        self._posted.append(self._links.send(value, stage, stage + 1))
        # What is under way takes memory; with fewer at a time ranks could wait in a circle.
        if len(self._posted) > 2 * self._ranks:
            self._links.communicator.finish(self._posted.popleft())


def _compiled(model: keras.Model) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    def forward(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = model(x, training=False)
        own = [tf.reduce_sum(tf.cast(loss, keras.config.floatx())) for loss in model.losses]
        return y, tf.add_n(own) if own else tf.zeros((), keras.config.floatx())

    call: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    call = tf.function(forward, reduce_retracing=True)
    return call
