"""Counts from the schedule stand beside the formula's, and a difference is said."""

from __future__ import annotations

import pytest

from labkit.common.errors import InvalidInput
from labkit.figures import counts_reading, counts_table
from labkit.schedules import ALLREDUCE


def test_all_algorithms_equal_their_formula() -> None:
    table = counts_table(sizes=range(1, 18))
    assert len(table) == 17 * len(ALLREDUCE)
    assert table["equal"].all()
    assert (table["messages"] == table["messages_formula"]).all()


def test_ring_and_master_send_as_much_but_the_master_alone_sends_half() -> None:
    ring, master = counts_table(["ring", "master_worker"], [8]).to_dict("records")
    assert ring["volume"] == master["volume"] == 14
    assert ring["busiest_rank"] == pytest.approx(2 * 7 / 8)
    assert master["busiest_rank"] == 7
    said = counts_reading(counts_table(["ring", "master_worker"], [8]))
    assert "2 of 2 rows equal" in said
    assert "1.75 n with ring, and 7 n with master_worker" in said


def test_a_row_that_differs_is_named() -> None:
    table = counts_table(["ring"], [4])
    table.loc[0, ["messages", "equal"]] = [23, False]
    assert "**ring** on 4 ranks does not: 23 messages counted, 24" in counts_reading(table)


def test_an_unknown_name_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="no schedule is called 'rign'"):
        counts_table(["rign"], [2])
