"""One process of a peer: reads its task, measures each case, and rank 0 tells what it found.

    python foreign.py labkit.bench.peers.rank '{"peer": "ddp", "rank": 0, "cases": ["cnn"], ...}'

Started by `labkit.frameworks.foreign`, so that it also runs in a Python where labkit is not
installed; of labkit only modules that need no more than NumPy are imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(task: dict[str, Any]) -> None:
    """Measure the cases; a JSON line each on standard output of rank 0."""
    from importlib import import_module

    from labkit.bench.peers.meeting import Meeting
    from labkit.bench.steps import CASES

    module = import_module(f"labkit.bench.peers.{task['peer']}")
    # mpirun numbers its processes itself
    rank = task["rank"] if task["rank"] is not None else int(os.environ["OMPI_COMM_WORLD_RANK"])
    meeting = Meeting(Path(task["meeting"]), rank, task["size"])
    peer = module.join(meeting, task)
    for name in task["cases"]:
        found = peer.measure(CASES[name], task["repeats"])
        if rank == 0:
            print(json.dumps({"case": name, "version": peer.version} | found), flush=True)
    # A peer that leaves early may end what the others still use.
    meeting.meet()
    peer.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
