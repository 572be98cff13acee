"""Notebooks that run as jobs: parameters, processes, sweeps, forms and logged runs."""
