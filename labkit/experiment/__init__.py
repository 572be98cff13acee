"""Experiments, which define runs: immutable, validated, and named by a hash of their content."""

from labkit.experiment.experiment import Experiment
from labkit.experiment.virtual_clock import VirtualClock

__all__ = ["Experiment", "VirtualClock"]
