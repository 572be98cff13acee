"""Experiments: immutable, validated definitions of runs, named by a hash of their content."""

from labkit.experiment.experiment import Experiment
from labkit.experiment.virtual_clock import VirtualClock

__all__ = ["Experiment", "VirtualClock"]
