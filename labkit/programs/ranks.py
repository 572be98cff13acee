"""The wall clock: each MPI rank plays the programs of its place, and time is what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.communicator import WORDS, Communicator, Letter, computing
from labkit.programs.actions import (
    Action,
    Compute,
    Drop,
    Gradient,
    Message,
    Program,
    Receive,
    Send,
    Snapshot,
    Update,
    Vector,
    Wait,
)
from labkit.programs.diary import Diary, Scenes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


@dataclass
class _Player:
    """A program of this place.

    Attributes:
        inbox: what was delivered and not received.
        waits: what it wants to receive.
        wakes: when it goes on, s; None: not by itself.
        computes: what another thread computes for it.
        over: it has ended.
    """

    program: Program
    inbox: list[Message] = field(default_factory=list)
    waits: Receive | None = None
    wakes: float | None = None
    computes: Future[tuple[Gradient, float, float]] | None = None
    over: bool = False


class RankWorld:
    """Plays the programs of one place, and passes messages between places over MPI.

    A rank with one program computes where it stands. One with a worker and a server that answers
    each gradient at once lets another thread compute; all of MPI stays with this one.

    Args:
        programs: of this place, by number.
        hosts: the rank of each number.
        communicator: all places.
        scenes: computes gradients and applies them.
        diary: where steps and updates are written.
        dtype: of the weights.
        meanwhile: whether a server has something to say while the worker beside it computes.
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
    ) -> None:
        self._players = {number: _Player(program) for number, program in programs.items()}
        self._hosts, self._communicator = hosts, communicator
        self._scenes, self._diary, self._dtype = scenes, diary, np.dtype(dtype)
        self._clock, self._mailbox = communicator.clock, communicator.mailbox()
        self._slowly: Callable[[], AbstractContextManager[None]] = computing(communicator)
        self._begin = 0.0
        self._beside = ThreadPoolExecutor(1) if len(programs) > 1 and meanwhile else None

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
                    self._nap(polls)
                    polls += 1
        finally:
            if self._beside:
                self._beside.shutdown()

    def _done(self) -> bool:
        return all(player.over for player in self._players.values()) and self._mailbox.idle

    def _nap(self, polls: int) -> None:
        self._communicator.patience.pause(polls)

    def _look(self) -> bool:
        """Take in what has come and let go on who can; whether anything happened."""
        letters = self._mailbox.collect()
        for letter in letters:
            to, message = self._opened(letter)
            self._deliver(to, message)
        happened = bool(letters)
        for number, player in self._players.items():
            if player.computes is not None and player.computes.done():
                found, player.computes = player.computes.result(), None
                self._computed(number, player, *found)
                happened = True
            elif player.wakes is not None and player.wakes <= self._clock.now():
                player.wakes = None
                self._resume(number, None)
                happened = True
        return happened

    def _resume(self, number: int, answer: Any) -> None:
        player = self._players[number]
        while True:
            try:
                action = player.program.send(answer)
            except StopIteration:
                player.over = True
                self._diary.ends(number, self._clock.now())
                return
            done, answer = self._act(number, player, action)
            if not done:
                return

    def _act(self, number: int, player: _Player, action: Action) -> tuple[bool, Any]:
        match action:
            case Compute(weights):
                if self._beside is None:
                    found = self._compute(number, weights)
                    return True, self._noted(number, player, *found)
                player.computes = self._beside.submit(self._compute, number, weights)
            case Update(gradient, of):
                self._diary.applies(number, of, self._clock.now())
                with self._slowly():
                    return True, self._scenes.update(number, gradient)
            case Send(to, message, answers):
                now = self._clock.now()
                held = now - answers.delivered if answers else 0.0
                self._send(number, to, replace(message, sent=now, held=held))
                return True, None
            case Receive():
                if (came := self._next(player, action)) is None:
                    player.waits = action
                    return False, None
                self._received(number, came)
                return True, came
            case Wait(seconds):
                player.wakes = self._clock.now() + seconds
            case Drop(message):
                self._diary.drops(number, message, self._clock.now())
                return True, None
            case Snapshot(epoch, weights):
                now = self._clock.now() - self._begin
                self._scenes.snapshot(epoch, number, weights, now)
                return True, None
            case _:
                raise NotImplementedError(f"{type(action).__name__} has no ranks that carry it out")
        return False, None

    # --- computing ---------------------------------------------------------------------------

    def _compute(self, number: int, weights: Vector) -> tuple[Gradient, float, float]:
        start = self._clock.now()
        with self._slowly():
            found = self._scenes.gradient(number, weights)
        if number == 0:
            found = replace(found, last=self._scenes.stops())
        return found, start, self._clock.now()

    def _noted(
        self, number: int, player: _Player, found: Gradient, start: float, stop: float
    ) -> Gradient:
        self._diary.begins(number, found, start, stop)
        return found

    def _computed(
        self, number: int, player: _Player, found: Gradient, start: float, stop: float
    ) -> None:
        self._resume(number, self._noted(number, player, found, start, stop))

    # --- messages ----------------------------------------------------------------------------

    def _send(self, source: int, to: int, message: Message) -> None:
        nbytes = 0 if message.values is None else message.values.nbytes
        away = self._hosts[source] != self._hosts[to]
        self._diary.carried(source, nbytes, away)
        if away:
            self._mailbox.post(self._hosts[to], *self._sealed(to, message))
        else:
            self._deliver(to, message)

    def _deliver(self, to: int, message: Message) -> None:
        player = self._players[to]
        player.inbox.append(replace(message, delivered=self._clock.now()))
        if player.waits and (found := self._next(player, player.waits)) is not None:
            player.waits = None
            self._received(to, found)
            self._resume(to, found)

    def _received(self, to: int, message: Message) -> None:
        nbytes = 0 if message.values is None else message.values.nbytes
        self._diary.carried(to, nbytes, self._hosts[to] != self._hosts[message.source])
        self._diary.waited(to, message.held)

    def _next(self, player: _Player, wanted: Receive) -> Message | None:
        for place, message in enumerate(player.inbox):
            if wanted.source in (None, message.source):
                return player.inbox.pop(place)
        return None

    def _sealed(
        self, to: int, message: Message
    ) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.uint8]]]:
        values = message.values
        words = np.zeros(WORDS)
        words[:9] = (
            *(to, message.source, values is not None, message.version, message.rows, message.step),
            *(message.ends, message.sent, message.held),
        )
        flat = np.ascontiguousarray(values) if values is not None else np.empty(0)
        return words, flat.view(np.uint8)

    def _opened(self, letter: Letter) -> tuple[int, Message]:
        to, source, has, version, rows, step, ends, sent, held, *_ = letter.words.tolist()
        values = letter.values.view(self._dtype) if has else None
        told = Message(int(source), values, int(version), int(rows), int(step), bool(ends), sent)
        return int(to), replace(told, held=held)
