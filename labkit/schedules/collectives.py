"""Schedules of allreduces and other collectives, with one function per algorithm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import (
    SUM,
    AlphaBetaCost,
    Counts,
    all_ranks_hold,
    ceil_lg,
    chunked_cost,
    chunked_counts,
    collective,
    floor_lg,
    owners_hold,
    root_holds,
    rooted_counts,
    two_round_costs,
    uniform_counts,
)
from labkit.schedules.round import Integers, Round, Schedule, circle, count_chunks


@collective(
    all_ranks_hold(SUM),
    counts=lambda p: uniform_counts(p, p - 1, 1),
    cost=lambda p: AlphaBetaCost(p - 1, p - 1, p - 1),
    # A rank submits all its messages at once, so it pays the latency only once.
    critical_paths=lambda p: (AlphaBetaCost(p > 1, p - 1, p - 1),),
)
def all_to_all(size: int) -> Iterator[Round]:
    """Every rank sends its buffer to every other rank and adds all buffers in rank order.

        0 ──► 1 2 3        p(p - 1) messages of n: least rounds, most bytes.
        1 ──► 2 3 0
        2 ──► 3 0 1        rows by step k: r ──► r + k, so that receivers take turns
        3 ──► 0 1 2

    Args:
        size: Number of ranks, at least 1.

    Source: folklore; one round is the minimum for any allreduce.
    """
    if size > 1:
        # If destinations were in plain rank order, all ranks would send to rank 0 first.
        source, destination = circle(size)
        yield Round(source, destination, reduce=True)


@collective(
    all_ranks_hold(SUM),
    counts=lambda p: rooted_counts(p, p - 1),
    cost=lambda p: AlphaBetaCost(2 * (p - 1), 2 * (p - 1), p - 1),
    # The master's link carries a round's messages without gaps, so a round has one latency.
    critical_paths=lambda p: (AlphaBetaCost(2 * (p > 1), 2 * (p - 1), p - 1),),
)
def master_worker(size: int) -> Iterator[Round]:
    """Rank 0 adds the buffers of all ranks and sends the sum back.

        round 1           round 2
        1 ──┐             ┌──► 1       2(p - 1) messages of n, all of them
        2 ──┼──► 0 ═ sum ═┼──► 2       over the master's link: the bottleneck.
        3 ──┘             └──► 3

    Args:
        size: Number of ranks, at least 1.

    Source: Dean et al. 2012, *Large scale distributed deep networks*; the master acts as a
    synchronous parameter server.
    """
    workers = np.arange(1, size)
    master = np.zeros_like(workers)
    if size > 1:
        yield Round(workers, master, reduce=True)
        yield Round(master, workers, reduce=False)


@collective(all_ranks_hold(SUM), chunked_counts, chunked_cost, two_round_costs)
def round_robin(size: int) -> Iterator[Round]:
    """Rank i adds the contributions to chunk i and sends the sum to every other rank.

        round 1, step k: r ── chunk r + k ──► r + k      round 2, step k: r ── chunk r ──► r + k

              step 1     step 2     step 3
        0     1 ► 1      2 ► 2      3 ► 3                chunk ► owner
        1     2 ► 2      3 ► 3      0 ► 0
        2     3 ► 3      0 ► 0      1 ► 1
        3     0 ► 0      1 ► 1      2 ► 2

    Each rank sends 2(p - 1) messages of n/p bytes, as in the ring. Unlike in the ring, no message
    of a round waits for another. A rank's link carries the messages in the order of the steps. Each
    receiver therefore gets one message per step.

    Args:
        size: Number of ranks, at least 1.

    Source: the "round-robin" allreduce of Zhao and Canny 2013, *Sparse Allreduce*
    (arXiv 1312.3020), and of Kylix (2014).
    """
    if size > 1:
        source, destination = circle(size)
        yield Round(source, destination, destination, reduce=True)
        yield Round(source, destination, source, reduce=False)


@collective(root_holds(np.arange), lambda p: rooted_counts(p, 0, p))
def gather(size: int, root: int = 0) -> Iterator[Round]:
    """The root receives chunk i of n/p bytes from every other rank i, in one round.

        1 ── chunk 1 ──┐
        2 ── chunk 2 ──┼──► 0
        3 ── chunk 3 ──┘

    Args:
        size: Number of ranks, at least 1.
        root: The rank that receives the chunks.
    """
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Round(others, np.full_like(others, root), others, reduce=False)


def _root_counts(size: int) -> Counts:
    sent = np.where(np.arange(size) == 0, size - 1, 0)
    return Counts(sent, sent, size)


@collective(owners_hold(0), _root_counts)
def scatter(size: int, root: int = 0) -> Iterator[Round]:
    """The root sends chunk i of n/p bytes to every other rank i, in one round.

             ┌── chunk 1 ──► 1
        0 ───┼── chunk 2 ──► 2
             └── chunk 3 ──► 3

    Args:
        size: Number of ranks, at least 1.
        root: The rank that sends the chunks.
    """
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Round(np.full_like(others, root), others, others, reduce=False)


@collective(
    owners_hold(SUM),
    lambda p: uniform_counts(p, p - 1, p),
    lambda p: AlphaBetaCost(p - 1, (p - 1) / p, (p - 1) / p),
)
def reduce_scatter_ring(size: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r: partial sums travel once around the ring.

        p = 4         round 1    round 2    round 3          0 ──► 1
        0 ──► 1       chunk 3    chunk 2    chunk 1          ▲     │
        1 ──► 2       chunk 0    chunk 3    chunk 2          │     ▼
        2 ──► 3       chunk 1    chunk 0    chunk 3          3 ◄── 2
        3 ──► 0       chunk 2    chunk 1    chunk 0

    Args:
        size: Number of ranks, at least 1.

    Source: Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of
    workstations*.
    """
    return _around(size, first=-1, reduce=True)


@collective(
    lambda size, chunks: np.tile(np.arange(chunks), (size, 1)),
    lambda p: uniform_counts(p, p - 1, p),
    lambda p: AlphaBetaCost(p - 1, (p - 1) / p),
)
def allgather_ring(size: int) -> Iterator[Round]:
    """Every rank gets chunk i of every rank i; the chunks travel once around the ring.

        p = 4         round 1    round 2    round 3
        0 ──► 1       chunk 0    chunk 3    chunk 2
        1 ──► 2       chunk 1    chunk 0    chunk 3
        2 ──► 3       chunk 2    chunk 1    chunk 0
        3 ──► 0       chunk 3    chunk 2    chunk 1

    Args and source: as `reduce_scatter_ring`.
    """
    return _around(size, first=0, reduce=False)


@collective(all_ranks_hold(SUM), chunked_counts, chunked_cost, gathers=allgather_ring)
def ring(size: int) -> Iterator[Round]:
    """Reduce-scatter, then allgather: 2(p - 1) rounds with one n/p-byte message per rank.

        +──► chunk r - 1 - k in round k, added         then         chunk r - k, replaced
        0 ──► 1 ──► 2 ──► 3 ──► 0

    Each rank sends 2(p - 1)/p · n bytes, which is the minimum for an allreduce.

    Args and source: as `reduce_scatter_ring`.
    """
    yield from reduce_scatter_ring(size)
    yield from allgather_ring(size)


def _around(size: int, first: int, reduce: bool) -> Iterator[Round]:
    """Yield the rounds of a ring, in which each rank sends to the next rank."""
    ranks = np.arange(size)
    following = (ranks + 1) % size
    span, adds = np.ones_like(ranks), np.full(size, reduce)
    # Each round uses a view of the array `tape`, so that no copy is made.
    tape: Integers = np.arange(2 * size) % size
    for step in range(size - 1):
        start = (first - step) % size
        yield Round(ranks, following, tape[start : start + size], span, reduce=adds)


@collective(root_holds(lambda chunks: SUM), lambda p: rooted_counts(p, 0))
def reduce_tree(size: int, root: int = 0) -> Iterator[Round]:
    """The root ends with the sum of all buffers, and the other ranks with partial sums.

        round 1   0 ◄ 1   2 ◄ 3   4 ◄ 5   6 ◄ 7      ⌈lg p⌉ rounds, p - 1 messages of n:
        round 2   0 ◄──── 2       4 ◄──── 6          half of the active ranks
        round 3   0 ◄──────────── 4                  sends to the other half

    Args:
        size: Number of ranks, at least 1.
        root: The rank at the root of the tree. Rank (root + i) mod size takes position i in the
            tree.

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    names = (np.arange(size) + root) % size
    for distance in _doubling(size):
        sender = np.arange(distance, size, 2 * distance)
        yield Round(sender, sender - distance, reduce=True).on(names)


def _to_children(size: int) -> Counts:
    """Count the children r + 2ᵏ < p of each rank r in a binomial broadcast tree."""
    lowest = [(rank & -rank).bit_length() - 1 if rank else size for rank in range(size)]
    room = [ceil_lg(size - rank) for rank in range(size)]
    # In the broadcast tree, the highest ranks have fewer children than they would have in a full
    # tree.
    children = np.minimum(lowest, room)
    return Counts(children, children, 1)


@collective(all_ranks_hold(0), _to_children)
def broadcast_tree(size: int, root: int = 0) -> Iterator[Round]:
    """Every rank ends with the root's buffer: `reduce_tree` in reverse.

        round 1   0 ────────────► 4
        round 2   0 ────► 2       4 ────► 6
        round 3   0 ► 1   2 ► 3   4 ► 5   6 ► 7

    Args and source: as `reduce_tree`.
    """
    names = (np.arange(size) + root) % size
    for distance in reversed(_doubling(size)):
        receiver = np.arange(distance, size, 2 * distance)
        yield Round(receiver - distance, receiver, reduce=False).on(names)


def _counts(size: int) -> Counts:
    messages = _to_children(size).messages + rooted_counts(size, 0).messages
    return Counts(messages, messages, 1)


def _cost(size: int) -> AlphaBetaCost:
    """Return the cost of a tree allreduce on p ranks: 2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ."""
    depth = ceil_lg(size)
    return AlphaBetaCost(2 * depth, 2 * depth, depth)


def _critical_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the critical paths; a path has ⌊lg p⌋ hops in the reduction and in the broadcast.

    If the number p of ranks is not 2ᵐ, the root's link carries ⌈lg p⌉ messages each way. The number
    of messages on the root's link is one more than the number of hops. In the broadcast, the
    additional message on the root's link adds the transfer time nβ. Without the additional message,
    the time is ⌊lg p⌋(2α + 2nβ + nγ). In the reduction, the additional message on the root's link
    adds transfer or addition time. The cost includes only the longer of transfer time and addition
    time.
    """
    depth = floor_lg(size)
    hops = AlphaBetaCost(2 * depth, 2 * depth, depth)
    if depth == ceil_lg(size):
        return (hops,)
    return hops + AlphaBetaCost(beta=2), hops + AlphaBetaCost(beta=1, gamma=1)


@collective(all_ranks_hold(SUM), _counts, _cost, _critical_paths)
def tree(size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast: 2⌈lg p⌉ rounds, 2(p - 1) messages of n bytes.

        0 ◄ 1   2 ◄ 3          reduce
        0 ◄──── 2
        0 ────► 2              broadcast
        0 ► 1   2 ► 3

    Args:
        size: Number of ranks, at least 1.

    Source: as `reduce_tree`.
    """
    yield from reduce_tree(size)
    yield from broadcast_tree(size)


def _doubling(size: int) -> list[int]:
    """Return the powers of two below size: 1, 2, 4, …"""
    return [1 << bit for bit in range((size - 1).bit_length())]


def folded(size: int, schedule: Schedule) -> Iterator[Round]:
    """Run a schedule for 2ᵐ ranks on p ranks; each surplus rank sends its buffer to a neighbour.

        p = 6, 2ᵐ = 4        0 ◄ 1   2 ◄ 3   4   5      fold in: the odd neighbour's buffer
                             0 ····· 2 ····· 4 · 5      the schedule, for four
                             0 ► 1   2 ► 3              fold out: the result

    Compared with 2ᵐ ranks, folding takes the additional time 2(α + nβ) + nγ. Folding also adds two
    messages of n bytes for each of the p - 2ᵐ folded ranks.

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    power = 1 << floor_lg(size)
    even = 2 * np.arange(size - power)
    whole = count_chunks(schedule(power))
    if power < size:
        yield Round(even + 1, even, span=whole, reduce=True)
    for step in schedule(power):
        yield step.on(np.concatenate([even, np.arange(2 * len(even), size)]))
    if power < size:
        yield Round(even, even + 1, span=whole, reduce=False)


def folded_counts(size: int, messages: int, volume: int, chunks: int) -> Counts:
    """Count each rank's messages and chunks; the ranks of a folded pair send each other one buffer.

    Args:
        size: Number of ranks.
        messages: Number of messages that each rank sends in the power-of-two schedule.
        volume: Number of chunks that each rank sends in the power-of-two schedule.
        chunks: Number of equal parts of the buffer.
    """
    rank, hidden = np.arange(size), 2 * (size - (1 << floor_lg(size)))
    whole = (rank < hidden).astype(np.int64)
    takes_part = (rank >= hidden) | (rank % 2 == 0)
    return Counts(takes_part * messages + whole, takes_part * volume + whole * chunks, chunks)


def folded_cost(size: int, cost: AlphaBetaCost) -> AlphaBetaCost:
    """Return a schedule's cost, plus the cost of folding if `size` is not a power of two."""
    return cost + AlphaBetaCost(2, 2, 1) if floor_lg(size) < ceil_lg(size) else cost


def _butterfly_counts(size: int) -> Counts:
    rounds = floor_lg(size)
    return folded_counts(size, rounds, rounds, 1)


def _butterfly_cost(size: int) -> AlphaBetaCost:
    """Return the butterfly's cost lg p (α + nβ + nγ), plus the cost of folding (`folded`)."""
    rounds = floor_lg(size)
    return folded_cost(size, AlphaBetaCost(rounds, rounds, rounds))


def _butterfly_critical_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the candidate critical paths; ranks without a folded partner start to send earlier.

    Let p = 2ᶠ + e be the number of ranks, with F = ⌊lg p⌋. One of two paths is the longest critical
    path. On the first path, the last rank without a folded partner ends after F + 1 hops. On the
    second path, a folded rank gets the result after 2 + ⌈lg e⌉ hops. A folded rank gets the result
    from its neighbour. Before the result, the neighbour's link carries F - ⌈lg e⌉ other messages.
    """
    rounds = floor_lg(size)
    extra = size - (1 << rounds)
    if not extra:
        return (_butterfly_cost(size),)
    # Ranks beyond the largest power of two are folded; folded ranks wait for each other in `shared`
    # rounds.
    shared = ceil_lg(extra)
    hops, queued = AlphaBetaCost(shared + 2, shared + 2, shared + 1), rounds - shared
    last = AlphaBetaCost(rounds + 1, rounds + 1, rounds + 1)
    return last, hops + AlphaBetaCost(beta=queued), hops + AlphaBetaCost(gamma=queued)


@collective(all_ranks_hold(SUM), _butterfly_counts, _butterfly_cost, _butterfly_critical_paths)
def butterfly(size: int) -> Iterator[Round]:
    """After round k of lg p rounds, every rank has the sum of 2ᵏ ranks' buffers.

        0   1   2   3   4   5   6   7
        0 ↔ 1   2 ↔ 3   4 ↔ 5   6 ↔ 7        distance 1
        0 ↔ 2   1 ↔ 3   4 ↔ 6   5 ↔ 7        distance 2
        0 ↔ 4   1 ↔ 5   2 ↔ 6   3 ↔ 7        distance 4

    Args:
        size: Number of ranks, at least 1; ranks beyond the largest power of two are folded
            (`folded`).

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    return folded(size, _butterfly_doubling)


def _butterfly_doubling(size: int) -> Iterator[Round]:
    ranks = np.arange(size)
    distance = 1
    while distance < size:
        # In a butterfly round, the numbers of two partner ranks differ in one bit.
        yield Round(ranks, ranks ^ distance, reduce=True)
        distance *= 2


def _rabenseifner_counts(size: int) -> Counts:
    power = 1 << floor_lg(size)
    return folded_counts(size, 2 * floor_lg(size), 2 * (power - 1), power)


def _rabenseifner_cost(size: int) -> AlphaBetaCost:
    """Return 2 lg p α + (p - 1)/p n(2β + γ) for p ranks, plus the cost of folding."""
    volume = chunked_cost(1 << floor_lg(size))
    return folded_cost(size, AlphaBetaCost(2 * floor_lg(size), volume.beta, volume.gamma))


@collective(all_ranks_hold(SUM), _rabenseifner_counts, _rabenseifner_cost)
def rabenseifner(size: int) -> Iterator[Round]:
    """Partners halve the buffer until each rank has the sum of one chunk, then exchange the sums.

        Messages of rank 0 of 4 ranks, and the state of its chunks after each round
        halving    0 ↔ 2  sends 23, keeps 01      2 ranks
                   0 ↔ 1  sends 1, keeps 0        4 ranks
        doubling   0 ↔ 1  sends 0, gets 1         01 whole
                   0 ↔ 2  sends 01, gets 23       0123 whole

    Like a tree, the schedule has 2 lg p rounds for p ranks. Like in a ring, each rank sends 2(p -
    1)/p · n bytes. Each exchanged half of the buffer is one message of many chunks.

    Args:
        size: Number of ranks, at least 1; ranks beyond the largest power of two are folded
            (`folded`).

    Source: Rabenseifner 2004, *Optimization of collective reduction operations*.
    """
    return folded(size, _halving_doubling)


def _halving_doubling(size: int) -> Iterator[Round]:
    ranks = np.arange(size)
    distances = [1 << bit for bit in range(size.bit_length() - 1)]
    for distance in reversed(distances):
        partner = ranks ^ distance
        yield Round(ranks, partner, partner // distance * distance, distance, reduce=True)
    for distance in distances:
        yield Round(ranks, ranks ^ distance, ranks // distance * distance, distance, reduce=False)
