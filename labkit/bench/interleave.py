"""Kinds of steps take turns, so that a machine that slows down does so for all of them.

Runs in the Python of other frameworks, too: NumPy only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

WARM, STEPS = 10, 50
TURN = 0.2  # seconds; within one, the machine's speed hardly changes

Step = Callable[[], object]


@dataclass(frozen=True)
class Taken:
    """What steps took, by kind; a value for each repeat, s.

    Args:
        seconds: the median step.
        added: the median, over neighbouring rounds, of what the kind's turns took more than those
            of "local" (medians of their steps): forward and backward, so that a steady drift goes
            out. A difference of medians over all rounds would hold every change of the machine's
            speed in those seconds.
    """

    seconds: dict[str, list[float]]
    added: dict[str, list[float]]


def take(
    steps: Mapping[str, Step],
    meet: Callable[[], None],
    gather: Callable[[list[float]], np.ndarray],
    repeats: int,
    counts: Mapping[str, int] | None = None,
) -> Taken:
    """Time the steps of all kinds, in rounds in which each kind has a turn.

    A step lasts as long as its slowest rank, from a common start: 10 warm-up steps, then in each
    repeat 50 timed ones of every kind, each behind an untimed barrier. A turn has 1, 2, 5 or 10
    steps: as many as last 0.2 s; one alone would begin with the caches of another kind. Every
    other round goes backwards.

    Args:
        steps: kind -> its step; one is "local".
        meet: comes back at the same time on all ranks.
        gather: everybody's numbers, shape (ranks, numbers); at most 50.
        repeats: rounds over everything.
        counts: of kinds whose calls are several steps that reach into each other: how many; what
            such a call takes is divided by them.
    """
    for step in steps.values():
        for _ in range(WARM):
            step()
    length = _length(float(gather(_turn(meet, steps["local"], 3)).max(axis=0).min()))
    taken = Taken({kind: [] for kind in steps}, {kind: [] for kind in steps})
    for _ in range(repeats):
        own: dict[str, list[float]] = {kind: [] for kind in steps}
        for number in range(STEPS // length):
            # Backwards every other round: no kind always follows the same one.
            for kind in list(steps)[:: -1 if number % 2 else 1]:
                calls = _turn(meet, steps[kind], length)
                own[kind] += [seconds / (counts or {}).get(kind, 1) for seconds in calls]
        slowest = {kind: gather(values).max(axis=0) for kind, values in own.items()}
        turns = {kind: np.median(s.reshape(-1, length), axis=1) for kind, s in slowest.items()}
        for kind in steps:
            taken.seconds[kind].append(float(np.median(slowest[kind])))
            more = turns[kind] - turns["local"]
            # Neighbouring rounds, one forwards, one backwards: a linear drift has the opposite sign
            # in them.
            taken.added[kind].append(float(np.median((more[:-1] + more[1:]) / 2)))
    return taken


def _length(seconds: float) -> int:
    """Steps of a turn: of those that divide 50, the most that fit."""
    return max((count for count in (2, 5, 10) if count * seconds <= TURN), default=1)


def _turn(meet: Callable[[], None], step: Step, count: int) -> list[float]:
    """Seconds of this rank's next steps, each from a common start."""
    own = []
    for _ in range(count):
        meet()
        start = time.perf_counter()
        step()
        own.append(time.perf_counter() - start)
    return own
