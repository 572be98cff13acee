"""A model over a grid of machines on real ranks: each machine's part, and what crosses between."""

from labkit.model_parallel.grid.part import Part
from labkit.model_parallel.grid.pieces import cut

__all__ = ["Part", "cut"]
