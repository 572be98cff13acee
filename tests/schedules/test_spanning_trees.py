"""Test packing spanning trees on unequal links."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.schedules import allreduce, pack, spanning_trees
from labkit.schedules.interpreter import verify_schedule
from labkit.schedules.spanning_trees import Tree


def both_ways(links: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return links | {(b, a): bandwidth for (a, b), bandwidth in links.items()}


def rate(trees: dict[Tree, int], links: dict[tuple[int, int], float]) -> float:
    """Return the total weight of all trees when the fullest link is just full."""
    load: dict[tuple[int, int], float] = {}
    for tree, weight in trees.items():
        for level in tree:
            for one, other in level:
                pair = min(one, other), max(one, other)
                load[pair] = load.get(pair, 0.0) + weight
    return sum(trees.values()) / max(load[pair] / links[pair] for pair in load)


@st.composite
def joined_links(draw: st.DrawFn) -> tuple[int, dict[tuple[int, int], float]]:
    size = draw(st.integers(2, 9))
    bandwidth = st.floats(0.5, 8.0)
    links = {(draw(st.integers(0, rank - 1)), rank): draw(bandwidth) for rank in range(1, size)}
    for one in range(size):
        for other in range(one + 1, size):
            if draw(st.booleans()):
                links[one, other] = draw(bandwidth)
    return size, both_ways(links)


@given(given_links=joined_links(), pieces=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_any_joined_links_end_with_the_sum(
    given_links: tuple[int, dict[tuple[int, int], float]], pieces: int
) -> None:
    size, links = given_links
    schedule = partial(spanning_trees, links=links, pieces=pieces)
    counted = verify_schedule(allreduce(schedule), size)
    assert counted.volume.sum() == 2 * (size - 1) * counted.chunks
    for each in schedule(size):
        for source, destination, *_ in each.rows():
            assert (source, destination) in links


@pytest.mark.parametrize("size", [2, 3, 4, 6, 9])
def test_equal_links_give_the_stars_that_are_the_default(size: int) -> None:
    links = {(a, b): 1.0 for a in range(size) for b in range(size) if a != b}
    assert set(pack(size, links).values()) == {1}
    rounds = [tree.rows() for tree in spanning_trees(size, links)]
    assert rounds == [tree.rows() for tree in spanning_trees(size)]


def test_a_double_link_is_in_both_trees_of_a_triangle() -> None:
    links = both_ways({(0, 1): 2.0, (0, 2): 1.0, (1, 2): 1.0})
    trees = pack(3, links)
    edges = [{tuple(sorted(edge)) for level in tree for edge in level} for tree in trees]
    assert sorted(map(sorted, edges)) == [[(0, 1), (0, 2)], [(0, 1), (1, 2)]]
    assert set(trees.values()) == {1}


def test_a_ring_of_links_packs_to_its_best_rate() -> None:
    # Cutting a ring of p links into p parts allows the rate p / (p - 1) (Tutte; Nash-Williams
    # 1961).
    links = both_ways({(rank, (rank + 1) % 5): 1.0 for rank in range(5)})
    assert rate(pack(5, links), links) == pytest.approx(5 / 4)


def test_shares_follow_unequal_links_towards_the_best_rate() -> None:
    # A triangle of links 3, 2 and 1: separating all ranks allows 6 / 2, and separating rank 2
    # allows 1 + 2 = 3.
    links = both_ways({(0, 1): 3.0, (0, 2): 2.0, (1, 2): 1.0})
    assert rate(pack(3, links, shares=60), links) == pytest.approx(3.0, rel=0.05)


def test_a_slow_link_carries_a_small_share() -> None:
    links = both_ways({(0, 1): 10.0, (1, 2): 10.0, (0, 2): 1.0})
    rounds = list(spanning_trees(3, links))
    over = {True: 0, False: 0}
    for each in rounds:
        for source, destination, _, span, _ in each.rows():
            over[{source, destination} == {0, 2}] += span
    assert 0 < over[True] < over[False] / 8


def test_pieces_let_the_levels_of_a_tree_work_at_the_same_time() -> None:
    line = both_ways({(rank, rank + 1): 1.0 for rank in range(6)})
    whole = list(spanning_trees(7, line))
    piecewise = list(spanning_trees(7, line, pieces=4))
    assert len(whole) == 6  # depth 3 from the centre, up and down
    assert len(piecewise) == 6 + 3
    assert max(len(np.unique(each.chunk)) for each in piecewise) > 1


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ({(0, 1): 1.0, (1, 0): 1.0}, "do not connect rank 2 to rank 0"),
        ({(0, 1): 1.0, (1, 2): 1.0, (2, 1): 1.0}, "in both directions"),
        ({(0, 7): 1.0}, "ranks from 0 to 2"),
        ({(0, 1): 0.0}, "bandwidth above 0"),
    ],
)
def test_links_that_cannot_carry_trees_are_refused(
    links: dict[tuple[int, int], float], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        list(spanning_trees(3, links))


def test_no_pieces_are_refused() -> None:
    with pytest.raises(InvalidInput, match="pieces=0"):
        list(spanning_trees(3, pieces=0))
