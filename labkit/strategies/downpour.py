"""Downpour SGD: replicas take local steps, and regularly push gradients and fetch weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.programs import (
    Code,
    Compute,
    Drop,
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
from labkit.strategies.servers import Quota, Servers, fetch_weights
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell


class Downpour(Servers):
    r"""Replicas push accumulated gradients and fetch new weights at fixed intervals of batches.

    After each batch, a replica takes a local step, \(w \leftarrow w - \eta g\). The replica adds
    the gradient g to its accumulated gradient. Every `push_every` batches, the replica pushes its
    accumulated gradient; each server applies it on arrival. Every `fetch_every` batches, the
    replica replaces its weights by the weights of the servers. If `push_every` and `fetch_every`
    are 1, the method is an asynchronous parameter server.

    Args:
        fetch_every: The number of batches between two fetches.
        push_every: The number of batches between two pushes.
        local_rate: The learning rate η of a replica's local steps.
        optimizer: The servers' optimizer. According to the paper, Adagrad makes the method stable.
            Adagrad decreases the learning rate of each weight over time.

    The other fields are those of the base class `Servers`. With `stages` or `grid`, and with
    placement="sharded", the configuration equals that of DistBelief. Training ends at the first
    fetch after completed and running batches together reach the total of all epochs.

    Source: J. Dean et al., Large scale distributed deep networks, NIPS 2012, algorithm 7.1.
        Difference from the paper: labkit answers a fetch before the next batch begins; the paper
        answers it during the batch. A server waits for the pushes of all stages or machines of a
        replica. The server applies all pushes of a replica as one update.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("asynchronous", "asynchronous periodic")
    paper: ClassVar[str] = "Dean 2012, NIPS"

    fetch_every: PositiveInt = Field(1, kw_only=False)
    push_every: PositiveInt = 1
    local_rate: NonNegativeFloat = 0.01
    optimizer: str | None = "adagrad"

    @property
    def replays(self) -> bool:
        """Whether replicas take no local steps, so that all gradients use the servers' weights."""
        return self.fetch_every == self.push_every == 1

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy; an interval of several batches makes it periodic."""
        cell = super().cell(workers)
        is_periodic = max(self.fetch_every, self.push_every) > 1
        return cell._replace(synchronization="asynchronous periodic") if is_periodic else cell

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that servers do not support, before any rank starts."""
        super().check(experiment)
        if max(self.fetch_every, self.push_every) > 10_000:
            raise InvalidInput(
                f"fetch_every={self.fetch_every}, push_every={self.push_every} are so long that "
                "a replica would train alone; allowed: 1 to 10000"
            )

    @property
    def cycle(self) -> int:
        """The number of batches after which pushes and fetches repeat their pattern."""
        return math.lcm(self.push_every, self.fetch_every)

    def work(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return the program of a replica: compute, take local steps, push, and fetch."""
        ends = False
        accrued: Vector | None = None
        weights, versions, channels, done, rows = *self.worker_state(roles, number), 0, 0
        if mark is not None:
            weights, versions, channels, done, rows, accrued = mark
        while not ends:
            yield RestartPoint((weights, versions, channels, done, rows, accrued))
            gradient = yield Compute(weights)
            accrued = gradient.values if accrued is None else accrued + gradient.values
            rows, done = rows + gradient.rows, done + 1
            pushes, fetches = done % self.push_every == 0, done % self.fetch_every == 0
            if pushes or fetches:
                push_values = accrued if pushes else None
                for server in roles.servers:
                    payload: Vector | None = None
                    if push_values is not None:
                        part = roles.part(server).take(push_values)
                        payload = yield Code(partial(channels[server].push, part))
                    state = versions[server], rows, gradient.step, gradient.last
                    yield Send(server, Message(number, payload, *state, wants=fetches))
            if pushes:
                accrued, rows = None, 0
            if not fetches:
                weights = weights - weights.dtype.type(self.local_rate) * gradient.values
                continue
            weights, ends = yield from fetch_weights(roles, channels, versions)
        for server in roles.servers:
            if accrued is not None:
                part = roles.part(server).take(accrued)
                payload = yield Code(partial(channels[server].push, part))
                message = Message(
                    number, payload, versions[server], rows, gradient.step, wants=False
                )
                yield Send(server, message)
            # The last message tells the server that the worker ends.
            yield Send(server, Message(number, wants=False))

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return the program of a server that applies pushes on arrival and answers fetches."""
        weights, version = roles.part(number).take(roles.weights), 0
        quota, channels = (
            Quota(roles, number, self.fetch_every),
            self.server_channels(roles, number),
        )
        finished = 0
        if mark is not None:
            weights, version, quota, channels, finished = mark
        while finished < roles.workers:
            yield RestartPoint((weights, version, quota, channels, finished))
            push = yield Receive()
            if push.values is None and not push.wants:
                quota.leaves(push)
                finished += 1
                continue
            if push.values is not None and push.rows:
                gradient = yield Code(partial(channels[push.source].pushed, push.values))
                weights = yield Update(gradient, (push,))
                version += 1
            elif push.values is not None:
                yield Drop(push)
            if not push.wants:
                continue
            ends = quota.ends(push)
            payload = yield Code(partial(channels[push.source].answer, weights))
            yield Send(push.source, Message(number, payload, version, ends=ends), answers=push)
            for epoch in quota.epochs():
                yield Snapshot(epoch, weights)
        for epoch in quota.epochs(last=True):
            yield Snapshot(epoch, weights)
