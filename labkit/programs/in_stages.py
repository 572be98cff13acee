"""Replicas in stages: what each stage does, and how servers see them as one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.programs.actions import (
    Action,
    Backward,
    Compute,
    Forward,
    Gradient,
    Message,
    Program,
    Receive,
    Send,
    Vector,
)
from labkit.programs.roles import Roles


def passing(program: Program, roles: Roles, number: int) -> Program:
    """A worker's program as that of a stage, which computes its gradients with the others.

        first   F         B push ·····      forward: what it passes on goes to the next stage,
        last       F B push ·····           backward: the gradient of that comes back

    All else the stage does by itself, with those of the weights that it has.

    Args:
        program: of a worker that has these weights alone, see `Roles.of_stage`.
        roles: of all.
        number: of the stage.
    """
    place = roles.place(number)
    members = roles.members(place.worker)
    before = members[place.stage - 1] if place.stage else None
    behind = members[place.stage + 1] if number != place.worker else None
    back: Message | None = None  # the latest one, which what is passed on next answers

    def gradient(weights: Vector) -> Generator[Action, Any, Gradient]:
        nonlocal back
        given: Message | None = None
        if before is not None:
            given = yield Receive(before)
        passed = yield Forward(place, weights, given.values if given else None)
        if behind is not None:
            yield Send(behind, Message(number, passed.values, step=passed.step), back)
            back = yield Receive(behind)
        found: Gradient = yield Backward(place, back.values if back else None)
        back = replace(back, values=None) if back else None
        if before is not None:
            yield Send(before, Message(number, found.before, step=found.step), given)
        return found

    answer: Any = None
    while (action := _next(program, answer)) is not None:
        answer = None  # who waits keeps no gradient
        if isinstance(action, Compute):
            answer = yield from gradient(action.weights)
        else:
            answer = yield action


def whole(program: Program, roles: Roles, number: int) -> Program:
    """A server's program for which a replica is one worker, although its stages speak apart.

    What all stages of a replica have sent is one message; what it is answered goes to each of them,
    by its weights. A push is thus applied as a whole, whenever its pieces come.

    Args:
        program: of the server.
        roles: of all.
        number: of the server.

    Differs from Dean 2012, where a server applies what one machine of a replica sends without
    waiting for the others'.
    """
    pieces = _Pieces(roles, number)
    answer: Any = None
    while (action := _next(program, answer)) is not None:
        answer = None
        match action:
            case Receive():
                while answer is None:
                    answer = pieces.add((yield Receive()))
            case Send(worker, message):
                for member, part, asked in pieces.divided(worker, message.values):
                    yield Send(member, replace(message, values=part), asked)
            case _:
                answer = yield action


class _Pieces:
    """Messages of stages, until those of a replica are all there."""

    def __init__(self, roles: Roles, number: int) -> None:
        self._roles, self._own = roles, roles.part(number)
        self._shared = [self._own.within(stage) for stage in roles.stages]
        self._here = {
            worker: [deque[Message]() for _ in roles.stages] for worker in range(roles.workers)
        }
        self._latest: dict[int, list[Message]] = {}

    def add(self, piece: Message) -> Message | None:
        """Take one in; what the replica says, once all of its stages have."""
        worker, stage, _ = self._roles.place(piece.source)
        here = self._here[worker]
        here[stage].append(piece)
        if not all(here):
            return None
        found = self._latest[worker] = [line.popleft() for line in here]
        delivered = max(each.delivered for each in found)
        # Lost on the way: what some stages had sent by then is no push.
        said = next((each for each in found if _lost(each)), found[-1])
        values = None if said.values is None else self._joined(found)
        return replace(said, source=worker, values=values, delivered=delivered)

    def divided(
        self, worker: int, values: Vector | None
    ) -> list[tuple[int, Vector | None, Message]]:
        """Of an answer: to whom, which values, and what it answers there."""
        parts = [None if values is None else own.take(values) for own in self._shared]
        return list(zip(self._roles.members(worker), parts, self._latest[worker], strict=True))

    def _joined(self, found: Sequence[Message]) -> Vector:
        flat = np.empty(self._own.size, self._roles.weights.dtype)
        for own, each in zip(self._shared, found, strict=True):
            if each.values is not None:
                own.put(each.values, flat)
        return flat


def _lost(message: Message) -> bool:
    return message.values is None and message.ends and not message.wants


def _next(program: Program, answer: Any) -> Action | None:
    """What a program asks for when it has its answer; None where it has ended."""
    try:
        return program.send(answer)
    except StopIteration:
        return None
