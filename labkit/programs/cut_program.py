"""Replicas that are cut: what each member does, and how servers see them as one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from labkit.programs.actions import (
    Action,
    Backward,
    Compute,
    Forward,
    Gradient,
    Mark,
    Message,
    Passed,
    Program,
    Receive,
    Send,
    Vector,
)
from labkit.programs.roles import Roles

Begin: TypeAlias = Callable[[Any], Program]  # of a program, at a mark or at its begin


def passing(begin: Begin, roles: Roles, number: int, mark: Any = None) -> Program:
    """A worker's program as that of a member, which computes its gradients with the others.

        stages    first  F         B push ·····      forward: what it passes on goes to the next,
                  last      F B push ·····           backward: the gradient of that comes back

        grid      one    F ⇄ F ⇄ F B ⇄ B ⇄ B push    before each layer what others read of it goes
                  other  F ⇄ F ⇄ F B ⇄ B ⇄ B push    to them, and the gradients of that come back

    All else the member does by itself, with those of the weights that it has.

    Args:
        begin: of a worker that has these weights alone, see `Roles.of_member`.
        roles: of all.
        number: of the member.
        mark: where it begins again.
    """
    inner, heard = mark or (None, {})
    member, program = _Member(roles, number, heard), begin(inner)
    answer: Any = None
    while (action := _next(program, answer)) is not None:
        answer = None  # who waits keeps no gradient
        if isinstance(action, Compute):
            answer = yield from member.gradient(action.weights)
        elif isinstance(action, Mark):
            yield Mark((action.state, member.heard))
        else:
            answer = yield action


def whole(begin: Begin, roles: Roles, number: int, mark: Any = None) -> Program:
    """A server's program for which a replica is one worker, although its members speak apart.

    What all members of a replica have sent is one message; what it is answered goes to each of
    them, by its weights. A push is thus applied as a whole, whenever its pieces come.

    Args:
        begin: of the server.
        roles: of all.
        number: of the server.
        mark: where it begins again.

    Differs from Dean 2012, where a server applies what one machine of a replica sends without
    waiting for the others'.
    """
    pieces = _Pieces(roles, number)
    inner = None
    if mark is not None:
        inner, pieces.here, pieces.latest = mark
    program = begin(inner)
    answer: Any = None
    while (action := _next(program, answer)) is not None:
        answer = None
        match action:
            case Mark(state):
                yield Mark((state, pieces.here, pieces.latest))
            case Receive():
                while answer is None:
                    answer = pieces.add((yield Receive()))
            case Send(worker, message):
                for member, part, asked in pieces.divided(worker, message.values):
                    yield Send(member, replace(message, values=part), asked)
            case _:
                answer = yield action


class _Member:
    """One who computes a replica's gradients with the other members, pass by pass."""

    def __init__(self, roles: Roles, number: int, heard: dict[int, Message]) -> None:
        place = roles.place(number)
        self._number, self._members = number, roles.members(place.worker)
        self._turns = [
            (place._replace(turn=turn, share=each.share), each)
            for turn, each in enumerate(roles.passes[place.member])
        ]
        self.heard = heard  # the latest of each, which the next to it answers

    def gradient(self, weights: Vector) -> Generator[Action, Any, Gradient]:
        """Of the replica's next batch, at these weights of the member's."""
        for turn, each in self._turns:
            passed: Passed = yield Forward(turn, weights, (yield from self._received(each.gets)))
            yield from self._sent(each.gives, passed.values, passed.step)
        for turn, each in reversed(self._turns):
            if not each.goes_back:
                continue
            found: Gradient = yield Backward(turn, (yield from self._received(each.gives)))
            if each.returns:
                yield from self._sent(each.gets, found.before, found.step)
        return found

    def _received(self, sources: Sequence[int]) -> Generator[Action, Any, tuple[Vector, ...]]:
        found = []
        for source in sources:
            message = yield Receive(self._members[source])
            found.append(message.values)
            self.heard[source] = replace(message, values=None)  # who waits keeps no activation
        return tuple(found)

    def _sent(
        self, to: Sequence[int], values: Sequence[Vector], step: int
    ) -> Generator[Action, Any, None]:
        for member, value in zip(to, values, strict=True):
            message = Message(self._number, value, step=step)
            yield Send(self._members[member], message, self.heard.get(member))


class _Pieces:
    """Messages of members, until those of a replica are all there."""

    def __init__(self, roles: Roles, number: int) -> None:
        self._roles, self._own = roles, roles.part(number)
        self._shared = [self._own.within(part) for part in roles.cut]
        self.here = {
            worker: [deque[Message]() for _ in roles.cut] for worker in range(roles.workers)
        }
        self.latest: dict[int, list[Message]] = {}

    def add(self, piece: Message) -> Message | None:
        """Take one in; what the replica says, once all of its members have."""
        worker, member, *_ = self._roles.place(piece.source)
        here = self.here[worker]
        here[member].append(piece)
        if not all(here):
            return None
        found = self.latest[worker] = [line.popleft() for line in here]
        delivered = max(each.delivered for each in found)
        # Lost on the way: what some members had sent by then is no push.
        said = next((each for each in found if _lost(each)), found[-1])
        values = None if said.values is None else self._joined(found)
        return replace(said, source=worker, values=values, delivered=delivered)

    def divided(
        self, worker: int, values: Vector | None
    ) -> list[tuple[int, Vector | None, Message]]:
        """Of an answer: to whom, which values, and what it answers there."""
        parts = [None if values is None else own.take(values) for own in self._shared]
        return list(zip(self._roles.members(worker), parts, self.latest[worker], strict=True))

    def _joined(self, found: Sequence[Message]) -> Vector:
        flat = np.empty_like(self._roles.weights, shape=self._own.size)
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
