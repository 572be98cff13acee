"""One process of another framework, which measures the cases of its task.

    python foreign.py labkit.bench.peers.rank '{"peer": "ddp", "rank": 0, "cases": ["cnn"], ...}'

`labkit.frameworks.foreign` starts this module, so that the module also runs in a Python without
labkit. The module imports only modules of labkit that depend on nothing but NumPy. Rank 0 prints
the results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(task: dict[str, Any]) -> None:
    """Measure the cases; rank 0 prints one JSON line per case."""
    from importlib import import_module

    from labkit.bench.peers.meeting import Meeting
    from labkit.bench.steps import CASES

    module = import_module(f"labkit.bench.peers.{task['peer']}")
    # Under mpirun, an environment variable contains the rank.
    rank = task["rank"] if task["rank"] is not None else int(os.environ["OMPI_COMM_WORLD_RANK"])
    meeting = Meeting(Path(task["meeting"]), rank, task["size"])
    peer = module.join(meeting, task)
    for name in task["cases"]:
        result = peer.measure(CASES[name], task["repeats"])
        if rank == 0:
            print(json.dumps({"case": name, "version": peer.version} | result), flush=True)
    # All processes wait here, because a process that leaves early may end services that other
    # processes still use.
    meeting.barrier()
    peer.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
