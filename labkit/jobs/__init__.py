"""Notebooks that run as jobs: their parameters, processes, sweeps, forms and logged runs."""
