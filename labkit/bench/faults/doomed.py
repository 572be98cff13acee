"""Trains with checkpoints until it is killed.

python -m labkit.bench.faults.doomed CLUSTER WORKERS EXPERIMENT    its name, its ranks, a file
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from labkit.cluster import Cluster

EVERY = 7  # steps from one checkpoint to the next


def main() -> None:
    name, workers, file = sys.argv[1:]
    experiment = pickle.loads(Path(file).read_bytes())
    with Cluster(workers=int(workers), name=name) as cluster:
        cluster.run(experiment, show=False, checkpoint=EVERY)


if __name__ == "__main__":
    main()
