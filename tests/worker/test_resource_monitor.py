"""Test the samples of processor time, memory and traffic of a rank."""

from __future__ import annotations

import time

import numpy as np

from labkit import Cluster, Experiment
from labkit.worker.resource_monitor import ResourceMonitor


def test_work_and_memory_are_seen() -> None:
    with ResourceMonitor(interval=0.05) as monitor:
        kept = np.ones(4_000_000)  # 32 MB
        end = time.process_time() + 0.3
        while time.process_time() < end:
            kept += 1
    first, last = monitor.rows[0], monitor.rows[-1]
    assert first["cpu_seconds"] == first["sent_bytes"] == 0
    assert 0.25 < last["cpu_seconds"] < last["seconds"] * 8
    assert max(row["memory_bytes"] for row in monitor.rows) > first["memory_bytes"] + 20e6
    seconds = [row["seconds"] for row in monitor.rows]
    assert seconds == sorted(seconds)
    assert len(seconds) > 3


def test_a_long_training_has_few_samples_from_its_start_to_its_end() -> None:
    with ResourceMonitor(interval=0.001, most=8) as monitor:
        time.sleep(0.3)
    assert len(monitor.rows) <= 9
    assert monitor.rows[0]["seconds"] < 0.1
    assert monitor.rows[-1]["seconds"] >= 0.3


def test_a_run_has_the_samples_of_each_rank(cluster: Cluster) -> None:
    run = cluster.run(Experiment(dataset="digits", workers=2, epochs=1, verify=False))
    table = run.resources
    assert set(table["rank"]) == {0, 1}
    for _, samples in table.groupby("rank"):
        assert len(samples) >= 2
        assert samples["cpu_seconds"].iloc[-1] > 0
        assert (samples["memory_bytes"] > 100e6).all()
