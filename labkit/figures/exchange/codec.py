"""Where a step goes: computing, encoding and decoding, the wire, waiting for other ranks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labkit.common.units import seconds_text
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import (
    INK,
    OVERSUBSCRIBED,
    PALETTE,
    Entry,
    Line,
    clock_and_network,
    safe_text,
)
from labkit.figures.kit.panels import Panel
from labkit.figures.runs.speed import refusals
from labkit.records.run import Run
from labkit.records.step_costs import PARTS, StepCosts, step_costs

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

# Colour and hatch: told apart without colour, too.
_LOOKS = dict(zip(PARTS, zip(PALETTE, ("", "/", "x", "."), strict=False), strict=True))
_LETTERS = 140  # of a line under all bars
_LINES, _LINE = 5, 14  # lines a bar at most, hovering shows the rest; pixels of a line


def step_parts(runs: Iterable[Run] | Run) -> Figure:
    """A bar a run, stacked: compute, codec, wire and wait seconds a step.

    Medians over the steady steps, mean over ranks; the diamond is the measured step, with p10 to
    p90. A run whose equivalence gate failed has no bar. Raises LabkitError where there are no runs.
    """
    from labkit.figures.kit.canvas import draw

    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    drawn = [(e, costs) for e in shown if not e.gate_failed and (costs := step_costs(e.run))]
    names = [_short(entry.label, len(drawn)) for entry, _ in drawn]
    panel = Panel(
        title="Seconds of a step\nmedian over steps, mean over ranks; ◆ measured step, p10 to p90",
        x="run",
        y="ms a step",
        traces=_traces(drawn),
        note=refusals(shown) or "no history",
        always_note=bool(refusals(shown)),
        x_axis={
            "tickvals": list(range(len(drawn))),
            "ticktext": ["<br>".join(map(safe_text, lines)) for lines in names],
            "range": [-0.6, max(len(drawn), 1) - 0.4],
            "showgrid": False,
            "tickangle": 0,
        },
        y_axis={"rangemode": "tozero"},
    )
    title = f"Where a step goes · {clock_and_network(shown)}"
    busy = OVERSUBSCRIBED if any(e.metrics.get("oversubscribed") for e in shown) else ""
    words = [f"{entry.label}: {parts_in_words(costs)}" for entry, costs in drawn]
    alt = ". ".join(part for part in [title, busy, *words, refusals(shown)] if part) + "."
    looks = [Line(part, color, "solid", "square") for part, (color, _) in _LOOKS.items()]
    below = 36 + _LINE * max(map(len, names), default=0)
    figure = draw([[panel]], looks, title, busy, alt, plot=280, below=below)
    figure.update_layout(barmode="stack")
    return figure


def parts_in_words(costs: StepCosts) -> str:
    """`compute 3 ms, codec 1 ms, wire 2 ms, wait 0 s`"""
    return ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in PARTS)


def _traces(drawn: list[tuple[Entry, StepCosts]]) -> list[dict[str, Any]]:
    if not drawn:
        return []
    places = list(range(len(drawn)))
    bars: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": places,
            "y": [1e3 * getattr(costs, part) for _, costs in drawn],
            "marker": {"color": color, "pattern": {"shape": hatch, "fillmode": "overlay"}},
            "text": [safe_text(entry.label) for entry, _ in drawn],
            "textposition": "none",
            "hovertemplate": f"%{{text}}<br>{part} %{{y:.3g}} ms<extra></extra>",
            "name": part,
            "legendgroup": part,
            "showlegend": False,
        }
        for part, (color, hatch) in _LOOKS.items()
    ]
    return [*bars, _measured(drawn)]


def _measured(drawn: list[tuple[Entry, StepCosts]]) -> dict[str, Any]:
    steps = [entry.metrics["step_ms"] for entry, _ in drawn]
    return {
        "x": list(range(len(drawn))),
        "y": [step["median"] for step in steps],
        "mode": "markers",
        "marker": {"symbol": "diamond", "color": INK, "size": 9},
        "error_y": {
            "array": [step["p90"] - step["median"] for step in steps],
            "arrayminus": [step["median"] - step["p10"] for step in steps],
            "symmetric": False,
            "thickness": 1.5,
            "color": INK,
        },
        "hovertemplate": "measured step %{y:.3g} ms<extra></extra>",
        "name": "measured step",
        "showlegend": False,
    }


def _short(label: str, bars: int) -> list[str]:
    """Lines of a label; a word too long for one is broken behind brackets and underscores."""
    width = max(9, _LETTERS // bars)
    words = [w if len(w) <= width else re.sub(r"(?<=[(_])", " ", w) for w in label.split()]
    found = textwrap.wrap(" ".join(words), width, max_lines=_LINES, placeholder=" …")
    return [re.sub(r"(?<=[(_]) ", "", line) for line in found]
