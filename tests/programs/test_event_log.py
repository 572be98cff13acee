"""Test that the sender alone counts each message, with the bytes of the method's formula."""

from __future__ import annotations

from typing import Any

import pytest
from sample_programs import SIZE, play

from labkit import (
    AsynchronousDiLoCo,
    Codistillation,
    Downpour,
    ElasticAveraging,
    Gossip,
    ParameterAveraging,
    ParameterServer,
)

WORKERS, STEPS = 4, 20
MODEL = 8 * 4 * SIZE  # bytes
SHARE = 8  # bytes of the weight factor that a gossiping worker sends
RING = 2 * (WORKERS - 1) / WORKERS  # share of the buffer that each worker sends


@pytest.mark.parametrize(
    ("strategy", "each", "agreed"),
    [
        (ParameterAveraging(1), RING * MODEL, 0),
        (ParameterAveraging(4), RING * MODEL / 4, 0),
        (
            ParameterAveraging(4, fragments=4, outer_optimizer="nesterov"),
            RING * MODEL * 23 / 4 / STEPS,
            0,
        ),
        # Workers exchange at steps 4, 8, 12 and 16, and after the last step, when no server
        # answers.
        (ElasticAveraging(0.1, period=4, center="allreduce"), RING * MODEL * 5 / STEPS, 0),
        (ElasticAveraging(0.1, period=4), (2 * 4 + 1) * MODEL / STEPS, 0),
        (AsynchronousDiLoCo(4), 2 * MODEL / 4, 0),
        # At the end of the epoch, all workers agree on one number.
        (Gossip("ring"), 2 * (MODEL + SHARE), RING * 8),
        (Gossip("exponential"), MODEL + SHARE, RING * 8),
        (Gossip("random_pairs"), MODEL + SHARE, RING * 8),
        # At steps 4, 8 and 12, each worker sends to the three others for the next period.
        (Codistillation(4, exchange="weights"), 3 * 3 * MODEL / STEPS, 0),
        (Codistillation(4), 3 * 12 * 8 * 10 / STEPS, 0),
        (ParameterServer(2), 2 * MODEL, 0),  # servers have no rows, so workers also count answers
        (Downpour(push_every=2, fetch_every=4), (1 / 2 + 1 / 4) * MODEL, 0),
    ],
    ids=lambda given: type(given).__name__ if hasattr(given, "uses_programs") else "",
)
def test_bytes_are_those_of_the_formula(strategy: Any, each: float, agreed: float) -> None:
    _, scenes, _ = play(strategy, WORKERS, steps=STEPS)
    for worker in range(WORKERS):
        own = [row for row in scenes.rows if row["rank"] == worker]
        assert len(own) == STEPS
        assert sum(row["wire_bytes"] for row in own) == pytest.approx(each * STEPS + agreed)


def test_what_is_sent_before_a_gradient_counts_in_its_step() -> None:
    rows = play(Gossip("ring"), WORKERS, steps=STEPS)[1].rows
    assert {row["wire_bytes"] for row in rows if row["step"] < STEPS - 1} == {2 * (MODEL + SHARE)}


def test_ears_answer_for_the_workers_beside_them() -> None:
    """Test that an active worker counts weights sent and received, and a passive worker none."""
    rows = play(Gossip("ring", asynchronous=True), WORKERS, steps=STEPS)[1].rows
    assert {row["wire_bytes"] for row in rows if row["rank"] % 2 == 0} == {2 * MODEL}
    assert {row["wire_bytes"] for row in rows if row["rank"] % 2} == {0}
