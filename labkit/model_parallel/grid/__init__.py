"""A model over a grid of machines on real ranks: each machine's part, and what crosses between."""

from labkit.model_parallel.grid.border import extent
from labkit.model_parallel.grid.machine import Machine, planes_of
from labkit.model_parallel.grid.part import Part
from labkit.model_parallel.grid.pieces import cut

__all__ = ["Machine", "Part", "cut", "extent", "planes_of"]
