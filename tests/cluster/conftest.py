"""A runtime folder that only one test uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from left import processes

from labkit.common.files import runtime_folder


@pytest.fixture
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a new runtime folder for this test; at the end, kill the processes that remain in it."""
    folder = tmp_path / "own-runtime"
    (private := folder / f"labkit-{os.getuid()}").mkdir(parents=True, mode=0o700)
    (private / "fork").symlink_to(runtime_folder("fork"))  # the fork server of all tests
    monkeypatch.setenv("LABKIT_RUNTIME", str(folder))
    yield folder
    for process in processes(folder):
        process.kill()
