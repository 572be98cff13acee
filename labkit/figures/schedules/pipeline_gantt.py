"""The Gantt of pipelines, predicted and measured: which stage does what with what, when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.figures.cuts.staged_runs import measured_pipeline
from labkit.figures.kit.entries import INK, Line, entries, safe_text
from labkit.figures.kit.panels import Panel, lanes_axis
from labkit.figures.runs.speed import refused
from labkit.records.run import Run
from labkit.schedules.pipeline.table import Table
from labkit.simulate.pipeline import PipelineSimulation

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

LANE = 28  # pixels a lane
# Okabe and Ito (2008), as in `entries`: told apart with any colour vision.
ACTIONS = {
    "forward": ("forward", "#56B4E9"),
    "backward": ("backward", "#E69F00"),
    "backward_input": ("backward, input part", "#D55E00"),
    "backward_weight": ("backward, weight part", "#009E73"),
}
MESSAGE = ("message, from its first byte to its delivery", INK)
FREE = "none: messages take no time"
PALEST = 0.45  # opacity of a rank's last chunk


Drawn = PipelineSimulation | Run


def pipeline_gantt(pipelines: Drawn | Iterable[Drawn], step: int | None = None) -> Figure:
    """A Gantt a pipeline, one under the other on the same scale of time: one bar a computation.

    The number in a bar is its micro-batch; a rank's later chunks are paler. Where nothing is drawn
    the rank waits. A run shows one of its steps, as it was (of delayed gradients three): give
    `[run, predicted_pipeline(run)]` to see what was measured above what was predicted.

    Args:
        pipelines: one or several, of `simulate_pipeline`, or runs of models in stages.
        step: of the runs; default: one that takes as long as is usual, without the first ten.

    Raises:
        InvalidInput: there is none, or a run has no such step. LabkitError: a run has no timeline
            of stages.
    """
    from labkit.figures.kit.canvas import draw

    given = [pipelines] if isinstance(pipelines, PipelineSimulation | Run) else list(pipelines)
    if not given:
        raise InvalidInput("no pipeline to draw: give what simulate_pipeline returns, or runs")
    named = [_named(each, step) for each in given]
    shown = [each for _, each in named if each is not None]
    end = 1e3 * max((each.seconds for each in shown), default=1e-3)
    title = f"Pipeline · {_clocks(shown)} · network {_networks(shown)}"
    told = (name if each is None else f"{name}; {_in_words(each)}" for name, each in named)
    alt = ". ".join([title, *told]) + "."
    present = {action for each in shown for action in each.table.action.tolist()}
    legend = [ACTIONS[action] for action in ACTIONS if action in present]
    if any(_messages(each) for each in shown):
        legend.append(MESSAGE)
    figure = draw(
        [[_panel(name, each, end)] for name, each in named],
        [Line(name, color, "solid", "square") for name, color in legend],
        title,
        "number: micro-batch; empty: the rank waits",
        alt,
        LANE * max((each.table.ranks for each in shown), default=1),
    )
    figure.update_layout(barmode="overlay", bargap=0.12, margin={"l": 80})
    return figure


def _named(each: Drawn, step: int | None) -> tuple[str, PipelineSimulation | None]:
    """What stands above a panel, and what is drawn in it: nothing of a run without speed."""
    if isinstance(each, PipelineSimulation):
        return _called(each), each
    (entry,) = entries([each])
    if entry.gate_failed:
        return f"{each.name}\n{refused(entry)}", None
    found = measured_pipeline(each, step)
    return _called(found), found


def _panel(name: str, each: PipelineSimulation | None, end: float) -> Panel:
    if each is None:
        title, _, note = name.partition("\n")
        return Panel(title, "", "", [], note)
    lanes = [_lane(each.table, rank) for rank in range(each.table.ranks)]
    actions = [action for action in ACTIONS if (each.table.action == action).any()]
    return Panel(
        title=f"{name}\n{_in_words(each)}",
        x="time, ms",
        y="",
        traces=[*_messages(each), *(_bars(each, action) for action in actions)],
        x_axis={"range": [-0.01 * end, 1.01 * end]},
        y_axis=lanes_axis(lanes),
        link="time",
    )


def _lane(table: Table, rank: int) -> str:
    return f"stage {rank}" if table.chunks == 1 else f"rank {rank}"


def _bars(each: PipelineSimulation, action: str) -> dict[str, Any]:
    """One bar a computation of this kind."""
    name, color = ACTIONS[action]
    table = each.table
    rows = table.action == action
    paler = (1 - PALEST) / max(table.chunks - 1, 1)
    start, length = 1e3 * each.start[rows], 1e3 * (each.stop - each.start)[rows]
    stages, microbatches = table.stage[rows], table.microbatch[rows]
    return {
        "type": "bar",
        "orientation": "h",
        "x": length,
        "base": start,
        "y": [_lane(table, rank) for rank in table.rank[rows]],
        "customdata": np.column_stack([stages, microbatches, start]),
        "text": [str(number) for number in microbatches],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "marker": {
            "color": color,
            "opacity": 1 - paler * table.chunk[rows],
            "line": {"color": "white", "width": 0.5},
        },
        "hovertemplate": f"{name} of micro-batch %{{customdata[1]:.0f}} at stage "
        "%{customdata[0]:.0f}<br>%{customdata[2]:.3f} ms, for %{x:.3f} ms<extra>%{y}</extra>",
        "legendgroup": name,
        "name": safe_text(name),
        "showlegend": False,
    }


def _messages(each: PipelineSimulation) -> list[dict[str, Any]]:
    """A line a message, from its sender to its receiver; none where messages take no time."""
    table = each.table
    rows = np.flatnonzero((table.action == "send") & (each.stop > each.start))
    if not len(rows):
        return []
    name, color = MESSAGE
    times = [(1e3 * each.start[row], 1e3 * each.stop[row], None) for row in rows]
    ends = [
        (_lane(table, stage % table.ranks), _lane(table, peer % table.ranks), None)
        for stage, peer in zip(table.stage[rows], table.peer[rows], strict=True)
    ]
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": [time for pair in times for time in pair],
        "y": [lane for pair in ends for lane in pair],
        "line": {"color": color, "width": 1},
        "opacity": 0.6,
        "hoverinfo": "skip",
        "legendgroup": name,
        "name": safe_text(name),
        "showlegend": False,
    }
    return [line]


def _called(each: PipelineSimulation) -> str:
    """`1f1b, 4 stages, 8 micro-batches: 12.3 ms`"""
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


def _in_words(each: PipelineSimulation) -> str:
    """`bubble 27 % of the time; the ranks compute 80 %, 70 % of it`"""
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
