"""A neural network on a grid of machines: the values that each machine owns, reads and sends."""

from labkit.schedules.grid.crossing import Crossing, crossing, first_trained_layer
from labkit.schedules.grid.fit import allowed_grids, squarest_grid, validate_grid
from labkit.schedules.grid.layer import (
    Boxes,
    Grid,
    GridLayer,
    Shape,
    input_boxes,
    owned_boxes,
    window,
)

__all__ = [
    "Boxes",
    "Crossing",
    "Grid",
    "GridLayer",
    "Shape",
    "allowed_grids",
    "crossing",
    "first_trained_layer",
    "input_boxes",
    "owned_boxes",
    "squarest_grid",
    "validate_grid",
    "window",
]
