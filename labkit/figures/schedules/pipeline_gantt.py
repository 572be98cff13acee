"""The Gantt of pipelines, predicted and measured: which stage does what with what, when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.figures.kit.entries import INK, entries, safe_text
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.sheet import Trace
from labkit.figures.runs.speed import refused
from labkit.records.run import Run
from labkit.records.staged_steps import measured_pipeline
from labkit.simulate.pipeline import PipelineSimulation

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

LANE = 28  # pixels a lane
STAGE, MICROBATCH = "%{customdata[0]}", "%{customdata[1]}"
# Okabe and Ito (2008), as in `entries`: told apart with any colour vision.
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
    given = [pipelines] if isinstance(pipelines, PipelineSimulation | Run) else list(pipelines)
    if not given:
        raise InvalidInput("no pipeline to draw: give what simulate_pipeline returns, or runs")
    panels = [_panel(each, step) for each in given]
    shown = [each for each, _ in panels if each is not None]
    title = f"Pipeline · {_clocks(shown)} · network {_networks(shown)}"
    told = (f"{panel.title}\n{panel.note}".strip().replace("\n", "; ") for _, panel in panels)
    return lanes(
        [panel for _, panel in panels],
        ACTIONS,
        title,
        "number: micro-batch; empty: the rank waits",
        list(told),
        LANE,
        1e3 * max((each.seconds for each in shown), default=1e-3),
        [MESSAGE] if any(panel.below for _, panel in panels) else [],
    )


def _panel(each: Drawn, step: int | None) -> tuple[PipelineSimulation | None, Lanes]:
    """What is drawn and how; nothing of a run without speed."""
    if isinstance(each, Run):
        (entry,) = entries([each])
        if entry.gate_failed:
            return None, Lanes(each.name, note=refused(entry))
        each = measured_pipeline(each, step)
    title = f"{_called(each)}\n{_bubble(each)}"
    order = [_lane(each, rank) for rank in range(each.table.ranks)]
    return each, Lanes(title, order, _bars(each), ("stage", "microbatch"), _messages(each))


def _lane(each: PipelineSimulation, rank: int) -> str:
    return f"stage {rank}" if each.table.chunks == 1 else f"rank {rank}"


def _bars(each: PipelineSimulation) -> pandas.DataFrame:
    """A row a computation."""
    import pandas as pd

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
    """A line a message, from its sender to its receiver; none where messages take no time."""
    table = each.table
    # A message without duration would be a vertical line through the bars.
    rows = np.flatnonzero((table.action == "send") & (each.stop > each.start))
    if not len(rows):
        return []
    times = [(1e3 * each.start[row], 1e3 * each.stop[row], None) for row in rows]
    ends = [
        (_lane(each, stage % table.ranks), _lane(each, peer % table.ranks), None)
        for stage, peer in zip(table.stage[rows], table.peer[rows], strict=True)
    ]
    line = {
        "mode": "lines",
        "x": [time for pair in times for time in pair],
        "y": [lane for pair in ends for lane in pair],
        "line": {"color": MESSAGE.color, "width": 1},
        "opacity": 0.6,
        "hoverinfo": "skip",
        "legendgroup": MESSAGE.name,
        "name": safe_text(MESSAGE.name),
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


def _bubble(each: PipelineSimulation) -> str:
    """`bubble 27 % of the time, from 20 % to 30 % by rank`"""
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
