"""One member of a sweep, as an element of a job array of Slurm's.

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

NOT_MINE = 2  # exit code


def main(folder: Path, array: str, place: int, modules: str = "") -> int:
    """Execute the member that stands at a place of the array; returns the exit code.

    Args:
        folder: of the sweep.
        array: the number of the array.
        place: of the element.
        modules: the folder of its notebook, whose modules can be imported.
    """
    number = f"{array}_{place}"
    try:
        record = store.read_json(folder / manifest.FILE)
        path = folder / Path(str(record["elements"][place])).name
        if store.read_json(path / "status.json").get("element") != number:
            raise LabkitError("another attempt has taken its place")
    except (LabkitError, LookupError) as error:
        print(f"labkit: element {number} has no member in {folder}: {error}", file=sys.stderr)
        return NOT_MINE
    clusters = {"LABKIT_LAUNCHER": "slurm"}  # on the nodes of this element's allocation
    own = {store.ELEMENT: number, "LABKIT_JOB": str(path.resolve()), imports.VARIABLE: modules}
    os.environ |= clusters | own
    # A job ends with who started it, by the end of its input; this one ends when Slurm says so.
    reading, _ = os.pipe()
    os.dup2(reading, 0)
    sys.stdin = os.fdopen(0)
    return job.main(folder / manifest.NOTEBOOK, path, record.get("limit"), shown=False)


if __name__ == "__main__":
    _, folder, modules = sys.argv
    own = os.environ
    place = int(own["SLURM_ARRAY_TASK_ID"])
    sys.exit(main(Path(folder), own["SLURM_ARRAY_JOB_ID"], place, modules))
