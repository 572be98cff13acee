"""A pipeline schedule tick by tick: values pass from stage to stage, and gradients come back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK
from labkit.figures.kit.frames import BARE, arrows, legend, played, table, words
from labkit.figures.kit.panels import Trace
from labkit.figures.schedules.pipeline_gantt import ACTIONS
from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.stage_memory import Tick, ticks
from labkit.schedules.pipeline.table import LETTERS

MOST_STAGES = 8
MOST_TICKS = 200
VERBS = {
    "forward": "goes forward with",
    "backward": "goes back with",
    "backward_input": "goes back (input part) with",
    "backward_weight": "goes back (weight part) with",
}
FORTH, BACK = "#0072B2", "#D55E00"
HEIGHT = 250  # pixels
HALF = 0.3  # of the width of a stage's box, where stages are 1 apart
# From top to bottom: what is said, names, arrows forth, boxes, arrows back, what is held.
CAPTION, NAMES, ABOVE, BOX, BELOW, HELD = 3.1, 2.3, 1.6, 1.0, 0.4, -0.45


def pipeline_steps(table: Table) -> Figure:
    """An animated figure of a schedule, a frame a tick: stages, and what passes between them.

    Value x3 of micro-batch 3 moves to the right, its gradient ∂3 to the left; below each stage
    stand the micro-batches whose activations it holds. Play, pause and a slider move in time.

    Args: table: of `labkit.schedules.PIPELINE`, of at most 8 stages and 200 ticks.
    Raises: InvalidInput, for a larger one.
    """
    count = int(table.tick.max(initial=-1)) + 1
    if table.stages > MOST_STAGES or count > MOST_TICKS:
        raise InvalidInput(
            f"{table.stages} stages and {count} ticks: an animation shows at most {MOST_STAGES} "
            f"stages and {MOST_TICKS} ticks; give fewer, or ask pipeline_gantt"
        )
    steps = ticks(table)
    what = "stretch" if table.recurrent else "micro-batch"
    many = f"{plural(table.stages, 'stage')}, {plural(table.microbatches, what)}"
    title = f"Pipeline {table.name}, {many} · schedule, no clock"
    captions = [
        f"tick {number} of {count}: {plural(len(step.work), 'stage')} of {table.stages} at work "
        f"on a {what} each"
        for number, step in enumerate(steps, 1)
    ]
    actions = [action for action in ACTIONS if (table.action == action).any()]
    named = [(ACTIONS[action].name, ACTIONS[action].color, "square") for action in actions]
    named += [("x: activations", FORTH, "solid"), ("∂: gradients", BACK, "solid")]
    return played(
        fixed=[_names(table), *legend(named)],
        states=[_state(actions, *each) for each in zip(steps, captions, strict=True)],
        layout=_layout(table.stages),
        title=title,
        alt=f"Animated schedule. {title}. {'. '.join(captions)}.",
        table=_as_table(steps),
        step="tick ",
        first=1,
    )


def _as_table(steps: Sequence[Tick]) -> str:
    stages = range(len(steps[0].held))
    rows = ([str(n), *(_cell(step, stage) for stage in stages)] for n, step in enumerate(steps, 1))
    return table(["tick", *(f"stage {stage}" for stage in stages)], rows)


def _cell(step: Tick, stage: int) -> str:
    """`goes forward with 3; holds 1, 2, 3`"""
    said = "waits"
    if stage in step.work:
        action, number = step.work[stage]
        said = f"{VERBS[action]} {number}"
    return f"{said}; holds {', '.join(map(str, step.held[stage])) or 'nothing'}"


def _state(actions: Sequence[str], step: Tick, caption: str) -> list[Trace]:
    """The traces that change from frame to frame."""
    held = [f"holds {_several(each)}" for each in step.held]
    return [
        _arrows(step, 1, ABOVE, FORTH),
        _arrows(step, -1, BELOW, BACK),
        *(_boxes(step, action) for action in actions),
        words([[stage, HELD] for stage in range(len(held))], held, 12),
        # As a trace, not as a title: a frame changes traces only.
        words([[-0.4, CAPTION]], [caption], 13, textposition="middle right"),
    ]


def _arrows(step: Tick, way: int, height: float, color: str) -> Trace:
    """Arrows from the middle of a stage to that of the next one, with the value's name."""
    sent = [(source, number) for source, to, number in step.sent if to - source == way]
    paths = [
        np.array([[source + part * way, height] for part in (0.15, 0.5, 0.85)])
        for source, _ in sent
    ]
    names = [f"{'x' if way > 0 else '∂'}{number}" for _, number in sent]
    return arrows(paths, color, names=names, side="top" if way > 0 else "bottom")


def _boxes(step: Tick, action: str) -> Trace:
    """The stages that do this, filled, with the micro-batch in them."""
    name, color, _ = ACTIONS[action]
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


def _several(held: tuple[int, ...]) -> str:
    """`x1 x2 x3`; of many the first and the last."""
    if len(held) > 4:
        return f"x{held[0]} … x{held[-1]} ({len(held)})"
    return " ".join(f"x{number}" for number in held) or "nothing"


def _names(table: Table) -> Trace:
    stages = range(table.stages)
    of_rank = (f"<br>rank {stage % table.ranks}" if table.chunks > 1 else "" for stage in stages)
    names = [f"stage {stage}{rank}" for stage, rank in zip(stages, of_rank, strict=True)]
    return words([[stage, NAMES] for stage in stages], names, 12)


def _layout(stages: int) -> Trace:
    frame = {"type": "rect", "layer": "below", "line": {"color": INK, "width": 1}}
    return {
        "height": HEIGHT,
        "xaxis": BARE | {"range": [-0.5, stages - 0.5]},
        "yaxis": BARE | {"range": [-0.8, 3.5]},
        "barmode": "overlay",
        "shapes": [
            frame | {"x0": stage - HALF, "x1": stage + HALF, "y0": BOX - 0.4, "y1": BOX + 0.4}
            for stage in range(stages)
        ],
    }
