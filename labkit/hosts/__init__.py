"""A testbed: virtual hosts on this machine, joined by links of a given rate, with Slurm."""

from labkit.hosts.testbed import Testbed, testbed

__all__ = ["Testbed", "testbed"]
