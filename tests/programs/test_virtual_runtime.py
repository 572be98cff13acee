"""Test the virtual clock with programs that only compute numbers, on links with known times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_programs import FAST, SIZE, Numbers, play

from labkit.common.errors import LabkitError
from labkit.network import ComputeTime, Slowdown
from labkit.programs import EventLog, Message, Receive, Send, placed
from labkit.programs.actions import TimingModel
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.strategies import ParameterServer


def test_a_synchronous_server_takes_what_the_formula_says() -> None:
    # n vectors share the server's link in each direction, and each direction adds one latency.
    workers, nbytes = 4, 4 * SIZE * 8
    world, scenes, _ = play(ParameterServer(1), workers)
    step = 0.1 + 2 * (workers * nbytes / FAST.bandwidth + FAST.latency)
    # After the last answer, an empty message takes one more latency.
    assert world.now == pytest.approx(10 * step + FAST.latency, rel=0.01)
    assert [row["seconds"] for row in scenes.rows] == pytest.approx([step] * 40, rel=1e-6)


def test_both_transports_are_the_same_flows() -> None:
    one, two = (
        play(ParameterServer(2, synchronous=False, transport=transport), 3)
        for transport in ("one_sided", "two_sided")
    )
    assert one[2].events == two[2].events
    assert one[0].now == two[0].now


def test_servers_divide_their_links() -> None:
    one, four = (play(ParameterServer(n, placement="sharded"), 4)[0].now for n in (1, 4))
    transfer = 4 * 4 * SIZE * 8 / FAST.bandwidth
    assert one - four == pytest.approx(10 * 2 * transfer * 3 / 4, rel=0.02)


def test_colocated_servers_share_the_link_of_their_worker() -> None:
    apart, together = (
        play(ParameterServer(4, placement="sharded", colocated=where), 4)[0].now
        for where in (False, True)
    )
    # A worker's own shard uses no link, so three of four shards are sent.
    assert together < apart
    only = play(ParameterServer(1, colocated=True), 4)[0].now
    assert only > together


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_equal_asynchronous_workers_are_n_minus_one_behind(workers: int) -> None:
    _, _, diary = play(ParameterServer(1, synchronous=False), workers, steps=40)
    late = [event["staleness"] for event in diary.events][5 * workers :]
    assert np.mean(late) == pytest.approx(workers - 1, rel=0.1)


def test_as_many_gradients_as_the_epochs_have_whoever_computes_them() -> None:
    slow = {0: Slowdown(compute=5.0)}
    _, scenes, diary = play(ParameterServer(1, synchronous=False), 3, slow=slow)
    assert len(diary.events) == len(scenes.rows) == 3 * 10
    assert scenes.steps[0] < 10 < scenes.steps[1]
    assert scenes.epochs == [(0, 3)]


def test_servers_that_wait_keep_their_weights_at_the_end_of_each_epoch() -> None:
    _, scenes, _ = play(ParameterServer(2), 3, steps=5, epochs=2)
    assert sorted(scenes.epochs) == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_backup_workers_are_not_waited_for() -> None:
    slow = {2: Slowdown(compute=4.0)}
    waits = play(ParameterServer(1), 3, slow=slow)[0].now
    world, _, diary = play(ParameterServer(1, backup_workers=1), 3, slow=slow)
    assert world.now < 0.5 * waits
    dropped = [event for event in diary.events if event["update"] < 0]
    assert {event["worker"] for event in dropped} == {2}
    updates = [event["update"] for event in diary.events if event["update"] >= 0]
    assert sorted(updates) == sorted([*range(10), *range(10)])  # each update has two gradients


def test_the_same_laws_give_the_same_run_bit_for_bit() -> None:
    given: Any = {"compute": ComputeTime(0.1, distribution="lognormal"), "steps": 20}
    strategy = ParameterServer(2, synchronous=False)
    first, again = (play(strategy, 4, **given) for _ in range(2))
    assert first[2].events == again[2].events
    assert first[0].now == again[0].now
    for server in (4, 5):
        assert first[1].held[server].tobytes() == again[1].held[server].tobytes()


def test_a_worker_that_is_slower_changes_nobody_elses_times() -> None:
    given: Any = {"compute": ComputeTime(0.1, distribution="exponential"), "network": None}
    strategy = ParameterServer(1, synchronous=False)
    _, plain, _ = play(strategy, 3, **given)
    _, slower, _ = play(strategy, 3, slow={1: Slowdown(compute=3.0)}, **given)

    def times(scenes: Numbers, worker: int) -> list[float]:
        return [row["compute_seconds"] for row in scenes.rows if row["rank"] == worker][:5]

    assert times(plain, 0) == pytest.approx(times(slower, 0), abs=1e-9)
    assert [3 * each for each in times(plain, 1)] == pytest.approx(times(slower, 1), abs=1e-9)


def test_the_order_of_another_run_gives_its_weights() -> None:
    strategy = ParameterServer(2, synchronous=False)
    _, ours, diary = play(strategy, 3, compute=ComputeTime(0.1, distribution="exponential"))
    script: dict[int, list[tuple[int, int]]] = {3: [], 4: []}
    for event in diary.events:
        script[int(event["server"])].append((int(event["worker"]), int(event["step"])))
    other: Any = {"compute": ComputeTime(0.3), "network": None}
    _, forced, _ = play(strategy, 3, script=script, **other)
    _, free, _ = play(strategy, 3, **other)
    for server in (3, 4):
        assert forced.held[server].tobytes() == ours.held[server].tobytes()
    assert any(free.held[s].tobytes() != ours.held[s].tobytes() for s in (3, 4))


def test_a_message_that_is_later_is_applied_later() -> None:
    strategy = ParameterServer(1, synchronous=False)
    _, _, plain = play(strategy, 3)
    _, _, later = play(strategy, 3, later={(1, 2): 0.5})

    def arrival(diary: EventLog) -> float:
        return next(e["delivered"] for e in diary.events if (e["worker"], e["step"]) == (1, 2))

    assert arrival(later) == pytest.approx(arrival(plain) + 0.5)
    before = [event for event in plain.events if event["applied"] < arrival(plain)]
    assert later.events[: len(before)] == before


def test_a_pause_stops_a_worker_and_then_lets_it_go_on() -> None:
    slow = {0: Slowdown(pause=(0.25, 1.25))}
    _, scenes, _ = play(ParameterServer(1, synchronous=False), 1, network=None, slow=slow)
    seconds = [row["compute_seconds"] for row in scenes.rows]
    assert seconds == pytest.approx([0.1, 0.1, 1.1, *[0.1] * 7])


def test_programs_that_wait_for_each_other_are_named() -> None:
    def waits(other: int) -> Any:
        yield Receive(other)

    diary = EventLog(Numbers(), 1)
    laws = TimingModel(ComputeTime(0.1), {}, 0)
    world = VirtualRuntime({0: waits(1), 1: waits(0)}, [0, 1], Numbers(), diary, laws)
    with pytest.raises(LabkitError, match=r"programs \[0, 1\] wait for messages"):
        world.play()


@pytest.mark.parametrize("sharing", ["fair", "fifo"])
def test_two_messages_share_the_link_to_one_place(sharing: Any) -> None:
    came: list[float] = []

    def sends(to: int) -> Any:
        yield Send(to, Message(0, np.zeros(SIZE)))

    def receives() -> Any:
        for _ in range(2):
            message = yield Receive()
            came.append(message.delivered)

    network = FAST.model_copy(update={"sharing": sharing})
    laws = TimingModel(ComputeTime(0.1), {}, 0)
    diary = EventLog(Numbers(), 1)
    programs = {0: sends(2), 1: sends(2), 2: receives()}
    VirtualRuntime(programs, [0, 1, 2], Numbers(), diary, laws, network).play()
    assert came[-1] == pytest.approx(2 * 8e-3 + 1e-3)
    assert came[0] == pytest.approx(came[-1] if sharing == "fair" else 9e-3)


def test_parts_of_no_weights_do_no_harm() -> None:
    parts = placed([(3,), (2,)], 4, "round_robin")
    assert [part.size for part in parts] == [3, 2, 0, 0]
    _, scenes, _ = play(ParameterServer(6), 2)
    assert len(scenes.rows) == 2 * 10
