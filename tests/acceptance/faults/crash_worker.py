"""Train with checkpoints until another process kills this process.

Usage: python -m tests.acceptance.faults.crash_worker CLUSTER WORKERS FILE (cluster name, number of
ranks, experiment file)
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from labkit.cluster import Cluster

EVERY = 7  # number of steps between two checkpoints


def main() -> None:
    name, workers, file = sys.argv[1:]
    experiment = pickle.loads(Path(file).read_bytes())
    with Cluster(workers=int(workers), name=name) as cluster:
        cluster.run(experiment, show=False, checkpoint=EVERY)


if __name__ == "__main__":
    main()
