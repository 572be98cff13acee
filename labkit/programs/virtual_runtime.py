"""The virtual clock: one process plays all workers and servers, and time is an event heap."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator import Injector
from labkit.network import Network
from labkit.programs.actions import (
    Action,
    AllReduce,
    Backward,
    Begin,
    Compute,
    Computes,
    Curve,
    Forward,
    Join,
    Message,
    Predict,
    Program,
    Update,
    Wait,
)
from labkit.programs.carriers import Changing, Event, carrier
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.program_state import ProgramState
from labkit.programs.runtime import Runtime
from labkit.programs.virtual_allreduce import Meeting, Together

# Of a world, what changes while it is played.
_STATE = (
    *("now", "_begun", "_players", "_heap", "_order", "_lines", "_there"),
    *("_met", "_joins", "_script"),
)
_EVENTS = frozenset({"_arrive", "_comes", "_lose", "_resume"})
FORWARDS = 1 / 3  # of a gradient's time


class VirtualTiming(Protocol):
    """How long things take on the virtual clock, s."""

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """When a worker has computed the gradient of this step, or a share of it."""

    def updated(self, server: int, start: float) -> float:
        """When a server has applied a gradient."""

    def late(self, to: int, message: Message) -> float:
        """By how much a message arrives later than the network would have it."""


class VirtualRuntime(Runtime):
    """Plays programs on the virtual clock: values are real, time is what the laws say.

    Everything happens in the order of its moments, and at one moment in the order in which it was
    asked for: the same laws and the same seed give the same run, bit for bit. Messages are flows
    on the links of a network, which they share as `labkit.network.Flows` says; without a network,
    and between those at one place, they take no time.

    Args:
        programs: by number, workers before servers.
        hosts: the place of each.
        scenes: computes gradients and applies them.
        diary: where steps and updates are written.
        times: the laws.
        network: the links; None: there are none to wait for.
        shapes: of the weights.
        seed: of compressors' random choices.
        script: the order in which a server takes gradients, as (worker, step); by its number.
        lost: when who is gone, s, the members of a replica together. What they have sent arrives;
            who is left hears of it behind that.
        servers: those who hear of it.
        killed: the steps with whose begin workers are gone.
        injectors: who spoil messages of workers.

    Attributes:
        now: s.
        times: the laws.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        scenes: Backend,
        diary: EventLog,
        times: VirtualTiming,
        network: Network | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        seed: int = 0,
        script: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        lost: Mapping[tuple[int, ...], float] | None = None,
        servers: Sequence[int] = (),
        killed: Mapping[int, int] | None = None,
        injectors: Mapping[int, Injector] | None = None,
    ) -> None:
        super().__init__(programs, hosts, scenes, diary)
        self.now, self.times = 0.0, times
        self._script = {server: list(order)[::-1] for server, order in (script or {}).items()}
        self._heap: list[tuple[float, int, Event]] = []
        self._order = 0  # of what is asked for next
        self._carrier = carrier(network, 1 + max(hosts), self._at)
        self._lines: dict[tuple[int, int], deque[Message]] = {}  # under way, by source and to
        self._there: set[Message] = set()  # that wait for one before them
        self._together = Together(len(programs), network, shapes, seed)
        self._met: dict[int, Meeting] = {}  # allreduces that are known to end, by worker
        self._joins: set[int] = set()  # who waits for one
        self._servers, self._begun = servers, False
        self._killed, self._injectors = killed or {}, injectors or {}
        for members, moment in (lost or {}).items():
            self._at(moment, Event("_lose", (members,)))

    def play(self, between: Callable[[VirtualRuntime], None] = lambda world: None) -> None:
        """Play all programs to their ends.

        Args:
            between: called when all is done that happens at a moment; there the world may be kept.

        Raises:
            LabkitError: programs wait for each other.
        """
        if not self._begun:
            self._begun = True
            for number in self._players:
                self._resume(number, None)
        while (moment := self._soonest()) < np.inf:
            for wake, event in self._carrier.run(moment):
                self._at(wake, event)
            self.now = moment
            while self._heap and self._heap[0][0] <= moment:
                self._carry_out(heapq.heappop(self._heap)[2])
            between(self)
        if stuck := [number for number, player in self._players.items() if not player.over]:
            raise LabkitError(
                f"programs {stuck} wait for messages that nobody will send, at {self.now:g} s"
            )

    # --- its state ---------------------------------------------------------------------------

    @property
    def _changing(self) -> Changing:
        meetings = self._together, ("_here", "_states")
        return [(self, _STATE), *super()._changing, meetings, *self._carrier.changing]

    def keep(self, beside: Any = None) -> ProgramState:
        """All that has happened, and all that will happen.

        Args:
            beside: what scenes hold; arrays that both know stay one.
        """
        return self._kept(beside)

    def take(self, kept: ProgramState, program: Callable[[int, Any], Program]) -> Any:
        """Go on from there; what was kept beside it.

        Args:
            kept: of a world of the same programs.
            program: that of a number, which begins at a mark, or where there is None at its begin.
        """
        (beside,) = self._taken(kept, program)
        return beside

    def _soonest(self) -> float:
        return min(self._heap[0][0] if self._heap else np.inf, self._carrier.next)

    def _at(self, moment: float, event: Event) -> None:
        heapq.heappush(self._heap, (moment, self._order, event))
        self._order += 1

    def _carry_out(self, event: Event) -> None:
        if event.what not in _EVENTS:  # a state names it, and a name may be that of any method
            raise LabkitError(
                f"a state asks for {event.what!r:.80}; allowed: {', '.join(sorted(_EVENTS))}"
            )
        getattr(self, event.what)(*event.given)

    def _answer(self, moment: float, number: int, answer: Any) -> None:
        """A program gets its answer at that moment."""
        self._at(moment, Event("_resume", (number, answer)))

    def _now(self) -> float:
        return self.now

    def _act(self, number: int, action: Action) -> tuple[bool, Any]:
        """What takes time is answered when that is over."""
        match action:
            case Compute() | Forward() | Backward():
                found = self._computed(number, action)
                if self._killed.get(number) == found.step:
                    self._lose((number,))
                    return False, None
                stop = self._stop(number, action, found.step)
                self._noted(number, action, found, self.now, stop)
                self._answer(stop, number, found)
            case Predict(worker, step, weights):
                predicted = self._scenes.predictions(number, worker, step, weights)
                stop = self.times.computed(number, step, self.now, FORWARDS)
                self._diary.predicted(number, stop - self.now)
                self._answer(stop, number, predicted)
            case Curve(weights, ends):
                curved = self._scenes.curved(number, weights, ends)
                # A product with the Hessian is a gradient, and the gradient of that.
                stop = self.times.computed(number, 0, self.now, 2.0 * (len(ends) - 1))
                self._answer(stop, number, curved)
            case Update(gradient, of, rate):
                self._diary.applies(number, of, self.now)
                weights = self._scenes.update(number, gradient, rate)
                stop = self.times.updated(number, self.now)
                self._answer(stop, number, weights)
            case AllReduce():
                self._join(number)
                self._begin_together(number, action)
            case Begin(allreduce):
                self._begin_together(number, allreduce)
                return True, None
            case Join():
                self._join(number)
            case Wait(seconds):
                self._answer(self.now + seconds, number, None)
            case _:
                return super()._act(number, action)
        return False, None

    def _stop(self, number: int, action: Computes, step: int) -> float:
        """When what begins now is computed: a member's part, a third of it forwards."""
        match action:
            case Forward(place):
                share = place.share * FORWARDS
            case Backward(place):
                share = place.share * (1 - FORWARDS)
            case _:
                return self.times.computed(number, step, self.now)
        return self.times.computed(place.worker, step, self.now, share)

    def _lose(self, members: tuple[int, ...]) -> None:
        """One is gone with all its members, as broken connections tell servers in its place."""
        if self._players[members[-1]].over:
            return
        self._diary.loses(members, self.now)
        for number in members:
            player = self._players[number]
            player.program.close()
            player.over, player.waits = True, None
            for server in self._servers:
                self._send(number, server, Message(number, ends=True, wants=False))

    # --- messages ----------------------------------------------------------------------------

    def _send(self, source: int, to: int, message: Message) -> None:
        injector = self._injectors.get(source)
        if injector is not None and message.values is not None:
            values = injector.outgoing(message.values)
            if values is None:
                return
            message = replace(message, values=values)
        nbytes = 0 if message.values is None else message.values.nbytes
        away = self._sent(source, to, message)
        self._lines.setdefault((source, to), deque()).append(message)
        arrives = Event("_arrive", (source, to, message))
        if away:
            ends = self._hosts[source], self._hosts[to]
            self._carrier.start(ends, nbytes, self.now, arrives)
        else:
            self._at(self.now, arrives)

    def _arrive(self, source: int, to: int, message: Message) -> None:
        """The network has brought a message."""
        late = self.times.late(to, message)
        if late:
            self._at(self.now + late, Event("_comes", (source, to, message)))
        else:
            self._comes(source, to, message)

    def _comes(self, source: int, to: int, message: Message) -> None:
        """A message is there. As on ranks, it overtakes nothing that the same one sent before."""
        line = self._lines[source, to]
        self._there.add(message)
        while line and line[0] in self._there:
            self._there.remove(line[0])
            self._deliver(to, line.popleft())

    def _in_turn(self, number: int, message: Message) -> bool:
        """By the script, of what has values."""
        script = self._script.get(number)
        if not script or message.values is None:
            return True
        found = (message.source, message.step) == script[-1]
        if found:
            script.pop()
        return found

    def _begin_together(self, number: int, action: AllReduce) -> None:
        """A worker has come to an allreduce; with the last one to come it is known when it ends."""
        for worker, meeting in (self._together.comes(number, action, self.now) or {}).items():
            self._met[worker] = meeting
            if worker in self._joins:
                self._join(worker)

    def _join(self, number: int) -> None:
        """A worker waits for the mean; it goes on when the allreduce has ended."""
        meeting = self._met.pop(number, None)
        if meeting is None:
            self._joins.add(number)
            return
        self._joins.discard(number)
        self._diary.met(number, meeting)
        self._answer(max(self.now, meeting.stop), number, meeting.mean)
