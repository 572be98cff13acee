"""Codistillation: each worker trains a model and also learns from other workers' predictions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.forecast.workers import PLAYED, Crowd
from labkit.programs import (
    Compute,
    Message,
    Predict,
    Program,
    Receive,
    RestartPoint,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.programs.actions import Action, Vector
from labkit.strategies.replicas import Replicas
from labkit.strategies.strategy import ExperimentSpec


class Codistillation(Replicas):
    r"""Each worker trains its own model; its loss includes earlier predictions of other workers.

    Worker j predicts the probabilities \(p_j\) for the batch of worker i. Worker i minimizes the
    following sum of two losses:

    \[\mathrm{loss}(y, p_i) + \psi\, \mathrm{loss}\Bigl(\tfrac1{n-1}
    \sum_{j \ne i} \bar p_j,\; p_i\Bigr),\]

    where \(\bar p_j\) is computed with weights of worker j that are H to 2H steps old. A message is
    sent at the start of one period, and used in the next. A message therefore has a whole period to
    arrive.

    Args:
        period: The number H of steps in a period.
        distillation_weight: The weight ψ of the distillation term. With 0, the workers train
            independently.
        exchange: What workers send. "predictions": each worker predicts the next batches of all
            other workers and sends them these predictions. A worker can predict the batches of
            others because the rows of all batches are known in advance. "weights": each worker
            sends its weights, and the receivers compute the predictions for their own batches. The
            exchanges "predictions" and "weights" give the same result. The exchange "predictions"
            sends class probabilities for the batches; the exchange "weights" sends weights.

    In the first 2H steps, the loss has no distillation term. The model of worker 0 is evaluated and
    is the result of training. When a worker predicts, it uses the moving statistics of its own
    normalization layers. Messages are never compressed.

    Source: R. Anil et al., Large scale distributed neural network training through online
    distillation, 2018, arXiv 1804.03235. Difference from the paper: the paper exchanges only
    weights, through checkpoints that each worker may read at any time. In the paper, the model
    copies start with different weights. In labkit, all workers start with the same weights, but
    read different rows.
    """

    scheduling: ClassVar[tuple[str, ...]] = ("overlap",)
    paper: ClassVar[str] = "Anil 2018, arXiv 1804.03235"

    period: PositiveInt = Field(8, kw_only=False)
    distillation_weight: NonNegativeFloat = 1.0
    exchange: Literal["predictions", "weights"] = "predictions"

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        super().check(experiment)
        if experiment.rows is None:
            raise InvalidInput(
                "a callable data set yields each batch once, but other workers predict on a "
                "batch before its own worker reads the batch; give arrays (x, y) or a named data "
                "set"
            )

    def copies(self, workers: int) -> Sequence[int]:
        """Return [0], because the weights of worker 0 are the result of training."""
        return [0]

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Return the steps of two periods, as a period uses messages of the previous period."""
        return 2 * self.period

    def crowd(self, workers: int) -> Crowd | None:
        """Return a sample of workers for a forecast, with message counts scaled to all workers."""
        sample = PLAYED // 2
        return (
            Crowd(self, sample, everyone=(workers - 1) / (sample - 1)) if workers > sample else None
        )

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return a worker's program; each period uses messages from the period before."""
        peers = [worker for worker in range(roles.workers) if worker != number]
        total = roles.steps * roles.epochs
        first, weights, wants, stop_requested = mark or (0, roles.weights, False, False)
        for start in range(first, total, self.period):
            yield RestartPoint((start, weights, wants, stop_requested))
            messages = []
            steps, next_steps = (self._period(start + offset, total) for offset in (0, self.period))
            if start >= 2 * self.period:
                messages = yield from self._receive(peers, len(steps))
            # If a worker must end training, it tells all other workers at the start of the next
            # period. All workers stop one period after they receive the message that a worker must
            # end training.
            ends = stop_requested or any(
                message.ends for peer_messages in messages for message in peer_messages
            )
            if start >= self.period and not ends:
                stop_requested = wants
                yield from self._send(
                    peers, Message(number, weights, step=start, ends=stop_requested), next_steps
                )
            for step in steps:
                targets = yield from self._mean_prediction(messages, step - start, number, step)
                gradient = yield Compute(weights, targets, self.distillation_weight)
                weights = (yield Update(gradient.values)) if gradient.rows else weights
                wants = wants or gradient.last
                del gradient  # The deletion frees memory for the next gradient.
                if (step + 1) % roles.steps == 0:
                    yield Snapshot(step // roles.steps, weights)
            if ends:
                return

    def _period(self, start: int, total: int) -> range:
        return range(start, min(start + self.period, total))

    def _send(
        self, peers: Sequence[int], message: Message, next_steps: Sequence[int]
    ) -> Generator[Action, Any, None]:
        """Send the model's weights, or its predictions for each step of the next period."""
        assert message.values is not None
        for peer in peers:
            for step in next_steps[:1] if self.exchange == "weights" else next_steps:
                sent_message = message
                if self.exchange == "predictions":
                    sent_message = replace(
                        message, values=(yield Predict(peer, step, message.values))
                    )
                yield Send(peer, sent_message)

    def _receive(
        self, peers: Sequence[int], steps: int
    ) -> Generator[Action, Any, list[list[Message]]]:
        """Receive messages from all other workers for each step of a period."""
        count = 1 if self.exchange == "weights" else steps
        messages: list[list[Message]] = [[] for _ in peers]
        for peer, peer_messages in zip(peers, messages, strict=True):
            for _ in range(count):
                peer_messages.append((yield Receive(peer)))
        return messages

    def _mean_prediction(
        self, messages: Sequence[Sequence[Message]], index: int, number: int, step: int
    ) -> Generator[Action, Any, Vector | None]:
        """Return the mean of the other workers' predictions for this worker's next batch."""
        predictions: list[Vector] = []
        for peer_messages in messages:
            values = peer_messages[0 if self.exchange == "weights" else index].values
            assert values is not None
            sends_weights = self.exchange == "weights"
            predictions.append((yield Predict(number, step, values)) if sends_weights else values)
        return np.mean(predictions, 0) if predictions else None
