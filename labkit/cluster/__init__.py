"""Cluster: MPI engines that a notebook starts, shares and never leaves behind."""

from labkit.cluster.calls import RankError, Refused
from labkit.cluster.cluster import Cluster, leftovers, predict, run
from labkit.cluster.live import Live
from labkit.cluster.replay import replay
from labkit.cluster.serving import serve

__all__ = [
    "Cluster",
    "Live",
    "RankError",
    "Refused",
    "leftovers",
    "predict",
    "replay",
    "run",
    "serve",
]
