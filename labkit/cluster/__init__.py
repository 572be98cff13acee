"""Cluster: MPI engines that a notebook starts, shares and never leaves behind."""

from labkit.cluster.calls import RankError
from labkit.cluster.cluster import Cluster, leftovers, run
from labkit.cluster.live import Live

__all__ = ["Cluster", "Live", "RankError", "leftovers", "run"]
