"""The figure that grows in JupyterLab while ranks work."""

from __future__ import annotations

from typing import Any

from labkit.figures.entries import INK, PALETTE, safe_text


def live_figure(label: str, workers: int) -> Any:
    """A FigureWidget with two empty curves a rank: first all losses, then all speeds.

    Args:
        label: of the experiment.
        workers: ranks.
    """
    import plotly.graph_objects as go

    from labkit.figures.canvas import CLEAR, GRID

    axis = {"gridcolor": GRID, "zeroline": False, "title": {"text": "step"}}
    layout = {
        "title": {"text": f"{safe_text(label)} · wall clock"},
        "height": 320,
        "margin": {"t": 48, "b": 40, "l": 60, "r": 16},
        "font": {"color": INK},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "grid": {"rows": 1, "columns": 2, "pattern": "independent"},
        "xaxis": axis,
        "xaxis2": axis,
        "yaxis": axis | {"title": {"text": "loss of the rank's batch"}},
        "yaxis2": axis | {"title": {"text": "samples/s of the rank"}, "rangemode": "tozero"},
    }
    traces = [
        go.Scatter(
            x=[],
            y=[],
            mode="lines",
            name=f"rank {rank}",
            legendgroup=str(rank),
            showlegend=not panel,
            line={"color": PALETTE[rank % len(PALETTE)]},
            xaxis=f"x{panel or ''}",
            yaxis=f"y{panel or ''}",
        )
        for panel in (0, 2)
        for rank in range(workers)
    ]
    return go.FigureWidget(data=traces, layout=layout)
