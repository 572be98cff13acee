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
    """Store the runs of this context in a temporary folder, which is removed when the context ends.

    In a batch job, runs of earlier attempts at the same job are not visible in this context.
    """
    ours = ("LABKIT_RUNS", "LABKIT_JOB", RESUME_VARIABLE)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        # In a batch job, LABKIT_JOB stays set, because it tells processes that they have no
        # terminal.
        os.environ |= dict.fromkeys(("LABKIT_RUNS", *before), folder)
        os.environ.pop(RESUME_VARIABLE, None)
        try:
            yield Path(folder)
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before
