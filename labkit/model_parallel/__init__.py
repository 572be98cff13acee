"""Models divided across ranks: into stages, into slices of layers, or over a grid of machines."""
