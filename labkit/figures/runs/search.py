"""A search: its trials in order with the best so far, and how much each parameter mattered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.figures.kit.entries import INK, PALETTE, safe_text
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.records.analysis.search_results import Searched

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure


def search_history(found: Searched) -> Figure:
    """Each trial's value, the best so far as a line, and importances as bars."""
    metric, trials = safe_text(found.metric), found.trials
    points = [
        _points(trials[trials["state"] == state], state, symbol)
        for state, symbol in (("complete", "circle"), ("pruned", "x"))
    ]
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": trials["trial"].tolist(),
        "y": trials["best"].tolist(),
        "line": {"shape": "hv", "color": PALETTE[0]},
        "name": "best so far",
        "showlegend": False,
    }
    history = Panel(
        "Trials in order\n● complete, × pruned, line: best so far", "trial", metric, [line, *points]
    )
    names = list(found.importances)[::-1]
    bars: Trace = {
        "type": "bar",
        "orientation": "h",
        "x": [found.importances[name] for name in names],
        "y": [safe_text(name) for name in names],
        "marker": {"color": PALETTE[0]},
        "showlegend": False,
    }
    importance = Panel(
        "What mattered\nOptuna's importance, of 1",
        "share",
        "",
        [bars] if names else [],
        note="one parameter, or too few trials",
    )
    pruned = int((trials["state"] == "pruned").sum())
    words = [f"{len(trials)} trials, {pruned} pruned"]
    if trials["best"].notna().any():
        words.append(f"best {found.metric} {trials['best'].iloc[-1]:.6g}")
    words += [f"importance of {name} {share:.2f}" for name, share in found.importances.items()]
    return sheet([[history, importance]], [], f"Search for {found.metric}", words=words)


def _points(trials: pd.DataFrame, state: str, symbol: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": trials["trial"].tolist(),
        "y": trials["value"].tolist(),
        "marker": {"symbol": symbol, "color": INK},
        "name": state,
        "showlegend": False,
        "hovertemplate": f"trial %{{x}}, {state}: %{{y:.6g}}<extra></extra>",
    }
