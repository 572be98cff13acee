"""The repository's root folder, which is on the import path of all processes of a campaign."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Options of mpiexec that pass PYTHONPATH to ranks on other hosts.
EXPORT_PATH = ("-x", "PYTHONPATH")


def import_path() -> str:
    """Return a PYTHONPATH with which `python -P` can import `tests.acceptance`."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(ROOT), *(each for each in folders if each not in ("", str(ROOT)))])
