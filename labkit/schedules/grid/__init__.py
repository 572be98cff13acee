"""A model over a grid of machines as data: who holds what, who reads it, and what crosses."""

from labkit.schedules.grid.crossing import Crossing, crossing, first_trained
from labkit.schedules.grid.fit import check_fit, fitting, squarest
from labkit.schedules.grid.layer import Boxes, Grid, Layer, Shape, held, read, window

__all__ = [
    "Boxes",
    "Crossing",
    "Grid",
    "Layer",
    "Shape",
    "check_fit",
    "crossing",
    "first_trained",
    "fitting",
    "held",
    "read",
    "squarest",
    "window",
]
