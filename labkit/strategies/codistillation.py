"""Codistillation: each worker trains a model of its own, and learns from what others predict."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.forecast.worker_sampling import PLAYED, Crowd
from labkit.programs import (
    Compute,
    Mark,
    Message,
    Predict,
    Program,
    Receive,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.programs.actions import Action, Vector
from labkit.strategies.replicas import Replicas
from labkit.strategies.strategy import ExperimentSpec


class Codistillation(Replicas):
    r"""Workers never share weights: what others have predicted a while ago enters the loss of each.

    With \(p_j\) the probabilities that worker j gives the rows of worker i's batch, i descends

    \[\mathrm{loss}(y, p_i) + \psi\, \mathrm{loss}\Bigl(\tfrac1{n-1}
    \sum_{j \ne i} \bar p_j,\; p_i\Bigr),\]

    where \(\bar p_j\) is of weights that are H to 2H steps old: what is said at the begin of a
    period is used in the next, and has all of one to arrive.

    Args:
        period: H, in steps.
        weight: ψ, the weight of the term; 0: separate trainings.
        exchange: "predictions": each worker predicts the batches that the others will have in the
            next period, which labkit's order of rows tells in advance, and sends what it predicts;
            "weights": each sends its weights, and who has got them predicts its own batches. Both
            say the same, in other bytes: those of the batches' classes, or those of the model.

    The first 2H steps have no term. What is evaluated, and what training leaves, is worker 0's
    model. What layers keep beside weights (moving statistics) is that of whoever predicts. What is
    said is never compressed.

    Source: R. Anil et al., Large scale distributed neural network training through online
    distillation, 2018, arXiv 1804.03235. Differs from it: there weights alone are exchanged, as
    checkpoints that each reads when it likes, and copies begin with different weights; here all
    begin with the same, and differ by the rows that they see.
    """

    scheduling: ClassVar[tuple[str, ...]] = ("overlap",)
    paper: ClassVar[str] = "Anil 2018, arXiv 1804.03235"

    period: PositiveInt = Field(8, kw_only=False)
    weight: NonNegativeFloat = 1.0
    exchange: Literal["predictions", "weights"] = "predictions"

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        if experiment.rows is None:
            raise InvalidInput(
                "a data set of your own gives each batch once, but others predict it before its "
                "worker has it; give arrays (x, y) or a named data set"
            )

    def copies(self, workers: int) -> Sequence[int]:
        """All have weights of their own, of which the first one's count."""
        return [0]

    def cycle(self, experiment: ExperimentSpec) -> int:
        """What is said in one period is used in the next."""
        return 2 * self.period

    def crowd(self, workers: int) -> Crowd | None:
        """All speak to all."""
        few = PLAYED // 2
        return Crowd(self, few, everyone=(workers - 1) / (few - 1)) if workers > few else None

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """A worker: periods in which it learns from what was said at the begin of the last one."""
        peers = [worker for worker in range(roles.workers) if worker != number]
        total = roles.steps * roles.epochs
        first, own, wants, asked = mark or (0, roles.weights, False, False)
        for start in range(first, total, self.period):
            yield Mark((start, own, wants, asked))
            told = []
            now, then = (self._period(start + more, total) for more in (0, self.period))
            if start >= 2 * self.period:
                told = yield from self._hears(peers, len(now))
            # Whoever wants to stop says so to all at one step, and all stop a period later.
            over = asked or any(message.ends for each in told for message in each)
            if start >= self.period and not over:
                asked = wants
                yield from self._says(peers, Message(number, own, step=start, ends=asked), then)
            for step in now:
                soft = yield from self._mean(told, step - start, number, step)
                found = yield Compute(own, soft, self.weight)
                own = (yield Update(found.values)) if found.rows else own
                wants = wants or found.last
                del found  # the next gradient may lie where this one did
                if (step + 1) % roles.steps == 0:
                    yield Snapshot(step // roles.steps, own)
            if over:
                return

    def _period(self, start: int, total: int) -> range:
        return range(start, min(start + self.period, total))

    def _says(
        self, peers: Sequence[int], message: Message, then: Sequence[int]
    ) -> Generator[Action, Any, None]:
        """For the steps of the next period: the weights, or what they predict for each."""
        assert message.values is not None  # for the type checker: they are the weights
        for peer in peers:
            for step in then[:1] if self.exchange == "weights" else then:
                said = message
                if self.exchange == "predictions":
                    said = replace(message, values=(yield Predict(peer, step, message.values)))
                yield Send(peer, said)

    def _hears(
        self, peers: Sequence[int], steps: int
    ) -> Generator[Action, Any, list[list[Message]]]:
        """What each of the others has said for the steps of a period."""
        count = 1 if self.exchange == "weights" else steps
        told: list[list[Message]] = [[] for _ in peers]
        for peer, each in zip(peers, told, strict=True):
            for _ in range(count):
                each.append((yield Receive(peer)))
        return told

    def _mean(
        self, told: Sequence[Sequence[Message]], place: int, number: int, step: int
    ) -> Generator[Action, Any, Vector | None]:
        """What the others predict for this worker's next batch."""
        found: list[Vector] = []
        for each in told:
            heard = each[0 if self.exchange == "weights" else place].values
            assert heard is not None  # for the type checker: whoever says has something to say
            copied = self.exchange == "weights"
            found.append((yield Predict(number, step, heard)) if copied else heard)
        return np.mean(found, 0) if found else None
