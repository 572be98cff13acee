"""A timer that interleaves kinds of steps, so that changes of machine speed affect all kinds.

The module depends only on NumPy, because it also runs in Python environments of other frameworks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

WARM, STEPS = 10, 50
# Successive steps of one kind take at most this many seconds, in which the machine's speed hardly
# changes.
TURN = 0.2

Step = Callable[[], object]


@dataclass(frozen=True)
class InterleavedTimes:
    """Times in seconds, by kind of step, with one value per repeat.

    Args:
        seconds: Median time of a step of this kind.
        added: Median time that this kind of step adds to the "local" step. The time differences of
            two successive rounds, one forward and one backward, are averaged. This average cancels
            the effect of a linear drift of the machine's speed. A difference of the medians over
            all rounds would include the drift of the machine's speed.
    """

    seconds: dict[str, list[float]]
    added: dict[str, list[float]]


def time_interleaved(
    steps: Mapping[str, Step],
    meet: Callable[[], None],
    gather: Callable[[list[float]], np.ndarray],
    repeats: int,
    counts: Mapping[str, int] | None = None,
) -> InterleavedTimes:
    """Measure all kinds of steps in rounds; each round runs some successive steps of every kind.

    The time of a step is the time of the slowest rank, measured from a common start. Each kind of
    step has 10 warm-up steps, then 50 timed steps per repeat. All ranks wait at an untimed barrier
    before each step. A round runs 1, 2, 5 or 10 successive steps of each kind; several successive
    steps take at most 0.2 s. Short steps run several times in succession, because a single step
    would find the CPU caches filled by another kind of step. Every second round runs the kinds of
    steps in reverse order.

    Args:
        steps: Step function of each kind; one kind is "local".
        meet: Function that waits until all ranks have called it (a barrier).
        gather: Function that gathers at most 50 numbers per rank into shape (ranks, numbers).
        repeats: Number of repeats; each repeat gives one value per kind of step.
        counts: For each kind of step, the number of overlapping steps in one call; the time of a
            call is divided by this number.
    """
    for step in steps.values():
        for _ in range(WARM):
            step()
    length = _length(float(gather(_turn(meet, steps["local"], 3)).max(axis=0).min()))
    taken = InterleavedTimes({kind: [] for kind in steps}, {kind: [] for kind in steps})
    for _ in range(repeats):
        own: dict[str, list[float]] = {kind: [] for kind in steps}
        for number in range(STEPS // length):
            # Every second round reverses the order, so that no kind of step always follows the same
            # kind.
            for kind in list(steps)[:: -1 if number % 2 else 1]:
                calls = _turn(meet, steps[kind], length)
                own[kind] += [seconds / (counts or {}).get(kind, 1) for seconds in calls]
        slowest = {kind: gather(values).max(axis=0) for kind, values in own.items()}
        turns = {kind: np.median(s.reshape(-1, length), axis=1) for kind, s in slowest.items()}
        for kind in steps:
            taken.seconds[kind].append(float(np.median(slowest[kind])))
            more = turns[kind] - turns["local"]
            # A linear drift of the machine's speed has opposite signs in a forward and a backward
            # round.
            taken.added[kind].append(float(np.median((more[:-1] + more[1:]) / 2)))
    return taken


def _length(seconds: float) -> int:
    """Return how many steps of `seconds` run in succession: 1, 2, 5 or 10, which divide 50."""
    return max((count for count in (2, 5, 10) if count * seconds <= TURN), default=1)


def _turn(meet: Callable[[], None], step: Step, count: int) -> list[float]:
    """Run `count` steps on this rank, each after a barrier; return the seconds of each step."""
    own = []
    for _ in range(count):
        meet()
        start = time.perf_counter()
        step()
        own.append(time.perf_counter() - start)
    return own
