"""A pipeline schedule tick by tick: values pass from stage to stage, and gradients come back."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.figures.schedules.pipeline_ticks import Tick, follow
from labkit.schedules.pipeline import Table

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

MOST_STAGES = 8
MOST_TICKS = 200
VERBS = {
    "forward": "goes forward with",
    "backward": "goes back with",
    "backward_input": "goes back (input part) with",
    "backward_weight": "goes back (weight part) with",
}


def pipeline_steps(table: Table) -> Figure:
    """An animated figure of a schedule, a frame a tick: stages, and what passes between them.

    Value x3 of micro-batch 3 moves to the right, its gradient ∂3 to the left; below each stage
    stand the micro-batches whose activations it holds. Play, pause and a slider move in time.

    Args: table: of `labkit.schedules.PIPELINE`, of at most 8 stages and 200 ticks.
    Raises: InvalidInput, for a larger one.
    """
    from labkit.figures.schedules.pipeline_frames import animation

    ticks = int(table.tick.max(initial=-1)) + 1
    if table.stages > MOST_STAGES or ticks > MOST_TICKS:
        raise InvalidInput(
            f"{table.stages} stages and {ticks} ticks: an animation shows at most {MOST_STAGES} "
            f"stages and {MOST_TICKS} ticks; give fewer, or ask pipeline_gantt"
        )
    steps = follow(table)
    what = "stretch" if table.recurrent else "micro-batch"
    count = plural(table.microbatches, what)
    title = f"Pipeline {table.name}, {plural(table.stages, 'stage')}, {count} · schedule, no clock"
    captions = [_caption(step, number, ticks, what) for number, step in enumerate(steps)]
    return animation(table, steps, captions, title, _in_words(title, captions), _html(steps))


def _caption(step: Tick, number: int, ticks: int, what: str) -> str:
    count = plural(len(step.work), "stage")
    return f"tick {number + 1} of {ticks}: {count} of {len(step.held)} at work on a {what} each"


def _in_words(title: str, captions: list[str]) -> str:
    return f"Animated schedule. {title}. {'. '.join(captions)}."


def _html(steps: list[Tick]) -> str:
    """The schedule as an HTML table, a row a tick: for readers of screens, paper and keyboards."""
    stages = len(steps[0].held)
    head = "".join(f"<th>stage {stage}</th>" for stage in range(stages))
    body = []
    for number, step in enumerate(steps, 1):
        cells = (f"<td>{escape(_cell(step, stage))}</td>" for stage in range(stages))
        body.append(f"<tr><th>{number}</th>{''.join(cells)}</tr>")
    return f"<table><thead><tr><th>tick</th>{head}</tr></thead>{''.join(body)}</table>"


def _cell(step: Tick, stage: int) -> str:
    """`goes forward with 3; holds 1, 2, 3`"""
    said = "waits"
    if stage in step.work:
        action, number = step.work[stage]
        said = f"{VERBS[action]} {number}"
    return f"{said}; holds {', '.join(map(str, step.held[stage])) or 'nothing'}"
