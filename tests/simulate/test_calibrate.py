"""Test that fits recover the network that made the times, and report their error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.network import Network
from labkit.simulate import Measurement, calibrate, predict, simulate

SIZES = [1e3, 1e4, 1e5, 1e6, 1e7]


def sweep(
    network: Network, gamma: float, algorithms: list[str], size: int, noise: float = 0.0
) -> list[Measurement]:
    random = np.random.default_rng(0)
    return [
        Measurement(
            nbytes,
            simulate(name, size, nbytes, network, gamma=gamma).seconds
            * float(np.exp(noise * random.normal())),
            name,
            size,
        )
        for name in algorithms
        for nbytes in SIZES
    ]


@given(
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e7, 1e10),
    gamma=st.floats(1e-11, 1e-8),
    size=st.sampled_from([2, 4, 6, 7, 8]),
)
@settings(max_examples=40, deadline=None)
def test_a_fit_finds_the_network_that_made_the_times(
    latency: float, bandwidth: float, gamma: float, size: int
) -> None:
    # With 6 or 7 ranks, early messages slow others down on shared links, so no closed form exists.
    sharing = "fifo" if size in (6, 7) else "fair"
    made = Network(latency=latency, bandwidth=bandwidth, sharing=sharing)
    fit = calibrate(sweep(made, gamma, ["ring", "tree", "all_to_all", "butterfly"], size))
    assert fit.worst < 1e-3
    assert fit.alpha == pytest.approx(latency, rel=1e-2)
    assert fit.network().bandwidth == pytest.approx(bandwidth, rel=1e-1, abs=1e-3)


def test_noise_shows_in_the_error() -> None:
    made = Network.named("1GbE")
    fit = calibrate(sweep(made, 1e-10, ["ring", "tree"], 4, noise=0.05))
    assert 0.01 < fit.error < fit.worst < 0.2
    assert fit.network().latency == pytest.approx(made.latency, rel=0.1)
    assert fit.network().bandwidth == pytest.approx(made.bandwidth, rel=0.1)
    assert fit.count == 10


def test_where_adding_would_explain_all_sending_still_costs_something() -> None:
    """Test two ranks: master_worker adds as often as butterfly but sends twice; noise hides it."""
    times = {"master_worker": 2.4e-3, "butterfly": 2.6e-3}
    found = [
        Measurement(nbytes, seconds * nbytes / 2**24 + 4e-5, name)
        for name, seconds in times.items()
        for nbytes in (2**16, 2**24)
    ]
    fit = calibrate(found)
    assert (fit.gamma, fit.beta > 0) == (0.0, True)
    # A buffer crosses a link at least once and at most twice, in about 2.5 ms.
    assert 2**24 / 2.5e-3 / 1.1 < fit.network().bandwidth < 2 * 2**24 / 2.5e-3 * 1.1


def test_small_messages_count_as_much_as_large_ones() -> None:
    # With absolute errors, the largest times alone would decide, and the latency would be lost.
    rows = [Measurement(nbytes, 1e-4 + 2 * nbytes * 1e-8) for nbytes in SIZES]
    fit = calibrate([*rows, Measurement(1e9, 1.1 * 20)])
    assert fit.alpha == pytest.approx(0.5e-4, rel=0.15)


def test_adding_that_cannot_be_told_from_sending_counts_as_sending() -> None:
    network = Network(latency=1e-4, bandwidth=1e8)
    fit = calibrate(sweep(network, 4e-9, ["ring"], 2))
    assert fit.gamma == 0
    assert fit.beta == pytest.approx(1e-8 + 4e-9 / 2)
    assert fit.worst < 1e-9


def test_nothing_is_ever_negative() -> None:
    # A straight line through these super-linear times would start below zero.
    fit = calibrate([Measurement(nbytes, 1e-6 * nbytes**1.3) for nbytes in SIZES])
    assert min(fit.alpha, fit.beta, fit.gamma) >= 0


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Measurement(1, 1)],
        [Measurement(1, 1), Measurement(1, 0)],
        [Measurement(1, 1, size=1)] * 2,
    ],
)
def test_too_little_is_refused(rows: list[Measurement]) -> None:
    with pytest.raises(InvalidInput, match="allow no fit; give at least two"):
        calibrate(rows)


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    fit = calibrate([Measurement(nbytes, 1e-3) for nbytes in (1.0, 2.0, 4.0)])
    with pytest.raises(InvalidInput, match="measure larger buffers"):
        fit.network()


def test_predicted_stands_beside_measured_with_the_error() -> None:
    half = Network(latency=1e-4, bandwidth=1e8)
    rows = predict([Measurement(1e6, 0.02, "master_worker", 2)], half)
    (row,) = rows
    assert (row.algorithm, row.size, row.nbytes, row.measured) == ("master_worker", 2, 1e6, 0.02)
    assert row.predicted == pytest.approx(2 * (1e-4 + 1e-2)) == row.closed_form
    assert row.error == pytest.approx(0.01)


@pytest.mark.parametrize(("size", "sharing"), [(16, "fair"), (13, "fifo")])
def test_a_fit_predicts_other_algorithms_and_sizes(size: int, sharing: str) -> None:
    made = Network(latency=2e-5, bandwidth=5e8, sharing=sharing)
    fit = calibrate(sweep(made, 2e-10, ["ring", "tree"], 4))
    unseen = sweep(made, 2e-10, ["rabenseifner", "master_worker"], size)
    found = fit.network().model_copy(update={"sharing": sharing})
    assert max(abs(row.error) for row in predict(unseen, found, fit.gamma)) < 1e-6
