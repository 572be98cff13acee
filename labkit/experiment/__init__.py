"""All that defines a run: frozen, validated, and named by its content."""

from labkit.experiment.experiment import Experiment

__all__ = ["Experiment"]
