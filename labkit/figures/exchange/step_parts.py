"""Where a step goes: computing, encoding and decoding, the wire, waiting for other ranks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.common.units import seconds_text
from labkit.figures.kit.entries import (
    INK,
    PALETTE,
    Entry,
    Line,
    clock_and_network,
    entries,
    safe_text,
)
from labkit.figures.kit.marks import points
from labkit.figures.kit.sheet import Panel, Trace, busy, sheet
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
    shown = entries(runs)
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
    words = [f"{entry.label}: {_in_words(costs)}" for entry, costs in drawn]
    looks = [Line(part, color, "solid", "square") for part, (color, _) in _LOOKS.items()]
    below = 36 + _LINE * max(map(len, names), default=0)
    said = [*words, refusals(shown)]
    figure = sheet([[panel]], looks, title, busy(shown), said, plot=280, below=below)
    # The parts add up to a step, which the diamond shows as measured.
    figure.update_layout(barmode="stack")
    return figure


def _in_words(costs: StepCosts) -> str:
    """`compute 3 ms, codec 1 ms, wire 2 ms, wait 0 s`"""
    return ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in PARTS)


def _traces(drawn: list[tuple[Entry, StepCosts]]) -> list[Trace]:
    if not drawn:
        return []
    places = list(range(len(drawn)))
    bars: list[Trace] = [
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


def _measured(drawn: list[tuple[Entry, StepCosts]]) -> Trace:
    import pandas as pd

    steps = [entry.metrics["step_ms"] for entry, _ in drawn]
    table = pd.DataFrame(
        {
            "place": range(len(drawn)),
            "step": [step["median"] for step in steps],
            "step_low": [step["p10"] for step in steps],
            "step_high": [step["p90"] for step in steps],
            "hover": [f"measured step {step['median']:.3g} ms" for step in steps],
        }
    )
    return points(table, "place", "step", Line("measured step", INK, "", "diamond"), size=9)


def _short(label: str, bars: int) -> list[str]:
    """Lines of a label; a word too long for one is broken behind brackets and underscores."""
    # Nine letters at least: less would break every word.
    width = max(9, _LETTERS // bars)
    # A blank where a word may be broken; it is taken out again below.
    words = [w if len(w) <= width else re.sub(r"(?<=[(_])", " ", w) for w in label.split()]
    found = textwrap.wrap(" ".join(words), width, max_lines=_LINES, placeholder=" …")
    return [re.sub(r"(?<=[(_]) ", "", line) for line in found]
