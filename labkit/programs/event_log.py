"""What happened when a program was played: the steps of workers, and the updates of servers."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np

from labkit.common.state import record
from labkit.programs.actions import Gradient, Message, Passed, Place, Vector
from labkit.programs.virtual_allreduce import Meeting

Row: TypeAlias = dict[str, float]
Event: TypeAlias = dict[str, float]


class Backend(Protocol):
    """What a world needs of the one that trains: gradients, servers, and who looks at weights."""

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Of the worker's next batch."""

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Likewise, of a loss that counts the distance from soft targets by this share."""

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """What one predicts at these weights for a batch of a worker, as soft targets, flat."""

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """The curvature of the loss of the worker's first batch along blocks of the weights."""

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        """What a pass of a member gives, of its replica's next batch."""

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        """The gradients of a pass that has gone forward."""

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Apply a gradient to what this one holds; the new weights, which nobody writes into."""

    def states(self, worker: int) -> Vector:
        """What a worker keeps beside its weights, flat."""

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """A worker holds these weights from now on."""

    def forget(self, worker: int) -> None:
        """A worker's optimizer begins anew."""

    def step(self, row: Row) -> None:
        """A worker's step is over."""

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """An epoch is over for this one, so many seconds after the begin."""

    def stops(self) -> bool:
        """Whether someone wants training to end."""


@record()
@dataclass
class Carried:
    """What a worker has sent, and what those have sent it who write no rows.

    Attributes:
        nbytes: handed over. wire: of these, what has left its place. messages: how many.
    """

    nbytes: int = 0
    wire: int = 0
    messages: int = 0

    def add(self, nbytes: int, wire: int, messages: int = 1) -> None:
        """So much more."""
        self.nbytes, self.wire = self.nbytes + nbytes, self.wire + wire
        self.messages += messages


@record()
@dataclass
class Play:
    """A step of a worker under way: from the request of a gradient to that of the next.

    Attributes:
        start: s.
        gradient: what it computed, without its values.
        computed: s that it took.
        until: s; when that is over.
        carried: what it has sent for this step.
        coded: s that it took to encode and decode.
        held: s for which a server kept the worker waiting for others.
    """

    start: float
    gradient: Gradient
    computed: float
    until: float
    carried: Carried
    coded: float = 0.0
    held: float = 0.0


@dataclass
class EventLog:
    """Writes rows of history and of the interleaving while a program is played.

    Attributes:
        scenes: who is told of each step.
        steps: of an epoch.
        events: one a gradient at a server: server, update (its number there, -1 where it was
            dropped), worker, step, version (of the weights that it is of), staleness, rows, sent,
            delivered, applied (s).
        losses: of workers: who, when (s), and the gradients that it had computed.
        writers: numbers of those who write rows: workers, and each member of one that is cut. A
            message counts once: in its sender's row, or, where that one writes none (a server), in
            the row of who gets it. Of replicas that are cut, loss and samples are in the row of the
            last member.
    """

    scenes: Backend
    steps: int
    events: list[Event] = field(default_factory=list)
    losses: list[Event] = field(default_factory=list)
    writers: Container[int] = ()
    _plays: dict[int, Play] = field(default_factory=dict)
    _ahead: dict[int, Carried] = field(default_factory=dict)  # sent for steps to come
    _updates: dict[int, int] = field(default_factory=dict)

    def begins(self, worker: int, gradient: Gradient, start: float, stop: float) -> None:
        """A worker has computed a gradient; the step before is over."""
        carried = self._ahead.pop(worker, Carried())
        self.ends(worker, start)
        self._plays[worker] = Play(start, _about(gradient), stop - start, stop, carried)

    def predicted(self, worker: int, seconds: float) -> None:
        """A worker has computed predictions."""
        if play := self._plays.get(worker):
            play.computed += seconds

    def passes(self, member: int, passed: Passed, start: float, stop: float) -> None:
        """A member has gone forward; with its first pass its step before is over."""
        play = self._plays.get(member)
        if play is None or play.gradient.step != passed.step:
            self.begins(member, Gradient(np.empty(0), 0, math.nan, passed.step), start, stop)
        else:
            play.computed, play.until = play.computed + stop - start, stop

    def goes_back(self, member: int, gradient: Gradient, start: float, stop: float) -> None:
        """A member has gone back: with its last pass its gradient is there."""
        if play := self._plays.get(member):
            play.gradient = _about(gradient)
            play.computed, play.until = play.computed + stop - start, stop

    def ends(self, worker: int, now: float) -> None:
        """The step of this worker that is under way, if any, is over."""
        play = self._plays.pop(worker, None)
        if play is None:
            return
        if more := self._ahead.pop(worker, None):  # for a step that never came
            play.carried.add(more.nbytes, more.wire, more.messages)
        seconds = now - play.start
        rest = max(0.0, seconds - play.computed - play.coded)
        held = min(play.held, rest)
        self.scenes.step(
            {
                "epoch": play.gradient.step // self.steps,
                "step": play.gradient.step,
                "rank": worker,
                "loss": play.gradient.loss,
                "seconds": seconds,
                "compute_seconds": play.computed,
                "codec_seconds": play.coded,
                "communicate_seconds": rest - held,
                "wait_seconds": held,
                "payload_bytes": play.carried.nbytes,
                "wire_bytes": play.carried.wire,
                "messages": play.carried.messages,
                "samples": play.gradient.rows,
            }
        )

    def loses(self, members: Sequence[int], now: float) -> None:
        """A worker is gone with all its members, and what it had not computed never was."""
        *others, worker = members
        for member in others:
            self._plays.pop(member, None)
        play = self._plays.get(worker)
        step = play.gradient.step if play else 0
        # Between its passes a member has no loss yet, and waits.
        done = play is not None and play.until <= now and not math.isnan(play.gradient.loss)
        if not done:
            self._plays.pop(worker, None)
        self.losses.append({"worker": worker, "seconds": now, "gradients": step + done})
        self.ends(worker, now)

    def sends(self, worker: int, message: Message, on_wire: bool) -> None:
        """One has sent a message, which may be for the step that it comes to next."""
        play = self._plays.get(worker)
        if play is not None and message.step <= play.gradient.step:
            _count(play.carried, message, on_wire)
        elif worker in self.writers:
            _count(self._ahead.setdefault(worker, Carried()), message, on_wire)

    def receives(self, worker: int, message: Message, on_wire: bool) -> None:
        """One has got a message, which counts here where its sender writes no rows."""
        play = self._plays.get(worker)
        if play is not None and message.source not in self.writers:
            _count(play.carried, message, on_wire)

    def coded(self, worker: int, seconds: float) -> None:
        """A worker has encoded or decoded what travels."""
        if play := self._plays.get(worker):
            play.coded += seconds

    def waited(self, worker: int, seconds: float) -> None:
        """Others kept a worker waiting."""
        if play := self._plays.get(worker):
            play.held = max(play.held, seconds)

    def met(self, worker: int, meeting: Meeting) -> None:
        """A worker has been in an allreduce, which may be before its first step."""
        play = self._plays.get(worker)
        carried = play.carried if play else self._ahead.setdefault(worker, Carried())
        carried.add(meeting.nbytes, meeting.wire, meeting.messages)
        if play:
            play.held += meeting.held

    def applies(self, server: int, of: Sequence[Message], now: float) -> None:
        """A server begins to apply what these messages brought."""
        number = self._updates.get(server, 0)
        self._updates[server] = number + 1
        for message in of:
            self.events.append(_event(server, number, message, number - message.version, now))

    def drops(self, server: int, message: Message, now: float) -> None:
        """A gradient came too late."""
        late = self._updates.get(server, 0) - message.version
        self.events.append(_event(server, -1, message, late, now))


def _count(carried: Carried, message: Message, on_wire: bool) -> None:
    nbytes = 0 if message.values is None else message.values.nbytes
    carried.add(nbytes, nbytes if on_wire else 0)


def _about(gradient: Gradient) -> Gradient:
    """A gradient without its values, which may go."""
    return replace(gradient, values=gradient.values[:0].copy(), before=())


def _event(server: int, update: int, message: Message, staleness: int, now: float) -> Event:
    return {
        "server": server,
        "update": update,
        "worker": message.source,
        "step": message.step,
        "version": message.version,
        "staleness": staleness,
        "rows": message.rows,
        "sent": message.sent,
        "delivered": message.delivered,
        "applied": now,
    }
