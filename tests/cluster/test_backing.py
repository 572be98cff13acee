"""Test that ranks share memory through files on a disk with room, or do not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit import InvalidInput
from labkit.cluster.launch import launch
from labkit.cluster.lease import Lease
from labkit.cluster.processes import FOLDERS, backing_variables
from labkit.cluster.start import Start

FULL = Path("/proc")  # a file system that reports no free space
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has /dev/shm")


def test_a_folder_with_room_stands_for_a_small_dev_shm(tmp_path: Path) -> None:
    assert backing_variables(2, [], shared=tmp_path) == {}
    found = backing_variables(2, [FULL, tmp_path], shared=FULL)
    assert {found[name] for name in FOLDERS} == {str(tmp_path)}


def test_no_room_anywhere_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    told = (
        "2 ranks share 288 MiB .* /proc has 0 MiB free; make the file system larger: mount "
        "-o remount,size=2G"
    )
    with pytest.raises(InvalidInput, match=told):
        backing_variables(2, [], shared=FULL)
    with pytest.raises(InvalidInput, match="share 16000256 MiB"):
        backing_variables(10**6, [FULL, tmp_path], shared=FULL)


def test_what_a_person_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS[0], "/somewhere")
    assert backing_variables(2, [], shared=FULL) == {}


@pytest.mark.heavy  # a process
def test_a_start_that_a_keeper_refuses_is_tried_once(own_runtime: Path) -> None:
    (folder := own_runtime / "million").mkdir(parents=True)
    # A fault-tolerant cluster repeats a start that failed, but not a start that was refused.
    lease = Lease(folder)
    with pytest.raises(InvalidInput, match="the engines did not start: 1000000 ranks share"):
        launch(folder, Start(10**6, fault_tolerant=True))
    lease.release()
