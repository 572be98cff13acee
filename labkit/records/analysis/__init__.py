"""Analyses of runs as tidy tables: one row per observation, with units in the column names.

A value and its range are adjacent columns: `loss`, `loss_low`, `loss_high`. The column `run`
contains the name of each run, which is its key in the caller's mapping.
"""
