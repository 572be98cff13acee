"""Functions that time allreduces and training steps, and fields that all rows have.

Kinds of steps are interleaved, so that changes of machine speed affect all kinds. The functions
verify and time an allreduce over any transport. The module depends only on NumPy, because it also
runs in Python environments of other frameworks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T")

# A `Row` contains one measurement, with times in milliseconds and sizes in bytes. Shares in a `Row`
# are numbers from 0 to 1.
Row: TypeAlias = "dict[str, str | float | None]"
WARM, STEPS = 10, 50
# Successive steps of one kind take at most `TURN` seconds, in which the machine's speed hardly
# changes.
TURN = 0.2


class TimedRanks(Protocol):
    """The protocol (interface) of ranks whose allreduces are timed; `Communicator` has it."""

    rank: int
    size: int

    def barrier(self, label: str = ...) -> None:
        """Wait until all ranks have called the barrier."""

    def allgather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order."""

    def allreduce(self, buffer: np.ndarray, algorithm: str) -> None:
        """Replace the content of the buffer by the sum of all ranks' buffers."""


def verify_sum(ranks: TimedRanks, algorithm: str, buffer: np.ndarray) -> bool:
    """Run a first, untimed allreduce; return whether its sums are exact on all ranks."""
    # In float32, sums of small whole numbers are exact in any order.
    index = np.arange(len(buffer)) % 1000
    buffer[...] = index * (ranks.rank + 1)
    ranks.allreduce(buffer, algorithm)
    total = ranks.size * (ranks.size + 1) // 2
    return all(ranks.allgather(bool(np.array_equal(buffer, index * total))))


def timed(ranks: TimedRanks, algorithm: str, buffer: np.ndarray, calls: int) -> np.ndarray:
    """Return the seconds of each call on its slowest rank, as an array of shape (calls,)."""
    # The buffer contains zeros, because repeated sums of other values would overflow.
    buffer[...] = 0.0
    seconds = []
    for _ in range(calls):
        ranks.barrier("the barrier before the next timed call")
        # The clock starts after the barrier, so that the measured time contains no waiting for late
        # ranks.
        start = time.perf_counter()
        ranks.allreduce(buffer, algorithm)
        seconds.append(time.perf_counter() - start)
    slowest: np.ndarray = np.max(ranks.allgather(seconds), axis=0)
    return slowest


def sweep(ranks: TimedRanks, cases: list[tuple[str, int, int]]) -> list[tuple[float, bool]]:
    """Measure cases (algorithm, bytes, calls); return their median seconds and correctness."""
    results = []
    for algorithm, nbytes, calls in cases:
        buffer = np.zeros(nbytes // 4, np.float32)
        right = verify_sum(ranks, algorithm, buffer)
        results.append((float(np.median(timed(ranks, algorithm, buffer, calls))), right))
    return results


def head(
    bench: str, case: str, variant: str, workers: int, network: str | None = None, **more: int
) -> Row:
    """Return the fields that all benchmark rows have in common.

    Args:
        bench: Name of the benchmark in `labkit bench`.
        case: The subject of the measurement, such as a model.
        variant: The operation that is timed; it becomes the field `what` of the row.
        workers: Number of ranks or processes.
        network: Emulated or real network; None: the machine's network.
        more: Further fields: the number of `repeats`, and the size in `bytes`.
    """
    row: Row = {"bench": bench, "case": case, "what": variant, "workers": workers}
    return row | {"network": network, "clock": "wall"} | more


def spread(seconds: Sequence[float]) -> Row:
    """Return fields with median, minimum and 90th percentile (ms) of the repeats' times."""
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "min_ms": 1e3 * min(seconds),
        "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
    }


def added(seconds: Sequence[float]) -> Row:
    """Return fields with median, minimum and maximum (ms) of the time added to a local step."""
    return {
        "added_ms": 1e3 * float(np.median(seconds)),
        "added_min_ms": 1e3 * min(seconds),
        "added_max_ms": 1e3 * max(seconds),
    }


Step = Callable[[], object]


@dataclass(frozen=True)
class InterleavedTimes:
    """Step times in seconds: one list per kind of step, with one value per repeat.

    Args:
        seconds: Median time of a step of this kind.
        added: Median time that this kind of step adds to the "local" step. Each time difference is
            averaged over two successive rounds. The second round runs the kinds of steps in reverse
            order. The average over a forward and a backward round cancels a linear drift of the
            machine's speed. A difference of the medians over all rounds would include the drift of
            the machine's speed.
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
    """Measure all kinds of steps in rounds; each round runs 1 to 10 steps of every kind.

    The time of a step is the time of the slowest rank, measured from a common start. Each kind of
    step has 10 warm-up steps, then 50 timed steps per repeat. All ranks wait at an untimed barrier
    before each step. A round runs 1, 2, 5 or 10 successive steps of each kind. Together, these
    steps take at most 0.2 s, unless a single step takes longer. Short steps run several times in
    succession. A single step would find the CPU caches filled by another kind of step. Every second
    round runs the kinds of steps in reverse order.

    Args:
        steps: Step function of each kind; one kind is "local".
        meet: Function that waits until all ranks have called it (a barrier).
        gather: Function that gathers at most 50 numbers per rank into shape (ranks, numbers).
        repeats: Number of repeats; each repeat gives one value per kind of step.
        counts: For each kind of step, the number of overlapping steps per call. The time of a call
            is divided by its number of steps.
    """
    for step in steps.values():
        for _ in range(WARM):
            step()
    length = _length(float(gather(_turn(meet, steps["local"], 3)).max(axis=0).min()))
    taken = InterleavedTimes({kind: [] for kind in steps}, {kind: [] for kind in steps})
    for _ in range(repeats):
        own: dict[str, list[float]] = {kind: [] for kind in steps}
        for number in range(STEPS // length):
            # Every second round times the kinds of steps in reverse order. The reversal varies
            # which kind of step precedes another kind.
            for kind in list(steps)[:: -1 if number % 2 else 1]:
                calls = _turn(meet, steps[kind], length)
                own[kind] += [seconds / (counts or {}).get(kind, 1) for seconds in calls]
        slowest = {kind: gather(values).max(axis=0) for kind, values in own.items()}
        turns = {kind: np.median(s.reshape(-1, length), axis=1) for kind, s in slowest.items()}
        for kind in steps:
            taken.seconds[kind].append(float(np.median(slowest[kind])))
            more = turns[kind] - turns["local"]
            # The mean of a forward and a backward round cancels a linear drift of the machine's
            # speed.
            taken.added[kind].append(float(np.median((more[:-1] + more[1:]) / 2)))
    return taken


def time_on_ranks(
    ranks: TimedRanks,
    steps: Mapping[str, Step],
    repeats: int,
    counts: Mapping[str, int] | None = None,
    label: str = "the barrier before the next timed step",
) -> InterleavedTimes:
    """Time all kinds of steps as `time_interleaved` does; the communicator is `ranks`."""
    return time_interleaved(
        steps,
        lambda: ranks.barrier(label),
        lambda own: np.array(ranks.allgather(own)),
        repeats,
        counts,
    )


def _length(seconds: float) -> int:
    """Return how many steps run in succession: 1, 2, 5 or 10; each takes `seconds`."""
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
