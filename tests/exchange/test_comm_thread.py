"""Test that the communication thread serves buckets in one order, and no wait lasts forever."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.communicator import WALL
from labkit.exchange.comm_thread import CommThread, Timeline


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(5)), st.lists(st.permutations(range(5)), min_size=1, max_size=4))
def test_buckets_are_served_in_the_fixed_order_whatever_order_they_are_issued_in(
    order: list[int], issued: list[list[int]]
) -> None:
    served: list[int] = []
    service = CommThread(served.append, order, Timeline(WALL))
    for step in issued:
        for bucket in step:
            service.issue(bucket)
        for bucket in random.Random(0).sample(step, len(step)):
            service.wait(bucket)
    assert served == order * len(issued)


def test_a_wait_returns_only_when_its_bucket_is_served() -> None:
    gate, served = threading.Event(), []

    def serve(bucket: int) -> None:
        gate.wait(60)
        served.append(bucket)

    service = CommThread(serve, [0, 1], Timeline(WALL))
    service.issue(0)
    service.issue(1)
    waiter = threading.Thread(target=service.wait, args=(1,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    gate.set()
    waiter.join(60)
    assert not waiter.is_alive()
    assert served == [0, 1]


def test_a_bucket_that_is_issued_again_is_waited_for_again() -> None:
    count = [0]

    def serve(bucket: int) -> None:
        time.sleep(0.01)
        count[0] += 1

    service = CommThread(serve, [0], Timeline(WALL))
    for step in range(1, 4):
        service.issue(0)
        service.wait(0)
        assert count[0] == step


def test_an_error_of_the_thread_reaches_every_waiter_at_once() -> None:
    def serve(bucket: int) -> None:
        raise KeyError("the cable is gone")

    service = CommThread(serve, [0, 1], Timeline(WALL))
    service.issue(0)
    for bucket in (0, 1):
        with pytest.raises(KeyError, match="the cable is gone"):
            service.wait(bucket)


def test_an_error_reaches_those_that_waited_before_it_happened() -> None:
    fail, heard = threading.Event(), []

    def serve(bucket: int) -> None:
        fail.wait(60)
        raise ValueError("no more ink")

    service = CommThread(serve, [0, 1], Timeline(WALL))
    service.issue(0)

    def wait(bucket: int) -> None:
        try:
            service.wait(bucket)
        except ValueError as error:
            heard.append(str(error))

    waiters = [threading.Thread(target=wait, args=(bucket,)) for bucket in (0, 1)]
    for waiter in waiters:
        waiter.start()
    fail.set()
    for waiter in waiters:
        waiter.join(60)
    assert heard == ["no more ink"] * 2


class ByHand:
    """A clock that advances only when a test says so."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def sleep(self, seconds: float) -> None:
        self.moment += seconds

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        self.moment = max(self.moment, moment)


def test_the_order_changes_once_after_so_many_rounds() -> None:
    clock = ByHand()
    served: list[int] = []
    told: list[tuple[list[float], list[float]]] = []

    def reorder(ready: list[float], seconds: list[float]) -> list[int]:
        told.append((ready, seconds))
        return [2, 0, 1]

    def serve(bucket: int) -> None:
        served.append(bucket)
        clock.sleep(0.25 if bucket == 1 else 0.0)

    service = CommThread(serve, [0, 1, 2], Timeline(clock))
    service.reorder_after(2, reorder)
    for _ in range(4):
        for bucket in (2, 1, 0):
            service.issue(bucket)  # the bucket to serve first is issued last
            clock.sleep(0.5 if bucket else 0.0)
        for bucket in range(3):
            service.wait(bucket)
    assert served == [0, 1, 2] * 2 + [2, 0, 1] * 2
    [(ready, seconds)] = told
    assert ready == [1.0, 0.5, 0.0]  # the times at which the buckets were issued
    assert seconds == [0.0, 0.25, 0.0]


def test_the_timeline_has_what_was_served_and_waited_for() -> None:
    timeline = Timeline(WALL)
    service = CommThread(lambda bucket: time.sleep(0.005), [0, 1], timeline)
    timeline.step = 7
    for bucket in (1, 0):
        service.issue(bucket)
    for bucket in (0, 1):
        service.wait(bucket)
    events = timeline.of_step(7)
    served = [(kind, bucket) for kind, _, bucket, _, _ in events if kind == "communicate"]
    assert served == [("communicate", 0), ("communicate", 1)]
    assert sorted(event[2] for event in events if event[0] == "wait") == [0, 1]
    assert all(stop - start >= 0.005 for kind, _, _, start, stop in events if kind == served[0][0])


def test_a_step_that_failed_before_it_waited_leaves_nothing_done() -> None:
    served: list[int] = []

    def serve(bucket: int) -> None:
        time.sleep(0.05)
        served.append(bucket)

    service = CommThread(serve, [0], Timeline(WALL))
    service.issue(0)
    service.settle()  # the step has failed, so nobody waits for the bucket
    service.issue(0)
    service.wait(0)
    assert served == [0, 0]
