"""Asynchronous DiLoCo: workers take local steps, and a server applies each pseudo-gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from labkit.programs import (
    Adopt,
    Compute,
    Message,
    Program,
    Receive,
    RestartPoint,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.programs.actions import Vector
from labkit.strategies.replicas import Replicas
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell


class AsynchronousDiLoCo(Replicas):
    r"""Each worker takes H local steps from the server's weights, then sends its pseudo-gradient.

    The server applies each pseudo-gradient \(\Delta_t\) as soon as it arrives. Delayed Nesterov
    momentum reduces the effect of stale pseudo-gradients. The server updates its momentum only at
    every N-th pseudo-gradient:

    \[v \leftarrow \beta v + \tfrac1N \sum_{s=t-N+1}^t \Delta_s \ \text{and}\
    \theta \leftarrow \theta - \eta (\beta v + \tfrac1N \Delta_t) \quad\text{at each N-th},\qquad
    \theta \leftarrow \theta - \tfrac{\eta}{N} \Delta_t \quad\text{else}.\]

    Args:
        period: The number H of local steps between two exchanges with the server.
        momentum_delay: The number N of pseudo-gradients per momentum update. With 1, each
            pseudo-gradient updates the momentum.
        outer_learning_rate: The learning rate η of the server.
        outer_momentum: The momentum β of the server.

    A faster worker sends more pseudo-gradients. Training ends after the steps of all epochs, so the
    last periods may have fewer than H steps. Messages are never compressed. The final model has the
    moving statistics of worker 0's normalization layers.

    Source: B. Liu et al., Asynchronous Local-SGD training for language modeling, 2024, arXiv
        2401.09135. labkit omits the paper's dynamic local updates, and the use of momentum between
        two momentum updates (c = 0).
    """

    architecture: ClassVar[tuple[str, ...]] = ("parameter servers",)
    synchronization: ClassVar[tuple[str, ...]] = ("asynchronous periodic", "asynchronous")
    paper: ClassVar[str] = "Liu 2024, arXiv 2401.09135"

    period: PositiveInt = Field(8, kw_only=False)
    momentum_delay: PositiveInt = 1
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: NonNegativeFloat = Field(0.9, lt=1.0)

    def cell(self, workers: int) -> Cell:
        """Return the strategy's place in the taxonomy; with H = 1 it is not periodic."""
        cell = super().cell(workers)
        return cell._replace(synchronization="asynchronous") if self.period == 1 else cell

    @property
    def central(self) -> bool:
        """True: a server holds the weights."""
        return True

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Return the number H of local steps between two exchanges of a worker."""
        return self.period

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of a worker or of the server."""
        program = self._serve if number == roles.workers else self._work
        return program(roles, number, mark)

    def _work(self, roles: Roles, number: int, mark: Any) -> Program:
        server = roles.workers
        start = weights = roles.weights
        steps, done, wants = self._first_period(roles), 0, False
        if mark is not None:
            start, weights, steps, done, wants = mark
        while steps:
            yield RestartPoint((start, weights, steps, done, wants))
            gradient = yield Compute(weights)
            weights = (yield Update(gradient.values)) if gradient.rows else weights
            done, wants = done + 1, wants or gradient.last
            if done == steps:
                yield Send(server, Message(number, start - weights, step=gradient.step, ends=wants))
                answer = yield Receive(server)
                start = weights = yield Adopt(answer.values)
                steps, done = answer.version, 0

    def _serve(self, roles: Roles, number: int, mark: Any) -> Program:
        weights, epoch, epoch_steps = roles.weights, 0, roles.workers * roles.steps
        velocity = delta_sum = np.zeros_like(weights)
        periods = dict.fromkeys(range(roles.workers), self._first_period(roles))  # in steps
        remaining, count, done, wants = (
            epoch_steps * roles.epochs - sum(periods.values()),
            0,
            0,
            False,
        )
        if mark is not None:
            weights, epoch, velocity, delta_sum, periods, remaining, count, done, wants = mark
        while any(periods.values()):
            yield RestartPoint(
                (weights, epoch, velocity, delta_sum, periods, remaining, count, done, wants)
            )
            message = yield Receive()
            count, delta_sum = count + 1, delta_sum + message.values
            done += periods[message.source]
            if count % self.momentum_delay == 0:
                velocity = self._cast(weights, self.outer_momentum) * velocity + (
                    delta_sum / self._cast(weights, self.momentum_delay)
                )
                delta_sum = np.zeros_like(weights)
            weights = yield Adopt(weights - self._step(message.values, velocity, count))
            wants = wants or message.ends
            periods[message.source] = granted = 0 if wants else min(self.period, remaining)
            remaining -= granted
            yield Send(message.source, Message(number, weights, version=granted), answers=message)
            while done >= (epoch + 1) * epoch_steps:
                yield Snapshot(epoch, weights)
                epoch += 1

    def _first_period(self, roles: Roles) -> int:
        """Return the number of local steps in the first period of each worker."""
        return min(self.period, roles.steps * roles.epochs)

    def _step(self, delta: Vector, velocity: Vector, count: int) -> Vector:
        """Return what the server subtracts from its weights for one pseudo-gradient."""
        direction = delta / self._cast(delta, self.momentum_delay)
        if count % self.momentum_delay == 0:
            direction = direction + self._cast(delta, self.outer_momentum) * velocity
        decrease: Vector = self._cast(delta, self.outer_learning_rate) * direction
        return decrease

    @staticmethod
    def _cast(like: Vector, number: float) -> Vector:
        """Return a number converted to the dtype of the weights."""
        return np.asarray(number, like.dtype)
