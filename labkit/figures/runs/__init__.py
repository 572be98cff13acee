"""Figures of results and speeds of runs: curves, tables, scatter plots, and summaries."""
