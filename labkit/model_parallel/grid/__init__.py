"""A model over a grid of machines on real ranks: each machine's part, and what crosses between."""

from labkit.model_parallel.grid.cut import Piece, cut
from labkit.model_parallel.grid.halo import Halo
from labkit.model_parallel.grid.part import Part
from labkit.model_parallel.grid.tiles import Tiles

__all__ = ["Halo", "Part", "Piece", "Tiles", "cut"]
