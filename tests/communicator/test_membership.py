"""Test that a waiting spare notices which ranks end, even if other ranks are dead."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from labkit.communicator.clock import WallClock
from labkit.communicator.membership import SPARE, Membership


class Told:
    """A substitute for a spare's MPI communicator, with dead ranks and ranks that have ended."""

    size, rank = 3, 2

    def __init__(self, gone: set[int], ended: set[int]) -> None:
        self.gone, self.ended, self.asked = gone, ended, 0
        self.Is_revoked, self.Iprobe = self.is_revoked, self.probe

    def is_revoked(self) -> bool:
        return self.asked > 20

    def probe(self, rank: int, tag: int) -> bool:
        self.asked += 1
        if rank in self.gone:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        return rank in self.ended


@pytest.mark.parametrize(
    ("gone", "ended", "called"),
    [({0}, {1}, False), ({1}, {0}, False), (set(), {1}, False), ({0}, set(), True)],
)
def test_who_is_gone_hides_nobody_who_ends(gone: set[int], ended: set[int], called: bool) -> None:
    comm: Any = Told(gone, ended)
    crew = Membership(comm, 2, WallClock())
    assert crew.numbers == [0, 1, SPARE]
    assert crew.wait_as_spare() == called
