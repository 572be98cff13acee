"""Test mailboxes with every transport: all messages arrive complete, in each sender's order."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Network
from labkit.cluster import RankError
from labkit.communicator import TRANSPORTS, EagerMailbox, open_mailbox
from labkit.communicator.one_sided import MIN_SEND_BYTES

LETTERS, NBYTES = 30, 4096
SLOW = Network(latency=0.01, bandwidth=2e5)  # a message of 4 kB takes 30 ms
all_of_them = pytest.mark.parametrize("transport", list(TRANSPORTS))


def carried(communicator: Any, transport: str, hosts: Any, nbytes: int = NBYTES) -> Any:
    """Return a mailbox through which each endpoint can write to all endpoints on other ranks."""
    numbers = range(len(hosts))
    pairs = [(a, b) for a in numbers for b in numbers if hosts[a] != hosts[b]]
    return open_mailbox(transport, communicator, dict.fromkeys(pairs, nbytes), hosts)


def wait_for(communicator: Any, mailbox: Any, letters: int) -> list[Any]:
    """Return received messages, as many as `letters`, when this rank's own messages are sent."""
    found: list[Any] = []
    communicator.wait_policy.name_call("letters of a test", collective=False)
    communicator.wait_policy.start_wait()
    polls = 0
    while len(found) < letters or not mailbox.idle:
        found += mailbox.collect()
        communicator.wait_policy.pause(polls)
        polls += 1
    return found


def exchange(
    communicator: Any, transport: str, apart: bool
) -> dict[int, list[tuple[float, int, bool]]]:
    """Send messages of all lengths up to 4 kB to all other ranks; return the received messages."""
    if apart:  # as if ranks had no shared memory
        communicator.wait_policy.on_one_host = False
    mailbox = carried(communicator, transport, range(communicator.size))
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
    ("transport", "apart"),
    [
        *((transport, False) for transport in TRANSPORTS),
        *((transport, True) for transport in TRANSPORTS if transport != "two_sided"),
    ],
)
def test_letters_of_each_rank_come_whole_and_in_order(
    cluster: Cluster, transport: str, apart: bool
) -> None:
    expected = [(float(n), (n * 97) % (NBYTES + 1), True) for n in range(LETTERS)]
    for rank, found in enumerate(cluster.call(exchange, transport, apart, ranks=3)):
        assert set(found) == {0, 1, 2} - {rank}
        assert all(letters == expected for letters in found.values())


def neighbours(communicator: Any, transport: str) -> list[tuple[int, int]]:
    """Let two endpoints per rank write to both endpoints of the other rank; free no message."""
    rank, mailbox = communicator.rank, carried(communicator, transport, [0, 1, 0, 1])
    for source in (rank, rank + 2):
        for to in (1 - rank, 3 - rank):
            mailbox.post((source, to), np.zeros(1), np.full(NBYTES, source, np.uint8))
    found = wait_for(communicator, mailbox, 4)
    assert all((letter.values == letter.route[0]).all() for letter in found)
    communicator.barrier("the end of a test")
    routes = sorted(letter.route for letter in found)
    mailbox.close()
    return routes


@all_of_them
def test_who_stand_on_one_rank_do_not_wait_for_each_others_letters(
    cluster: Cluster, transport: str
) -> None:
    told = cluster.call(neighbours, transport, ranks=2)
    assert told == [[(1, 0), (1, 2), (3, 0), (3, 2)], [(0, 1), (0, 3), (2, 1), (2, 3)]]


def late(communicator: Any, transport: str) -> tuple[float, float, tuple[int, int, int]]:
    """Return the times at which rank 0 starts and rank 1 has the message, and counted traffic."""
    mailbox = carried(communicator, transport, range(2))
    communicator.barrier("the begin of a test")
    begin, before = time.monotonic(), communicator.traffic.copy()
    if communicator.rank == 0:
        mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES, np.uint8))
    wait_for(communicator, mailbox, communicator.rank)
    end, sent = time.monotonic(), communicator.traffic.since(before)
    mailbox.close()
    return begin, end, (sent.messages, sent.payload_bytes, sent.wire_bytes)


@all_of_them
def test_a_letter_takes_its_time_on_an_emulated_network_and_is_counted_once(
    cluster: Cluster, transport: str
) -> None:
    (begin, _, sent), (_, end, none) = cluster.call(late, transport, ranks=2, network=SLOW)
    # Before a message is fetched, the sender announces it, and the receiver requests it.
    latencies = 3 if transport == "one_sided_dynamic" else 1
    assert end - begin >= 0.99 * (latencies * SLOW.latency + NBYTES / SLOW.bandwidth)
    assert (sent, none) == ((1, NBYTES, NBYTES), (0, 0, 0))


def forsaken(communicator: Any, transport: str) -> None:
    """Fail on rank 1, instead of reading the second message."""
    mailbox = carried(communicator, transport, range(2))
    if communicator.rank == 1:
        raise ZeroDivisionError("as planned")
    for _ in range(2):
        mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES, np.uint8))
    wait_for(communicator, mailbox, 1)


@all_of_them
def test_who_waits_for_a_letter_is_told_that_its_sender_has_failed(
    cluster: Cluster, transport: str
) -> None:
    with pytest.raises(RankError, match="rank 1 failed: ZeroDivisionError: as planned") as caught:
        cluster.call(forsaken, transport, ranks=2)
    assert "did not end" not in str(caught.value)


def too_long(communicator: Any) -> None:
    """Send a message that is longer than its slot."""
    mailbox = carried(communicator, "one_sided", range(2))
    mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES + 1, np.uint8))


def test_values_that_are_longer_than_their_slot_are_refused(cluster: Cluster) -> None:
    with pytest.raises(
        RankError, match="4097 bytes exceeds its receive slot of 4096 bytes; use transport='two_si"
    ):
        cluster.call(too_long, ranks=2)


def shapes(communicator: Any) -> list[str]:
    """Send 100 random arrays from rank 0 to 1 by each transport; return hashes of what arrives."""
    random, kinds = np.random.default_rng(7), ("float32", "float64", "uint8", "int16")
    sent = []
    for number in range(100):
        shape = random.integers(0 if number % 10 == 0 else 1, 40, random.integers(1, 4))
        values = random.bytes(int(shape.prod()) * np.dtype(kinds[number % 4]).itemsize)
        sent.append(np.frombuffer(values, kinds[number % 4]).reshape(shape))
    most = max(each.nbytes for each in sent)
    found = []
    for transport in TRANSPORTS:
        mailbox, came = carried(communicator, transport, range(2), most), hashlib.sha256()
        if communicator.rank == 0:
            for number, each in enumerate(sent):
                mailbox.post((0, 1), np.array([float(number)]), each.reshape(-1).view(np.uint8))
            wait_for(communicator, mailbox, 0)
        else:
            waiting = list(enumerate(sent))
            while waiting:
                for letter in wait_for(communicator, mailbox, 1):
                    number, each = waiting.pop(0)
                    assert letter.words[0] == number
                    assert letter.values.nbytes == each.nbytes
                    came.update(letter.values.tobytes())
                    mailbox.free(letter.route)
            assert came.digest() == hashlib.sha256(b"".join(map(np.ndarray.tobytes, sent))).digest()
        found.append(came.hexdigest())
        mailbox.close()
    return found


def test_a_hundred_random_shapes_come_bit_for_bit_by_every_transport(cluster: Cluster) -> None:
    _, found = cluster.call(shapes, ranks=2)
    assert len(found) == len(TRANSPORTS)
    assert len(set(found)) == 1


def longer(communicator: Any) -> tuple[bool, bool]:
    """Send a message longer than its memory, then a short one; return whether both are correct."""
    mailbox, long = carried(communicator, "one_sided_dynamic", range(2), 8), 7 * MIN_SEND_BYTES // 2
    if communicator.rank == 0:
        mailbox.post((0, 1), np.zeros(1), np.arange(long).astype(np.uint8))
        mailbox.post((0, 1), np.ones(1), np.ones(3, np.uint8))
        wait_for(communicator, mailbox, 0)
        right = True, True
    else:
        first, second = wait_for(communicator, mailbox, 2)
        whole = bool((first.values == np.arange(long).astype(np.uint8)).all())
        right = whole, second.values.tolist() == [1, 1, 1] and second.words[0] == 1
    mailbox.close()
    return right


def test_what_is_fetched_may_be_longer_than_the_memory_it_lies_in(cluster: Cluster) -> None:
    assert cluster.call(longer, ranks=2)[1] == (True, True)


def memories(communicator: Any) -> dict[str, bool]:
    """Return for each transport whether messages stay in the memory into which the sender wrote."""
    found = {}
    for transport in TRANSPORTS:
        mailbox = carried(communicator, transport, range(2))
        if communicator.rank == 0:
            mailbox.post((0, 1), np.zeros(1), np.ones(NBYTES, np.uint8))
        for letter in wait_for(communicator, mailbox, communicator.rank):
            placed = isinstance(mailbox, EagerMailbox)
            found[transport] = placed and np.may_share_memory(letter.values, mailbox.memory)
            mailbox.free(letter.route)
        mailbox.close()
    return found


def test_who_reads_a_static_slot_copies_nothing_and_the_others_do(cluster: Cluster) -> None:
    _, found = cluster.call(memories, ranks=2)
    assert found == {"two_sided": False, "one_sided": True, "one_sided_dynamic": False}
