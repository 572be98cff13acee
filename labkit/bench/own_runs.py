"""A folder of runs that nobody keeps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_runs() -> Iterator[Path]:
    """Meanwhile runs are kept in a folder that goes with this context."""
    before = os.environ.get("LABKIT_RUNS")
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        os.environ["LABKIT_RUNS"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["LABKIT_RUNS"]
            os.environ |= {} if before is None else {"LABKIT_RUNS": before}
