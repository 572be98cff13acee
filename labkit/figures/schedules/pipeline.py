"""Pipeline schedules: Gantt charts, predicted and measured, and an animation by ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import plural, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, entries
from labkit.figures.kit.frames import BARE, animation, arrows, legend, table, words
from labkit.figures.kit.lanes import Kind, Lanes, connections, lanes
from labkit.figures.kit.panels import Trace
from labkit.figures.runs.speed import refusal
from labkit.records.run import Run
from labkit.records.staged_steps import measured_pipeline
from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.stage_memory import Tick, ticks
from labkit.schedules.pipeline.table import LETTERS
from labkit.simulate.pipeline import PipelineSimulation

LANE = 28  # pixels a lane
STAGE, MICROBATCH = "%{customdata[0]}", "%{customdata[1]}"
# Colours of Okabe and Ito (2008), as in `entries`, distinct for any colour vision.
ACTIONS = {
    action: Kind(name, color, f"{name} of micro-batch {MICROBATCH} at stage {STAGE}")
    for action, name, color in (
        ("forward", "forward", "#56B4E9"),
        ("backward", "backward", "#E69F00"),
        ("backward_input", "backward, input part", "#D55E00"),
        ("backward_weight", "backward, weight part", "#009E73"),
    )
}
MESSAGE = Kind("message, from its first byte to its delivery", INK)
FREE = "none: messages take no time"
PALEST = 0.45  # opacity of a rank's last chunk

Drawn = PipelineSimulation | Run


def pipeline_gantt(pipelines: Drawn | Iterable[Drawn], step: int | None = None) -> Figure:
    """Draw a Gantt chart a pipeline, on the same scale of time: one bar a computation.

    The number in a bar is its micro-batch; later chunks of a rank are paler. A rank without a bar
    waits. A run shows one measured step (three of delayed gradients): give
    `[run, predicted_pipeline(run)]` to see the measured step above the predicted one.

    Args:
        pipelines: one or several, of `simulate_pipeline`, or runs of models in stages.
        step: of the runs; default: one that takes as long as is usual, without the first ten.

    Raises:
        InvalidInput: there is none, or a run has no such step. LabkitError: a run has no timeline
            of stages.
    """
    given = [pipelines] if isinstance(pipelines, PipelineSimulation | Run) else list(pipelines)
    if not given:
        raise InvalidInput("no pipeline to draw: give what simulate_pipeline returns, or runs")
    panels = [_panel(each, step) for each in given]
    shown = [each for each, _ in panels if each is not None]
    title = f"Pipeline · {_clocks(shown)} · network {_networks(shown)}"
    texts = (f"{panel.title}\n{panel.note}".strip().replace("\n", "; ") for _, panel in panels)
    return lanes(
        [panel for _, panel in panels],
        ACTIONS,
        title,
        "number: micro-batch; empty: the rank waits",
        list(texts),
        LANE,
        1e3 * max((each.seconds for each in shown), default=1e-3),
        [MESSAGE] if any(panel.below for _, panel in panels) else [],
    )


def _panel(each: Drawn, step: int | None) -> tuple[PipelineSimulation | None, Lanes]:
    """Return a pipeline and its lanes; without bars for a run that failed its gate."""
    if isinstance(each, Run):
        (entry,) = entries([each])
        if entry.gate_failed:
            return None, Lanes(each.name, note=refusal(entry))
        each = measured_pipeline(each, step)
    title = f"{_pipeline_text(each)}\n{_bubble_text(each)}"
    order = [_lane(each, rank) for rank in range(each.table.ranks)]
    return each, Lanes(title, order, _bars(each), ("stage", "microbatch"), _messages(each))


def _lane(each: PipelineSimulation, rank: int) -> str:
    return f"stage {rank}" if each.table.chunks == 1 else f"rank {rank}"


def _bars(each: PipelineSimulation) -> pd.DataFrame:
    """Return a row a computation."""
    table = each.table.take(each.table.computes)
    start, stop = (1e3 * column[each.table.computes] for column in (each.start, each.stop))
    paler = (1 - PALEST) / max(table.chunks - 1, 1)
    return pd.DataFrame(
        {
            "lane": [_lane(each, rank) for rank in table.rank],
            "kind": table.action,
            "start": start,
            "length": stop - start,
            "text": [str(number) for number in table.microbatch],
            "opacity": 1 - paler * table.chunk,
            "stage": table.stage,
            "microbatch": table.microbatch,
        }
    )


def _messages(each: PipelineSimulation) -> list[Trace]:
    """Return a line a message from sender to receiver, unless messages take no time."""
    table = each.table
    # A message without duration would be a vertical line through the bars.
    rows = np.flatnonzero((table.action == "send") & (each.stop > each.start))
    if not len(rows):
        return []
    times = [(1e3 * each.start[row], 1e3 * each.stop[row]) for row in rows]
    ends = [
        (_lane(each, stage % table.ranks), _lane(each, peer % table.ranks))
        for stage, peer in zip(table.stage[rows], table.peer[rows], strict=True)
    ]
    return [connections(MESSAGE, times, ends)]


def _pipeline_text(each: PipelineSimulation) -> str:
    """Return `1f1b, 4 stages, 8 micro-batches: 12.3 ms`."""
    table = each.table
    clock = "measured, " if each.measured else ""
    stages = f"{table.stages} stage{'s' if table.stages > 1 else ''}"
    if table.chunks > 1:
        stages += f" on {table.ranks} ranks"
    what = "time step" if table.recurrent else "micro-batch"
    # Of what never ends, such as delayed gradients, a part is drawn.
    many = len(set(table.microbatch[table.action == "forward"].tolist()))
    plural = "" if many == 1 else "s" if table.recurrent else "es"
    return f"{clock}{table.name}, {stages}, {many} {what}{plural}: {seconds_text(each.seconds)}"


def _bubble_text(each: PipelineSimulation) -> str:
    """Return `bubble 27 % of the time, from 20 % to 30 % by rank`."""
    shares = each.utilisation()
    words = f"bubble {each.bubble_share:.1%} of the time"
    if np.ptp(shares) < 0.005:
        return f"{words}, the same on all ranks"
    return f"{words}, from {1 - shares.max():.0%} to {1 - shares.min():.0%} by rank"


def _clocks(shown: list[PipelineSimulation]) -> str:
    clocks = ("wall clock" if each.measured else "simulation" for each in shown)
    return " and ".join(dict.fromkeys(clocks)) or "wall clock"


def _networks(shown: list[PipelineSimulation]) -> str:
    names = list(dict.fromkeys(_network(each) for each in shown)) or ["not emulated"]
    if set(names) == {"not emulated", FREE}:  # a run, and its prediction
        return f"not emulated ({FREE} in the simulation)"
    return names[0] if len(names) == 1 else f"{', '.join(names)} (by schedule)"


def _network(each: PipelineSimulation) -> str:
    if each.network is None:
        return "not emulated" if each.measured else FREE
    return str(each.network)


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
# From top to bottom: caption, names, arrows forth, boxes, arrows back, activations held.
CAPTION, NAMES, ABOVE, BOX, BELOW, HELD = 3.1, 2.3, 1.6, 1.0, 0.4, -0.45


def pipeline_steps(table: Table) -> Figure:
    """Animate a schedule, a frame a tick: stages, and the values between them.

    Value x3 of micro-batch 3 moves to the right, its gradient ∂3 to the left. Below each stage
    stand the micro-batches of the activations that it holds.

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
    return animation(
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
    """Return `goes forward with 3; holds 1, 2, 3`."""
    details = "waits"
    if stage in step.work:
        action, number = step.work[stage]
        details = f"{VERBS[action]} {number}"
    return f"{details}; holds {', '.join(map(str, step.held[stage])) or 'nothing'}"


def _state(actions: Sequence[str], step: Tick, caption: str) -> list[Trace]:
    """Return the traces that change from frame to frame."""
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
    """Return arrows from stage to stage, with the names of the values."""
    sent = [(source, number) for source, to, number in step.sent if to - source == way]
    paths = [
        np.array([[source + part * way, height] for part in (0.15, 0.5, 0.85)])
        for source, _ in sent
    ]
    names = [f"{'x' if way > 0 else '∂'}{number}" for _, number in sent]
    return arrows(paths, color, names=names, side="top" if way > 0 else "bottom")


def _boxes(step: Tick, action: str) -> Trace:
    """Return the boxes of the stages that do this action, with its micro-batch."""
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
    """Return `x1 x2 x3`; of many the first and the last."""
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
