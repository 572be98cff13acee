"""Test the timing of alternating kinds of steps on a machine that slows down."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from labkit.bench import timing
from labkit.bench.peers.rank import Meeting, measure
from labkit.bench.timing import STEPS, WARM, InterleavedTimes, time_interleaved


def test_a_step_lasts_as_long_as_its_slowest_process(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.write_bytes(bytes(Meeting.size_of(2)))
    pair = [Meeting(path, rank, 2) for rank in (0, 1)]
    found: dict[int, dict[str, dict[str, list[float]]]] = {}
    count = [0, 0]

    def work(meeting: Meeting) -> None:
        def slow() -> None:
            count[meeting.rank] += 1
            time.sleep(0.02 if meeting.rank else 0.0)

        found[meeting.rank] = measure(meeting, {"slow": slow, "local": lambda: None}, repeats=2)

    threads = [threading.Thread(target=work, args=(meeting,)) for meeting in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert [len(medians) for medians in found[0]["seconds"].values()] == [2, 2]
    assert min(found[0]["seconds"]["slow"]) >= 0.02
    assert found[0]["added"]["local"] == [0.0, 0.0]
    assert min(found[0]["added"]["slow"]) >= 0.001
    assert count == [WARM + 2 * STEPS] * 2


def taken(
    monkeypatch: pytest.MonkeyPatch, cost: dict[str, float], slower: float
) -> InterleavedTimes:
    """Time steps with given durations on a simulated clock of a machine that slows down.

    Args: cost: initial duration (s) of a step of each kind; slower: share by which each second
        slows the machine down.
    """
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step(seconds: float) -> None:
        now[0] += seconds * (1 + slower * now[0])

    steps = {kind: (lambda seconds=seconds: step(seconds)) for kind, seconds in cost.items()}
    return time_interleaved(steps, lambda: None, lambda own: np.array([own]), repeats=5)


@pytest.mark.parametrize("local", [0.3, 0.06, 0.01])
def test_what_is_added_stands_out_though_the_machine_slows_down(
    monkeypatch: pytest.MonkeyPatch, local: float
) -> None:
    """In each turn, the machine slows down by 2 %, which exceeds the cost differences of kinds."""
    cost = {"local": local, "null": local, "step": 1.01 * local}
    found = taken(monkeypatch, cost, slower=0.1)
    first, last = (found.seconds["local"][place] for place in (0, -1))
    assert last > 1.1 * first
    speed = np.array(found.seconds["local"]) / local
    assert np.abs(np.array(found.added["null"]) / local).max() < 0.005 * speed.max()
    assert np.array(found.added["step"]) / local / speed == pytest.approx(0.01, abs=0.005)


def test_kinds_take_turns_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(timing, "TURN", 1e9)
    steps = {"local": lambda: log.append("l"), "step": lambda: log.append("s")}
    time_interleaved(steps, lambda: None, lambda own: np.array([own]), repeats=2)
    rounds = "".join(log)[2 * WARM + 3 :]
    forth, back = "l" * 10 + "s" * 10, "s" * 10 + "l" * 10
    assert rounds == 2 * (2 * (forth + back) + forth)


def test_a_call_of_several_steps_counts_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step(seconds: float) -> None:
        now[0] += seconds

    steps = {"local": lambda: step(1.0), "chain": lambda: step(15.0)}
    found = time_interleaved(
        steps, lambda: None, lambda own: np.array([own]), 2, counts={"chain": 10}
    )
    assert found.seconds["chain"] == pytest.approx([1.5, 1.5])
    assert found.added["chain"] == pytest.approx([0.5, 0.5])
