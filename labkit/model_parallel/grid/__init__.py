"""Execution of one model on a grid of machines (one rank each): their layers and messages."""

from labkit.model_parallel.grid.border import extent
from labkit.model_parallel.grid.machine import GridMachine, planes_of
from labkit.model_parallel.grid.part import GridPart
from labkit.model_parallel.grid.pieces import cut

__all__ = ["GridMachine", "GridPart", "cut", "extent", "planes_of"]
