"""Test the progress of a run: its share, speed, transferred bytes, and remaining time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from labkit.cluster.run_progress import WINDOW, RunProgress


def row(rank: int, step: int, **changes: Any) -> dict[str, Any]:
    """Return the row of a training step of 0.5 s, with 8 samples, 100 bytes, and four parts."""
    plain = {"rank": rank, "epoch": step // 4, "step": step, "loss": 1.0, "seconds": 0.5}
    plain |= {"compute_seconds": 0.25, "codec_seconds": 0.0, "communicate_seconds": 0.125}
    return plain | {"wait_seconds": 0.125, "wire_bytes": 100, "samples": 8} | changes


def tally(*told: tuple[str, dict[str, Any]], epochs: int = 5) -> RunProgress:
    made = RunProgress(epochs)
    made.add(told)
    return made


def test_speed_bytes_and_shares_of_each_rank() -> None:
    slow = {"seconds": 1.0, "wait_seconds": 0.625}
    found = tally(*(("step", row(0, k)) for k in range(3)), ("step", row(1, 0, **slow)))
    assert found.ranks[0].speed == pytest.approx(16)
    assert found.ranks[1].speed == pytest.approx(8)
    assert found.ranks[0].sent == 300
    assert found.ranks[0].shares == {
        "compute": 0.5,
        "codec": 0.0,
        "communicate": 0.25,
        "wait": 0.25,
    }
    assert found.ranks[1].shares["wait"] == pytest.approx(0.625)
    assert found.steps == 1  # the number of steps that both ranks have finished


def test_speed_is_that_of_the_last_steps() -> None:
    rows = [row(0, 0, seconds=100.0), *(row(0, k) for k in range(1, WINDOW + 1))]
    assert tally(*(("step", each) for each in rows)).ranks[0].speed == pytest.approx(16)


def test_a_rank_that_counts_no_samples_has_no_speed_and_does_not_hide_the_loss() -> None:
    silent = row(1, 0, samples=0, loss=math.nan)
    found = tally(("step", row(0, 0, loss=0.25)), ("step", silent))
    assert found.ranks[1].speed is None
    assert found.loss == 0.25


def test_the_share_that_is_done() -> None:
    found = tally(("plan", {"steps": 4}), *(("step", row(0, k)) for k in range(5)))
    assert found.share == pytest.approx(5 / 20)


def test_workers_at_their_own_pace_reach_the_whole_together() -> None:
    """Asynchronous workers share the 20 gradients of 5 epochs of 2 steps each."""
    uneven = [
        ("step", row(rank, k, epoch=k // 2))
        for rank, count in ((0, 14), (1, 6))
        for k in range(count)
    ]
    found = tally(("plan", {"steps": 2}), *uneven[:-5])
    assert found.share == pytest.approx(15 / 20)
    found.add(uneven[-5:])
    assert found.share == 1
    assert found.seconds_left in (None, 0)
    assert found.epoch == 4  # the last of five; the fast worker begins no sixth


def test_an_epoch_that_has_ended_is_done_although_late_gradients_were_dropped() -> None:
    found = tally(("plan", {"steps": 4}), *(("step", row(0, k)) for k in range(20)))
    found.add([("step", row(1, k)) for k in range(5)])
    assert found.share == pytest.approx(12.5 / 20)
    found.add([("epoch", {"epoch": 4, "step": 20, "accuracy": 0.5})])
    assert found.share == 1


def test_the_time_left_is_that_of_the_clock_without_the_first_steps() -> None:
    now = [100.0]
    found = RunProgress(5, clock=lambda: now[0])
    found.add([("plan", {"steps": 4}), ("step", row(0, 0)), ("step", row(0, 1))])
    assert found.seconds_left is None  # the first step compiles, so the speed is not known yet
    now[0] += 6.0
    found.add([("step", row(0, k)) for k in range(2, 5)])
    assert found.seconds_left == pytest.approx(15 * 6.0 / 3)
    now[0] += 60.0  # a validation takes this time
    found.add([("doing", {"what": "training"})])
    assert found.seconds_left == pytest.approx(15 * 6.0 / 3)


def test_an_epoch_of_unknown_length_is_known_when_it_has_ended() -> None:
    found = tally(("plan", {"steps": None}), *(("step", row(0, k)) for k in range(4)))
    assert found.share is None
    assert found.seconds_left is None
    found.add([("epoch", {"epoch": 0, "step": 4, "accuracy": 0.5})])
    assert found.share == pytest.approx(4 / 20)


def test_what_the_ranks_are_at() -> None:
    assert RunProgress(1).doing == "starting"
    assert tally(("doing", {"what": "checking equivalence"})).doing == "checking equivalence"
