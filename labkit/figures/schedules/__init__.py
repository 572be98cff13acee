"""Schedules of collectives and pipelines: traces, counts, costs, predictions."""
