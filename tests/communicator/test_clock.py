"""Test that ranks measure all waiting times by the clock that is given to them."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.communicator import WALL, Communicator, WaitTooLong, computing, single_rank, world
from labkit.network import Network

NETWORK = Network(latency=100.0, bandwidth=1e3, stragglers={0: 3.0})  # the tests do not wait for it
NBYTES = 40_000


class ManualClock:
    """A clock that advances only when somebody sleeps."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def sleep(self, seconds: float) -> None:
        self.moment += seconds

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        self.moment = max(self.moment, moment)


@pytest.mark.parametrize("exact", [True, False])
def test_the_wall_clock_wakes_up_when_it_was_asked_to(exact: bool) -> None:
    moment = WALL.now() + 0.01
    WALL.sleep_until(moment, exact)
    assert moment <= WALL.now()
    WALL.sleep_until(moment - 10.0, exact)  # is over
    assert WALL.now() < moment + 5.0


def on_its_own_clock(communicator: Any, act: Any) -> tuple[float, float]:
    """Return the seconds of the manual clock and of the wall clock that two ranks' action takes."""
    communicator.barrier()
    clock, start = ManualClock(), time.monotonic()
    own = world([0, 1], math.inf, NETWORK, clock)
    act(own)
    taken = clock.now(), time.monotonic() - start
    assert own.split(0).clock is clock
    return taken


def exchange(own: Communicator) -> None:
    own.allreduce(np.ones(NBYTES, np.uint8), "ring")


def hand_over(own: Communicator) -> None:
    data = np.ones(NBYTES // 2, np.uint8)
    for sender in (0, 1):
        if own.rank == sender:
            own.send(data, 1 - sender)
        else:
            own.recv(data, sender)
        own.barrier()


def put(own: Communicator) -> None:
    window = own.window(NBYTES // 2)
    for _ in range(2):
        window.put(np.ones(NBYTES // 2, np.uint8), 1 - own.rank)


@pytest.mark.parametrize("act", [exchange, hand_over, put])
def test_an_emulated_network_keeps_the_clock_it_is_given(cluster: Cluster, act: Any) -> None:
    """Two successive messages take seconds of the given clock, not of the wall clock."""
    expected = 2 * NETWORK.latency + NBYTES / NETWORK.bandwidth
    for passed, real in cluster.call(on_its_own_clock, act, ranks=2):
        assert passed >= expected if act is not hand_over else passed >= expected / 2
        assert real < expected / 4


def test_a_slow_rank_computes_longer_by_the_clock_it_is_given(cluster: Cluster) -> None:
    def compute(communicator: Any) -> float:
        clock = ManualClock()
        own = Communicator(single_rank()._comm, network=NETWORK, clock=clock)
        before = clock.now()
        with computing(own)():
            clock.sleep(100.0)
        return clock.now() - before

    assert cluster.call(compute, ranks=1) == [pytest.approx(300.0)]


def test_patience_ends_by_the_clock_it_is_given(cluster: Cluster) -> None:
    def wait_in_vain(communicator: Any) -> tuple[str, float, float]:
        clock, start = ManualClock(), time.monotonic()
        own = Communicator(single_rank()._comm, timeout=20.0, clock=clock)
        try:
            own.recv(np.zeros(1), 0)
        except WaitTooLong as error:
            return str(error), clock.now(), time.monotonic() - start
        return "", 0.0, 0.0

    ((message, passed, real),) = cluster.call(wait_in_vain, ranks=1)
    assert "rank 0 has waited 20 s in recv from rank 0" in message
    assert passed > 20.0
    assert real < 10.0
