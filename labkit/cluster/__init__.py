"""Clusters of MPI engines (rank processes), which notebooks start, share and clean up."""

from labkit.cluster.calls import RankError, Refused
from labkit.cluster.cluster import Cluster, leftovers, predict, run
from labkit.cluster.run_handle import RunHandle
from labkit.cluster.serving import replay, serve

__all__ = [
    "Cluster",
    "RankError",
    "Refused",
    "RunHandle",
    "leftovers",
    "predict",
    "replay",
    "run",
    "serve",
]
