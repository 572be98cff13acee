"""What every rank holds after every round of a schedule: whose values each chunk is the sum of."""

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
    """A schedule as it goes.

    Args: rounds: its messages; held: shape (rounds + 1, nodes, chunks, size): how often the value
    of rank j is in chunk c of rank r after k rounds is held[k, r, c, j]. Behind the ranks stand
    the switches that take part.
    """

    rounds: list[Round]
    held: Integers

    @property
    def chunks(self) -> int:
        """Number of parts of the buffer."""
        return int(self.held.shape[2])

    @property
    def names(self) -> list[str]:
        """Of ranks, and of the switches behind them: `rank 0`, `rank 1`, `switch 0`."""
        _, nodes, _, size = self.held.shape
        return [f"rank {n}" if n < size else f"switch {n - size}" for n in range(nodes)]

    @property
    def labels(self) -> list[str]:
        """The same, short: `0`, `1`, `S0`."""
        return [name.removeprefix("rank ").replace("switch ", "S") for name in self.names]

    @property
    def messages(self) -> int:
        """Messages of all rounds."""
        return sum(map(len, self.rounds))

    @property
    def complete(self) -> bool:
        """Whether every rank ends with every value once in every chunk: the sum."""
        return bool((self.held[-1, : self.held.shape[3]] == 1).all())

    def new(self, after: int) -> Integers:
        """Shape (nodes, chunks, size): 1 where a value came in the last of so many rounds."""
        before = self.held[max(after - 1, 0)]
        came: Integers = (self.held[after] > before).astype(np.int64)
        return came


def follow(schedule: Schedule, size: int) -> Holdings:
    """Carry out a schedule on markers in place of numbers: rank j starts with the unit vector e_j.

    Their sums count, for each chunk, how often each rank's value is in it.
    """
    rounds = list(schedule(size))
    chunks = count_chunks(rounds)
    nodes = size + count_switches(schedule, size)
    start = np.tile(np.eye(nodes, size, dtype=np.int64), chunks)  # (nodes, chunks · size)
    states = [start, *(values for _, values in execute(rounds, start))]
    return Holdings(rounds, np.stack(states).reshape(-1, nodes, chunks, size))


def chunk_name(chunk: int) -> str:
    """a, b, c, … as in lectures; after z with numbers: a1., b1., …"""
    turn, letter = divmod(chunk, 26)
    return chr(ord("a") + letter) + (f"{turn}." if turn else "")


def span_name(chunk: int, span: int) -> str:
    """The chunks of a message: `b`, or `a–c`."""
    first = chunk_name(chunk)
    return first if span == 1 else f"{first}–{chunk_name(chunk + span - 1)}"


def sum_name(held: Integers, chunk: int, room: int = 80) -> str:
    """`a0+a1`; in less room `a0–3+6`, or `5/8`; with all ranks' values once `Σa`.

    Args: held: shape (size,), how often each rank's value is in the chunk; room: letters.
    """
    name = chunk_name(chunk)
    if (held == 1).all():
        return f"Σ{name}"
    ranks = np.flatnonzero(held).tolist()
    terms = [f"{'' if held[rank] == 1 else held[rank]}{name}{rank}" for rank in ranks]
    long = "+".join(terms)
    if len(long) <= room:
        return long
    # Only a schedule that adds a value twice, which is wrong, comes here.
    if held.max() > 1:
        return f"{held.sum()} values"
    short = name + "+".join(_range(run) for run in _runs(ranks))
    return short if len(short) <= room else f"{len(ranks)}/{len(held)}"


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """[0, 1, 2, 5] -> [[0, 1, 2], [5]]"""
    runs = [[ranks[0]]]
    for before, rank in pairwise(ranks):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"


def message_size(each: Round, chunks: int) -> str:
    """Size of a round's messages as a part of the buffer: `n/4`, `3n/8`, `n/4 to n`."""
    shares = sorted({Fraction(span, chunks) for span in each.span.tolist()})
    return " to ".join(dict.fromkeys(_part(share) for share in (shares[0], shares[-1])))


def _part(share: Fraction) -> str:
    above = "n" if share.numerator == 1 else f"{share.numerator}n"
    return above if share.denominator == 1 else f"{above}/{share.denominator}"
