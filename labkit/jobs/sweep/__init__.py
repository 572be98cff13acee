"""Sweeps: one notebook with many values, as jobs that survive whatever ends the sweep."""
