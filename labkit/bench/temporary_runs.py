"""A folder of runs that nobody keeps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.records.checkpoints import RESUMES


@contextmanager
def temporary_runs() -> Iterator[Path]:
    """Meanwhile runs are kept in a folder that goes with this context, also within a job.

    None of them is one of an earlier attempt at that job.
    """
    ours = ("LABKIT_RUNS", "LABKIT_JOB", RESUMES)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        # A job's stays set: by it a process knows that nobody looks at it.
        os.environ |= dict.fromkeys(("LABKIT_RUNS", *before), folder)
        os.environ.pop(RESUMES, None)
        try:
            yield Path(folder)
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before
