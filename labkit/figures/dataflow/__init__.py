"""Figures of what goes on within one process: its graph, its threads, its input."""
