"""How far gossiping replicas are apart, from runs made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import write_run

from labkit.figures import consensus, consensus_reading, slow_worker_reading
from labkit.programs import Roles
from labkit.records.run import Run


def gossiped(
    root: Path, topology: str | None, distance: float, seconds: float = 30.0, **more: bool
) -> Run:
    """A run on this graph, or of an allreduce, with this distance after the last epoch."""
    epochs: list[dict[str, Any]] = [
        {"epoch": e, "step": 2 * (e + 1), "seconds": 1.0} for e in (0, 1)
    ]
    if topology is not None:
        epochs = [e | {"consensus_distance": distance * (2 - e["epoch"])} for e in epochs]
    found = {"clock": "virtual", "network": "wan", "test_accuracy": 0.9, "epochs": epochs}
    found |= {"train_seconds": seconds, "wire_bytes_per_step": 1e6}
    strategy = (
        {"name": "Gossip", "topology": topology} | more if topology else {"name": "AllReduce"}
    )
    return write_run(root, measured=found, strategy=strategy, workers=8)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    graphs = [gossiped(tmp_path, *each) for each in (("ring", 0.5), ("random_pairs", 0.1))]
    return [gossiped(tmp_path, None, 0.0, 90.0), *graphs]


def test_distances_fall_by_epochs(runs: list[Run]) -> None:
    figure = consensus(runs)
    assert figure.layout.title.text == "Consensus distance · virtual clock · network wan"
    assert [list(t.y) for t in figure.data if t.x[0] is not None] == [[1.0, 0.5], [0.2, 0.1]]


def test_the_reading_names_gap_and_distance(runs: list[Run]) -> None:
    said = consensus_reading(runs)
    assert "spectral gap 0.195, replicas are 0.5 apart at the end" in said
    assert "all have the same weights" in said
    assert said.count(": it came") == 3
    assert "did **not** come" not in said


def test_and_says_what_did_not_come(tmp_path: Path) -> None:
    runs = [gossiped(tmp_path, None, 0.0, 9.0), gossiped(tmp_path, "ring", 0.1)]
    said = consensus_reading([*runs, gossiped(tmp_path, "random_pairs", 0.5)])
    assert said.count("it did **not** come") == 2


def test_an_epoch_with_a_slow_worker_is_told_by_who_waits(tmp_path: Path) -> None:
    together = gossiped(tmp_path, None, 0.0, 90.0)
    for seconds, said in ((15.0, ": it came"), (30.0, ": it did **not** come")):
        free = gossiped(tmp_path, "ring", 0.1, seconds, asynchronous=True)
        told = slow_worker_reading([together, free])
        assert "**ring, asynchronous**" in told
        assert said in told


def test_the_distance_is_the_root_mean_square() -> None:
    roles = Roles(3, [], 1, 1, np.zeros(2), [0, 1, 2])
    parts = {0: np.array([0.0, 0.0]), 1: np.array([3.0, 0.0]), 2: np.array([0.0, 6.0])}
    # The mean is (1, 2): squared distances are 5, 8 and 17.
    assert roles.consensus_distance(parts) == pytest.approx(np.sqrt(30 / 3))
