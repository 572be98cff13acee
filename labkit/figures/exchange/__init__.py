"""Figures of the time and bytes of a step: compute, compression, waiting, and the network."""
