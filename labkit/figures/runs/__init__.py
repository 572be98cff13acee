"""Results and speeds of runs: curves, tables, and any of their numbers over any other."""
