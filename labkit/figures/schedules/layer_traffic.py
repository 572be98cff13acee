"""Traffic between ranks that hold parts of a model, layer by layer."""

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
from labkit.schedules.grid import Crossing, Grid, Layer, check_fit, crossing, held
from labkit.schedules.round import Integers

if TYPE_CHECKING:
    from labkit.records.run import Run

Points = NDArray[np.float64]  # row and column

TILES = 230  # pixels of a panel of tiles
FAINT = fade_to("213,94,0", 0.5)
SPOKEN = 12  # the words name every message of a layer where there are no more
ITEMSIZE = {"float64": 8, "mixed_float16": 2, "float16": 2, "mixed_bfloat16": 2, "bfloat16": 2}


def grid_traffic(layers: Sequence[Layer], grid: Grid, run: Run | None = None) -> Figure:
    """Draw the tiles of each layer on a grid of machines, and the values that cross between them.

    Left, each place of the previous layer, darker if more other machines read it; thicker lines
    carry more values. Right, values a sample from machine to machine. The gradients of the same
    values travel back.

    Args: layers: from the input to the loss, such as `experiment.planes`; grid: rows and columns of
    machines; run: one of these layers and this grid, for its measured bytes.
    Raises: InvalidInput, for a grid larger than the smallest layer, or a run of another strategy.
    """
    machines = grid[0] * grid[1]
    check_fit(grid, machines, layers)
    crossings = crossing(layers, grid)
    size = 4 if run is None else ITEMSIZE.get(str(run.experiment.get("precision")), 4)
    measured = [] if run is None else _measured(run, layers, machines)
    title = f"Values that cross between {grid[0]} × {grid[1]} machines · predicted, bytes a sample"
    if run is not None:
        title += f", and measured · {clock_and_network(entries([run]))}"
    words, rows = [], []
    for number in range(2, len(layers)):
        details = _summary(layers, crossings, number, size, measured)
        rows.append(
            [_tiles(layers, grid, crossings, number, details), _matrix(crossings, number, machines)]
        )
        words.append(f"{details.replace(chr(10), ', ')}: {_messages(crossings, number)}")
    # Every machine reads its own rows of the data set, so that the first layer needs no message.
    remark = "the input is on all machines: nothing crosses before the first layer"
    figure = sheet(rows, [], title, [remark], words, plot=TILES)
    figure.update_layout(margin={"l": 40})
    return figure


def _measured(run: Run, layers: Sequence[Layer], machines: int) -> list[tuple[float, float]]:
    """Return bytes a sample that one replica sent before each layer, forward and backward."""
    table = run.layers
    if table.empty or (table["rank"] == 0).sum() != len(layers) - 1:
        raise InvalidInput(
            f"{run.name} has not metered these {len(layers) - 1} layers: give a run of "
            "LocallyConnected, and the layers of its model"
        )
    table = table[table["rank"] < machines]
    samples = run.history[run.history["rank"] == 0]["samples"].mean()
    # Names may repeat, so that the place of a layer identifies it.
    places = table.groupby("rank").cumcount()  # rows of a rank are in the order of its layers
    sums = table.groupby(places)[["forward_bytes", "backward_bytes"]].sum() / samples
    return [(0.0, 0.0), *sums.itertuples(index=False, name=None)]


def _summary(
    layers: Sequence[Layer],
    results: Crossing,
    number: int,
    size: int,
    measured: Sequence[tuple[float, float]],
) -> str:
    """Return `conv to dense: 36 values cross`, and below it predicted and measured bytes."""
    here = results.layer == number
    forward, back = int(results.values[here].sum()), int(results.values_back[here].sum())
    details = f"{layers[number - 1].name} to {layers[number].name}: "
    details += f"{forward:,} values cross, {back:,} gradients back"
    details += f"\npredicted {bytes_text(size * forward)} forward, {bytes_text(size * back)} back"
    if measured:
        there, again = measured[number]
        details += f"; measured {bytes_text(there)} forward, {bytes_text(again)} back"
    return details


def _messages(results: Crossing, number: int) -> str:
    """Return `0 sends 18 values to 1, …`, or the number of messages."""
    rows = [row[1:] for row in results.rows() if row[0] == number]
    if not rows:
        return "no messages"
    if len(rows) > SPOKEN:
        values = [values for _, _, values in rows]
        return f"{len(rows)} messages of {min(values):,} to {max(values):,} values"
    return ", ".join(f"{a} sends {values:,} to {b}" for a, b, values in rows)


def _tiles(
    layers: Sequence[Layer], grid: Grid, results: Crossing, number: int, details: str
) -> Panel:
    """Return the previous layer in tiles, with machines in the middles and lines between them."""
    before = layers[number - 1]
    strip = before.kind == "units"  # units stand in one row
    rows, columns = (1, before.shape[2]) if strip else before.shape[:2]
    axes = (0, 2) if strip else (0, 1)
    # The number of machines that read a place: boxes overlap like the kernels.
    readers = np.zeros((rows, columns), np.int64)
    for box in results.box[results.layer == number][:, axes]:
        readers[box[0, 0] : box[0, 1], box[1, 0] : box[1, 1]] += 1
    boxes = held(before, grid)[:, axes]
    centers = boxes.mean(axis=2) - 0.5  # (machines, 2): row, column
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
    """Return the outlines of all tiles."""
    x: list[float | None] = []
    y: list[float | None] = []
    for (top, bottom), (left, right) in (boxes - 0.5).tolist():
        x += [left, right, right, left, left, None]
        y += [top, top, bottom, bottom, top, None]
    return rule(x, y) | {"line": {"color": INK, "width": 2}}


def _lines(results: Crossing, number: int, centers: Points) -> list[Trace]:
    """Return a line a pair of machines, thicker for more values between them."""
    pairs: dict[tuple[int, int], int] = {}
    for layer, source, destination, values in results.rows():
        if layer == number:
            pair = (min(source, destination), max(source, destination))
            pairs[pair] = pairs.get(pair, 0) + values
    # Thickness in proportion to the thickest line of this layer: layers differ by orders of
    # magnitude.
    most = max(pairs.values(), default=1)
    found_lines = []
    for (a, b), values in pairs.items():
        path = _path(centers, a, b)
        line = {"color": PALETTE[0], "width": 1 + 4 * values / most}
        look = {"mode": "lines", "opacity": 0.8, "hoverinfo": "skip", "showlegend": False}
        found_lines.append(look | {"x": path[:, 1], "y": path[:, 0], "line": line})
    return found_lines


def _path(centers: Points, a: int, b: int) -> Points:
    """Return the line between two machines, (points, 2), bent around those in between."""
    along = np.linspace(0, 1, 13)[:, None]
    path: Points = centers[a] + along * (centers[b] - centers[a])
    for axis in (0, 1):
        others = np.unique(centers[:, 1 - axis])
        # Only a line along a row or a column can pass another machine's middle.
        passed = np.count_nonzero(
            (others > path[:, 1 - axis].min()) & (others < path[:, 1 - axis].max())
        )
        if centers[a, axis] == centers[b, axis] and passed:
            room = np.diff(np.unique(centers[:, axis])).min(initial=1.0)
            path[:, axis] -= 0.4 * room * passed / len(others) * 4 * (along * (1 - along))[:, 0]
    return path


def _matrix(results: Crossing, number: int, machines: int) -> Panel:
    """Return values a sample, a row a sender and a column a receiver."""
    values = np.zeros((machines, machines), np.int64)
    here = results.layer == number
    values[results.source[here], results.destination[here]] = results.values[here]
    names = [str(machine) for machine in range(machines)]
    axes = "to machine (values a sample)", "from machine"
    letters = 12 if machines <= 9 else 8
    return matrix_panel("", names, values, "{:,}".format, "sends %{z:,} values to", axes, letters)


LANE = 26  # pixels a layer
WAYS = ("forward", "backward")


def layer_traffic(run: Run) -> Figure:
    """Draw the payload bytes of each layer a step, forward and backward, of the busiest rank.

    Layers that send nothing are named below the axis.

    Args:
        run: of a model in slices, see `Run.layers`.

    Raises: LabkitError, where the run has no layers in slices.
    """
    sending, silent = _by_layer(run)
    (entry,) = entries([run])
    names = [f"{row.layer} ({row.slices})" for row in sending.itertuples()]
    drawn = lines(WAYS)
    held, whole = _weights(run)
    panel = Panel(
        title="What a rank hands over\nof layers on several ranks, the rank that sends most",
        x="KiB a step",
        y="",
        traces=bars(_bars(sending, names), "sent", "layer", drawn, by="way", horizontal=True),
        note=f"Whole on every rank, nothing sent: {', '.join(silent)}" if silent else "",
        always_note=bool(silent),
        x_axis={"rangemode": "tozero"},
        y_axis=lanes_axis(names) | {"automargin": True},
    )
    title = f"Bytes a layer and step · {clock_and_network([entry])}"
    remark = f"A rank holds {bytes_text(held)} of {bytes_text(whole)} of weights"
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
    """Return a row a sending layer with the most of any rank, and the names of other layers."""
    table = run.layers
    if table.empty:
        where = "; its seeds have them" if run.seeds else ""
        raise LabkitError(
            f"{run.name} has no layers in slices (state: {run.status['state']}); a completed run "
            "with strategy=lk.TensorParallel(), lk.LocallyConnected(), or stages of slices "
            f"(lk.Pipeline, lk.Layerwise, lk.DelayedGradients with slices) has{where}"
        )
    columns = [f"{way}{kind}_bytes" for way in WAYS for kind in ("", "_wire")]
    # The busiest rank decides when a layer is done.
    most = table.groupby(["layer", "slices"], sort=False)[columns].max().reset_index()
    sends = most[columns].sum(axis=1) > 0
    return most[sends], list(most[~sends]["layer"])


def _weights(run: Run) -> tuple[int, int]:
    """Return the most bytes of weights on a rank, and the bytes of all weights."""
    held = run.layers.groupby("rank")["weights_bytes"].sum()
    # Every rank lists every layer, but the whole counts once.
    whole = run.layers.drop_duplicates("layer")["whole_weights_bytes"]
    return int(held.max()), int(whole.sum())


def _bars(sending: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Return a row a layer and direction: KiB a step."""
    parts = []
    for way in WAYS:
        payload, wire = sending[f"{way}_bytes"], sending[f"{way}_wire_bytes"]
        details = [
            f"{safe_text(name)}, {way}: {bytes_text(a)} handed over, {bytes_text(b)} on the wire"
            for name, a, b in zip(names, payload, wire, strict=True)
        ]
        layers = [safe_text(name) for name in names]
        rows = {"way": way, "layer": layers, "sent": payload.to_numpy() / 1024, "hover": details}
        parts.append(pd.DataFrame(rows))
    return pd.concat(parts, ignore_index=True)
