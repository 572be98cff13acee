"""Predictions through stages: forward only, one micro-batch behind the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import keras
import tensorflow as tf

from labkit.model_parallel.functional import Nest, mask_of, masked
from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.passing import Links, Passing, Posted
from labkit.model_parallel.stages.stage import Passed, answer, listed


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
        self._passing = Passing(links)
        self._posted: deque[Posted] = deque()

    def __call__(self, batches: Iterable[Passed]) -> Iterator[tuple[Nest | None, float]]:
        """The output of each micro-batch, and what the own layers add to its loss.

        Args:
            batches: the same inputs (rows, …) on all ranks, with one row or more each; a list
                where the model has several.

        Yields:
            The outputs (rows, …) on the rank of the last stage, elsewhere None; a number.
        """
        left = iter(batches)
        # So many at a time keep all ranks busy: when the last of them has gone through a rank's
        # first stage, the first of them has come round to its next.
        while group := list(islice(left, self._ranks)):
            yield from self._pass_on([listed(x) for x in group])
        while self._posted:
            self._links.communicator.finish(self._posted.popleft())

    def _pass_on(self, group: list[list[Rows]]) -> list[tuple[Nest | None, float]]:
        found: list[Nest | None] = [None] * len(group)
        penalties = [0.0] * len(group)
        for stage, call in self._calls.items():
            for number, read in enumerate(group):
                self._passing.receive(stage, True, number, (len(read[0]),))
                y, penalty = call(listed(self._passing.take(stage, number, read)))
                penalties[number] += float(penalty)
                if stage < self._last:
                    self._passing.give(stage, number, keras.tree.flatten(y))
                    self._post(stage, number)
                else:
                    found[number] = y
        return list(zip(found, penalties, strict=True))

    def _post(self, stage: int, number: int) -> None:
        self._passing.send(stage, True, number)
        self._posted.append(self._passing.posted)
        self._passing.posted = []
        # What is under way takes memory; with fewer at a time ranks could wait in a circle.
        if len(self._posted) > 2 * self._ranks:
            self._links.communicator.finish(self._posted.popleft())


def _compiled(model: keras.Model) -> Callable[[Sequence[Rows]], tuple[Nest, tf.Tensor]]:
    def forward(x: list[tf.Tensor]) -> tuple[Nest, list[tf.Tensor | None], tf.Tensor]:
        y = answer(model, x, training=False)
        own = [tf.reduce_sum(tf.cast(loss, keras.config.floatx())) for loss in model.losses]
        masks = [mask_of(each) for each in keras.tree.flatten(y)]
        return y, masks, tf.add_n(own) if own else tf.zeros((), keras.config.floatx())

    compiled = tf.function(forward, autograph=False, reduce_retracing=True)

    def call(x: Sequence[Rows]) -> tuple[Nest, tf.Tensor]:
        y, masks, penalty = compiled([tf.convert_to_tensor(each) for each in x])
        for each, mask in zip(keras.tree.flatten(y), masks, strict=True):
            masked(each, mask)  # what compiled functions return has lost it
        return y, penalty

    return call
