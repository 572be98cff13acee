"""One notebook run of a sweep, as a task of a Slurm job array.

python -m labkit.jobs.sweep.element FOLDER MODULES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from labkit.common import imports
from labkit.common.errors import LabkitError
from labkit.jobs import job
from labkit.jobs.sweep import manifest
from labkit.records import store

# An array task exits with the code NOT_MINE if it finds no record of its notebook run.
NOT_MINE = 2


def main(folder: Path, array: str, place: int, modules: str = "") -> int:
    """Execute a sweep's notebook run as a task of a Slurm job array; return the exit code.

    Args:
        folder: Folder of the sweep.
        array: Number of the Slurm job array.
        place: Index of the notebook run's task in the job array.
        modules: Folder of the original notebook, from which the executed copy can import modules.
    """
    number = f"{array}_{place}"
    try:
        record = store.read_json(folder / manifest.FILE)
        path = folder / Path(str(record["elements"][place])).name
        if store.read_json(path / "status.json").get("element") != number:
            raise LabkitError("a later attempt has replaced this element")
    except (LabkitError, LookupError) as error:
        print(
            f"labkit: Slurm element {number} has no notebook run in {folder}: {error}",
            file=sys.stderr,
        )
        return NOT_MINE
    # With the launcher `slurm`, MPI ranks start on the nodes of the array task's Slurm allocation.
    clusters = {"LABKIT_LAUNCHER": "slurm"}
    job_environment = {
        store.ELEMENT: number,
        "LABKIT_JOB": str(path.resolve()),
        imports.VARIABLE: modules,
    }
    os.environ |= clusters | job_environment
    # A labkit job ends when its standard input is closed. The write end of the pipe stays open.
    # Standard input therefore never ends the job. Slurm itself ends array tasks.
    reading, _ = os.pipe()
    os.dup2(reading, 0)
    sys.stdin = os.fdopen(0)
    return job.main(folder / manifest.NOTEBOOK, path, record.get("limit"), show=False)


if __name__ == "__main__":
    _, folder, modules = sys.argv
    environment = os.environ
    place = int(environment["SLURM_ARRAY_TASK_ID"])
    sys.exit(main(Path(folder), environment["SLURM_ARRAY_JOB_ID"], place, modules))
