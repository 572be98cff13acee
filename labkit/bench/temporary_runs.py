"""A temporary folder for the runs of a benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.records.checkpoints import RESUMES


@contextmanager
def temporary_runs() -> Iterator[Path]:
    """Keep runs in a folder that this context removes, also within a job.

    The runs of an earlier attempt at that job are not found.
    """
    ours = ("LABKIT_RUNS", "LABKIT_JOB", RESUMES)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        # LABKIT_JOB stays set within a job: it tells a process that no terminal shows its output.
        os.environ |= dict.fromkeys(("LABKIT_RUNS", *before), folder)
        os.environ.pop(RESUMES, None)
        try:
            yield Path(folder)
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before
