"""The wall clock: each MPI rank plays the programs of its place, and time is what it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.communicator import Carrier, Communicator, Letter, computing
from labkit.exchange.compressed import CompressedMean, Layer
from labkit.programs.actions import (
    Action,
    AllReduce,
    Backward,
    Begin,
    Compute,
    Computes,
    Curve,
    Forward,
    Gradient,
    Join,
    Message,
    Passed,
    Predict,
    Program,
    Update,
    Vector,
    Wait,
)
from labkit.programs.carriers import Changing
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.program_state import ProgramState
from labkit.programs.quiescence import Quiescence
from labkit.programs.runtime import Runtime
from labkit.programs.virtual_allreduce import Meeting

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_WAIT = "a message of a program"

# What was asked for, what it gave, from when to when, s.
Spent: TypeAlias = tuple[Computes, "Gradient | Passed", float, float]


# Of a world, what changes while it is played.
_STATE = ("_players", "_ready", "_near", "_far", "_wakes", "_begin")


class MpiRuntime(Runtime):
    """Plays the programs of one place, and passes messages between places over MPI.

    A rank with one program computes where it stands. One with a worker and a server that answers
    each gradient at once lets another thread compute; all of MPI stays with this one.

    Args:
        programs: of this place, by number.
        hosts: the rank of each number.
        communicator: all places.
        scenes: computes gradients and applies them.
        diary: where steps and updates are written.
        dtype: of what messages bring.
        mailbox: what carries messages; None: two-sided.
        meanwhile: whether a server has something to say while the worker beside it computes.
        shapes: of the weights.
        seed: of compressors' random choices.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        communicator: Communicator,
        scenes: Backend,
        diary: EventLog,
        dtype: DTypeLike,
        meanwhile: bool = True,
        mailbox: Carrier | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(programs, hosts, scenes, diary)
        self._communicator, self._dtype = communicator, np.dtype(dtype)
        self._ready: dict[int, Any] = dict.fromkeys(programs)  # answers to be handed over next
        self._near: deque[tuple[int, Message]] = deque()  # to whom; said at this place
        self._far: deque[tuple[int, Message]] = deque()  # likewise, come from elsewhere
        self._wakes: dict[int, float] = {}  # when who goes on by itself, s
        # What another thread computes for whom.
        self._computes: dict[int, Future[Spent]] = {}
        self._clock, self._mailbox = communicator.clock, mailbox or communicator.mailbox(hosts)
        self._behind = 0.0  # s, by which this world's time is behind the clock's
        self._between: Callable[[MpiRuntime], None] | None = None
        self.still: Quiescence | None = None  # where somebody wants to keep it
        self._slowly: Callable[[], AbstractContextManager[None]] = computing(communicator)
        self._beside = ThreadPoolExecutor(1) if len(programs) > 1 and meanwhile else None
        self._shapes, self._seed = shapes, seed
        self._means: dict[int, CompressedMean] = {}  # by fragment
        self._recalled: dict[int, Mapping[str, Vector]] = {}  # what those know that are to come
        # An allreduce that goes on while this rank computes has MPI to itself: nobody sends then.
        self._aside = ThreadPoolExecutor(1)
        self._under_way: Future[Meeting] | None = None

    def play(self, between: Callable[[MpiRuntime], None] | None = None) -> None:
        """Play this place's programs to their ends.

        Args:
            between: called between two actions, where the world may stand still and be kept.

        Raises:
            RankFailed, WaitTooLong: see `Communicator`.
        """
        patience = self._communicator.patience
        self._between, self._begin = between, self._begin or self._now()
        patience.enter(_WAIT, collective=False)
        try:
            patience.begin()
            polls = 0
            while not self._done():
                if between is not None:
                    between(self)
                if self._look():
                    patience.begin()
                    polls = 0
                else:
                    patience.pause(polls)
                    polls += 1
        finally:
            self._aside.shutdown()
            if self._beside:
                self._beside.shutdown()

    def _done(self) -> bool:
        if not all(player.over for player in self._players.values()) or not self._mailbox.idle:
            return False
        return self.still is None or self.still.ended()

    def _look(self) -> bool:
        """Take in what has come and let go on who can; whether anything happened."""
        self._take_in()
        for number in [number for number, wakes in self._wakes.items() if wakes <= self._now()]:
            del self._wakes[number]
            self._ready[number] = None
        happens = False
        while self._ready or self._near or self._far:
            happens = True
            if self._ready:
                number = next(iter(self._ready))
                self._resume(number, self._ready.pop(number))
            else:
                self._deliver(*(self._near or self._far).popleft())
        return happens

    def _take_in(self) -> None:
        """What others have sent, and what was computed beside."""
        for letter in self._mailbox.collect():
            self._far.append(self._opened(letter))
            if self.still is not None:
                self.still.count(got=1)
        for number in [number for number, future in self._computes.items() if future.done()]:
            self._ready[number] = self._spent(number, *self._computes.pop(number).result())

    def _now(self) -> float:
        return self._clock.now() - self._behind

    # --- its state ---------------------------------------------------------------------------

    def keeps(self, outside: Mapping[str, object]) -> None:
        """See `World`; ranks count what they say to each other."""
        super().keeps(outside)
        self.still = Quiescence(self._communicator)

    def stands(self) -> int | None:
        """Stand still with all others (collective): the steps that all have behind them.

        None: this rank has to go on before.
        """
        assert self.still is not None  # for the type checker: see `keeps`
        if self._under_way is not None:
            self._under_way.result()
        wait(self._computes.values())
        found = self.still.comes(self._take_in)
        self._communicator.patience.enter(_WAIT, collective=False)
        return found

    @property
    def _changing(self) -> Changing:
        return [(self, _STATE), *super()._changing]

    def keep(self, beside: Any = None) -> ProgramState:
        """All that this rank has to know to go on, while all stand still; see `VirtualWorld`."""
        assert self.still is not None  # for the type checker: see `keeps`
        meeting = None if self._under_way is None else self._under_way.result()
        means = {fragment: means.remembered() for fragment, means in self._means.items()}
        more = self._now(), self.still.steps, meeting, self._recalled | means
        return self._kept(more, beside)

    def take(self, kept: ProgramState, program: Callable[[int, Any], Program]) -> Any:
        """Go on from there; what was kept beside it."""
        assert self.still is not None  # for the type checker: see `keeps`
        (now, steps, meeting, self._recalled), beside = self._taken(kept, program)
        self._behind = self._clock.now() - now
        self.still.count(steps)
        if meeting is not None:
            self._under_way = Future()
            self._under_way.set_result(meeting)
        return beside

    def _may_stand(self, number: int) -> None:
        """Let whoever keeps this world look at it, as if the program had not asked yet.

        It does so when it is handed the answer again.
        """
        if self._between is not None:
            heard = self._players[number].heard
            self._ready[number] = heard.pop()
            self._between(self)
            heard.append(self._ready.pop(number))

    def _act(self, number: int, action: Action) -> tuple[bool, Any]:
        """What computes is done at once, or by the other thread."""
        self._may_stand(number)
        match action:
            case Compute() | Forward() | Backward():
                if self._beside is None:
                    return True, self._spent(number, *self._compute(number, action))
                self._computes[number] = self._beside.submit(self._compute, number, action)
            case Update(gradient, of, rate):
                self._diary.applies(number, of, self._now())
                with self._slowly():
                    return True, self._scenes.update(number, gradient, rate)
            case Curve(weights, ends):
                with self._slowly():
                    return True, self._scenes.curved(number, weights, ends)
            case Predict(worker, step, weights):
                start = self._now()
                with self._slowly():
                    predicted = self._scenes.predictions(number, worker, step, weights)
                self._diary.predicted(number, self._now() - start)
                return True, predicted
            case AllReduce():
                self._comes_to_meet()
                return True, self._joined(number, self._reduced(number, action))
            case Begin(allreduce):
                self._comes_to_meet()
                self._under_way = self._aside.submit(self._reduced, number, allreduce)
                return True, None
            case Join():
                assert self._under_way is not None  # for the type checker: programs begin first
                meeting, self._under_way = self._under_way.result(), None
                return True, self._joined(number, meeting)
            case Wait(seconds):
                self._wakes[number] = self._now() + seconds
            case _:
                return super()._act(number, action)
        return False, None

    def _coded(self, number: int, call: Callable[[], Vector]) -> Vector:
        start = self._now()
        with self._slowly():
            found = call()
        self._diary.coded(number, self._now() - start)
        return found

    # --- computing ---------------------------------------------------------------------------

    def _compute(self, number: int, action: Computes) -> Spent:
        start = self._now()
        with self._slowly():
            found = self._computed(number, action)
        return action, found, start, self._now()

    def _spent(self, number: int, *spent: *Spent) -> Gradient | Passed:
        self._noted(number, *spent)
        if self.still is not None:
            self.still.count(steps=1)
        return spent[1]

    # --- allreduce ---------------------------------------------------------------------------

    def _comes_to_meet(self) -> None:
        """From here on this rank goes nowhere before all have come."""
        if self.still is not None:
            self.still.count(met=1)

    def _reduced(self, number: int, action: AllReduce) -> Meeting:
        """The mean over the ranks (collective)."""
        given, meter = action.gradient, self._communicator.traffic
        what = f"fragment {action.fragment} of the weights"
        told = np.array([given.rows, given.loss, given.last], np.float64)
        rows, loss, last = self._communicator.tally(told, what)
        before = meter.copy()
        values = given.values.copy()
        if action.compressor is None:
            self._communicator.mean(values, given.rows, action.algorithm, what, total=float(rows))
        else:
            values *= values.dtype.type(given.rows / rows * self._communicator.size)
            self._compressed(action, values, what)
        spent = meter.since(before)
        held, counts = spent.wait_seconds, (spent.payload_bytes, spent.wire_bytes, spent.messages)
        size = self._communicator.size
        mean = Gradient(values, int(rows), float(loss) / size, given.step, bool(last))
        return Meeting(mean, held, self._now(), *counts)

    def _compressed(self, action: AllReduce, values: Vector, what: str) -> None:
        """The mean of what ranks say of their values, in place."""
        assert action.compressor is not None  # for the type checker
        if action.fragment not in self._means:
            means = CompressedMean(self._communicator, action.compressor, self._seed)
            means.recall(self._recalled.pop(action.fragment, {}))
            self._means[action.fragment] = means
        ends = [0, values.size]
        shapes: Sequence[tuple[int, ...]] = [values.shape]
        if action.compressor.by_layer:
            shapes = self._shapes
            ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
        layers = [
            Layer("", *edges, shape) for edges, shape in zip(pairwise(ends), shapes, strict=True)
        ]
        means = self._means[action.fragment]
        pieces = [values[layer.start : layer.stop] for layer in layers]  # views: in place
        means.reduce(action.fragment, pieces, layers, action.algorithm, what)

    def _joined(self, number: int, meeting: Meeting) -> Gradient:
        self._diary.met(number, meeting)
        return meeting.mean

    # --- messages ----------------------------------------------------------------------------

    def _send(self, source: int, to: int, message: Message) -> None:
        if self._sent(source, to, message):
            self._mailbox.post((source, to), *_sealed(message))
            if self.still is not None:
                self.still.count(sent=1)
        else:
            self._near.append((to, message))

    def _opened(self, letter: Letter) -> tuple[int, Message]:
        has, version, rows, step, ends, sent, held, wants = letter.words.tolist()
        values = letter.values.view(self._dtype) if has else None
        if values is not None and self.still is not None and self._mailbox.stay:
            values = values.copy()  # they are remembered, and others will write there
            self._mailbox.free(letter.route)
        source, to = letter.route
        told = Message(source, values, int(version), int(rows), int(step), bool(ends), sent)
        return to, replace(told, held=held, wants=bool(wants))


def _sealed(message: Message) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """The words and the bytes of a message."""
    values = message.values
    words = (values is not None, message.version, message.rows, message.step, message.ends)
    flat = np.ascontiguousarray(values) if values is not None else np.empty(0)
    rest = message.sent, message.held, message.wants
    return np.array([*words, *rest], np.float64), flat.view(np.uint8)
