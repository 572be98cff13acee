"""Asynchronous gossip: active workers go to passive ones, at each of which somebody always answers.

    worker     0 (active)   1 (passive)   2 (active)   3 (passive)
    ears                    4                          5              at the places of 1 and 3
    counter    6                                                      at the place of 0

Were all alike, two that ask each other at one moment would wait for ever; an active one is never
asked. What a passive worker holds is held by its ear, which answers while the worker computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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


def ears(workers: int) -> dict[int, int]:
    """The ear of each passive worker."""
    return {worker: workers + worker // 2 for worker in range(1, workers, 2)}


def places(workers: int) -> list[int]:
    """The place of each worker, then of ears, and of the counter."""
    return [*range(workers), *ears(workers), 0]


def holders(workers: int) -> list[int]:
    """Who holds weights: active workers and ears."""
    return [*range(0, workers, 2), *ears(workers).values()]


def program(roles: Roles, number: int, near: bool, mark: Any = None) -> Program:
    """What this one does.

    Args:
        roles: who there is.
        number: of this one.
        near: active workers go to their neighbours on the ring alone.
        mark: where it begins again.
    """
    known = ears(roles.workers)
    if number in known:
        return _passive(roles, number, known[number], mark)
    if number < roles.workers:
        around = {(number - 1) % roles.workers, (number + 1) % roles.workers}
        partners = [ear for worker, ear in known.items() if not near or worker in around]
        return _active(roles, number, partners, mark)
    return (_ear if number < _counter(roles) else _count)(roles, number, mark)


def _active(roles: Roles, number: int, partners: Sequence[int], mark: Any) -> Program:
    """Sends its weights to a partner's ear, computes, takes the mean with what is answered."""
    counter, half, over = _counter(roles), roles.weights.dtype.type(0.5), False
    own, epochs, step, wants = mark or (roles.weights, 0, 0, False)
    while not over:
        yield Mark((own, epochs, step, wants))
        ear = int(np.random.default_rng([roles.seed, number, step]).choice(partners))
        yield Send(counter, Message(number, step=step, ends=wants))
        yield Send(ear, Message(number, own, step=step))
        found = yield Compute(own)
        heard = yield Receive(ear)
        own = yield Adopt(half * (own + heard.values))
        own = (yield Update(found.values)) if found.rows else own
        told = yield Receive(counter)
        for epoch in range(epochs, told.version):
            yield Snapshot(epoch, own)
        epochs, over, wants, step = told.version, told.ends, wants or found.last, step + 1
    for ear in ears(roles.workers).values():
        yield Send(ear, Message(number, wants=False))


def _passive(roles: Roles, number: int, ear: int, mark: Any) -> Program:
    """Computes at what its ear holds, and gives it the gradient."""
    counter, over = _counter(roles), False
    own, step, wants = mark or (roles.weights, 0, False)
    while not over:
        yield Mark((own, step, wants))
        yield Send(counter, Message(number, step=step, ends=wants))
        found = yield Compute(own)
        told = yield Receive(counter)
        about = told.version, found.rows, step
        yield Send(ear, Message(number, found.values, *about))
        own = (yield Receive(ear)).values
        over, wants, step = told.ends, wants or found.last, step + 1
    yield Send(ear, Message(number, wants=False))


def _ear(roles: Roles, number: int, mark: Any) -> Program:
    """Answers active workers, with which it takes the mean, and applies its worker's gradients."""
    own, epochs, left = mark or (roles.weights, 0, 1 + (roles.workers + 1) // 2)
    half = own.dtype.type(0.5)
    while left:
        yield Mark((own, epochs, left))
        heard = yield Receive()
        if not heard.wants:
            left -= 1
        elif heard.source % 2:
            own = (yield Update(heard.values)) if heard.rows else own
            yield Send(heard.source, Message(number, own), answers=heard)
            for epoch in range(epochs, heard.version):
                yield Snapshot(epoch, own)
            epochs = heard.version
        else:
            yield Send(heard.source, Message(number, own), answers=heard)
            own = yield Adopt(half * (own + heard.values))


def _count(roles: Roles, number: int, mark: Any) -> Program:
    """Grants as many steps as the epochs have, whoever takes them."""
    epoch = roles.workers * roles.steps
    total = epoch * roles.epochs
    granted, asked, left, wants = mark or (roles.workers, 0, roles.workers, False)
    while left:
        yield Mark((granted, asked, left, wants))
        ask = yield Receive()
        wants, asked = wants or ask.ends, asked + 1
        over = wants or granted >= total
        granted, left = granted + (not over), left - over
        # Whoever asks is in the middle of the step; its last answer is for all epochs there were.
        done = (asked - roles.workers) // epoch if not over or wants else roles.epochs
        yield Send(ask.source, Message(number, version=max(done, 0), ends=over), answers=ask)


def _counter(roles: Roles) -> int:
    return roles.workers + len(ears(roles.workers))
