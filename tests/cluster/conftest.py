"""A runtime folder that only one test uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from left import processes


@pytest.fixture
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a new runtime folder for this test; at the end, kill the processes that remain in it."""
    folder = tmp_path / "own-runtime"
    monkeypatch.setenv("LABKIT_RUNTIME", str(folder))
    yield folder
    for process in processes(folder):
        process.kill()
