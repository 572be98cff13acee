"""Test that a forked process does not clean up its parent's objects."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from labkit.jobs.fork import Fork


class Left:
    """An object that refers to itself and writes to a file when it is garbage-collected."""

    def __init__(self, told: Path) -> None:
        self.told, self.itself = told, self

    def __del__(self) -> None:
        with self.told.open("a") as file:
            file.write("collected\n")


@pytest.mark.heavy
def test_a_fork_does_not_clean_up_after_its_parent(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def act(orders: int) -> int:
        gc.collect()
        return 3 if told.exists() else 0

    gc.disable()  # the parent keeps the garbage until the fork has checked
    try:
        Left(told)
        assert Fork(act).wait() == 0
    finally:
        gc.enable()
    gc.collect()
    assert told.read_text() == "collected\n"
