"""What each layer of a model in slices sends in a step, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.common.units import bytes_text
from labkit.figures.kit.entries import clock_and_network, entries, lines, safe_text
from labkit.figures.kit.marks import bars
from labkit.figures.kit.sheet import PLOT, Panel, lanes_axis, sheet
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

LANE = 26  # pixels a layer
WAYS = ("forward", "backward")


def layer_traffic(run: Run) -> Figure:
    """Bars a layer: payload bytes a step, forward and backward, of the rank that sends most.

    Layers that send nothing are named below, and not drawn.

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
    plot, said = max(PLOT, LANE * len(names)), [*words, *unsent]
    figure = sheet([[panel]], drawn.values(), title, [remark], said, plot=plot)
    figure.update_layout(barmode="group", margin={"l": 16})
    return figure


def _by_layer(run: Run) -> tuple[pandas.DataFrame, list[str]]:
    """A row a layer that sends, the most of any rank; the names of the others."""
    table = run.layers
    if table.empty:
        where = "; its seeds have them" if run.seeds else ""
        raise LabkitError(
            f"{run.name} has no layers in slices (state: {run.status['state']}); a completed run "
            "with strategy=lk.TensorParallel(), lk.LocallyConnected(), or stages of slices "
            f"(lk.Pipeline, lk.Layerwise, lk.DelayedGradients with slices) has{where}"
        )
    columns = [f"{way}{kind}_bytes" for way in WAYS for kind in ("", "_wire")]
    # The rank that sends most decides when a layer is done.
    most = table.groupby(["layer", "slices"], sort=False)[columns].max().reset_index()
    sends = most[columns].sum(axis=1) > 0
    return most[sends], list(most[~sends]["layer"])


def _weights(run: Run) -> tuple[int, int]:
    """Bytes that the rank which has most holds of the weights, and of all of them."""
    held = run.layers.groupby("rank")["weights_bytes"].sum()
    # Every rank tells of every layer: the whole counts once.
    whole = run.layers.drop_duplicates("layer")["whole_weights_bytes"]
    return int(held.max()), int(whole.sum())


def _bars(sending: pandas.DataFrame, names: list[str]) -> pandas.DataFrame:
    """A row a layer and way: KiB a step."""
    import pandas as pd

    parts = []
    for way in WAYS:
        payload, wire = sending[f"{way}_bytes"], sending[f"{way}_wire_bytes"]
        said = [
            f"{safe_text(name)}, {way}: {bytes_text(a)} handed over, {bytes_text(b)} on the wire"
            for name, a, b in zip(names, payload, wire, strict=True)
        ]
        layers = [safe_text(name) for name in names]
        rows = {"way": way, "layer": layers, "sent": payload.to_numpy() / 1024, "hover": said}
        parts.append(pd.DataFrame(rows))
    return pd.concat(parts, ignore_index=True)
