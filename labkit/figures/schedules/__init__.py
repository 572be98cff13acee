"""Figures of collective and pipeline schedules: traces, counts, costs, predictions."""
