"""Which grids of machines a model can be cut over."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.common.errors import InvalidInput
from labkit.schedules.grid.layer import Grid, Layer

SHOWN = 6  # allowed grids in a message


def fitting(layers: Sequence[Layer], workers: int, divide: bool = True) -> list[Grid]:
    """Grids of which each machine has a place or a unit of every layer, and that divide workers.

    Args:
        layers: of the model.
        workers: among all machines; what a grid leaves of them are its replicas.
        divide: whether a grid is of these; else of any machines up to so many.
    """
    machines = [n for n in range(1, workers + 1) if not divide or workers % n == 0]
    grids = [(r, n // r) for n in machines for r in range(1, n + 1) if n % r == 0]
    return [grid for grid in grids if _too_small(layers, grid) is None]


def squarest(workers: int) -> Grid:
    """The grid of all workers that is nearest to a square; it has no more rows than columns.

    squarest(6) = (2, 3)
    """
    rows = max(r for r in range(1, workers + 1) if workers % r == 0 and r * r <= workers)
    return rows, workers // rows


def check_fit(grid: Grid, workers: int | None, layers: Sequence[Layer] = ()) -> None:
    """Refuse a grid that does not divide the workers, or is larger than the smallest layer.

    Args:
        grid: rows and columns.
        workers: None, where a grid has machines of its own.
        layers: of the model, as far as they are known.

    Raises: InvalidInput, with the nearest grids that are allowed.
    """
    machines = grid[0] * grid[1]
    small = _too_small(layers, grid)
    if workers is not None and workers % machines:
        cause = f"is of {machines} machines, which does not divide workers={workers}"
    elif small is not None:
        what = {"places": "{0} × {1} places", "units": "{2} units"}[small.kind]
        cause = f"is larger than layer {small.name!r} of {what.format(*small.shape)}"
    else:
        return

    def distance(other: Grid) -> tuple[int, int]:
        sides = abs(other[0] - grid[0]) + abs(other[1] - grid[1])
        return sides, abs(other[0] * other[1] - machines)

    # Those nearest in shape: a person who asked for 2 × 3 wants no list of all.
    fit = fitting(layers, workers or machines, divide=workers is not None)
    nearest = sorted(fit, key=distance)
    more = " …" if len(nearest) > SHOWN else ""
    raise InvalidInput(
        f"grid={grid} {cause}; allowed: {', '.join(map(str, nearest[:SHOWN]))}{more}"
    )


def _too_small(layers: Sequence[Layer], grid: Grid) -> Layer | None:
    """The first layer of which some machine would have nothing."""
    for layer in layers:
        rows, columns, units = layer.shape
        if layer.kind == "places" and (rows < grid[0] or columns < grid[1]):
            return layer
        if layer.kind == "units" and units < grid[0] * grid[1]:
            return layer
    return None
