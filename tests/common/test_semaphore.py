"""Test a semaphore of processes: it limits their number; a dead holder frees its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.common.locks import KEEPER, Lock, Semaphore, start_semaphore

HOLDER = """
import sys
from pathlib import Path
from labkit.common.locks import Semaphore

assert Semaphore(Path(sys.argv[1]), 1).acquire()
print("holds", flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.heavy  # processes


def test_a_place_is_free_as_soon_as_its_holder_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        looks = iter([True, True, False])
        assert not Semaphore(tmp_path, 1).acquire(lambda: next(looks))
        assert Semaphore(tmp_path, 2).acquire()
        holder.kill()
        holder.wait()
        assert Semaphore(tmp_path, 1).acquire()


@pytest.mark.parametrize("places", ["taken", "free"])
def test_a_rank_starts_in_its_turn_and_ends_with_its_keeper(tmp_path: Path, places: str) -> None:
    (tmp_path / "rank.py").write_text("import sys; open('ran', 'w').write(sys.argv[1])")
    keeper = Lock(tmp_path / "keeper.lock")
    assert keeper.acquire()
    count = start_semaphore(keeper.path).count
    taken = [Lock(tmp_path / "starts" / str(n)) for n in range(count * (places == "taken"))]
    assert all(place.acquire() for place in taken)
    command = [sys.executable, "-m", "labkit.common.locks", "rank", "argument"]
    own = os.environ | {KEEPER: str(keeper.path)}
    child = subprocess.Popen(command, cwd=tmp_path, env=own)
    if places == "taken":
        keeper.release()  # the rank waits or has not begun; it must not run
    assert child.wait(60) == 0
    assert (tmp_path / "ran").exists() == (places == "free")
