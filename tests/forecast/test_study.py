"""Test questions about forecasts: each answer agrees with the forecasts themselves."""

from __future__ import annotations

from math import inf

import pytest
from sample_calibrations import calibration, experiment

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.compression import Float16
from labkit.forecast import Study
from labkit.forecast.study import _last
from labkit.network import Network

LINK = Network(latency=1e-5, bandwidth=1e9)
RING = lk.AllReduce(algorithm="ring")
STUDY = Study(experiment(strategy=RING, workers=1), calibration(), LINK)
SPARED = lk.ParameterAveraging(period=8)


def test_workers_until_is_the_last_number_before_efficiency_falls() -> None:
    last = STUDY.workers_until(0.5)
    assert last is not None
    assert STUDY.at(last).weak_efficiency >= 0.5 > STUDY.at(last + 1).weak_efficiency
    assert STUDY.workers_until(0.0) is None
    assert STUDY.workers_until(1.0) == 1


def test_workers_until_asks_for_powers_of_two_first() -> None:
    asked: list[int] = []

    def holds(workers: int) -> bool:
        asked.append(workers)
        return workers < 11 or workers > 500

    assert _last(holds, 10_000) == 10
    assert asked[:4] == [2, 4, 8, 16]
    assert max(asked) == 16
    assert _last(lambda n: n < 99, 100) == 98
    assert _last(lambda n: True, 100) is None


def test_who_never_gains_and_who_always_does_has_no_bandwidth_at_which_that_changes() -> None:
    study = Study(experiment(strategy=RING, workers=4), calibration(), LINK)
    assert study.bandwidth_until(RING) == 0.0
    assert study.bandwidth_until(SPARED) is None  # this strategy also communicates less often
    assert study.bandwidth_until(lk.AllReduce(algorithm="master_worker"), SPARED) == 0.0


def test_a_compressor_pays_up_to_its_bandwidth_and_not_beyond() -> None:
    study = Study(experiment(strategy=RING, workers=4), calibration(Float16()), LINK)
    less = lk.AllReduce(algorithm="ring", compressor=Float16())
    edge = study.bandwidth_until(less)
    assert edge is not None
    for factor, pays in ((0.99, True), (1.01, False)):
        link = LINK.model_copy(update={"bandwidth": factor * edge})
        one = study.at(network=link, strategy=less).seconds
        assert (one < study.at(network=link).seconds) == pays


def test_weak_keeps_rows_and_strong_divides_them() -> None:
    assert STUDY.at(8).rows == 8 * STUDY.experiment.batch_size
    strong = Study(experiment(strategy=RING, workers=1), calibration(), LINK, weak=False)
    assert strong.at(8).rows == STUDY.experiment.batch_size
    assert strong.efficiency(strong.at(8)) == strong.at(8).strong_efficiency


def test_the_fewest_servers_that_are_nearly_the_fastest_are_enough() -> None:
    servers = [lk.ParameterServer(servers=count) for count in (1, 2, 4)]
    chosen = STUDY.servers_needed(servers, 4)
    times = [STUDY.at(4, strategy=server).seconds for server in servers]
    assert STUDY.at(4, strategy=chosen).seconds <= 1.05 * min(times)
    with pytest.raises(InvalidInput, match="no server strategies to compare"):
        STUDY.servers_needed([])


def test_a_slow_rank_holds_up_all_who_wait_for_it() -> None:
    assert STUDY.slow_rank(1.0, 4) == pytest.approx(0)
    assert STUDY.slow_rank(3.0, 4) > STUDY.slow_rank(2.0, 4) > 0


def test_a_map_has_all_places_and_times_to_a_target_are_of_those_who_come_there() -> None:
    ways = {"ring": RING, "seldom": SPARED}
    places = list(STUDY.map(ways, [2, 4], [1e6, 1e9], [1e-5]))
    assert [(place.workers, place.bandwidth) for place in places] == [
        *((2, 1e6), (2, 1e9), (4, 1e6), (4, 1e9)),
    ]
    first = places[0]
    link = LINK.model_copy(update={"bandwidth": 1e6})
    assert first.seconds["ring"] == STUDY.at(2, link, RING).seconds
    ring = first.seconds["ring"]
    there = first.to_target({"ring": [8, 10, 30]})
    assert there.seconds == {"ring": 10 * ring}
    assert there.bands == {"ring": (8 * ring, 30 * ring)}
    assert first.bands is None
    # The other strategies' epochs to the target are unknown.
    assert first.to_target({"ring": [10]}).bands == {"ring": (0.0, inf)}
