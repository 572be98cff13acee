"""Hosts: several of them on this machine, joined by a link of a given rate, with Slurm on top."""

from labkit.hosts.testbed import Testbed, testbed

__all__ = ["Testbed", "testbed"]
