"""Programs of model-parallel replicas, each of which acts as one worker for the servers."""

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
    Message,
    Passed,
    Program,
    Receive,
    RestartPoint,
    Send,
    Vector,
)
from labkit.programs.roles import Roles

# The type `ProgramFactory` is a function that creates a program. The program resumes at a restart
# point, or starts from the beginning.
ProgramFactory: TypeAlias = Callable[[Any], Program]


def passing(create: ProgramFactory, roles: Roles, number: int, mark: Any = None) -> Program:
    """Run a worker's program on one member (stage or machine) of a model-parallel replica.

    A replica member is a stage, or a machine of a grid. The diagram shows forward (F) and backward
    (B) passes of two members over time:

        stages    first  F         B push ·····      forward: outputs go to the next stage,
                  last      F B push ·····           backward: their gradients come back

        grid      one    F ⇄ F ⇄ F B ⇄ B ⇄ B push    before each layer, members exchange the values
                  other  F ⇄ F ⇄ F B ⇄ B ⇄ B push    that others read; their gradients come back

    Each replica member executes forward and backward passes together with the other members. It
    executes all other actions alone, with its part of the weights.

    Args:
        create: Function that creates a worker's program for the weights of one replica member; see
            `Roles.of_member`.
        roles: Roles of all programs.
        number: Program number of the replica member.
        mark: State at the restart point, or None if the program starts at its beginning.
    """
    inner, latest_messages = mark or (None, {})
    member, program = _Member(roles, number, latest_messages), create(inner)
    answer: Any = None
    while (action := _next(program, answer)) is not None:
        # The assignment of None frees the memory of the answer while the program waits.
        answer = None
        if isinstance(action, Compute):
            answer = yield from member.gradient(action.weights)
        elif isinstance(action, RestartPoint):
            yield RestartPoint((action.state, member.heard))
        else:
            answer = yield action


def whole_replica_program(
    create: ProgramFactory, roles: Roles, number: int, mark: Any = None
) -> Program:
    """Run a server's program, which sees all members of a replica as one worker.

    The server's answer is divided among the replica members, so that each receives the weights that
    it stores. The server applies a gradient only after messages from all members of a replica have
    arrived.

    Args:
        create: Function that creates the server's program, which knows nothing about replica
            members.
        roles: Roles of all programs.
        number: Program number of the server.
        mark: State at the restart point, or None if the program starts at its beginning.

    Difference from Dean 2012: there, a server applies each machine's part of a gradient without
    waiting for other machines.
    """
    pieces = _PieceBuffer(roles, number)
    inner = None
    if mark is not None:
        inner, pieces.here, pieces.latest = mark
    program = create(inner)
    answer: Any = None
    while (action := _next(program, answer)) is not None:
        answer = None
        match action:
            case RestartPoint(state):
                yield RestartPoint((state, pieces.here, pieces.latest))
            case Receive():
                while answer is None:
                    answer = pieces.add((yield Receive()))
            case Send(worker, message):
                for member, part, answered in pieces.divided(worker, message.values):
                    yield Send(member, replace(message, values=part), answered)
            case _:
                answer = yield action


class _Member:
    """A replica member (stage or machine), which computes gradients jointly with other members."""

    def __init__(self, roles: Roles, number: int, latest_messages: dict[int, Message]) -> None:
        place = roles.place(number)
        self._number, self._members = number, roles.members(place.worker)
        self._turns = [
            (place._replace(turn=turn, share=each_pass.share), each_pass)
            for turn, each_pass in enumerate(roles.passes[place.member])
        ]
        # The dict `heard` stores the latest message from each sender. The next message to the
        # sender answers the stored message.
        self.heard = latest_messages

    def gradient(self, weights: Vector) -> Generator[Action, Any, Gradient]:
        """Compute the gradient of the next batch with the given weights."""
        for turn, current_pass in self._turns:
            passed: Passed = yield Forward(
                turn, weights, (yield from self._received(current_pass.gets))
            )
            yield from self._sent(current_pass.gives, passed.values, passed.step)
        for turn, current_pass in reversed(self._turns):
            if not current_pass.goes_back:
                continue
            gradient: Gradient = yield Backward(
                turn, (yield from self._received(current_pass.gives))
            )
            if current_pass.returns:
                yield from self._sent(current_pass.gets, gradient.before, gradient.step)
        return gradient

    def _received(self, sources: Sequence[int]) -> Generator[Action, Any, tuple[Vector, ...]]:
        values = []
        for source in sources:
            message = yield Receive(self._members[source])
            values.append(message.values)
            # The stored copy of the message omits the activations, to free their memory.
            self.heard[source] = replace(message, values=None)
        return tuple(values)

    def _sent(
        self, to: Sequence[int], values: Sequence[Vector], step: int
    ) -> Generator[Action, Any, None]:
        for member, value in zip(to, values, strict=True):
            message = Message(self._number, value, step=step)
            yield Send(self._members[member], message, self.heard.get(member))


class _PieceBuffer:
    """A buffer that joins the messages of a replica's members after each member has sent one."""

    def __init__(self, roles: Roles, number: int) -> None:
        self._roles, self._own = roles, roles.part(number)
        self._shared = [self._own.within(part) for part in roles.cut]
        self.here = {
            worker: [deque[Message]() for _ in roles.cut] for worker in range(roles.workers)
        }
        self.latest: dict[int, list[Message]] = {}

    def add(self, piece: Message) -> Message | None:
        """Join the messages from all parts of a replica into one message."""
        worker, member, *_ = self._roles.place(piece.source)
        queues = self.here[worker]
        queues[member].append(piece)
        if not all(queues):
            return None
        messages = self.latest[worker] = [queue.popleft() for queue in queues]
        delivered = max(message.delivered for message in messages)
        # The gradient is incomplete if a stage or machine has failed. For a failed replica member,
        # the method returns the failed member's message.
        last = next((message for message in messages if _lost(message)), messages[-1])
        values = None if last.values is None else self._joined(messages)
        return replace(last, source=worker, values=values, delivered=delivered)

    def divided(
        self, worker: int, values: Vector | None
    ) -> list[tuple[int, Vector | None, Message]]:
        """Return each replica member's number, its part of the values, and its latest message."""
        parts = [None if values is None else part.take(values) for part in self._shared]
        return list(zip(self._roles.members(worker), parts, self.latest[worker], strict=True))

    def _joined(self, messages: Sequence[Message]) -> Vector:
        flat = np.empty_like(self._roles.weights, shape=self._own.size)
        for part, message in zip(self._shared, messages, strict=True):
            if message.values is not None:
                part.put(message.values, flat)
        return flat


def _lost(message: Message) -> bool:
    return message.values is None and message.ends and not message.wants


def _next(program: Program, answer: Any) -> Action | None:
    """Resume a program with an answer, and return its next action, or None if it has ended."""
    try:
        return program.send(answer)
    except StopIteration:
        return None
