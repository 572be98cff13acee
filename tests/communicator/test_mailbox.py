"""Letters from whoever sends, by both transports: all arrive, whole, each sender's in order."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import Cluster

LETTERS = 30


def exchange(communicator: Any, one_sided: bool) -> dict[int, list[tuple[float, int, bool]]]:
    """Every rank posts letters to every other, of all lengths up to 4 kB, and answers none."""
    import numpy as np

    mailbox = communicator.slots(4096) if one_sided else communicator.mailbox()
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    for number in range(LETTERS):
        for other in others:
            nbytes = (number * 97) % 4097
            fill = (communicator.rank + number) % 256
            mailbox.post(other, np.array([float(number)]), np.full(nbytes, fill, np.uint8))
    found: dict[int, list[tuple[float, int, bool]]] = {other: [] for other in others}
    while any(len(each) < LETTERS for each in found.values()) or not mailbox.idle:
        for letter in mailbox.collect():
            number = letter.words[0]
            right = bool((letter.values == (letter.source + number) % 256).all())
            found[letter.source].append((number, letter.values.nbytes, right))
            mailbox.free(letter.source)
    mailbox.close()
    return found


@pytest.mark.parametrize("one_sided", [False, True], ids=["two-sided", "one-sided"])
def test_letters_of_each_rank_come_whole_and_in_order(cluster: Cluster, one_sided: bool) -> None:
    expected = [(float(n), (n * 97) % 4097, True) for n in range(LETTERS)]
    for rank, found in enumerate(cluster.call(exchange, one_sided, ranks=3)):
        assert set(found) == {0, 1, 2} - {rank}
        assert all(letters == expected for letters in found.values())
