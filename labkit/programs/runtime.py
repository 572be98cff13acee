"""The base class of the runtimes, which resumes programs and stores received messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from labkit.common.state import record
from labkit.network import FREE, FifoLinks, Flows, Links, Network
from labkit.programs.actions import (
    Action,
    Adopt,
    Backward,
    Code,
    Compute,
    Computes,
    Drop,
    Forget,
    Forward,
    Gradient,
    Message,
    Passed,
    Program,
    Receive,
    RestartPoint,
    Send,
    Snapshot,
    States,
    Vector,
)
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.program_state import ProgramState, keep, restore_object
from labkit.schedules.round import Integers


@record()
class Event(NamedTuple):
    """A future event as data: the name and the arguments of a method that the runtime will call."""

    what: str
    given: tuple[Any, ...]


# The type `StateAttributes` lists pairs of an object and its attribute names. A checkpoint saves
# and restores the listed attributes.
StateAttributes: TypeAlias = Sequence[tuple[object, Sequence[str]]]
# The type `Schedule` is a function of a time in s and an event. A `Schedule` function adds the
# event to the queue.
Schedule: TypeAlias = Callable[[float, Event], None]


class MessageCarrier(Protocol):
    """A transport of messages between simulated ranks, which determines their arrival times."""

    @property
    def next(self) -> float:
        """The time in s of the next event on the network links; infinity if no event is pending."""

    def run(self, until: float) -> Sequence[tuple[float, Event]]:
        """Advance the time to `until` s, and return (arrival time, event) of each message."""

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        """Start a message between two ranks, whose arrival is the event `arrive`."""

    @property
    def state_attributes(self) -> StateAttributes:
        """The objects that change during message transfers, with names of changing attributes."""


def carrier(network: Network | None, places: int, schedule: Schedule) -> MessageCarrier:
    """Return a message transport for a network, or one without delays if it is None."""
    if network is None:
        return _Free(schedule)
    return (
        _Queued(network, places, schedule) if network.sharing == "fifo" else _Fair(network, places)
    )


class _Free:
    """A message transport without a network model, in which each message arrives at once."""

    next = np.inf
    state_attributes: StateAttributes = ()

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def run(self, until: float) -> Sequence[tuple[float, Event]]:
        return ()

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        self._schedule(now, arrive)


class _Queued(_Free):
    """A message transport over FIFO links, each of which transfers one message at a time."""

    def __init__(self, network: Network, places: int, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._queues = FifoLinks(network, places)
        self.state_attributes = [(self._queues, ("numbers", "busy"))]

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        first = self._queues.depart(*ends, nbytes, now)
        self._schedule(self._queues.arrive(*ends, nbytes, first), arrive)


class _Fair:
    """A message transport over links whose bandwidth is shared by concurrent messages."""

    def __init__(self, network: Network, places: int) -> None:
        self._links = Links(network, places)
        self._flows = Flows(self._links.bandwidth, self._links.hops)
        self._ways: dict[tuple[int, int], tuple[Integers, float]] = {}
        # Messages that start at the same time are added to the links together. Transfer rates are
        # therefore computed only once for simultaneous messages.
        self._handed: list[tuple[int, Integers, float]] = []
        self._under_way: dict[int, tuple[float, Event]] = {}
        self._drained: list[tuple[float, Event]] = []
        self._number = 0  # The attribute `_number` is the number that the next message will get.

    @property
    def state_attributes(self) -> StateAttributes:
        return [
            (self, ("_under_way", "_handed", "_drained", "_number")),
            (self._links, ("numbers",)),
            (self._flows, ("now", "number", "way", "turn", "remaining", "rate", "_wait")),
        ]

    @property
    def next(self) -> float:
        self._begin()
        return self._flows.now if self._drained else self._flows.next

    def run(self, until: float) -> list[tuple[float, Event]]:
        self._pass(until)
        deliveries, self._drained = self._drained, []
        return deliveries

    def _begin(self) -> None:
        if self._handed:
            numbers, ways, nbytes = zip(*self._handed, strict=True)
            turns = np.full(len(numbers), FREE)
            self._flows.start(np.array(numbers), np.stack(ways), turns, np.array(nbytes))
            self._handed = []

    def _pass(self, until: float) -> None:
        self._begin()
        for number, moment in zip(*self._flows.run(until), strict=True):
            latency, arrive = self._under_way.pop(int(number))
            self._drained.append((float(moment) + latency, arrive))

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        if now > self._flows.now:
            self._pass(now)
        source = np.array([ends[0]])
        if ends not in self._ways:
            way, latency = self._links.route(source, np.array([ends[1]]))
            self._ways[ends] = way[0], float(latency[0])
        route, delay = self._ways[ends]
        number, self._number = self._number, self._number + 1
        self._under_way[number] = delay + float(self._links.jitters(source)[0]), arrive
        self._handed.append((number, route, float(nbytes)))


@record("inbox", "waits", "over", "mark", "heard")
@dataclass
class Player:
    """A program that a runtime executes, with its inbox and the answers that it received.

    A Python generator cannot be saved in a checkpoint. After a checkpoint is loaded, a new
    generator starts at the program's restart point. The new generator receives the recorded answers
    again.

    Attributes:
        inbox: Delivered messages that the program has not yet received.
        waits: The pending request of a program that waits for a message. If the program does not
            wait, `waits` is None.
        over: Whether the program has ended.
        mark: State at the latest restart point, or None if the program restarts from its beginning.
        heard: Answers to the program since its restart point; recorded only if checkpoints are
            enabled.
    """

    program: Program
    inbox: list[Message] = field(default_factory=list)
    waits: Receive | None = None
    over: bool = False
    mark: ProgramState | None = None
    heard: list[Any] = field(default_factory=list)

    def replay(self, program: Program) -> None:
        """Replace the program by a new one, and repeat the recorded answers to the new program."""
        self.program = program
        if not self.over:
            for answer in self.heard:
                action = program.send(answer)
                # The replay repeats the call of a `Code` action, because the call changes the
                # program's state.
                if isinstance(action, Code):
                    action.call()


_LOG_STATE = ("events", "losses", "_plays", "_ahead", "_updates")


class Runtime:
    """A base class of runtimes, which execute programs on the wall clock or a virtual clock.

    Args:
        programs: The programs to execute; each key is a program number.
        hosts: For each program number, the rank on which the program runs.
        backend: Backend that computes gradients and applies them.
        event_log: Event log of steps and updates.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        backend: Backend,
        event_log: EventLog,
    ) -> None:
        self._players = {number: Player(program) for number, program in programs.items()}
        self._hosts, self._backend, self._event_log = hosts, backend, event_log
        self._begin = 0.0
        # The dict `_outside` contains objects to which a saved state refers by name. If `_outside`
        # is None, checkpoints are disabled.
        self._outside: Mapping[str, object] | None = None

    def keeps(self, outside: Mapping[str, object]) -> None:
        """Enable checkpoints: from now on, record each program's answers since its restart point.

        Args:
            outside: Mapping from names to objects, which saved states name instead of containing.
        """
        self._outside = outside

    @property
    def _state_attributes(self) -> StateAttributes:
        """The objects that change while programs run, with names of changing attributes."""
        return [(self._event_log, _LOG_STATE)]

    def _save_state(self, *more: Any) -> ProgramState:
        """Save all changing attributes and the objects `more`, without copies of nested arrays."""
        # The assertion informs the type checker that the method `keeps` has set `_outside`.
        assert self._outside is not None
        parts = [
            {name: _snapshot_value(vars(thing)[name]) for name in names}
            for thing, names in self._state_attributes
        ]
        return keep([parts, *more], self._outside)

    def _restore_state(
        self, state: ProgramState, program: Callable[[int, Any], Program]
    ) -> Sequence[Any]:
        """Restore a saved state, and return the objects that `_save_state` stored as `more`."""
        # The assertion informs the type checker that the method `keeps` has set `_outside`.
        assert self._outside is not None
        content: list[Any] = restore_object(state, self._outside)
        parts, *further = content
        for (thing, names), values in zip(self._state_attributes, parts, strict=True):
            vars(thing).update({name: values[name] for name in names})
        for number, player in self._players.items():
            mark = None if player.mark is None else restore_object(player.mark, self._outside)
            player.replay(program(number, mark))
        return further

    def _now(self) -> float:
        """Return the current time of the runtime's clock, in s."""
        raise NotImplementedError

    def _send(self, source: int, to: int, message: Message) -> None:
        """Start the transfer of a message from one program to another."""
        raise NotImplementedError

    def _resume(self, number: int, answer: Any) -> None:
        """Send an answer to a program, then execute its next actions until it waits or ends."""
        player = self._players[number]
        while True:
            if self._outside is not None:
                player.heard.append(answer)
            try:
                action = player.program.send(answer)
            except StopIteration:
                player.over = True
                self._event_log.end_step(number, self._now())
                return
            done, answer = self._execute(number, action)
            if not done:
                return

    def _execute(self, number: int, action: Action) -> tuple[bool, Any]:
        """Execute an action, and return whether it is complete, and the program's answer."""
        answer: Any = None
        match action:
            case Send(to, message, answers):
                wait = self._now() - answers.delivered if answers else 0.0
                self._send(number, to, replace(message, sent=self._now(), held=wait))
            case Receive():
                answer = self._try_receive(number, action)
                return answer is not None, answer
            case Code(call):
                answer = self._run_codec(number, call)
            case Drop(message):
                self._event_log.record_dropped(number, message, self._now())
            case Snapshot(epoch, weights):
                self._backend.snapshot(epoch, number, weights, self._now() - self._begin)
            case States():
                answer = self._backend.states(number)
            case Adopt(weights, states):
                answer = self._backend.adopt(number, weights, states)
            case Forget():
                self._backend.forget(number)
            case RestartPoint(state):
                self._set_mark(number, state)
            case _:
                name = type(action).__name__
                raise NotImplementedError(
                    f"{type(self).__name__} does not support the action {name}"
                )
        return True, answer

    def _set_mark(self, number: int, state: Any) -> None:
        if self._outside is not None:
            player = self._players[number]
            # A new Python generator accepts only None in its first call of `send`. The first
            # recorded answer is therefore None.
            player.mark, player.heard = keep(state, self._outside), [None]

    def _execute_compute(self, number: int, action: Computes) -> Gradient | Passed:
        """Execute a computation, and return its result."""
        match action:
            case Compute(weights, soft, share, penalty):
                gradient = (
                    self._backend.gradient(number, weights)
                    if soft is None
                    else self._backend.distilled(number, weights, soft, share)
                )
                gradient = replace(gradient, loss=gradient.loss + penalty)
            case Forward(place, weights, values):
                return self._backend.forward(place, weights, values)
            case Backward(place, values):
                gradient = self._backend.backward(place, values)
        return replace(gradient, last=self._backend.stops()) if number == 0 else gradient

    def _record_compute(
        self, number: int, action: Computes, result: Gradient | Passed, start: float, stop: float
    ) -> None:
        """Record a computation with its start and end time."""
        if isinstance(result, Passed):
            self._event_log.record_forward(number, result, start, stop)
        elif isinstance(action, Backward):
            self._event_log.record_backward(number, result, start, stop)
        else:
            self._event_log.record_gradient(number, result, start, stop)

    def _run_codec(self, number: int, call: Callable[[], Vector]) -> Vector:
        return call()

    # --- messages ----------------------------------------------------------------------------

    def _record_sent(self, source: int, to: int, message: Message) -> bool:
        """Count a sent message, and return whether the receiver is on another rank."""
        away = self._hosts[source] != self._hosts[to]
        self._event_log.count_sent(source, message, away)
        return away

    def _deliver(self, to: int, message: Message) -> None:
        player = self._players[to]
        player.inbox.append(replace(message, delivered=self._now()))
        if player.waits and (received := self._try_receive(to, player.waits)) is not None:
            self._resume(to, received)

    def _try_receive(self, number: int, request: Receive) -> Message | None:
        """Return the requested message; if it is not here yet, record that the program waits."""
        message = self._next(number, request)
        self._players[number].waits = request if message is None else None
        if message is not None:
            away = self._hosts[number] != self._hosts[message.source]
            self._event_log.count_received(number, message, away)
            self._event_log.record_wait(number, message.held)
        return message

    def _next(self, number: int, request: Receive) -> Message | None:
        """Remove the first message that matches a request from the inbox, and return it."""
        inbox = self._players[number].inbox
        for place, message in enumerate(inbox):
            if request.source in (None, message.source) and self._may_receive(number, message):
                return inbox.pop(place)
        return None

    def _may_receive(self, number: int, message: Message) -> bool:
        """Return whether a message may be received now; if so, the caller must receive it."""
        return True


def _snapshot_value(value: Any) -> Any:
    """Copy an array, because network links write into arrays; return other values unchanged."""
    return value.copy() if isinstance(value, np.ndarray) else value
