"""Test the status bulletins that hosts exchange about their ranks."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.communicator.status_table import HostRanks, StatusTable

# Ranks placed by node, placed by core, and on hosts with unequal numbers of ranks.
HOSTS = [
    [HostRanks((0, 1), "a"), HostRanks((2, 3), "b")],
    [HostRanks((0, 2, 4), "a"), HostRanks((1, 3), "b"), HostRanks((5,), "c")],
]
AHEAD = 1000.0  # seconds by which each host's clock is ahead of the previous one


def sheets(hosts: list[HostRanks]) -> list[StatusTable]:
    found = [
        StatusTable(bytearray(StatusTable.nbytes(hosts)), hosts, here) for here in range(len(hosts))
    ]
    for here, sheet in enumerate(found):
        sheet.clear(AHEAD * here)
    return found


def tell(sheets: list[StatusTable], source: int, to: int, now: float, last: bool = False) -> None:
    """Transfer a bulletin from one host to another, at a time by the first host's clock."""
    bulletin = sheets[source].blank(source)
    sheets[source].write(bulletin, now + AHEAD * source, last)
    copy = sheets[to].blank(source)
    copy[...] = np.frombuffer(bulletin.tobytes(), copy.dtype)[0]
    assert sheets[to].read(source, copy, now + AHEAD * to) == last


@pytest.mark.parametrize("hosts", HOSTS)
def test_each_host_has_the_rows_of_all_ranks_by_its_own_clock(hosts: list[HostRanks]) -> None:
    known = sheets(hosts)
    for here, host in enumerate(hosts):
        for rank in host.ranks:
            row = known[here].rows[rank : rank + 1]
            row["place"], row["since"], row["waiting"] = f"call {rank}", rank + AHEAD * here, 1
            row["stop"], row["last"] = 10 + rank, 20 + rank
    known[0].fail(0, "ValueError: lost")
    for source in range(len(hosts)):
        for to in range(len(hosts)):
            if source != to:
                tell(known, source, to, now=50.0)
    size = len(known[0].rows)
    for here, sheet in enumerate(known):
        rows = sheet.rows
        assert rows["place"].tolist() == [f"call {rank}".encode() for rank in range(size)]
        assert (rows["since"] - AHEAD * here).tolist() == list(range(size))
        assert (rows["stop"] - rows["last"]).tolist() == [-10] * size
        assert rows["waiting"].all()
        assert rows["failed"].nonzero()[0].tolist() == [0]
        assert rows["cause"][0] == b"ValueError: lost"


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_knows_when_every_host_has_seen_what_it_has_written(hosts: list[HostRanks]) -> None:
    known, own = sheets(hosts), hosts[0].ranks[-1]
    assert known[0].is_confirmed(own)
    known[0].rows["mark"][own] += 1
    for other in range(1, len(hosts)):
        tell(known, other, 0, 1.0)  # bulletins from before the mark was known there
    for other in range(1, len(hosts)):
        assert not known[0].is_confirmed(own)
        tell(known, 0, other, 1.0)
        assert not known[0].is_confirmed()
        tell(known, other, 0, 1.0)
    assert known[0].is_confirmed(own)
    assert known[0].is_confirmed()


def test_nobody_waits_for_a_host_that_has_left() -> None:
    known = sheets(HOSTS[0])
    tell(known, 1, 0, 1.0, last=True)
    known[0].rows["mark"][0] += 1
    assert known[0].is_confirmed(0)
    known[0].poll_time[...] = 1e9
    assert known[0].silent_host(8.0) is None


def test_a_host_is_silent_when_it_was_listened_to_and_not_heard() -> None:
    known = sheets(HOSTS[1])
    tell(known, 1, 0, 30.0)
    tell(known, 2, 0, 32.0)
    known[0].poll_time[...] = 38.0
    assert known[0].silent_host(8.0) is None  # silence counts only up to the host's last poll
    known[0].poll_time[...] = 39.0
    assert known[0].silent_host(8.0) == (HOSTS[1][1], 9.0)
