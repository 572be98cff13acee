"""Test that the users of a cluster take turns, even if one of them asks again immediately."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cluster.lease import Turn

GREEDY = """
import sys, time
from pathlib import Path
from labkit.cluster.lease import Turn

folder = Path(sys.argv[1])
while not (folder / "enough").exists():
    turn = Turn(folder)
    (folder / "busy").touch()
    time.sleep(0.2)  # longer than who waits sleeps between two looks
    turn.release()
"""


@pytest.mark.heavy  # a process
def test_who_waits_is_next_although_another_asks_again_at_once(tmp_path: Path) -> None:
    greedy = subprocess.Popen([sys.executable, "-c", GREEDY, str(tmp_path)])
    try:
        while not (tmp_path / "busy").exists():
            assert greedy.poll() is None
        for _ in range(3):
            Turn(tmp_path).release()
    finally:
        (tmp_path / "enough").touch()
        assert greedy.wait(60) == 0
