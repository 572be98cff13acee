"""The event log of a program run: steps of workers, and updates of servers."""

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
    """The computation behind a runtime: gradients, updates, evaluation and progress."""

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Compute the gradient of the worker's next batch."""

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Compute the gradient of a loss that includes soft targets with coefficient `share`."""

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Return soft targets for a batch of a worker at given weights, as a flat vector."""

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """Compute the curvature of the loss of the worker's first batch along blocks of weights."""

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        """Run the forward pass of a replica's member over the replica's next batch."""

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        """Run the backward pass of a completed forward pass."""

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Apply a gradient to a program's weights; return the new weights, which are read-only."""

    def states(self, worker: int) -> Vector:
        """Return a worker's optimizer slots and layers' statistics, as one flat vector."""

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """Replace a worker's weights, and its state unless it is None; return the new weights."""

    def forget(self, worker: int) -> None:
        """Reset a worker's optimizer: its slots and its count of steps."""

    def step(self, row: Row) -> None:
        """Record a completed step of a worker, as a row of the history."""

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """Record a program's weights and the elapsed seconds (`now`) at the end of an epoch."""

    def stops(self) -> bool:
        """Return whether training must end now."""


@record()
@dataclass
class Carried:
    """The traffic of a worker: messages that it sent, or received from programs without history.

    Attributes:
        nbytes: Total payload bytes.
        wire: Total bytes that crossed the network.
        messages: Number of messages.
    """

    nbytes: int = 0
    wire: int = 0
    messages: int = 0

    def add(self, nbytes: int, wire: int, messages: int = 1) -> None:
        """Add payload bytes, network bytes and a number of messages."""
        self.nbytes, self.wire = self.nbytes + nbytes, self.wire + wire
        self.messages += messages


@record()
@dataclass
class Play:
    """A worker's step in progress, which lasts from one gradient request to the next.

    Attributes:
        start: Time when the step began, s.
        gradient: Computed gradient, without its values.
        computed: Total compute time of the step, s.
        until: Time when the computation ended, s.
        carried: Traffic of this step.
        coded: Total encoding and decoding time, s.
        held: Seconds for which the worker waited for other workers.
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
    """A log of history rows (one per worker and step) and of update events while programs run.

    Attributes:
        backend: Backend, which receives a row for each completed step.
        steps: Steps per epoch.
        events: One event per gradient at a server. Keys: server, update (number of the server's
            update; -1: the gradient was dropped), worker, step, version (of the gradient's
            weights), staleness, rows, sent, delivered, applied (s).
        losses: Worker failures: worker, time (s), and number of gradients that the worker computed.
        writers: Numbers of programs with history rows: workers, and each member of a model-parallel
            replica. A message counts once: in its sender's row, or in its receiver's row if the
            sender (a server) has no rows. The last member's row holds a replica's loss and samples.
    """

    backend: Backend
    steps: int
    events: list[Event] = field(default_factory=list)
    losses: list[Event] = field(default_factory=list)
    writers: Container[int] = ()
    _plays: dict[int, Play] = field(default_factory=dict)
    _ahead: dict[int, Carried] = field(default_factory=dict)  # traffic of the next step, by worker
    _updates: dict[int, int] = field(default_factory=dict)

    def record_gradient(self, worker: int, gradient: Gradient, start: float, stop: float) -> None:
        """Record a computed gradient, and end the worker's previous step."""
        carried = self._ahead.pop(worker, Carried())
        self.end_step(worker, start)
        self._plays[worker] = Play(start, _about(gradient), stop - start, stop, carried)

    def record_prediction(self, worker: int, seconds: float) -> None:
        """Add the seconds that a worker's predictions took to its compute time."""
        if play := self._plays.get(worker):
            play.computed += seconds

    def record_forward(self, member: int, passed: Passed, start: float, stop: float) -> None:
        """Record a replica member's forward pass; the first pass of a batch ends the last step."""
        play = self._plays.get(member)
        if play is None or play.gradient.step != passed.step:
            self.record_gradient(
                member, Gradient(np.empty(0), 0, math.nan, passed.step), start, stop
            )
        else:
            play.computed, play.until = play.computed + stop - start, stop

    def record_backward(self, member: int, gradient: Gradient, start: float, stop: float) -> None:
        """Record a replica member's backward pass; the last pass yields the weights' gradient."""
        if play := self._plays.get(member):
            play.gradient = _about(gradient)
            play.computed, play.until = play.computed + stop - start, stop

    def end_step(self, worker: int, now: float) -> None:
        """End the current step of a worker, if there is one."""
        play = self._plays.pop(worker, None)
        if play is None:
            return
        if traffic := self._ahead.pop(worker, None):  # traffic for a next step that never began
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
        """Record the failure of a replica with all its members; omit unfinished gradients."""
        *others, worker = members
        for member in others:
            self._plays.pop(member, None)
        play = self._plays.get(worker)
        step = play.gradient.step if play else 0
        # The loss of a member that waits between its passes is NaN.
        done = play is not None and play.until <= now and not math.isnan(play.gradient.loss)
        if not done:
            self._plays.pop(worker, None)
        self.losses.append({"worker": worker, "seconds": now, "gradients": step + done})
        self.end_step(worker, now)

    def count_sent(self, worker: int, message: Message, on_wire: bool) -> None:
        """Count a sent message in the sender's current step, or in its next step."""
        play = self._plays.get(worker)
        if play is not None and message.step <= play.gradient.step:
            _count(play.carried, message, on_wire)
        elif worker in self.writers:
            _count(self._ahead.setdefault(worker, Carried()), message, on_wire)

    def count_received(self, worker: int, message: Message, on_wire: bool) -> None:
        """Count a received message if its sender (a server) has no history rows."""
        play = self._plays.get(worker)
        if play is not None and message.source not in self.writers:
            _count(play.carried, message, on_wire)

    def add_codec_time(self, worker: int, seconds: float) -> None:
        """Add seconds of encoding or decoding to a worker's current step."""
        if play := self._plays.get(worker):
            play.coded += seconds

    def record_wait(self, worker: int, seconds: float) -> None:
        """Record the seconds for which other workers delayed a worker, as a maximum per step."""
        if play := self._plays.get(worker):
            play.held = max(play.held, seconds)

    def record_allreduce(self, worker: int, meeting: AllReduceState) -> None:
        """Add a worker's traffic and waiting time in an allreduce to its current or next step."""
        play = self._plays.get(worker)
        carried = play.carried if play else self._ahead.setdefault(worker, Carried())
        carried.add(meeting.nbytes, meeting.wire, meeting.messages)
        if play:
            play.held += meeting.held

    def record_update(self, server: int, of: Sequence[Message], now: float) -> None:
        """Record that a server begins to apply the gradients in some messages as one update."""
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
    """Return a gradient without its values, which frees their memory."""
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
