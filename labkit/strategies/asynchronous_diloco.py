"""Asynchronous DiLoCo: replicas take steps of their own, and a server takes what each brings."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from labkit.programs import (
    Adopt,
    Compute,
    Mark,
    Message,
    Program,
    Receive,
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
    r"""Each worker takes H steps from the server's weights, brings what they changed, and goes on.

    The server takes the pseudo-gradient \(\Delta_t\) when it comes. Its momentum waits for N of
    them, so that what is stale does not push it on at once: delayed Nesterov,

    \[v \leftarrow \beta v + \tfrac1N \sum_{s=t-N+1}^t \Delta_s \ \text{and}\
    \theta \leftarrow \theta - \eta (\beta v + \tfrac1N \Delta_t) \quad\text{at each N-th},\qquad
    \theta \leftarrow \theta - \tfrac{\eta}{N} \Delta_t \quad\text{else}.\]

    Args:
        period: H, in steps.
        delayed: N; 1: Nesterov's momentum with each of them.
        outer_learning_rate: η.
        outer_momentum: β.

    Whoever is faster brings more; training ends when as many steps are taken as the epochs have,
    so that the last periods may be shorter.
    What is said is never compressed. The model keeps moving statistics of worker 0.

    Source: B. Liu et al., Asynchronous Local-SGD training for language modeling, 2024, arXiv
    2401.09135, without its dynamic local updates; the momentum of steps between is none (its
    c = 0).
    """

    architecture: ClassVar[tuple[str, ...]] = ("parameter servers",)
    synchronization: ClassVar[tuple[str, ...]] = ("asynchronous periodic", "asynchronous")
    paper: ClassVar[str] = "Liu 2024, arXiv 2401.09135"

    period: PositiveInt = Field(8, kw_only=False)
    delayed: PositiveInt = 1
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: NonNegativeFloat = Field(0.9, lt=1.0)

    def cell(self, workers: int) -> Cell:
        """With H = 1 each step is exchanged."""
        cell = super().cell(workers)
        return cell._replace(synchronization="asynchronous") if self.period == 1 else cell

    @property
    def central(self) -> bool:
        """The server holds what workers begin with."""
        return True

    def cycle(self, experiment: ExperimentSpec) -> int:
        """H."""
        return self.period

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What a worker does, or the server."""
        does = self._serve if number == roles.workers else self._work
        return does(roles, number, mark)

    def _work(self, roles: Roles, number: int, mark: Any) -> Program:
        server = roles.workers
        begun = own = roles.weights
        steps, done, wants = self._first(roles), 0, False
        if mark is not None:
            begun, own, steps, done, wants = mark
        while steps:
            yield Mark((begun, own, steps, done, wants))
            found = yield Compute(own)
            own = (yield Update(found.values)) if found.rows else own
            done, wants = done + 1, wants or found.last
            if done == steps:
                yield Send(server, Message(number, begun - own, step=found.step, ends=wants))
                told = yield Receive(server)
                begun = own = yield Adopt(told.values)
                steps, done = told.version, 0

    def _serve(self, roles: Roles, number: int, mark: Any) -> Program:
        weights, epoch, each = roles.weights, 0, roles.workers * roles.steps
        velocity = waiting = np.zeros_like(weights)
        takes = dict.fromkeys(range(roles.workers), self._first(roles))  # the steps of each
        left, brought, done, wants = each * roles.epochs - sum(takes.values()), 0, 0, False
        if mark is not None:
            weights, epoch, velocity, waiting, takes, left, brought, done, wants = mark
        while any(takes.values()):
            yield Mark((weights, epoch, velocity, waiting, takes, left, brought, done, wants))
            heard = yield Receive()
            brought, waiting = brought + 1, waiting + heard.values
            done += takes[heard.source]
            if brought % self.delayed == 0:
                velocity = self._kind(weights, self.outer_momentum) * velocity + (
                    waiting / self._kind(weights, self.delayed)
                )
                waiting = np.zeros_like(weights)
            weights = yield Adopt(weights - self._step(heard.values, velocity, brought))
            wants = wants or heard.ends
            takes[heard.source] = granted = 0 if wants else min(self.period, left)
            left -= granted
            yield Send(heard.source, Message(number, weights, version=granted), answers=heard)
            while done >= (epoch + 1) * each:
                yield Snapshot(epoch, weights)
                epoch += 1

    def _first(self, roles: Roles) -> int:
        """The steps of each worker before anybody has said anything."""
        return min(self.period, roles.steps * roles.epochs)

    def _step(self, delta: Vector, velocity: Vector, brought: int) -> Vector:
        """By how much the weights change."""
        moved = delta / self._kind(delta, self.delayed)
        if brought % self.delayed == 0:
            moved = moved + self._kind(delta, self.outer_momentum) * velocity
        found: Vector = self._kind(delta, self.outer_learning_rate) * moved
        return found

    @staticmethod
    def _kind(like: Vector, number: float) -> Vector:
        """A number in the type of the weights."""
        return np.asarray(number, like.dtype)
