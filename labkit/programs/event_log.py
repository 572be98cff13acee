"""The event log of a program run: the steps of workers and the updates of servers."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np

from labkit.common.state import record
from labkit.programs.actions import Gradient, Message, Passed, Place, Vector
from labkit.programs.virtual_allreduce import AllReduceState

Row: TypeAlias = dict[str, float]
Event: TypeAlias = dict[str, float]


class Backend(Protocol):
    """The interface through which a runtime computes gradients, updates and evaluations."""

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Compute the gradient of a worker's next batch at given weights."""

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Compute the gradient of a loss that also includes soft targets."""

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Return soft targets for a batch of a worker, predicted with given weights."""

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """Compute the curvature of the loss of a worker's first batch along blocks of weights."""

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        """Run a forward pass of a replica member (stage or machine) over the next batch."""

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        """Run the backward pass that belongs to a completed forward pass."""

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Apply a gradient to a program's weights, and return the new read-only weights."""

    def states(self, worker: int) -> Vector:
        """Return a worker's optimizer slots and layer statistics as one flat vector."""

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """Replace a worker's weights and, if given, its states; return the new weights."""

    def forget(self, worker: int) -> None:
        """Reset a worker's optimizer: its slots and its step counter."""

    def step(self, row: Row) -> None:
        """Record a completed step of a worker as one row of the run's history."""

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """Record a program's weights at the end of an epoch, `now` seconds after the start."""

    def stops(self) -> bool:
        """Return whether training must end now."""


@record()
@dataclass
class Carried:
    """A worker's traffic: its sent messages, and messages from servers, which have no rows.

    Attributes:
        nbytes: Total bytes of the payloads of all messages.
        wire: Total bytes that were sent over the network.
        messages: Number of messages in this traffic.
    """

    nbytes: int = 0
    wire: int = 0
    messages: int = 0

    def add(self, nbytes: int, wire: int, messages: int = 1) -> None:
        """Add payload bytes, network bytes and the number of messages to the totals."""
        self.nbytes, self.wire = self.nbytes + nbytes, self.wire + wire
        self.messages += messages


@record()
@dataclass
class Play:
    """A worker's unfinished training step, which lasts from one gradient request to the next.

    Attributes:
        start: Time at which the step began, in s.
        gradient: Description of the step's gradient, without the values.
        computed: Total compute time of the step, in s.
        until: Time at which the latest computation of the step ended, in s.
        carried: Traffic of the worker in this step.
        coded: Total time for encoding and decoding in the step, in s.
        held: Seconds for which the worker has waited for other workers in this step.
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
    """The log of a program run: one history row per worker and step, and events of server updates.

    Attributes:
        backend: Backend that receives a history row for each completed step.
        steps: Number of training steps per epoch.
        events: A list with one event for each gradient that a server receives. The keys of an event
            are server, update, worker, step, version, staleness, rows, sent, delivered and applied.
            The value of `update` is the number of the server's update (-1 for a dropped gradient).
            The value of `version` is the version of the weights at which the gradient was computed.
            The values of `sent`, `delivered` and `applied` are times in s.
        losses: One entry per failed worker: its number, failure time, and gradient count. The
            failure time of a worker is in s.
        writers: Numbers of the programs with history rows: workers, or members (stages or machines)
            of model-parallel replicas. Each message is counted once, in the history row of its
            sender. A server has no history rows. The history row of the receiver counts messages
            from a server. The history row of a replica's last member contains the replica's loss.
            The last member's history row also contains the replica's number of samples.
    """

    backend: Backend
    steps: int
    events: list[Event] = field(default_factory=list)
    losses: list[Event] = field(default_factory=list)
    writers: Container[int] = ()
    _plays: dict[int, Play] = field(default_factory=dict)
    # The dict `_ahead` maps a worker to the message traffic of its next training step.
    _ahead: dict[int, Carried] = field(default_factory=dict)
    _updates: dict[int, int] = field(default_factory=dict)

    def record_gradient(self, worker: int, gradient: Gradient, start: float, stop: float) -> None:
        """Record a computed gradient, and end the worker's previous step."""
        carried = self._ahead.pop(worker, Carried())
        self.end_step(worker, start)
        self._plays[worker] = Play(start, _about(gradient), stop - start, stop, carried)

    def record_prediction(self, worker: int, seconds: float) -> None:
        """Add the seconds of a worker's predictions to its current step's compute time."""
        if play := self._plays.get(worker):
            play.computed += seconds

    def record_forward(self, member: int, passed: Passed, start: float, stop: float) -> None:
        """Record a replica member's forward pass; the first pass over a batch begins a new step."""
        play = self._plays.get(member)
        if play is None or play.gradient.step != passed.step:
            self.record_gradient(
                member, Gradient(np.empty(0), 0, math.nan, passed.step), start, stop
            )
        else:
            play.computed, play.until = play.computed + stop - start, stop

    def record_backward(self, member: int, gradient: Gradient, start: float, stop: float) -> None:
        """Record a replica member's backward pass; only a step's last pass yields weight
        gradients.
        """
        if play := self._plays.get(member):
            play.gradient = _about(gradient)
            play.computed, play.until = play.computed + stop - start, stop

    def end_step(self, worker: int, now: float) -> None:
        """End the current step of a worker, if there is one, and record its history row."""
        play = self._plays.pop(worker, None)
        if play is None:
            return
        # If a worker's next training step never begins, the current step includes the traffic of
        # the next step.
        if traffic := self._ahead.pop(worker, None):
            play.carried.add(traffic.nbytes, traffic.wire, traffic.messages)
        seconds = now - play.start
        rest = max(0.0, seconds - play.computed - play.coded)
        wait = min(play.held, rest)
        self.backend.step(
            {
                "epoch": play.gradient.step // self.steps,
                "step": play.gradient.step,
                "rank": worker,
                "loss": play.gradient.loss,
                "seconds": seconds,
                "compute_seconds": play.computed,
                "codec_seconds": play.coded,
                "communicate_seconds": rest - wait,
                "wait_seconds": wait,
                "payload_bytes": play.carried.nbytes,
                "wire_bytes": play.carried.wire,
                "messages": play.carried.messages,
                "samples": play.gradient.rows,
            }
        )

    def record_failure(self, members: Sequence[int], now: float) -> None:
        """Record that all members of a replica failed, and discard their incomplete gradients."""
        *others, worker = members
        for member in others:
            self._plays.pop(member, None)
        play = self._plays.get(worker)
        step = play.gradient.step if play else 0
        # The loss is NaN until the replica member has completed its last backward pass.
        done = play is not None and play.until <= now and not math.isnan(play.gradient.loss)
        if not done:
            self._plays.pop(worker, None)
        self.losses.append({"worker": worker, "seconds": now, "gradients": step + done})
        self.end_step(worker, now)

    def count_sent(self, worker: int, message: Message, on_wire: bool) -> None:
        """Count a sent message in the sender's current or next training step."""
        play = self._plays.get(worker)
        if play is not None and message.step <= play.gradient.step:
            _count(play.carried, message, on_wire)
        elif worker in self.writers:
            _count(self._ahead.setdefault(worker, Carried()), message, on_wire)

    def count_received(self, worker: int, message: Message, on_wire: bool) -> None:
        """Count a received message in the receiver's history row if the sender is a server."""
        play = self._plays.get(worker)
        if play is not None and message.source not in self.writers:
            _count(play.carried, message, on_wire)

    def add_codec_time(self, worker: int, seconds: float) -> None:
        """Add encoding or decoding time, in s, to a worker's current step."""
        if play := self._plays.get(worker):
            play.coded += seconds

    def record_wait(self, worker: int, seconds: float) -> None:
        """Record how long a worker waited for others; a step stores only its longest wait."""
        if play := self._plays.get(worker):
            play.held = max(play.held, seconds)

    def record_allreduce(self, worker: int, meeting: AllReduceState) -> None:
        """Add an allreduce's traffic and waiting time to the current or next step of a worker."""
        play = self._plays.get(worker)
        carried = play.carried if play else self._ahead.setdefault(worker, Carried())
        carried.add(meeting.nbytes, meeting.wire, meeting.messages)
        if play:
            play.held += meeting.held

    def record_update(self, server: int, of: Sequence[Message], now: float) -> None:
        """Record that a server applies the gradients from the messages `of` in one update."""
        number = self._updates.get(server, 0)
        self._updates[server] = number + 1
        for message in of:
            self.events.append(_event(server, number, message, number - message.version, now))

    def record_dropped(self, server: int, message: Message, now: float) -> None:
        """Record a gradient that a server does not apply."""
        staleness = self._updates.get(server, 0) - message.version
        self.events.append(_event(server, -1, message, staleness, now))


def _count(carried: Carried, message: Message, on_wire: bool) -> None:
    nbytes = 0 if message.values is None else message.values.nbytes
    carried.add(nbytes, nbytes if on_wire else 0)


def _about(gradient: Gradient) -> Gradient:
    """Return a copy of a gradient without its values, so that their memory can be freed."""
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
