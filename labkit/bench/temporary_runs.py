"""A temporary folder for the runs of a benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.records.checkpoints import RESUME_VARIABLE


@contextmanager
def temporary_runs() -> Iterator[Path]:
    """Make runs in this context use a temporary folder, which is removed at the end.

    In a batch job, runs of the job's earlier attempts stay invisible.
    """
    ours = ("LABKIT_RUNS", "LABKIT_JOB", RESUME_VARIABLE)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        # In a job, LABKIT_JOB stays set, because it tells processes that they have no terminal.
        os.environ |= dict.fromkeys(("LABKIT_RUNS", *before), folder)
        os.environ.pop(RESUME_VARIABLE, None)
        try:
            yield Path(folder)
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before
