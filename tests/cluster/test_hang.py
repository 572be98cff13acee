"""Test what a notebook reports about each rank after a timeout, if one rank hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.cluster.calls import RankError


def test_past_the_limit_each_rank_is_told_with_call_round_and_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    def train(communicator: Any, told: Path) -> None:
        def lose_the_way() -> None:
            while not told.exists():
                time.sleep(0.01)

        buffer = np.ones(6)
        communicator.allreduce(buffer, "ring", "the exchange")  # all ranks make this call
        if communicator.rank == 1:
            lose_the_way()
        try:
            communicator.allreduce(buffer, "ring", "the exchange")
        finally:
            told.touch()

    with (
        Cluster(workers=4, name=cluster.name, timeout=4) as impatient,
        pytest.raises(
            RankError, match="rank 1 did not reach the call in which other ranks wait: WaitTooLong"
        ) as caught,
    ):
        impatient.call(train, tmp_path / "told", ranks=3)
    text = str(caught.value)
    assert "in the exchange (ring of float64[6]): rank 1 is in work after the exchange" in text
    first, *others = text.split("; rank ")
    assert "lose_the_way" in first
    assert len(others) == 2
    for other in others:
        # Rank 2 has sent its data and waits for rank 1; rank 0 is one round further.
        assert " waits there too, round " in other
        assert "called from cluster/test_hang.py:29 train" in other
