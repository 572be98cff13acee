"""The content of every rank after each round: the ranks whose values each chunk includes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from labkit.schedules.collective import count_switches
from labkit.schedules.interpreter import execute
from labkit.schedules.round import Integers, Round, Schedule, count_chunks


@dataclass(frozen=True, eq=False)
class Holdings:
    """A schedule and the content of all buffers after each of its rounds.

    Args:
        rounds: The rounds of the schedule.
        held: Array of counts, shape (rounds + 1, nodes, chunks, size). Entry [k, r, c, j] is how
            often the value of rank j is in chunk c of rank r after k rounds. Network switches that
            take part are numbered after the ranks.
    """

    rounds: list[Round]
    held: Integers

    @property
    def chunks(self) -> int:
        """Number of chunks into which the buffer is divided."""
        return int(self.held.shape[2])

    @property
    def names(self) -> list[str]:
        """The names of ranks and then of switches: `rank 0`, `rank 1`, `switch 0`."""
        _, nodes, _, size = self.held.shape
        return [f"rank {n}" if n < size else f"switch {n - size}" for n in range(nodes)]

    @property
    def labels(self) -> list[str]:
        """The short names of ranks and switches: `0`, `1`, `S0`."""
        return [name.removeprefix("rank ").replace("switch ", "S") for name in self.names]

    @property
    def messages(self) -> int:
        """Number of messages in all rounds."""
        return sum(map(len, self.rounds))

    @property
    def complete(self) -> bool:
        """Whether every rank ends with the sum, in which each rank's value occurs exactly once."""
        return bool((self.held[-1, : self.held.shape[3]] == 1).all())

    def new(self, after: int) -> Integers:
        """Return 1 where round `after` added a rank's value, else 0: (nodes, chunks, size)."""
        before = self.held[max(after - 1, 0)]
        arrivals: Integers = (self.held[after] > before).astype(np.int64)
        return arrivals


def follow(schedule: Schedule, size: int) -> Holdings:
    """Run a schedule on unit vectors instead of numbers: rank j starts with the unit vector e_j.

    The sum in a chunk then counts how often it includes the value of each rank.
    """
    rounds = list(schedule(size))
    chunks = count_chunks(rounds)
    nodes = size + count_switches(schedule, size)
    start = np.tile(np.eye(nodes, size, dtype=np.int64), chunks)  # (nodes, chunks · size)
    states = [start, *(values for _, values in execute(rounds, start))]
    return Holdings(rounds, np.stack(states).reshape(-1, nodes, chunks, size))


def chunk_name(chunk: int) -> str:
    """Return the letter of a chunk: a, b, c, …; after z, a letter and a number: a1., b1., …"""
    turn, letter = divmod(chunk, 26)
    return chr(ord("a") + letter) + (f"{turn}." if turn else "")


def span_name(chunk: int, span: int) -> str:
    """Return the name of the chunks in a message, such as `b` or `a–c`."""
    first = chunk_name(chunk)
    return first if span == 1 else f"{first}–{chunk_name(chunk + span - 1)}"


def sum_name(terms: Integers, chunk: int, room: int = 80) -> str:
    """Return a sum as `a0+a1`; if that is too long, as `a0–3+6` or `5/8`; if complete, as `Σa`.

    Args:
        terms: How often each rank's value is in the chunk, shape (size,).
        chunk: Number of the chunk.
        room: Maximum number of characters.
    """
    name = chunk_name(chunk)
    if (terms == 1).all():
        return f"Σ{name}"
    ranks = np.flatnonzero(terms).tolist()
    summands = [f"{'' if terms[rank] == 1 else terms[rank]}{name}{rank}" for rank in ranks]
    long = "+".join(summands)
    if len(long) <= room:
        return long
    # A value occurs twice in a sum only if the schedule is wrong.
    if terms.max() > 1:
        return f"{terms.sum()} values"
    short = name + "+".join(_range(run) for run in _runs(ranks))
    return short if len(short) <= room else f"{len(ranks)}/{len(terms)}"


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Split sorted ranks into runs of consecutive numbers: [0, 1, 2, 5] -> [[0, 1, 2], [5]]."""
    runs = [[ranks[0]]]
    for before, rank in pairwise(ranks):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"


def message_size(step: Round, chunks: int) -> str:
    """Return a round's message sizes for a buffer of n bytes: `n/4`, `3n/8`, `n/4 to n`."""
    shares = sorted({Fraction(span, chunks) for span in step.span.tolist()})
    return " to ".join(dict.fromkeys(_part(share) for share in (shares[0], shares[-1])))


def _part(share: Fraction) -> str:
    numerator = "n" if share.numerator == 1 else f"{share.numerator}n"
    return numerator if share.denominator == 1 else f"{numerator}/{share.denominator}"
