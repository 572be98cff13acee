"""Test that closed forms equal the simulator, and the textbook where both apply."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.network import Network, Slowdown
from labkit.schedules import ALLREDUCE
from labkit.simulate import AlphaBetaCost, closed_form, exact_form, modelled, simulate, textbook

NET = Network(latency=0.5, bandwidth=4.0)


def test_every_allreduce_has_both_forms() -> None:
    for each in ALLREDUCE.values():
        assert isinstance(each.cost(5), AlphaBetaCost)
        assert each.critical_paths(5)


@given(
    name=st.sampled_from(list(ALLREDUCE)),
    size=st.integers(1, 17),
    nbytes=st.floats(0, 1e6),
    latency=st.floats(0, 10),
    gamma=st.floats(0, 10),
)
@settings(max_examples=300, deadline=None)
def test_the_simulator_takes_the_modelled_time_at_every_size(
    name: str, size: int, nbytes: float, latency: float, gamma: float
) -> None:
    """Test FIFO links, and shared links where no early message meets another."""
    network = Network(latency=latency, bandwidth=2.0, sharing="fifo")
    expected = closed_form(name, size, nbytes, network, gamma)
    assert simulate(name, size, nbytes, network, gamma=gamma).seconds == pytest.approx(
        expected, rel=1e-9
    )
    if size & (size - 1) == 0 or name in ("ring", "all_to_all", "master_worker", "spanning_trees"):
        shared = Network(latency=latency, bandwidth=2.0)
        found = simulate(name, size, nbytes, shared, gamma=gamma).seconds
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["tree", "butterfly", "rabenseifner", "ring"])
def test_textbook_and_model_agree_on_powers_of_two(name: str, size: int) -> None:
    assert modelled(name, size) == (textbook(name, size),)


@pytest.mark.parametrize("name", list(ALLREDUCE))
@pytest.mark.parametrize("size", range(1, 18))
def test_the_model_is_never_slower_than_the_textbook(name: str, size: int) -> None:
    by_book = textbook(name, size).seconds(100.0, NET, gamma=0.1)
    assert closed_form(name, size, 100.0, NET, gamma=0.1) <= by_book + 1e-9


def test_textbook_forms_at_eight_ranks() -> None:
    assert textbook("all_to_all", 8) == AlphaBetaCost(7, 7, 7)
    assert textbook("master_worker", 8) == AlphaBetaCost(14, 14, 7)
    assert textbook("tree", 8) == AlphaBetaCost(6, 6, 3)
    assert textbook("butterfly", 8) == AlphaBetaCost(3, 3, 3)
    assert textbook("rabenseifner", 8) == AlphaBetaCost(6, 14 / 8, 7 / 8)
    assert textbook("ring", 8) == AlphaBetaCost(14, 14 / 8, 7 / 8)


def test_at_the_crossover_both_take_as_long() -> None:
    ring, tree = textbook("ring", 8), textbook("tree", 8)
    size = ring.crossover(tree, NET, gamma=0.1)
    assert size is not None
    assert ring.seconds(size, NET, 0.1) == pytest.approx(tree.seconds(size, NET, 0.1))
    assert tree.seconds(size / 2, NET, 0.1) < ring.seconds(size / 2, NET, 0.1)


def test_one_that_is_always_ahead_has_no_crossover() -> None:
    ring, rabenseifner = textbook("ring", 8), textbook("rabenseifner", 8)
    assert ring.crossover(rabenseifner, NET) is None
    assert textbook("master_worker", 8).crossover(ring, NET) is None


def test_an_unknown_name_is_answered_with_the_names() -> None:
    for form in (textbook, modelled):
        with pytest.raises(InvalidInput, match=r"'mpi'; allowed: .*ring"):
            form("mpi", 2)


@pytest.mark.parametrize("sharing", ["fair", "fifo"])
def test_an_exact_form_is_what_the_rows_take(sharing: str) -> None:
    names = [*ALLREDUCE, "allgather_ring", "reduce_scatter_ring"]
    for hosts, sizes in ((None, (2, 3, 4, 7, 12, 16)), (2, (2, 4, 6)), (3, (6, 9)), (4, (4, 12))):
        uplinks = {} if hosts is None else {"host_latency": 1e-6, "host_bandwidth": 3e9}
        network = Network(latency=1e-5, bandwidth=1e9, hosts=hosts, sharing=sharing, **uplinks)
        told = set()
        for name, size, gamma in product(names, sizes, (0.0, 1e-10)):
            form = exact_form(name, size, 1e6, network, gamma)
            if form is not None:
                told.add(name)
                seconds = simulate(name, size, 1e6, network, gamma=gamma).seconds
                assert form == pytest.approx(seconds, rel=1e-9), (name, size, hosts)
        wanted = {"two_level"} if sharing == "fair" else set()
        power = {"hierarchical"} if hosts in (2, 4) else set()
        assert told == (set(names) if hosts is None else wanted | power)


def test_there_is_no_exact_form_where_links_differ() -> None:
    plain = Network(latency=1e-5, bandwidth=1e9)
    for update in ({"jitter": 1e-3}, {"stragglers": {0: Slowdown(transfer=2)}}, {"hosts": 3}):
        assert exact_form("ring", 4, 1e6, plain.model_copy(update=update)) is None
