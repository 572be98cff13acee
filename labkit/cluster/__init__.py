"""Clusters of MPI engines, which are started from a notebook, shared, and cleaned up after use."""

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
