"""Letters from whoever sends, by both transports: all arrive, whole, each sender's in order."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Network
from labkit.cluster import RankError

LETTERS, NBYTES = 30, 4096
SLOW = Network(latency=0.01, bandwidth=2e5)  # a letter of 4 kB takes 30 ms
both = pytest.mark.parametrize("one_sided", [False, True], ids=["two-sided", "one-sided"])


def carrier(communicator: Any, one_sided: bool, hosts: Any) -> Any:
    """A mailbox for letters from everyone to everyone at another rank."""
    numbers = range(len(hosts))
    pairs = [(a, b) for a in numbers for b in numbers if hosts[a] != hosts[b]]
    if one_sided:
        return communicator.slots(dict.fromkeys(pairs, NBYTES), hosts)
    return communicator.mailbox(hosts)


def wait_for(communicator: Any, mailbox: Any, letters: int) -> list[Any]:
    """So many letters, and all of one's own on their way."""
    found: list[Any] = []
    communicator.patience.enter("letters of a test", collective=False)
    communicator.patience.begin()
    polls = 0
    while len(found) < letters or not mailbox.idle:
        found += mailbox.collect()
        communicator.patience.pause(polls)
        polls += 1
    return found


def exchange(
    communicator: Any, one_sided: bool, apart: bool
) -> dict[int, list[tuple[float, int, bool]]]:
    """Every rank posts letters to every other, of all lengths up to 4 kB, and answers none."""
    if apart:  # as if ranks did not see each other's memory
        communicator.patience.on_one_host = False
    mailbox = carrier(communicator, one_sided, range(communicator.size))
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    for number in range(LETTERS):
        for other in others:
            nbytes = (number * 97) % (NBYTES + 1)
            fill = np.full(nbytes, (communicator.rank + number) % 256, np.uint8)
            mailbox.post((communicator.rank, other), np.array([float(number)]), fill)
    found: dict[int, list[tuple[float, int, bool]]] = {other: [] for other in others}
    while any(len(each) < LETTERS for each in found.values()) or not mailbox.idle:
        for letter in mailbox.collect():
            number, source = letter.words[0], letter.route[0]
            right = bool((letter.values == (source + number) % 256).all())
            found[source].append((number, letter.values.nbytes, right))
            mailbox.free(letter.route)
    mailbox.close()
    return found


@pytest.mark.parametrize(
    ("one_sided", "apart"),
    [(False, False), (True, False), (True, True)],
    ids=["two-sided", "one-sided", "one-sided between hosts"],
)
def test_letters_of_each_rank_come_whole_and_in_order(
    cluster: Cluster, one_sided: bool, apart: bool
) -> None:
    expected = [(float(n), (n * 97) % (NBYTES + 1), True) for n in range(LETTERS)]
    for rank, found in enumerate(cluster.call(exchange, one_sided, apart, ranks=3)):
        assert set(found) == {0, 1, 2} - {rank}
        assert all(letters == expected for letters in found.values())


def neighbours(communicator: Any, one_sided: bool) -> list[tuple[int, int]]:
    """Two at each rank write to two at the other one, who let go of nothing that they read."""
    rank, mailbox = communicator.rank, carrier(communicator, one_sided, [0, 1, 0, 1])
    for source in (rank, rank + 2):
        for to in (1 - rank, 3 - rank):
            mailbox.post((source, to), np.zeros(1), np.full(NBYTES, source, np.uint8))
    found = wait_for(communicator, mailbox, 4)
    assert all((letter.values == letter.route[0]).all() for letter in found)
    communicator.meet("the end of a test")
    routes = sorted(letter.route for letter in found)
    mailbox.close()
    return routes


@both
def test_who_stand_on_one_rank_do_not_wait_for_each_others_letters(
    cluster: Cluster, one_sided: bool
) -> None:
    told = cluster.call(neighbours, one_sided, ranks=2)
    assert told == [[(1, 0), (1, 2), (3, 0), (3, 2)], [(0, 1), (0, 3), (2, 1), (2, 3)]]


def late(communicator: Any, one_sided: bool) -> tuple[float, float, tuple[int, int, int]]:
    """When rank 0 begins to send, when rank 1 has the letter, and what a rank has counted."""
    mailbox = carrier(communicator, one_sided, range(2))
    communicator.meet("the begin of a test")
    begin, before = time.monotonic(), communicator.traffic.copy()
    if communicator.rank == 0:
        mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES, np.uint8))
    wait_for(communicator, mailbox, communicator.rank)
    end, sent = time.monotonic(), communicator.traffic.since(before)
    mailbox.close()
    return begin, end, (sent.messages, sent.payload_bytes, sent.wire_bytes)


@both
def test_a_letter_takes_its_time_on_an_emulated_network_and_is_counted_once(
    cluster: Cluster, one_sided: bool
) -> None:
    (begin, _, sent), (_, end, none) = cluster.call(late, one_sided, ranks=2, network=SLOW)
    assert end - begin >= 0.99 * (SLOW.latency + NBYTES / SLOW.bandwidth)
    assert (sent, none) == ((1, NBYTES, NBYTES), (0, 0, 0))


def forsaken(communicator: Any, one_sided: bool) -> None:
    """Rank 1 fails instead of reading the second letter."""
    mailbox = carrier(communicator, one_sided, range(2))
    if communicator.rank == 1:
        raise ZeroDivisionError("as planned")
    for _ in range(2):
        mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES, np.uint8))
    wait_for(communicator, mailbox, 1)


@both
def test_who_waits_for_a_letter_is_told_that_its_sender_has_failed(
    cluster: Cluster, one_sided: bool
) -> None:
    with pytest.raises(RankError, match="rank 1 failed: ZeroDivisionError: as planned") as caught:
        cluster.call(forsaken, one_sided, ranks=2)
    assert "did not end" not in str(caught.value)


def too_long(communicator: Any) -> None:
    """A letter that does not fit."""
    mailbox = carrier(communicator, True, range(2))
    mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES + 1, np.uint8))


def test_values_that_are_longer_than_their_slot_are_refused(cluster: Cluster) -> None:
    with pytest.raises(RankError, match=r"4097 bytes for a slot of 4096; use transport='two_si"):
        cluster.call(too_long, ranks=2)
