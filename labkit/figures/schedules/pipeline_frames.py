"""The frames of a pipeline schedule: stages in a row, arrows between them, what each one holds."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from labkit.figures.kit.canvas import HEAD, Figure, base_layout
from labkit.figures.kit.entries import INK
from labkit.figures.schedules.animation import Animation, buttons, slider, text_trace
from labkit.figures.schedules.pipeline_gantt import ACTIONS
from labkit.figures.schedules.pipeline_ticks import Tick, value_name
from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.table import LETTERS

FORTH, BACK = "#0072B2", "#D55E00"
HEIGHT, CONTROLS, LEGEND = 250, 74, 34  # pixels
HALF = 0.3  # of the width of a stage's box, where stages are 1 apart
# From top to bottom: what is said, names, arrows forth, boxes, arrows back, what is held.
CAPTION, NAMES, ABOVE, BOX, BELOW, HELD = 3.1, 2.3, 1.6, 1.0, 0.4, -0.45


def animation(
    table: Table, steps: list[Tick], captions: list[str], title: str, alt: str, html: str
) -> Figure:
    """All ticks of a schedule; the figure shows the first until it is played.

    captions: a line a tick; alt: the figure in words; html: its frames as a table.
    """
    states = [_state(table, step, caption) for step, caption in zip(steps, captions, strict=True)]
    fixed = [_names(table), *_legend(table)]
    places = list(range(len(fixed), len(fixed) + len(states[0])))
    frames = [
        go.Frame(name=str(number), data=state, traces=places)
        for number, state in enumerate(states, 1)
    ]
    figure = Animation(data=[*fixed, *states[0]], frames=frames)
    figure.update_layout(_layout(table.stages, title, alt))
    figure.update_layout(sliders=[slider(len(states), 0, "tick ", 1)], updatemenus=[buttons()])
    figure.layout.meta = {"alt": alt, "table": html, "controls": CONTROLS}
    return figure


def _state(table: Table, step: Tick, caption: str) -> list[dict[str, Any]]:
    """The traces that change from frame to frame."""
    return [
        _arrows([each for each in step.sent if each[1] > each[0]], ABOVE, FORTH),
        _arrows([each for each in step.sent if each[1] < each[0]], BELOW, BACK),
        *(_boxes(step, action) for action in _actions(table)),
        _held(step),
        text_trace([-0.4], [CAPTION], [caption], 13, hoverinfo="skip", textposition="middle right"),
    ]


def _actions(table: Table) -> list[str]:
    return [action for action in ACTIONS if (table.action == action).any()]


def _arrows(sent: list[tuple[int, int, int]], height: float, color: str) -> dict[str, Any]:
    """From the middle of a stage to that of the next one, the value's name on the way."""
    x: list[float | None] = []
    texts: list[str] = []
    heads: list[int] = []
    for source, destination, number in sent:
        way = destination - source
        x += [source + 0.15 * way, source + 0.5 * way, source + 0.85 * way, None]
        texts += ["", value_name(source, destination, number), "", ""]
        heads += [0, 0, 14, 0]
    side = "top" if height == ABOVE else "bottom"
    return {
        "type": "scatter",
        "x": x,
        "y": [height] * len(x),
        "text": texts,
        "textposition": f"{side} center",
        "textfont": {"size": 14, "color": color},
        "mode": "lines+markers+text",
        "line": {"color": color, "width": 2},
        "marker": {
            "symbol": "arrow",
            "angleref": "previous",
            "size": heads,
            "color": color,
            "opacity": 1,
            "line": {"width": 0},
        },
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _boxes(step: Tick, action: str) -> dict[str, Any]:
    """The stages that do this, filled, with the micro-batch in them."""
    name, color = ACTIONS[action]
    stages = [stage for stage, (what, _) in step.work.items() if what == action]
    return {
        "type": "bar",
        "x": stages,
        "y": [0.8] * len(stages),
        "base": BOX - 0.4,
        "width": 2 * HALF,
        "text": [f"<b>{LETTERS[action]}{step.work[stage][1]}</b>" for stage in stages],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 18, "color": "black"},
        "marker": {"color": color, "line": {"width": 0}},
        "hovertemplate": f"stage %{{x}}: {name}<extra></extra>",
        "showlegend": False,
    }


def _held(step: Tick) -> dict[str, Any]:
    texts = [f"holds {_several(held)}" for held in step.held]
    return text_trace(list(range(len(texts))), [HELD] * len(texts), texts, 12, hoverinfo="skip")


def _several(held: tuple[int, ...]) -> str:
    """`x1 x2 x3`; of many the first and the last."""
    if len(held) > 4:
        return f"x{held[0]} … x{held[-1]} ({len(held)})"
    return " ".join(f"x{number}" for number in held) or "nothing"


def _names(table: Table) -> dict[str, Any]:
    names = [
        f"stage {stage}" + (f"<br>rank {stage % table.ranks}" if table.chunks > 1 else "")
        for stage in range(table.stages)
    ]
    return text_trace(list(range(len(names))), [NAMES] * len(names), names, 12, hoverinfo="skip")


def _legend(table: Table) -> list[dict[str, Any]]:
    """Draw nothing but the legend."""
    nothing: dict[str, Any] = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip"}
    boxes: list[dict[str, Any]] = [
        {"name": ACTIONS[action][0], "mode": "markers"}
        | {"marker": {"color": ACTIONS[action][1], "symbol": "square", "size": 10}}
        for action in _actions(table)
    ]
    arrows: list[dict[str, Any]] = [
        {"name": name, "mode": "lines", "line": {"color": color, "width": 2}}
        for name, color in (("x: activations", FORTH), ("∂: gradients", BACK))
    ]
    return [nothing | each for each in [*boxes, *arrows]]


def _layout(stages: int, title: str, alt: str) -> dict[str, Any]:
    bare: dict[str, Any] = {"visible": False, "fixedrange": True}
    frame = {"type": "rect", "layer": "below", "line": {"color": INK, "width": 1}}
    return base_layout(title, "", alt) | {
        "height": HEAD + HEIGHT + LEGEND + CONTROLS,
        "margin": {"t": HEAD, "b": LEGEND + CONTROLS, "l": 16, "r": 16, "pad": 0},
        "xaxis": bare | {"range": [-0.5, stages - 0.5]},
        "yaxis": bare | {"range": [-0.8, 3.5]},
        "barmode": "overlay",
        "shapes": [
            frame | {"x0": stage - HALF, "x1": stage + HALF, "y0": BOX - 0.4, "y1": BOX + 0.4}
            for stage in range(stages)
        ],
        "dragmode": False,
    }
