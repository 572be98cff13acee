"""The wall clock: each MPI rank plays the programs of its place, and time is what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from labkit.programs.diary import Diary, Scenes
from labkit.programs.together import Meeting
from labkit.programs.world import World

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

# What was asked for, what it gave, from when to when, s.
Spent: TypeAlias = tuple[Computes, "Gradient | Passed", float, float]


class RankWorld(World):
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
        scenes: Scenes,
        diary: Diary,
        dtype: DTypeLike,
        meanwhile: bool = True,
        mailbox: Carrier | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(programs, hosts, scenes, diary)
        self._communicator, self._dtype = communicator, np.dtype(dtype)
        self._wakes: dict[int, float] = {}  # when who goes on by itself, s
        # What another thread computes for whom.
        self._computes: dict[int, Future[Spent]] = {}
        self._clock, self._mailbox = communicator.clock, mailbox or communicator.mailbox(hosts)
        self._slowly: Callable[[], AbstractContextManager[None]] = computing(communicator)
        self._beside = ThreadPoolExecutor(1) if len(programs) > 1 and meanwhile else None
        self._shapes, self._seed = shapes, seed
        self._means: dict[int, CompressedMean] = {}  # by fragment
        # An allreduce that goes on while this rank computes has MPI to itself: nobody sends then.
        self._aside = ThreadPoolExecutor(1)
        self._under_way: Future[Meeting] | None = None

    def play(self) -> None:
        """Play this place's programs to their ends.

        Raises:
            RankFailed, WaitTooLong: see `Communicator`.
        """
        patience = self._communicator.patience
        patience.enter("a message of a program", collective=False)
        self._begin = self._clock.now()
        try:
            for number in self._players:
                self._resume(number, None)
            patience.begin()
            polls = 0
            while not self._done():
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
        return all(player.over for player in self._players.values()) and self._mailbox.idle

    def _look(self) -> bool:
        """Take in what has come and let go on who can; whether anything happened."""
        letters = self._mailbox.collect()
        for letter in letters:
            to, message = self._opened(letter)
            self._deliver(to, message)
        found = [number for number, future in self._computes.items() if future.done()]
        for number in found:
            self._resume(number, self._spent(number, *self._computes.pop(number).result()))
        awake = [number for number, wakes in self._wakes.items() if wakes <= self._now()]
        for number in awake:
            del self._wakes[number]
            self._resume(number, None)
        return bool(letters or found or awake)

    def _now(self) -> float:
        return self._clock.now()

    def _act(self, number: int, action: Action) -> tuple[bool, Any]:
        """What computes is done at once, or by the other thread."""
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
                return True, self._joined(number, self._reduced(number, action))
            case Begin(allreduce):
                self._under_way = self._aside.submit(self._reduced, number, allreduce)
                return True, None
            case Join():
                assert self._under_way is not None  # for the type checker: programs begin first
                return True, self._joined(number, self._under_way.result())
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
        start = self._clock.now()
        with self._slowly():
            found = self._computed(number, action)
        return action, found, start, self._clock.now()

    def _spent(self, number: int, *spent: *Spent) -> Gradient | Passed:
        self._noted(number, *spent)
        return spent[1]

    # --- allreduce ---------------------------------------------------------------------------

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
        else:
            self._deliver(to, message)

    def _opened(self, letter: Letter) -> tuple[int, Message]:
        has, version, rows, step, ends, sent, held, wants = letter.words.tolist()
        values = letter.values.view(self._dtype) if has else None
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
