"""Everything that defines a run: immutable, validated, and with a name from its content."""

from labkit.experiment.experiment import Experiment
from labkit.experiment.virtual_clock import VirtualClock

__all__ = ["Experiment", "VirtualClock"]
