"""Test forecasts of messages that grow from round to round, as they do in the ranks' executor."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.forecast.allreduce_cost import Load, candidates, growing_rounds, load_cost
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import simulate

NET = Network(latency=1e-5, bandwidth=1e9)


@pytest.mark.parametrize("name", ALLREDUCE)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_load_that_does_not_grow_is_the_schedule_itself(name: str, size: int) -> None:
    same = Load("sparse", 1e9, dense=840_000)  # more bytes than the dense vector has
    rounds = list(growing_rounds(ALLREDUCE[name], size, same))
    plain = simulate(name, size, 840_000, NET)
    found = simulate(lambda _: rounds, size, max(int(each.span.max()) for each in rounds), NET)
    assert found.seconds == pytest.approx(plain.seconds, rel=1e-5)


def test_gathered_payloads_come_to_all_in_the_end() -> None:
    every = Load("gather", 1000).bytes_of(np.array([1.0, 2.0, 8.0]))
    assert every.tolist() == [1000, 2000, 8000]
    # A tree sends 1, 2 and 4 payloads up, then all 8 payloads down in each of three rounds.
    spans = [
        int(each.span.max()) for each in growing_rounds(ALLREDUCE["tree"], 8, Load("gather", 1000))
    ]
    assert spans == [1000, 2000, 4000, 8000, 8000, 8000]


def test_sparse_vectors_merge_and_turn_dense() -> None:
    load = Load("sparse", 8_000, dense=400_000)  # 1,000 of 100,000 values, with their indices
    one, two, most = load.bytes_of(np.array([1.0, 2.0, 1e6]))
    assert (one, most) == (pytest.approx(8_000), 400_000)
    assert 15_900 < two < 16_000
    seconds = [
        load_cost("ring", 8, Load("sparse", k, dense=400_000), NET).seconds
        for k in (80, 8_000, 8e5)
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(load_cost("ring", 8, Load("sum", 400_000), NET).seconds)


def test_who_is_far_behind_is_not_simulated_and_the_fastest_is_among_the_others() -> None:
    for size, nbytes in ((6, 100), (6, 1e8), (13, 1e6)):
        found = candidates(ALLREDUCE, size, nbytes, NET)
        every = {name: simulate(name, size, nbytes, NET).seconds for name in ALLREDUCE}
        assert min(found.values()) == pytest.approx(min(every.values()), rel=1e-9)
        assert len(found) < len(every)
