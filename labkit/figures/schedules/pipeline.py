"""Pipeline schedules: predicted and measured Gantt charts, and an animation tick by tick."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import plural, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, entries
from labkit.figures.kit.frames import BARE, animation, arrows, legend, table, words
from labkit.figures.kit.lanes import BarKind, GanttPanel, connections, lanes
from labkit.figures.kit.panels import Trace
from labkit.figures.runs.speed import refusal
from labkit.records.run import Run
from labkit.records.staged_steps import measured_pipeline
from labkit.schedules.pipeline import ScheduleTable
from labkit.schedules.pipeline_stages import Tick, ticks
from labkit.schedules.pipeline_table import LETTERS
from labkit.simulate.pipeline import PipelineSimulation

LANE = 28  # height of the lane of a rank in pixels
STAGE, MICROBATCH = "%{customdata[0]}", "%{customdata[1]}"
# The colours are from Okabe and Ito (2008); people with any colour vision can distinguish them.
ACTIONS = {
    action: BarKind(name, color, f"{name} of micro-batch {MICROBATCH} at stage {STAGE}")
    for action, name, color in (
        ("forward", "forward", "#56B4E9"),
        ("backward", "backward", "#E69F00"),
        ("backward_input", "backward, input part", "#D55E00"),
        ("backward_weight", "backward, weight part", "#009E73"),
    )
}
MESSAGE = BarKind("message, from its first byte to its delivery", INK)
FREE = "none (messages take no time)"
PALEST = 0.45  # opacity of the last virtual stage of a rank

Drawn = PipelineSimulation | Run


def pipeline_gantt(pipelines: Drawn | Iterable[Drawn], step: int | None = None) -> Figure:
    """Draw a Gantt chart per pipeline, on a common time scale, with one bar per computation.

    The number in a bar is the micro-batch of the computation. If a rank has several virtual stages,
    the bars of later stages are paler. A gap between bars means that the rank waits. The chart of a
    run shows one measured step, or three steps if gradients are delayed. The list `[run,
    predicted_pipeline(run)]` draws the measured step above the predicted one.

    Args:
        pipelines: One or several results of `simulate_pipeline`, or pipeline-parallel runs.
        step: Number of the training step to draw, if a pipeline is a run. By default, the chart
            shows a step of typical duration, after the first ten steps.

    Raises:
        InvalidInput: There is no pipeline, or a run does not have the training step `step`.
        LabkitError: A run has no timeline of its pipeline stages.
    """
    all_pipelines = (
        [pipelines] if isinstance(pipelines, PipelineSimulation | Run) else list(pipelines)
    )
    if not all_pipelines:
        raise InvalidInput("no pipeline was given; give results of simulate_pipeline, or runs")
    panels = [_panel(pipeline, step) for pipeline in all_pipelines]
    shown = [each for each, _ in panels if each is not None]
    title = f"Pipeline · {_clocks(shown)} · network {_networks(shown)}"
    texts = (f"{panel.title}\n{panel.note}".strip().replace("\n", "; ") for _, panel in panels)
    return lanes(
        [panel for _, panel in panels],
        ACTIONS,
        title,
        "number in a bar: micro-batch; no bar: the rank waits",
        list(texts),
        LANE,
        1e3 * max((pipeline.seconds for pipeline in shown), default=1e-3),
        [MESSAGE] if any(panel.below for _, panel in panels) else [],
    )


def _panel(pipeline: Drawn, step: int | None) -> tuple[PipelineSimulation | None, GanttPanel]:
    """Return a pipeline and its panel; None and no bars if the run's equivalence check failed."""
    if isinstance(pipeline, Run):
        (entry,) = entries([pipeline])
        if entry.equivalence_failed:
            return None, GanttPanel(pipeline.name, note=refusal(entry))
        pipeline = measured_pipeline(pipeline, step)
    title = f"{_pipeline_text(pipeline)}\n{_bubble_text(pipeline)}"
    order = [_lane(pipeline, rank) for rank in range(pipeline.table.ranks)]
    return pipeline, GanttPanel(
        title, order, _bars(pipeline), ("stage", "microbatch"), _messages(pipeline)
    )


def _lane(pipeline: PipelineSimulation, rank: int) -> str:
    return f"stage {rank}" if pipeline.table.chunks == 1 else f"rank {rank}"


def _bars(pipeline: PipelineSimulation) -> pd.DataFrame:
    """Return one row per computation: lane of its rank, times in ms, and the text of its bar."""
    table = pipeline.table.take(pipeline.table.computes)
    start, stop = (
        1e3 * column[pipeline.table.computes] for column in (pipeline.start, pipeline.stop)
    )
    paler = (1 - PALEST) / max(table.chunks - 1, 1)
    return pd.DataFrame(
        {
            "lane": [_lane(pipeline, rank) for rank in table.rank],
            "kind": table.action,
            "start": start,
            "length": stop - start,
            "text": [str(number) for number in table.microbatch],
            "opacity": 1 - paler * table.chunk,
            "stage": table.stage,
            "microbatch": table.microbatch,
        }
    )


def _messages(pipeline: PipelineSimulation) -> list[Trace]:
    """Return lines from sender lanes to receiver lanes, for all messages that take time."""
    table = pipeline.table
    # The figure omits messages without duration, because each would be a vertical line across the
    # bars.
    rows = np.flatnonzero((table.action == "send") & (pipeline.stop > pipeline.start))
    if not len(rows):
        return []
    times = [(1e3 * pipeline.start[row], 1e3 * pipeline.stop[row]) for row in rows]
    ends = [
        (_lane(pipeline, stage % table.ranks), _lane(pipeline, peer % table.ranks))
        for stage, peer in zip(table.stage[rows], table.peer[rows], strict=True)
    ]
    return [connections(MESSAGE, times, ends)]


def _pipeline_text(pipeline: PipelineSimulation) -> str:
    """Describe the pipeline: `1f1b, 4 stages, 8 micro-batches: 12.3 ms`."""
    table = pipeline.table
    clock = "measured, " if pipeline.measured else ""
    stages = f"{table.stages} stage{'s' if table.stages > 1 else ''}"
    if table.chunks > 1:
        stages += f" on {table.ranks} ranks"
    what = "time step" if table.recurrent else "micro-batch"
    # A pipeline schedule with delayed gradients has no end. The text therefore counts only the
    # micro-batches in the figure.
    many = len(set(table.microbatch[table.action == "forward"].tolist()))
    plural = "" if many == 1 else "s" if table.recurrent else "es"
    return f"{clock}{table.name}, {stages}, {many} {what}{plural}: {seconds_text(pipeline.seconds)}"


def _bubble_text(pipeline: PipelineSimulation) -> str:
    """Describe the bubble: `bubble 27 % of the time, between 20 % and 30 % on single ranks`."""
    shares = pipeline.utilisation()
    words = f"bubble {pipeline.bubble_share:.1%} of the time"
    if np.ptp(shares) < 0.005:
        return f"{words}, the same on all ranks"
    least, most = 1 - shares.max(), 1 - shares.min()
    return f"{words}, between {least:.0%} and {most:.0%} on single ranks"


def _clocks(shown: list[PipelineSimulation]) -> str:
    clocks = ("wall clock" if pipeline.measured else "simulation" for pipeline in shown)
    return " and ".join(dict.fromkeys(clocks)) or "wall clock"


def _networks(shown: list[PipelineSimulation]) -> str:
    names = list(dict.fromkeys(_network(pipeline) for pipeline in shown)) or ["not emulated"]
    # The figure shows a measured run beside its simulation.
    if set(names) == {"not emulated", FREE}:
        return "not emulated (in the simulation, messages take no time)"
    return names[0] if len(names) == 1 else f"{', '.join(names)} (by schedule)"


def _network(pipeline: PipelineSimulation) -> str:
    if pipeline.network is None:
        return "not emulated" if pipeline.measured else FREE
    return str(pipeline.network)


MOST_STAGES = 8
MOST_TICKS = 200
VERBS = {
    "forward": "forward pass of",
    "backward": "backward pass of",
    "backward_input": "backward pass (gradients of inputs) of",
    "backward_weight": "backward pass (gradients of weights) of",
}
FORTH, BACK = "#0072B2", "#D55E00"
HEIGHT = 250  # height of the animation in pixels
HALF = 0.3  # half of the width of a stage's box, relative to the distance between stages
# y coordinates from top to bottom: caption, stage names, forward arrows, boxes, backward arrows,
# and held activations
CAPTION, NAMES, ABOVE, BOX, BELOW, HELD = 3.1, 2.3, 1.6, 1.0, 0.4, -0.45


def pipeline_steps(table: ScheduleTable) -> Figure:
    """Animate a pipeline schedule: each frame shows the stages and their messages in one tick.

    For example, the activations x3 of micro-batch 3 move to the right. The gradients ∂3 of
    micro-batch 3 move to the left. The text below each stage lists the micro-batches whose
    activations the stage stores.

    Args:
        table: Schedule of `labkit.schedules.PIPELINE` with at most 8 stages and 200 ticks.

    Raises:
        InvalidInput: The schedule has more than 8 stages or 200 ticks.
    """
    count = int(table.tick.max(initial=-1)) + 1
    if table.stages > MOST_STAGES or count > MOST_TICKS:
        raise InvalidInput(
            f"the schedule has {table.stages} stages and {count} ticks, but an animation shows at "
            f"most {MOST_STAGES} stages and {MOST_TICKS} ticks; give fewer, or use pipeline_gantt"
        )
    steps = ticks(table)
    what = "time slice" if table.recurrent else "micro-batch"
    many = f"{plural(table.stages, 'stage')}, {plural(table.microbatches, what)}"
    title = f"Pipeline {table.name}, {many} · schedule, no clock"
    captions = [
        f"tick {number} of {count}: {plural(len(step.work), 'stage')} of {table.stages} active, "
        f"each on one {what}"
        for number, step in enumerate(steps, 1)
    ]
    actions = [action for action in ACTIONS if (table.action == action).any()]
    named = [(ACTIONS[action].name, ACTIONS[action].color, "square") for action in actions]
    named += [("x: activations", FORTH, "solid"), ("∂: gradients", BACK, "solid")]
    return animation(
        fixed=[_names(table), *legend(named)],
        states=[
            _state(actions, *step_and_caption)
            for step_and_caption in zip(steps, captions, strict=True)
        ],
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
    """Describe the state of a pipeline stage, such as `forward of 3; holds 1, 2, 3`."""
    details = "waits"
    if stage in step.work:
        action, number = step.work[stage]
        details = f"{VERBS[action]} {number}"
    return f"{details}; holds {', '.join(map(str, step.held[stage])) or 'nothing'}"


def _state(actions: Sequence[str], step: Tick, caption: str) -> list[Trace]:
    """Return the Plotly traces that differ between frames, for one tick."""
    holdings = [f"holds {_activations_text(microbatches)}" for microbatches in step.held]
    return [
        _arrows(step, 1, ABOVE, FORTH),
        _arrows(step, -1, BELOW, BACK),
        *(_boxes(step, action) for action in actions),
        words([[stage, HELD] for stage in range(len(holdings))], holdings, 12),
        # The caption is a trace, because Plotly's frames can change traces, but not titles.
        words([[-0.4, CAPTION]], [caption], 13, textposition="middle right"),
    ]


def _arrows(step: Tick, direction: int, height: float, color: str) -> Trace:
    """Return arrows between stages in one direction, with the names of the sent values."""
    sent = [(source, number) for source, to, number in step.sent if to - source == direction]
    paths = [
        np.array([[source + part * direction, height] for part in (0.15, 0.5, 0.85)])
        for source, _ in sent
    ]
    names = [f"{'x' if direction > 0 else '∂'}{number}" for _, number in sent]
    return arrows(paths, color, names=names, side="top" if direction > 0 else "bottom")


def _boxes(step: Tick, action: str) -> Trace:
    """Return boxes with micro-batch numbers, for stages that perform `action` in the tick."""
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


def _activations_text(held: tuple[int, ...]) -> str:
    """List stored activations as `x1 x2 x3`; if there are many, name only the first and last."""
    if len(held) > 4:
        return f"x{held[0]} … x{held[-1]} ({len(held)})"
    return " ".join(f"x{number}" for number in held) or "nothing"


def _names(table: ScheduleTable) -> Trace:
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
