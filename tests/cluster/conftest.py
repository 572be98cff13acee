"""A runtime folder that one test has alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from left import processes


@pytest.fixture
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test alone; what it started must be gone at its end."""
    folder = tmp_path / "own-runtime"
    monkeypatch.setenv("LABKIT_RUNTIME", str(folder))
    yield folder
    for process in processes(folder):
        process.kill()
