"""All that defines a run: frozen, validated, and named by its content."""

from labkit.experiment.experiment import Experiment
from labkit.experiment.virtual_clock import VirtualClock

__all__ = ["Experiment", "VirtualClock"]
