"""Figures of collective and pipeline schedules: traces, message counts, costs, predictions."""
