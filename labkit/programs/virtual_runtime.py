"""The runtime on the virtual clock: one process simulates all programs by discrete events."""

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
    AllReduceAction,
    Backward,
    Begin,
    Compute,
    Computes,
    Curvature,
    Forward,
    Join,
    Message,
    Predict,
    Program,
    Update,
    Wait,
)
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.program_state import ProgramState
from labkit.programs.runtime import Event, Runtime, StateAttributes, carrier
from labkit.programs.virtual_allreduce import AllReduceState, VirtualAllReduce

# The tuple `_STATE` names the attributes of a virtual runtime that a checkpoint saves.
_STATE = (
    *("now", "_begun", "_players", "_heap", "_order", "_lines", "_there"),
    *("_met", "_joins", "_script"),
)
_EVENTS = frozenset({"_arrive", "_comes", "_lose", "_resume"})
# The constant FORWARDS is the fraction of a gradient's compute time that the forward pass takes.
FORWARDS = 1 / 3


class VirtualTiming(Protocol):
    """The interface of a timing model, which returns times of events on the virtual clock."""

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """Return the end time in s of a computation that takes `share` of a full step's work."""

    def updated(self, server: int, start: float) -> float:
        """Return the end time of an update that a server starts at the time `start`."""

    def late(self, to: int, message: Message) -> float:
        """Return the injected delay of a message in s, which is added to the network's delay."""


class VirtualRuntime(Runtime):
    """A runtime on the virtual clock: values are really computed, but their times are simulated.

    The runtime processes events in order of time. Simultaneous events are processed in the order in
    which they were scheduled. Two runs with the same timing model and seed are bitwise identical.
    Messages are simulated as flows that share the links of a network, see `labkit.network.Flows`. A
    message takes no time if there is no network. A message within one rank also takes no time.

    Args:
        programs: Programs by program number; workers come before servers.
        hosts: For each program number, the simulated rank that runs the program.
        backend: Backend that computes gradients and applies them.
        event_log: Event log of steps and updates.
        times: Timing model of computations, updates and message delays, such as `TimingModel`.
        network: Network between the ranks; if None, messages take no time.
        shapes: Shapes of the model's weights.
        seed: Seed of the compressors' random numbers.
        script: For each server, the required order of its gradients, as a list of (worker, step)
            pairs.
        lost: Failure time in s of each failing replica. Each key is a tuple of the program numbers
            of a replica's members. Messages that were sent before a failure arrive before surviving
            programs learn of the failure.
        servers: Program numbers of the servers that are notified of failures.
        killed: Mapping from each failing worker to the training step at whose start it fails.
        injectors: Fault injectors that drop or corrupt messages; each key is the number of the
            sending worker.

    Attributes:
        now: Current time on the virtual clock, in s.
        times: The timing model that was passed as argument.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        backend: Backend,
        event_log: EventLog,
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
        super().__init__(programs, hosts, backend, event_log)
        self.now, self.times = 0.0, times
        self._script = {server: list(order)[::-1] for server, order in (script or {}).items()}
        self._heap: list[tuple[float, int, Event]] = []
        self._order = 0  # The number of the next event orders simultaneous events.
        self._carrier = carrier(network, 1 + max(hosts), self._schedule)
        # The dict `_lines` contains the undelivered messages of each (sender, receiver) pair in
        # sending order.
        self._lines: dict[tuple[int, int], deque[Message]] = {}
        # The set `_there` contains messages that arrived before an earlier message of the same
        # sender.
        self._there: set[Message] = set()
        self._allreduces = VirtualAllReduce(len(programs), network, shapes, seed)
        # The dict `_met` maps each worker to its allreduce result, until the worker takes the
        # result.
        self._met: dict[int, AllReduceState] = {}
        # The set `_joins` contains the workers that wait for the result of an allreduce.
        self._joins: set[int] = set()
        self._servers, self._begun = servers, False
        self._killed, self._injectors = killed or {}, injectors or {}
        for members, moment in (lost or {}).items():
            self._schedule(moment, Event("_lose", (members,)))

    def play(self, between: Callable[[VirtualRuntime], None] = lambda world: None) -> None:
        """Run all programs until each has ended.

        Args:
            between: Function that is called after each point in virtual time, for example to save a
                checkpoint.

        Raises:
            LabkitError: If the programs are in a deadlock. In a deadlock, each program waits for a
                message that no program will send.
        """
        if not self._begun:
            self._begun = True
            for number in self._players:
                self._resume(number, None)
        while (time := self._next_time()) < np.inf:
            for wake, event in self._carrier.run(time):
                self._schedule(wake, event)
            self.now = time
            while self._heap and self._heap[0][0] <= time:
                self._handle(heapq.heappop(self._heap)[2])
            between(self)
        if stuck := [number for number, player in self._players.items() if not player.over]:
            raise LabkitError(
                f"deadlock at {self.now:g} s: programs {stuck} wait for messages that no program "
                "will send"
            )

    # --- state -------------------------------------------------------------------------------

    @property
    def _state_attributes(self) -> StateAttributes:
        meetings = self._allreduces, ("_here", "_states")
        return [
            (self, _STATE),
            *super()._state_attributes,
            meetings,
            *self._carrier.state_attributes,
        ]

    def keep(self, backend_state: Any = None) -> ProgramState:
        """Return the state of the run, including its results and its pending events.

        Args:
            backend_state: State of the backend, which is stored together with the state of the
                runtime. An array that is in both the runtime's and the backend's state is stored
                only once.
        """
        return self._save_state(backend_state)

    def take(self, state: ProgramState, program: Callable[[int, Any], Program]) -> Any:
        """Restore a saved state of the run, and return the backend's state that it contains.

        Args:
            state: State that was saved by a runtime with the same programs.
            program: Function of (program number, state at the restart point) that creates a
                program. If the state is None, the program starts from its beginning.
        """
        (backend_state,) = self._restore_state(state, program)
        return backend_state

    def _next_time(self) -> float:
        return min(self._heap[0][0] if self._heap else np.inf, self._carrier.next)

    def _schedule(self, moment: float, event: Event) -> None:
        heapq.heappush(self._heap, (moment, self._order, event))
        self._order += 1

    def _handle(self, event: Event) -> None:
        # Only listed events are allowed, because a malicious saved state could call any other
        # method.
        if event.what not in _EVENTS:
            raise LabkitError(
                f"a state names the event {event.what!r:.80}; allowed: {', '.join(sorted(_EVENTS))}"
            )
        getattr(self, event.what)(*event.given)

    def _answer(self, moment: float, number: int, answer: Any) -> None:
        """Schedule an event at which a program receives an answer."""
        self._schedule(moment, Event("_resume", (number, answer)))

    def _now(self) -> float:
        return self.now

    def _execute(self, number: int, action: Action) -> tuple[bool, Any]:
        """Execute an action; if it takes virtual time, schedule the answer for its end time."""
        match action:
            case Compute() | Forward() | Backward():
                result = self._execute_compute(number, action)
                if self._killed.get(number) == result.step:
                    self._lose((number,))
                    return False, None
                stop = self._compute_end(number, action, result.step)
                self._record_compute(number, action, result, self.now, stop)
                self._answer(stop, number, result)
            case Predict(worker, step, weights):
                predicted = self._backend.predictions(number, worker, step, weights)
                stop = self.times.computed(number, step, self.now, FORWARDS)
                self._event_log.record_prediction(number, stop - self.now)
                self._answer(stop, number, predicted)
            case Curvature(weights, ends):
                curved = self._backend.curved(number, weights, ends)
                # A Hessian-vector product takes the time of two gradients. The computation
                # differentiates the loss, and then the gradient's product with the vector.
                stop = self.times.computed(number, 0, self.now, 2.0 * (len(ends) - 1))
                self._answer(stop, number, curved)
            case Update(gradient, of, rate):
                self._event_log.record_update(number, of, self.now)
                weights = self._backend.update(number, gradient, rate)
                stop = self.times.updated(number, self.now)
                self._answer(stop, number, weights)
            case AllReduceAction():
                self._join(number)
                self._begin_allreduce(number, action)
            case Begin(allreduce):
                self._begin_allreduce(number, allreduce)
                return True, None
            case Join():
                self._join(number)
            case Wait(seconds):
                self._answer(self.now + seconds, number, None)
            case _:
                return super()._execute(number, action)
        return False, None

    def _compute_end(self, number: int, action: Computes, step: int) -> float:
        """Return the end time of a computation; a forward pass takes 1/3 of a gradient's time."""
        match action:
            case Forward(place):
                share = place.share * FORWARDS
            case Backward(place):
                share = place.share * (1 - FORWARDS)
            case _:
                return self.times.computed(number, step, self.now)
        return self.times.computed(place.worker, step, self.now, share)

    def _lose(self, members: tuple[int, ...]) -> None:
        """Remove a failed worker with all members of its replica, and notify the servers."""
        if self._players[members[-1]].over:
            return
        self._event_log.record_failure(members, self.now)
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
        away = self._record_sent(source, to, message)
        self._lines.setdefault((source, to), deque()).append(message)
        arrives = Event("_arrive", (source, to, message))
        if away:
            ends = self._hosts[source], self._hosts[to]
            self._carrier.start(ends, nbytes, self.now, arrives)
        else:
            self._schedule(self.now, arrives)

    def _arrive(self, source: int, to: int, message: Message) -> None:
        """Deliver a message that the network has transferred, after its injected delay."""
        delay = self.times.late(to, message)
        if delay:
            self._schedule(self.now + delay, Event("_comes", (source, to, message)))
        else:
            self._comes(source, to, message)

    def _comes(self, source: int, to: int, message: Message) -> None:
        """Deliver the messages of each sender in the order in which they were sent, as MPI does."""
        queue = self._lines[source, to]
        self._there.add(message)
        while queue and queue[0] in self._there:
            self._there.remove(queue[0])
            self._deliver(to, queue.popleft())

    def _may_receive(self, number: int, message: Message) -> bool:
        """Return whether the script permits a message now; it permits all without values."""
        script = self._script.get(number)
        if not script or message.values is None:
            return True
        is_next = (message.source, message.step) == script[-1]
        if is_next:
            script.pop()
        return is_next

    def _begin_allreduce(self, number: int, action: AllReduceAction) -> None:
        """Register a worker's allreduce call; the last worker's call also stores all results."""
        for worker, meeting in (
            self._allreduces.add_worker(number, action, self.now) or {}
        ).items():
            self._met[worker] = meeting
            if worker in self._joins:
                self._join(worker)

    def _join(self, number: int) -> None:
        """Schedule the answer with a worker's allreduce result, as soon as the result is known."""
        meeting = self._met.pop(number, None)
        if meeting is None:
            self._joins.add(number)
            return
        self._joins.discard(number)
        self._event_log.record_allreduce(number, meeting)
        self._answer(max(self.now, meeting.stop), number, meeting.mean)
