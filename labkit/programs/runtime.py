"""What both worlds do alike: programs are handed answers, and messages wait for who wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from labkit.common.state import record
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
    Mark,
    Message,
    Passed,
    Program,
    Receive,
    Send,
    Snapshot,
    States,
    Vector,
)
from labkit.programs.carriers import Changing
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.program_state import ProgramState, keep, taken


@record("inbox", "waits", "over", "mark", "heard")
@dataclass
class Player:
    """A program that is being played.

    As state it has no program, which begins at the mark and is told again what it has heard.

    Attributes:
        inbox: what was delivered and not received.
        waits: what it wants to receive.
        over: it has ended.
        mark: where it can begin again; None: at its begin.
        heard: the answers that it has had since then, where somebody keeps them.
    """

    program: Program
    inbox: list[Message] = field(default_factory=list)
    waits: Receive | None = None
    over: bool = False
    mark: ProgramState | None = None
    heard: list[Any] = field(default_factory=list)

    def begin_again(self, program: Program) -> None:
        """Let a program that begins at the mark come to where this one was."""
        self.program = program
        if not self.over:
            for answer in self.heard:
                action = program.send(answer)
                if isinstance(action, Code):  # which changes what the program knows
                    action.call()


_DIARY = ("events", "losses", "_plays", "_ahead", "_updates")


class Runtime:
    """Programs that are played, on whichever clock.

    Args:
        programs: by number.
        hosts: the place of each number.
        scenes: computes gradients and applies them.
        diary: where steps and updates are written.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        scenes: Backend,
        diary: EventLog,
    ) -> None:
        self._players = {number: Player(program) for number, program in programs.items()}
        self._hosts, self._scenes, self._diary = hosts, scenes, diary
        self._begin = 0.0
        # What is not a part of the state; None: nobody wants to keep any.
        self._outside: Mapping[str, object] | None = None

    def keeps(self, outside: Mapping[str, object]) -> None:
        """Be able to be kept from now on: what programs hear is remembered to their next mark.

        Args:
            outside: by name, what programs' states refer to and is not a part of them.
        """
        self._outside = outside

    @property
    def _changing(self) -> Changing:
        """What changes while programs are played."""
        return [(self._diary, _DIARY)]

    def _kept(self, *more: Any) -> ProgramState:
        """What changes, and more; arrays that several know stay one."""
        assert self._outside is not None  # for the type checker: see `keeps`
        parts = [
            {name: _still(vars(thing)[name]) for name in names} for thing, names in self._changing
        ]
        return keep([parts, *more], self._outside)

    def _taken(self, kept: ProgramState, program: Callable[[int, Any], Program]) -> Sequence[Any]:
        """Go on from there; what more was kept."""
        assert self._outside is not None  # for the type checker: see `keeps`
        content: list[Any] = taken(kept, self._outside)
        parts, *more = content
        for (thing, names), values in zip(self._changing, parts, strict=True):
            vars(thing).update({name: values[name] for name in names})
        for number, player in self._players.items():
            mark = None if player.mark is None else taken(player.mark, self._outside)
            player.begin_again(program(number, mark))
        return more

    def _now(self) -> float:
        """The time, s."""
        raise NotImplementedError

    def _send(self, source: int, to: int, message: Message) -> None:
        """Bring a message on its way."""
        raise NotImplementedError

    def _resume(self, number: int, answer: Any) -> None:
        """Hand a program its answer, and carry out what it asks for until it has to wait."""
        player = self._players[number]
        while True:
            if self._outside is not None:
                player.heard.append(answer)
            try:
                action = player.program.send(answer)
            except StopIteration:
                player.over = True
                self._diary.ends(number, self._now())
                return
            done, answer = self._act(number, action)
            if not done:
                return

    def _act(self, number: int, action: Action) -> tuple[bool, Any]:
        """Whether an action is done at once, and then its answer."""
        found: Any = None
        match action:
            case Send(to, message, answers):
                held = self._now() - answers.delivered if answers else 0.0
                self._send(number, to, replace(message, sent=self._now(), held=held))
            case Receive():
                found = self._received(number, action)
                return found is not None, found
            case Code(call):
                found = self._coded(number, call)
            case Drop(message):
                self._diary.drops(number, message, self._now())
            case Snapshot(epoch, weights):
                self._scenes.snapshot(epoch, number, weights, self._now() - self._begin)
            case States():
                found = self._scenes.states(number)
            case Adopt(weights, states):
                found = self._scenes.adopt(number, weights, states)
            case Forget():
                self._scenes.forget(number)
            case Mark(state):
                self._marked(number, state)
            case _:
                name = type(action).__name__
                raise NotImplementedError(f"{type(self).__name__} does not carry out {name}")
        return True, found

    def _marked(self, number: int, state: Any) -> None:
        if self._outside is not None:
            player = self._players[number]
            # The begin of a program has no answer, but is one more call.
            player.mark, player.heard = keep(state, self._outside), [None]

    def _computed(self, number: int, action: Computes) -> Gradient | Passed:
        """What an action computes."""
        match action:
            case Compute(weights, soft, share, penalty):
                found = (
                    self._scenes.gradient(number, weights)
                    if soft is None
                    else self._scenes.distilled(number, weights, soft, share)
                )
                found = replace(found, loss=found.loss + penalty)
            case Forward(place, weights, values):
                return self._scenes.forward(place, weights, values)
            case Backward(place, values):
                found = self._scenes.backward(place, values)
        return replace(found, last=self._scenes.stops()) if number == 0 else found

    def _noted(
        self, number: int, action: Computes, found: Gradient | Passed, start: float, stop: float
    ) -> None:
        """Write down what was computed, and for how long."""
        if isinstance(found, Passed):
            self._diary.passes(number, found, start, stop)
        elif isinstance(action, Backward):
            self._diary.goes_back(number, found, start, stop)
        else:
            self._diary.begins(number, found, start, stop)

    def _coded(self, number: int, call: Callable[[], Vector]) -> Vector:
        return call()

    # --- messages ----------------------------------------------------------------------------

    def _sent(self, source: int, to: int, message: Message) -> bool:
        """Write down that a message was sent; whether it leaves the place."""
        away = self._hosts[source] != self._hosts[to]
        self._diary.sends(source, message, away)
        return away

    def _deliver(self, to: int, message: Message) -> None:
        player = self._players[to]
        player.inbox.append(replace(message, delivered=self._now()))
        if player.waits and (found := self._received(to, player.waits)) is not None:
            self._resume(to, found)

    def _received(self, number: int, wanted: Receive) -> Message | None:
        """The message that is wanted, if it is there; else the program waits for it."""
        found = self._next(number, wanted)
        self._players[number].waits = wanted if found is None else None
        if found is not None:
            away = self._hosts[number] != self._hosts[found.source]
            self._diary.receives(number, found, away)
            self._diary.waited(number, found.held)
        return found

    def _next(self, number: int, wanted: Receive) -> Message | None:
        """Take the first message that is wanted out of the inbox."""
        inbox = self._players[number].inbox
        for place, message in enumerate(inbox):
            if wanted.source in (None, message.source) and self._in_turn(number, message):
                return inbox.pop(place)
        return None

    def _in_turn(self, number: int, message: Message) -> bool:
        """Whether this one may take a message now; if so, it does."""
        return True


def _still(value: Any) -> Any:
    """The value as it stays: links write into their arrays."""
    return value.copy() if isinstance(value, np.ndarray) else value
