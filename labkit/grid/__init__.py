"""A model over a grid of machines on real ranks: each machine's part, and what crosses between."""

from labkit.grid.cut import Piece, cut
from labkit.grid.halo import Halo
from labkit.grid.part import Part
from labkit.grid.tiles import Tiles

__all__ = ["Halo", "Part", "Piece", "Tiles", "cut"]
