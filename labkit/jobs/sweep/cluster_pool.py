"""MPI clusters that several notebook runs of a sweep use, because starting a cluster is slow."""

from __future__ import annotations

import shutil
from pathlib import Path

from labkit.cluster.lease import HOLD, Hold, Lock
from labkit.common.paths import runtime_folder

Shape = tuple[int, int]


class ClusterPool:
    """Leases that keep a sweep's clusters running: one per run slot and pair (workers, threads).

    `Cluster(workers=…)` in a notebook run finds the lease of the run's slot in an environment
    variable. Simultaneous notebook runs have different slots and thus use different clusters; later
    notebook runs reuse these clusters.
    """

    def __init__(self) -> None:
        _remove_old_clusters()
        self._holds: dict[tuple[int, Shape], Hold] = {}

    def environment(self, place: int, shape: Shape) -> dict[str, str]:
        """Return the environment variable that names the lease of a run slot and cluster shape."""
        if (place, shape) not in self._holds:
            self._holds[place, shape] = Hold()
        return {HOLD: str(self._holds[place, shape].path)}

    def release(self, place: int, shape: Shape) -> None:
        """End the lease of a cluster, so that the cluster can stop."""
        if hold := self._holds.pop((place, shape), None):
            hold.release()

    def release_others(self, shapes: set[Shape]) -> None:
        """End the leases of all clusters whose shape is not among `shapes`."""
        for place, shape in list(self._holds):
            if shape not in shapes:
                self.release(place, shape)


def _remove_old_clusters() -> None:
    """Remove the folders of clusters that have ended and that earlier sweeps leased."""
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
