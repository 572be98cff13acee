"""Downpour: replicas that push and fetch now and then, and take steps of their own in between."""

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
from labkit.strategies.servers import Servers, fetched
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell
from labkit.strategies.work_quota import Quota


class Downpour(Servers):
    r"""Replicas push accrued gradients every few batches, and fetch weights every few others.

    After each batch a replica takes a step of its own, \(w \leftarrow w - \eta g\), and adds g to
    what it has accrued. Every `push_every` batches it pushes the sum, which each server applies
    when it comes; every `fetch_every` batches it gets the servers' weights in place of its own.
    With both at 1 it is an asynchronous parameter server.

    Args:
        fetch_every: batches.
        push_every: batches.
        local_rate: η of a replica's own steps.
        optimizer: of the servers; Adagrad, which gives each weight its own falling rate, is what
            made it stable.

    The other fields are those of all servers; with `stages` or `grid`, and placement="sharded", it
    is DistBelief's set-up. Training ends with the fetch at which as many batches are computed, or
    under way, as the epochs have.

    Source: J. Dean et al., Large scale distributed deep networks, NIPS 2012, algorithm 7.1. Differs
    from it: a fetch is answered before the next batch begins, and not meanwhile; a server applies
    what the members of a replica push as one, once all of it has come.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("asynchronous", "asynchronous periodic")
    paper: ClassVar[str] = "Dean 2012, NIPS"

    fetch_every: PositiveInt = Field(1, kw_only=False)
    push_every: PositiveInt = 1
    local_rate: NonNegativeFloat = 0.01
    optimizer: str | None = "adagrad"

    @property
    def replays(self) -> bool:
        """Where replicas take no steps of their own."""
        return self.fetch_every == self.push_every == 1

    def cell(self, workers: int) -> Cell:
        """With both at 1 each batch is exchanged."""
        cell = super().cell(workers)
        seldom = max(self.fetch_every, self.push_every) > 1
        return cell._replace(synchronization="asynchronous periodic") if seldom else cell

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        super().check(experiment)
        if max(self.fetch_every, self.push_every) > 10_000:
            raise InvalidInput(
                f"fetch_every={self.fetch_every}, push_every={self.push_every}: a replica would "
                "train alone; allowed: 1 to 10000"
            )

    @property
    def cycle(self) -> int:
        """Pushes and fetches."""
        return math.lcm(self.push_every, self.fetch_every)

    def work(self, roles: Roles, number: int, mark: Any) -> Program:
        """A replica: compute, step, push and fetch when it is time."""
        over = False
        accrued: Vector | None = None
        weights, versions, talks, done, rows = *self.begins(roles, number), 0, 0
        if mark is not None:
            weights, versions, talks, done, rows, accrued = mark
        while not over:
            yield Mark((weights, versions, talks, done, rows, accrued))
            found = yield Compute(weights)
            accrued = found.values if accrued is None else accrued + found.values
            rows, done = rows + found.rows, done + 1
            pushes, fetches = done % self.push_every == 0, done % self.fetch_every == 0
            if pushes or fetches:
                brought = accrued if pushes else None
                for server in roles.servers:
                    said: Vector | None = None
                    if brought is not None:
                        part = roles.part(server).take(brought)
                        said = yield Code(partial(talks[server].push, part))
                    about = versions[server], rows, found.step, found.last
                    yield Send(server, Message(number, said, *about, wants=fetches))
            if pushes:
                accrued, rows = None, 0
            if not fetches:
                weights = weights - weights.dtype.type(self.local_rate) * found.values
                continue
            weights, over = yield from fetched(roles, talks, versions)
        for server in roles.servers:
            if accrued is not None:
                part = roles.part(server).take(accrued)
                said = yield Code(partial(talks[server].push, part))
                last = Message(number, said, versions[server], rows, found.step, wants=False)
                yield Send(server, last)
            yield Send(server, Message(number, wants=False))  # nothing more will come

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """A server that applies what comes when it comes, and answers who asks."""
        weights, version = roles.part(number).take(roles.weights), 0
        quota, talks = Quota(roles, number, self.fetch_every), self.talks(roles, number)
        gone = 0
        if mark is not None:
            weights, version, quota, talks, gone = mark
        while gone < roles.workers:
            yield Mark((weights, version, quota, talks, gone))
            push = yield Receive()
            if push.values is None and not push.wants:
                quota.leaves(push)
                gone += 1
                continue
            if push.values is not None and push.rows:
                gradient = yield Code(partial(talks[push.source].pushed, push.values))
                weights = yield Update(gradient, (push,))
                version += 1
            elif push.values is not None:
                yield Drop(push)
            if not push.wants:
                continue
            ends = quota.ends(push)
            said = yield Code(partial(talks[push.source].answer, weights))
            yield Send(push.source, Message(number, said, version, ends=ends), answers=push)
            for epoch in quota.epochs():
                yield Snapshot(epoch, weights)
        for epoch in quota.epochs(last=True):
            yield Snapshot(epoch, weights)
