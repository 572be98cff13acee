"""Pipelined inference: micro-batches run forward through the stages of a model, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import keras
import tensorflow as tf

from labkit.model_parallel.functional import Nest, attach_mask, mask_of
from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.passing import Passing, Posted, StageMessages
from labkit.model_parallel.stages.stage import Passed, as_list, call_with_masks


class Inference:
    """Run micro-batches forward through the stages of a replica.

        rank 0   F0 F1 F2 F3
        rank 1      F0 F1 F2 F3
        rank 2         F0 F1 F2 F3

    While the following stage processes one micro-batch, a stage already processes the next
    micro-batch. If a rank has several stages, its first stage first processes a group with as many
    micro-batches as there are ranks. Then the rank's next stage processes the same group of
    micro-batches.

    Args:
        links: Messages to and from the stages on other ranks (`StageMessages`).
        models: Models of this rank's stages, by stage number.
        stages: Total number of stages on all ranks.
    """

    def __init__(
        self, links: StageMessages, models: Mapping[int, keras.Model], stages: int
    ) -> None:
        self._links, self._last = links, stages - 1
        self._ranks = links.communicator.size
        self._calls = {number: _compiled(models[number]) for number in sorted(models)}
        self._passing = Passing(links)
        self._posted: deque[Posted] = deque()

    def __call__(self, batches: Iterable[Passed]) -> Iterator[tuple[Nest | None, float]]:
        """Yield each micro-batch's output, and the loss that this rank's layers add for it.

        Args:
            batches: Inputs (rows, …) of the micro-batches, equal on all ranks, with at least one
                row each. If the model has several inputs, each element is a list of tensors.

        Yields:
            The outputs (rows, …) on the rank of the last stage, elsewhere None; and the added loss.
        """
        remaining = iter(batches)
        # A group that has as many micro-batches as there are ranks keeps all ranks busy. When a
        # rank's first stage finishes the group's last micro-batch, the rank's next stage receives
        # the group's first micro-batch.
        while group := list(islice(remaining, self._ranks)):
            yield from self._run_group([as_list(x) for x in group])
        while self._posted:
            self._links.communicator.finish(self._posted.popleft())

    def _run_group(self, group: list[list[Rows]]) -> list[tuple[Nest | None, float]]:
        outputs: list[Nest | None] = [None] * len(group)
        penalties = [0.0] * len(group)
        for stage, call in self._calls.items():
            for number, read in enumerate(group):
                self._passing.receive(stage, True, number, (len(read[0]),))
                y, penalty = call(as_list(self._passing.take(stage, number, read)))
                penalties[number] += float(penalty)
                if stage < self._last:
                    self._passing.store_outputs(stage, number, keras.tree.flatten(y))
                    self._post(stage, number)
                else:
                    outputs[number] = y
        return list(zip(outputs, penalties, strict=True))

    def _post(self, stage: int, number: int) -> None:
        self._passing.send(stage, True, number)
        self._posted.append(self._passing.posted)
        self._passing.posted = []
        # Pending sends occupy memory, so their number is limited; with a lower limit, ranks could
        # deadlock.
        if len(self._posted) > 2 * self._ranks:
            self._links.communicator.finish(self._posted.popleft())


def _compiled(model: keras.Model) -> Callable[[Sequence[Rows]], tuple[Nest, tf.Tensor]]:
    def forward(x: list[tf.Tensor]) -> tuple[Nest, list[tf.Tensor | None], tf.Tensor]:
        y = call_with_masks(model, x, training=False)
        penalties = [tf.reduce_sum(tf.cast(loss, keras.config.floatx())) for loss in model.losses]
        masks = [mask_of(output) for output in keras.tree.flatten(y)]
        return y, masks, tf.add_n(penalties) if penalties else tf.zeros((), keras.config.floatx())

    compiled = tf.function(forward, autograph=False, reduce_retracing=True)

    def call(x: Sequence[Rows]) -> tuple[Nest, tf.Tensor]:
        y, masks, penalty = compiled([tf.convert_to_tensor(value) for value in x])
        for output, mask in zip(keras.tree.flatten(y), masks, strict=True):
            attach_mask(output, mask)  # outputs of compiled functions lose their masks
        return y, penalty

    return call
