"""Clusters that stay up between members: engines take longer to start than many a member to run."""

from __future__ import annotations

import shutil
from pathlib import Path

from labkit.cluster.lease import HOLD, Hold, Lock
from labkit.common.paths import runtime_folder

Shape = tuple[int, int]


class Warm:
    """What holds the clusters of a sweep, one Hold for each shape and for each that run abreast.

    A member's `Cluster(workers=…)` finds in its environment the Hold that its place has. So two
    members that run at the same time have different clusters, and those after them the same.
    """

    def __init__(self) -> None:
        _tidy()
        self._holds: dict[tuple[int, Shape], Hold] = {}

    def environment(self, place: int, shape: Shape) -> dict[str, str]:
        """Variables for the next member of this shape at this place."""
        if (place, shape) not in self._holds:
            self._holds[place, shape] = Hold()
        return {HOLD: str(self._holds[place, shape].path)}

    def drop(self, place: int, shape: Shape) -> None:
        """Let a cluster end: its ranks may still work for a member that did not end in order."""
        if hold := self._holds.pop((place, shape), None):
            hold.release()

    def keep(self, wanted: set[Shape]) -> None:
        """Let all clusters of other shapes end."""
        for place, shape in list(self._holds):
            if shape not in wanted:
                self.drop(place, shape)


def _tidy() -> None:
    """Remove the folders of clusters that earlier sweeps held."""
    for path in runtime_folder("holds").iterdir():
        if _is_free(path):
            folders = list(runtime_folder("clusters").glob(f"*-{path.name}"))
            ended = [folder for folder in folders if _is_free(folder / "keeper.lock")]
            for folder in ended:
                shutil.rmtree(folder)
            if ended == folders:
                path.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    lock = Lock(path)
    try:
        return not lock.is_held()
    finally:
        lock.release()
