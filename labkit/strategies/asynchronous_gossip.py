"""Asynchronous gossip: active workers average weights with the server processes of passive workers.

    worker     0 (active)   1 (passive)   2 (active)   3 (passive)
    server                  4                          5              on the ranks of 1 and 3
    counter    6                                                      on the rank of 0

If all workers had the same role, two workers that wait for each other's weights could deadlock.
Workers are active or passive, and active workers never receive requests, which excludes such
deadlocks. The server process of a passive worker holds this worker's weights and answers requests
while the worker computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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


def passive_servers(workers: int) -> dict[int, int]:
    """Return a mapping from each passive worker to the number of its server process."""
    return {worker: workers + worker // 2 for worker in range(1, workers, 2)}


def places(workers: int) -> list[int]:
    """Return the rank on which each worker, each server process and the counter process runs."""
    return [*range(workers), *passive_servers(workers), 0]


def holders(workers: int) -> list[int]:
    """Return the processes that hold weights: active workers and server processes."""
    return [*range(0, workers, 2), *passive_servers(workers).values()]


def program(roles: Roles, number: int, on_ring: bool, mark: Any = None) -> Program:
    """Return the program of one process.

    Args:
        roles: The roles of all processes of the training.
        number: The number of this process.
        on_ring: Whether active workers average only with their two neighbours on the ring.
        mark: The state from which the program resumes, or None.
    """
    servers = passive_servers(roles.workers)
    if number in servers:
        return _passive(roles, number, servers[number], mark)
    if number < roles.workers:
        neighbours = {(number - 1) % roles.workers, (number + 1) % roles.workers}
        partners = [
            server for worker, server in servers.items() if not on_ring or worker in neighbours
        ]
        return _active(roles, number, partners, mark)
    return (_serve if number < _counter(roles) else _count)(roles, number, mark)


def _active(roles: Roles, number: int, partners: Sequence[int], mark: Any) -> Program:
    """Run an active worker: send weights to a random server, compute, average with the reply."""
    counter, half, ends = _counter(roles), roles.weights.dtype.type(0.5), False
    weights, epochs, step, wants = mark or (roles.weights, 0, 0, False)
    while not ends:
        yield RestartPoint((weights, epochs, step, wants))
        server = int(np.random.default_rng([roles.seed, number, step]).choice(partners))
        yield Send(counter, Message(number, step=step, ends=wants))
        yield Send(server, Message(number, weights, step=step))
        gradient = yield Compute(weights)
        answer = yield Receive(server)
        weights = yield Adopt(half * (weights + answer.values))
        weights = (yield Update(gradient.values)) if gradient.rows else weights
        count = yield Receive(counter)
        for epoch in range(epochs, count.version):
            yield Snapshot(epoch, weights)
        epochs, ends, wants, step = count.version, count.ends, wants or gradient.last, step + 1
    for server in passive_servers(roles.workers).values():
        yield Send(server, Message(number, wants=False))


def _passive(roles: Roles, number: int, server: int, mark: Any) -> Program:
    """Run a passive worker: compute gradients at the server's weights, and send them to it."""
    counter, ends = _counter(roles), False
    weights, step, wants = mark or (roles.weights, 0, False)
    while not ends:
        yield RestartPoint((weights, step, wants))
        yield Send(counter, Message(number, step=step, ends=wants))
        gradient = yield Compute(weights)
        count = yield Receive(counter)
        metadata = count.version, gradient.rows, step
        yield Send(server, Message(number, gradient.values, *metadata))
        weights = (yield Receive(server)).values
        ends, wants, step = count.ends, wants or gradient.last, step + 1
    yield Send(server, Message(number, wants=False))


def _serve(roles: Roles, number: int, mark: Any) -> Program:
    """Run a server: average with active workers' weights; apply the passive worker's gradients."""
    weights, epochs, senders = mark or (roles.weights, 0, 1 + (roles.workers + 1) // 2)
    half = weights.dtype.type(0.5)
    while senders:
        yield RestartPoint((weights, epochs, senders))
        message = yield Receive()
        if not message.wants:
            senders -= 1
        elif message.source % 2:
            weights = (yield Update(message.values)) if message.rows else weights
            yield Send(message.source, Message(number, weights), answers=message)
            for epoch in range(epochs, message.version):
                yield Snapshot(epoch, weights)
            epochs = message.version
        else:
            yield Send(message.source, Message(number, weights), answers=message)
            weights = yield Adopt(half * (weights + message.values))


def _count(roles: Roles, number: int, mark: Any) -> Program:
    """Run the counter, which assigns the training steps of all epochs to workers on request."""
    epoch = roles.workers * roles.steps
    total = epoch * roles.epochs
    granted, requests, workers, wants = mark or (roles.workers, 0, roles.workers, False)
    while workers:
        yield RestartPoint((granted, requests, workers, wants))
        request = yield Receive()
        wants, requests = wants or request.ends, requests + 1
        ends = wants or granted >= total
        granted, workers = granted + (not ends), workers - ends
        # The most recently requested step of each worker is not yet complete. The last reply to a
        # worker reports that all epochs are complete.
        epochs = (requests - roles.workers) // epoch if not ends or wants else roles.epochs
        yield Send(
            request.source, Message(number, version=max(epochs, 0), ends=ends), answers=request
        )


def _counter(roles: Roles) -> int:
    return roles.workers + len(passive_servers(roles.workers))
