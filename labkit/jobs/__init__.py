"""Notebooks as jobs: parameters, processes, sweeps, forms, and what is left of them."""
