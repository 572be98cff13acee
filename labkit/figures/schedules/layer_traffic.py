"""Traffic between ranks by layer, for models whose layers are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.units import bytes_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, PALETTE, clock_and_network, entries, lines, safe_text
from labkit.figures.kit.marks import bars, cells, fade_to, matrix_panel, rule
from labkit.figures.kit.panels import PLOT, Panel, Trace, lanes_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.run import Run
from labkit.schedules.grid_layers import (
    Crossing,
    Grid,
    GridLayer,
    crossing,
    owned_boxes,
    validate_grid,
)
from labkit.schedules.round import Integers

if TYPE_CHECKING:
    from labkit.records.run import Run

# The array has the shape (points, 2). Each row contains the row and the column of a point on the
# tiles.
Points = NDArray[np.float64]

TILES = 230  # height of a panel of tiles in pixels
FAINT = fade_to("213,94,0", 0.5)
SPOKEN = 12  # greatest number of messages of a layer that the alternative text lists one by one
ITEMSIZE = {"float64": 8, "mixed_float16": 2, "float16": 2, "mixed_bfloat16": 2, "bfloat16": 2}


def grid_traffic(layers: Sequence[GridLayer], grid: Grid, run: Run | None = None) -> Figure:
    """Draw which tile of each layer each machine owns, and the values that machines exchange.

    The left panel shows the positions of a layer's input. The more machines read a position without
    owning it, the darker the position. Lines connect machines that exchange values; thicker lines
    represent more values. The right panel shows how many values per sample each machine sends to
    each other machine. The backward pass sends the gradients of the exchanged values in the
    opposite direction.

    Args:
        layers: Layers from the input to the loss, such as `experiment.grid_layers`.
        grid: Numbers of rows and columns of the grid of machines.
        run: Run with the same layers and grid as `layers` and `grid`. The figure shows the bytes
            that the run measured. By default, the figure shows only predicted traffic.

    Raises:
        InvalidInput: The grid is larger than the smallest layer. InvalidInput also occurs for a run
            without byte counts of the layers.
    """
    machines = grid[0] * grid[1]
    validate_grid(grid, machines, layers)
    crossings = crossing(layers, grid)
    size = 4 if run is None else ITEMSIZE.get(str(run.experiment.get("precision")), 4)
    measured = [] if run is None else _measured(run, layers, machines)
    title = f"Traffic between {grid[0]} × {grid[1]} machines · predicted, bytes per sample"
    if run is not None:
        title += f", and measured · {clock_and_network(entries([run]))}"
    words, rows = [], []
    for number in range(2, len(layers)):
        details = _summary(layers, crossings, number, size, measured)
        rows.append(
            [_tiles(layers, grid, crossings, number, details), _matrix(crossings, number, machines)]
        )
        words.append(f"{details.replace(chr(10), ', ')}: {_messages(crossings, number)}")
    # Every machine has the complete input samples, so the first layer needs no messages.
    remark = "the first layer needs no messages, because every machine has the whole input"
    figure = sheet(rows, [], title, [remark], words, plot=TILES)
    figure.update_layout(margin={"l": 40})
    return figure


def _measured(run: Run, layers: Sequence[GridLayer], machines: int) -> list[tuple[float, float]]:
    """Return the bytes that one replica sent before each layer, per sample: (forward, backward)."""
    table = run.layers
    if table.empty or (table["rank"] == 0).sum() != len(layers) - 1:
        raise InvalidInput(
            f"{run.name} has no byte counts of these {len(layers) - 1} layers; give a run of "
            "SpatialParallel and the layers of its model"
        )
    table = table[table["rank"] < machines]
    samples = run.history[run.history["rank"] == 0]["samples"].mean()
    # Layer names may repeat, so a row's position in the table identifies its layer.
    # Each rank's table rows are in the order of the layers.
    places = table.groupby("rank").cumcount()
    sums = table.groupby(places)[["forward_bytes", "backward_bytes"]].sum() / samples
    return [(0.0, 0.0), *sums.itertuples(index=False, name=None)]


def _summary(
    layers: Sequence[GridLayer],
    results: Crossing,
    number: int,
    size: int,
    measured: Sequence[tuple[float, float]],
) -> str:
    """Describe the traffic into a layer: number of values, predicted bytes, and measured bytes."""
    of_layer = results.layer == number
    forward, back = int(results.values[of_layer].sum()), int(results.values_back[of_layer].sum())
    details = f"{layers[number - 1].name} to {layers[number].name}: "
    details += f"{forward:,} values forward, {back:,} gradients back"
    details += f"\npredicted {bytes_text(size * forward)} forward, {bytes_text(size * back)} back"
    if measured:
        sent, returned = measured[number]
        details += f"; measured {bytes_text(sent)} forward, {bytes_text(returned)} back"
    return details


def _messages(results: Crossing, number: int) -> str:
    """List the messages into a layer; if there are many, give only their number and sizes."""
    rows = [row[1:] for row in results.rows() if row[0] == number]
    if not rows:
        return "no messages"
    if len(rows) > SPOKEN:
        values = [values for _, _, values in rows]
        return f"{len(rows)} messages of {min(values):,} to {max(values):,} values"
    return ", ".join(f"{a} sends {values:,} to {b}" for a, b, values in rows)


def _tiles(
    layers: Sequence[GridLayer], grid: Grid, results: Crossing, number: int, details: str
) -> Panel:
    """Return the panel of a layer's input: the tiles of machines, and lines between machines."""
    before = layers[number - 1]
    strip = before.kind == "units"  # In the figure, the units of a dense layer form a single row.
    rows, columns = (1, before.shape[2]) if strip else before.shape[:2]
    axes = (0, 2) if strip else (0, 1)
    # `readers` counts, for each position of the layer's input, the machines that read this
    # position. The input boxes of machines overlap, because convolution kernels reach across tile
    # borders.
    readers = np.zeros((rows, columns), np.int64)
    for box in results.box[results.layer == number][:, axes]:
        readers[box[0, 0] : box[0, 1], box[1, 0] : box[1, 1]] += 1
    boxes = owned_boxes(before, grid)[:, axes]
    # The array (machines, 2) contains the row and the column of each machine's centre.
    centers = boxes.mean(axis=2) - 0.5
    where = "unit %{x}" if strip else "row %{y}, column %{x}"
    heat = cells(
        readers,
        colors=FAINT,
        most=grid[0] * grid[1] - 1 or 1,
        hover=f"{where}: read by %{{z}} other machines",
        on={"xgap": int(columns <= 40), "ygap": int(rows <= 40)},
    )
    nodes = {
        "mode": "markers+text",
        "x": centers[:, 1],
        "y": centers[:, 0],
        "text": [str(machine) for machine in range(len(boxes))],
        "textfont": {"color": "white", "size": 11},
        "marker": {"color": PALETTE[0], "size": 19},
        "hovertemplate": "machine %{text}<extra></extra>",
        "showlegend": False,
    }
    first, _, rest = details.partition("\n")
    across = {} if strip else {"scaleanchor": "y", "constrain": "domain"}
    plain = {"showgrid": False, "visible": not strip}
    return Panel(
        title=f"{first}\n{rest}",
        x="unit" if strip else "column",
        y="" if strip else "row",
        traces=[heat, _borders(boxes), *_lines(results, number, centers), nodes],
        x_axis={"range": [-0.5, columns - 0.5], "showgrid": False} | across,
        y_axis={"range": [rows - 0.5, -0.5], "constrain": "domain"} | plain,
    )


def _borders(boxes: Integers) -> Trace:
    """Return the outlines of all tiles as one trace."""
    x: list[float | None] = []
    y: list[float | None] = []
    for (top, bottom), (left, right) in (boxes - 0.5).tolist():
        x += [left, right, right, left, left, None]
        y += [top, top, bottom, bottom, top, None]
    return rule(x, y) | {"line": {"color": INK, "width": 2}}


def _lines(results: Crossing, number: int, centers: Points) -> list[Trace]:
    """Return one line per pair of machines that exchange values; wider lines carry more values."""
    pairs: dict[tuple[int, int], int] = {}
    for layer, source, destination, values in results.rows():
        if layer == number:
            pair = (min(source, destination), max(source, destination))
            pairs[pair] = pairs.get(pair, 0) + values
    # The busiest pair of machines in a layer has the thickest line. Each layer has its own scale,
    # because layers differ by orders of magnitude.
    most = max(pairs.values(), default=1)
    traces = []
    for (a, b), values in pairs.items():
        path = _path(centers, a, b)
        line = {"color": PALETTE[0], "width": 1 + 4 * values / most}
        look = {"mode": "lines", "opacity": 0.8, "hoverinfo": "skip", "showlegend": False}
        traces.append(look | {"x": path[:, 1], "y": path[:, 0], "line": line})
    return traces


def _path(centers: Points, a: int, b: int) -> Points:
    """Return a path from machine a to b, bent around machines between them; shape (points, 2)."""
    along = np.linspace(0, 1, 13)[:, None]
    path: Points = centers[a] + along * (centers[b] - centers[a])
    for axis in (0, 1):
        others = np.unique(centers[:, 1 - axis])
        # A straight line along the grid could cross another machine's tile. In that case, the line
        # bends around the tile.
        passed = np.count_nonzero(
            (others > path[:, 1 - axis].min()) & (others < path[:, 1 - axis].max())
        )
        if centers[a, axis] == centers[b, axis] and passed:
            room = np.diff(np.unique(centers[:, axis])).min(initial=1.0)
            path[:, axis] -= 0.4 * room * passed / len(others) * 4 * (along * (1 - along))[:, 0]
    return path


def _matrix(results: Crossing, number: int, machines: int) -> Panel:
    """Return the panel of values per sample, with senders as rows and receivers as columns."""
    values = np.zeros((machines, machines), np.int64)
    of_layer = results.layer == number
    values[results.source[of_layer], results.destination[of_layer]] = results.values[of_layer]
    names = [str(machine) for machine in range(machines)]
    axes = "receiving machine (cells: values per sample)", "sending machine"
    letters = 12 if machines <= 9 else 8
    return matrix_panel("", names, values, "{:,}".format, "sends %{z:,} values to", axes, letters)


LANE = 26  # height of the bars of a layer in pixels
WAYS = ("forward", "backward")


def layer_traffic(run: Run) -> Figure:
    """Draw how many payload bytes the busiest rank sends per step and layer, in both directions.

    A note below the axis names layers that send nothing.

    Args:
        run: Run with tensor or spatial parallelism, whose layers are divided into slices; see
            `Run.layers`.

    Raises:
        LabkitError: No layer of the run is divided into slices.
    """
    sending, silent = _by_layer(run)
    (entry,) = entries([run])
    names = [f"{row.layer} ({row.slices})" for row in sending.itertuples()]
    drawn = lines(WAYS)
    rank_bytes, whole = _weights(run)
    panel = Panel(
        title="Payload of the busiest rank\nfor each layer that several ranks share",
        x="KiB per step",
        y="",
        traces=bars(_bars(sending, names), "sent", "layer", drawn, by="way", horizontal=True),
        note=f"Replicated on every rank, so nothing is sent: {', '.join(silent)}" if silent else "",
        always_note=bool(silent),
        x_axis={"rangemode": "tozero"},
        y_axis=lanes_axis(names) | {"automargin": True},
    )
    title = f"Bytes per layer and step · {clock_and_network([entry])}"
    remark = f"a rank stores at most {bytes_text(rank_bytes)} of the {bytes_text(whole)} of weights"
    words = [
        f"{name}: {bytes_text(forward)} forward, {bytes_text(backward)} backward"
        for name, forward, backward in zip(
            names, sending["forward_bytes"], sending["backward_bytes"], strict=True
        )
    ]
    unsent = [panel.note] if silent else []
    plot, details = max(PLOT, LANE * len(names)), [*words, *unsent]
    figure = sheet([[panel]], drawn.values(), title, [remark], details, plot=plot)
    figure.update_layout(barmode="group", margin={"l": 16})
    return figure


def _by_layer(run: Run) -> tuple[pd.DataFrame, list[str]]:
    """Return the traffic per layer, and the names of layers without traffic."""
    table = run.layers
    if table.empty:
        where = "; give the run of a single seed" if run.seeds else ""
        raise LabkitError(
            f"{run.name} has no layers divided among ranks (state: {run.status['state']}); give a "
            "completed run with strategy=lk.TensorParallel(), lk.SpatialParallel(), or "
            "lk.Pipeline, lk.Layerwise or lk.DelayedGradients with "
            f"tensor_parallel_size above 1{where}"
        )
    columns = [f"{way}{kind}_bytes" for way in WAYS for kind in ("", "_wire")]
    # A layer is complete when its busiest rank is done, so the table contains the maximum over
    # ranks.
    most = table.groupby(["layer", "slices"], sort=False)[columns].max().reset_index()
    sends = most[columns].sum(axis=1) > 0
    return most[sends], list(most[~sends]["layer"])


def _weights(run: Run) -> tuple[int, int]:
    """Return the bytes of weights that the fullest rank stores, and the bytes of all weights."""
    by_rank = run.layers.groupby("rank")["weights_bytes"].sum()
    # Every rank lists every layer, so duplicates are dropped before the sum.
    whole = run.layers.drop_duplicates("layer")["whole_weights_bytes"]
    return int(by_rank.max()), int(whole.sum())


def _bars(sending: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Return one row per layer and direction (forward, backward): payload in KiB per step."""
    parts = []
    for way in WAYS:
        payload, wire = sending[f"{way}_bytes"], sending[f"{way}_wire_bytes"]
        details = [
            f"{safe_text(name)}, {way}: payload {bytes_text(a)}, {bytes_text(b)} on the wire"
            for name, a, b in zip(names, payload, wire, strict=True)
        ]
        layers = [safe_text(name) for name in names]
        rows = {"way": way, "layer": layers, "sent": payload.to_numpy() / 1024, "hover": details}
        parts.append(pd.DataFrame(rows))
    return pd.concat(parts, ignore_index=True)
