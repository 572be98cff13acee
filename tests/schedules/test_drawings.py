"""Test that the drawings in docstrings match the rows of their schedules."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from labkit.schedules import (
    Round,
    all_to_all,
    allgather_ring,
    broadcast_tree,
    butterfly,
    gather,
    hierarchical,
    master_worker,
    rabenseifner,
    reduce_scatter_ring,
    reduce_tree,
    ring,
    round_robin,
    scatter,
    tree,
    two_level,
    two_level_butterfly,
)
from labkit.schedules.collectives import folded


def arrows(rounds: Iterable[Round]) -> list[str]:
    """Return each round as `source>destination` pairs, in the order of its rows."""
    return [" ".join(f"{row[0]}>{row[1]}" for row in each.rows()) for each in rounds]


def chunks(rounds: Iterable[Round]) -> list[str]:
    """Return each round as the chunks of its messages, one word per message."""
    return [
        " ".join("".join(map(str, range(row[2], row[2] + row[3]))) for row in each.rows())
        for each in rounds
    ]


def test_all_to_all_goes_around_the_circle() -> None:
    assert arrows(all_to_all(4)) == ["0>1 1>2 2>3 3>0 0>2 1>3 2>0 3>1 0>3 1>0 2>1 3>2"]


def test_master_worker_sends_in_and_out() -> None:
    assert arrows(master_worker(4)) == ["1>0 2>0 3>0", "0>1 0>2 0>3"]
    assert [each.reduce.tolist() for each in master_worker(4)] == [[True] * 3, [False] * 3]


def test_reduce_tree_halves_the_ranks_that_still_send() -> None:
    assert arrows(reduce_tree(8)) == ["1>0 3>2 5>4 7>6", "2>0 6>4", "4>0"]


def test_broadcast_tree_runs_backwards() -> None:
    assert arrows(broadcast_tree(8)) == ["0>4", "0>2 4>6", "0>1 2>3 4>5 6>7"]


def test_tree_is_reduce_then_broadcast() -> None:
    assert arrows(tree(4)) == ["1>0 3>2", "2>0", "0>2", "0>1 2>3"]


def test_trees_turn_around_another_root() -> None:
    assert arrows(reduce_tree(3, root=2)) == ["0>2", "1>2"]
    assert arrows(broadcast_tree(3, root=2)) == ["2>1", "2>0"]


def test_round_robin_sends_each_chunk_home_step_by_step() -> None:
    home, back = round_robin(4)
    steps = home.chunk.reshape(3, 4).tolist()
    assert steps == [[1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]
    assert home.chunk.tolist() == home.destination.tolist()
    assert back.chunk.tolist() == back.source.tolist()


def test_butterfly_doubles_the_distance() -> None:
    pairs = [{tuple(sorted(row[:2])) for row in each.rows()} for each in butterfly(8)]
    assert pairs == [
        {(0, 1), (2, 3), (4, 5), (6, 7)},
        {(0, 2), (1, 3), (4, 6), (5, 7)},
        {(0, 4), (1, 5), (2, 6), (3, 7)},
    ]


def test_six_ranks_are_folded_to_four() -> None:
    rounds = arrows(folded(6, butterfly))
    assert rounds[0] == "1>0 3>2"
    assert rounds[1] == "0>2 2>0 4>5 5>4"
    assert rounds[-1] == "0>1 2>3"


def test_rabenseifner_halves_then_doubles_what_rank_0_sends() -> None:
    of_rank_0 = [each.sent_by(0) for each in rabenseifner(4)]
    assert arrows(of_rank_0) == ["0>2", "0>1", "0>1", "0>2"]
    assert chunks(of_rank_0) == ["23", "1", "0", "01"]


def test_a_half_buffer_is_one_message() -> None:
    assert [len(each) for each in rabenseifner(8)] == [8] * 6


def test_reduce_scatter_ring_draws_its_table() -> None:
    assert arrows(reduce_scatter_ring(4)) == ["0>1 1>2 2>3 3>0"] * 3
    assert chunks(reduce_scatter_ring(4)) == ["3 0 1 2", "2 3 0 1", "1 2 3 0"]


def test_allgather_ring_draws_its_table() -> None:
    assert chunks(allgather_ring(4)) == ["0 1 2 3", "3 0 1 2", "2 3 0 1"]


def test_ring_is_both() -> None:
    assert chunks(ring(4)) == chunks(reduce_scatter_ring(4)) + chunks(allgather_ring(4))


def test_hierarchical_leaves_the_links_between_hosts_to_leaders() -> None:
    assert arrows(hierarchical(8, hosts=4)) == [
        "1>0 3>2 5>4 7>6",
        "2>0 6>4",
        "0>4 4>0",
        "0>4 4>0",
        "0>2 4>6",
        "0>1 2>3 4>5 6>7",
    ]


def test_every_rank_of_two_levels_sends_between_hosts_a_part_of_its_own() -> None:
    rounds = list(two_level(4))
    assert arrows(rounds) == ["0>1 1>0 2>3 3>2", *["0>2 2>0 1>3 3>1"] * 2, "0>1 1>0 2>3 3>2"]
    assert chunks(rounds) == ["23 01 23 01", "1 0 3 2", "0 1 2 3", "01 23 01 23"]
    # One rank of the larger host owns no chunk.
    assert arrows(two_level_butterfly(5, hosts=3)) == [
        "0>1 2>0 1>0 2>1 3>4 4>3",
        "0>3 3>0 1>4 4>1",
        "0>1 1>2 0>2 1>0 3>4 4>3",
    ]


@pytest.mark.parametrize(
    ("schedule", "drawing"), [(gather, "1>0 2>0 3>0"), (scatter, "0>1 0>2 0>3")]
)
def test_gather_and_scatter_are_one_round(schedule: object, drawing: str) -> None:
    rounds = list(schedule(4))  # type: ignore[operator]
    assert arrows(rounds) == [drawing]
    assert chunks(rounds) == ["1 2 3"]
