"""The grids of machines over which a neural network can be divided."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.common.errors import InvalidInput
from labkit.schedules.grid.layer import Grid, GridLayer

SHOWN = 6  # maximum number of allowed grids in an error message


def allowed_grids(layers: Sequence[GridLayer], workers: int, divide: bool = True) -> list[Grid]:
    """Return the grids whose size divides `workers` and whose machines all get part of each layer.

    Args:
        layers: Layers of the neural network.
        workers: Total number of workers; workers / (machines of the grid) is the number of model
            replicas.
        divide: Whether the number of machines must divide `workers`; False: any grid of at most
            `workers` machines.
    """
    machines = [n for n in range(1, workers + 1) if not divide or workers % n == 0]
    grids = [(r, n // r) for n in machines for r in range(1, n + 1) if n % r == 0]
    return [grid for grid in grids if _too_small(layers, grid) is None]


def squarest_grid(workers: int) -> Grid:
    """Return the grid of all workers that is closest to a square, with rows ≤ columns.

    squarest_grid(6) = (2, 3)
    """
    rows = max(r for r in range(1, workers + 1) if workers % r == 0 and r * r <= workers)
    return rows, workers // rows


def validate_grid(grid: Grid, workers: int | None, layers: Sequence[GridLayer] = ()) -> None:
    """Raise an error unless the grid's size divides the workers and each layer is large enough.

    Args:
        grid: Numbers of rows and columns of machines.
        workers: Total number of workers; None: any number of machines is allowed.
        layers: Layers of the neural network that are known so far.

    Raises:
        InvalidInput: If the grid does not fit; the message lists the closest allowed grids.
    """
    machines = grid[0] * grid[1]
    smallest = _too_small(layers, grid)
    if workers is not None and workers % machines:
        cause = f"has {machines} machines, a number that does not divide workers={workers}"
    elif smallest is not None:
        what = {"places": "{0} × {1} places", "units": "{2} units"}[smallest.kind]
        cause = f"is larger than layer {smallest.name!r} of {what.format(*smallest.shape)}"
    else:
        return

    def distance(candidate: Grid) -> tuple[int, int]:
        sides = abs(candidate[0] - grid[0]) + abs(candidate[1] - grid[1])
        return sides, abs(candidate[0] * candidate[1] - machines)

    # The message lists only grids of a similar shape, because the complete list can be long.
    allowed = allowed_grids(layers, workers or machines, divide=workers is not None)
    nearest = sorted(allowed, key=distance)
    more = " …" if len(nearest) > SHOWN else ""
    raise InvalidInput(
        f"grid={grid} {cause}; allowed: {', '.join(map(str, nearest[:SHOWN]))}{more}"
    )


def _too_small(layers: Sequence[GridLayer], grid: Grid) -> GridLayer | None:
    """Return the first layer that is too small to give every machine a part, or None."""
    for layer in layers:
        rows, columns, units = layer.shape
        if layer.kind == "places" and (rows < grid[0] or columns < grid[1]):
            return layer
        if layer.kind == "units" and units < grid[0] * grid[1]:
            return layer
    return None
