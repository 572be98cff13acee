"""The repository's root, on the import path of every process that a campaign starts."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPORT_PATH = ("-x", "PYTHONPATH")  # words of mpiexec, whose ranks on other hosts inherit nothing


def import_path() -> str:
    """Return a PYTHONPATH by which a Python with the option -P imports `tests.acceptance`, too."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(ROOT), *(each for each in folders if each not in ("", str(ROOT)))])
