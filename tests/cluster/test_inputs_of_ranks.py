"""Test that a run records the files and modules that only its ranks read."""

from __future__ import annotations

from pathlib import Path

import labkit as lk
from labkit.communicator import Communicator
from labkit.records import provenance


def read_file(communicator: Communicator, name: str) -> int:
    return len(Path(name).read_text())


def test_files_that_ranks_read_are_recorded(cluster: lk.Cluster, tmp_path: Path) -> None:
    Path("of_ranks.csv").write_text("1,2")
    assert cluster.call(read_file, "of_ranks.csv") == [3] * cluster.workers
    provenance.write(tmp_path, begin=True)
    assert "of_ranks.csv" in provenance.read(tmp_path)["files"]
    experiment = lk.Experiment(model="mlp", dataset="digits", workers=2, epochs=1, verify=False)
    run = cluster.run(experiment)
    assert "tensorflow" in run.provenance["imports"]
    assert run.provenance["packages"]["tensorflow"] == run.environment["tensorflow"]
