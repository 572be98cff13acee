"""What is asked of runs, each answered by a tidy table: a row an observation, units in its words.

A column and its spread stand beside each other: `loss`, `loss_low`, `loss_high`. `run` holds the
names that the caller gave.
"""
