"""What control dependencies change in the order of a step: updates that wait for all gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.figures.dataflow.step_nodes import CLOCK, UPDATE, short
from labkit.figures.kit.entries import INK
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.sheet import Trace
from labkit.records.step_graph import Operation, StepGraph

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

LANE = 26  # pixels a lane
LANES = ("other operations", "gradients", "updates")
SAID = "%{customdata[0]}"
# Okabe and Ito (2008), as in `entries`: told apart with any colour vision.
KINDS = dict(
    zip(
        LANES,
        (
            Kind("other operations", "#56B4E9", SAID),
            Kind("makes a gradient", "#009E73", SAID),
            Kind("changes a variable", "#D55E00", SAID),
        ),
        strict=True,
    )
)


def control_timeline(graphs: Mapping[str, StepGraph]) -> Figure:
    """A Gantt a graph on one scale of time, with a line where the last gradient was there.

    Args:
        graphs: by what is said of each; the same training step with other control dependencies.

    Raises:
        InvalidInput: a step changes no variable, so that there is no order to see.
    """
    table = control_order(graphs)
    drawn = {what: _bars(graph) for what, graph in graphs.items()}
    end = max(float((rows["start"] + rows["length"]).max()) for rows in drawn.values())
    panels, words = [], []
    for what, rows in drawn.items():
        own = table.loc[what]
        said = (
            f"{own['early']} of {own['updates']} updates begin before the last gradient is there; "
            f"{plural(int(own['control_edges']), 'control edge')}"
        )
        mark = _mark(own["last_gradient_ms"])
        panels.append(Lanes(f"{what}\n{said}", LANES, rows, ("said",), [mark]))
        words.append(f"{what}: {said}")
    title = f"Control dependencies in one step · {CLOCK}"
    return lanes(panels, KINDS, title, "line: the last gradient is there", words, LANE, end)


def control_order(graphs: Mapping[str, StepGraph]) -> pandas.DataFrame:
    """A row a graph: its control edges, its updates and how many of them began `early`.

    Early is an update that starts before the last operation that makes a gradient has ended.
    `last_gradient_ms`, `first_update_ms` and `step_ms` are from the same traced step.
    """
    import pandas as pd

    rows = {what: _row(graph) for what, graph in graphs.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")


def control_reading(graphs: Mapping[str, StepGraph]) -> Markdown:
    """For each graph: whether an update may begin before all gradients are there, and did."""
    found = []
    for what, row in control_order(graphs).iterrows():
        found.append(
            Finding(
                f"**{what}**",
                said=(
                    f"{row['early']:.0f} of {row['updates']:.0f} updates began before the last "
                    f"gradient was there, at {row['last_gradient_ms']:.4g} ms",
                    f"the first update began at {row['first_update_ms']:.4g} ms",
                ),
                verdict=_verdict(row),
            )
        )
    return sentences(found)


def _verdict(row: pandas.Series) -> str:
    """Whether updates had to wait, and did."""
    if not row["gated"]:
        return "some may, as not every update waits for every gradient"
    return f"none may, yet {row['early']:.0f} did" if row["early"] else "none may, and none did"


def _parts(graph: StepGraph) -> dict[str, list[Operation]]:
    """Operations with an event, by the lane in which they are drawn."""
    timed = {each.name: each for each in graph.operations if not math.isnan(each.start)}
    updates = {name for name, each in timed.items() if each.op == UPDATE}
    if not updates:
        raise InvalidInput("this step changes no variable: give one that trains")
    # What an update reads, and was computed.
    made = {f.source for f in graph.flows if f.target in updates and not f.control} & timed.keys()
    found: dict[str, list[Operation]] = {lane: [] for lane in LANES}
    for name, each in timed.items():
        lane = LANES[2] if name in updates else LANES[1] if name in made else LANES[0]
        found[lane].append(each)
    return found


def _row(graph: StepGraph) -> dict[str, float]:
    parts = _parts(graph)
    _, gradients, updates = (parts[lane] for lane in LANES)
    last = max(each.stop for each in gradients)
    held = {(f.source, f.target) for f in graph.flows}
    gated = all((g.name, u.name) in held for g in gradients for u in updates)
    return {
        "control_edges": sum(flow.control for flow in graph.flows),
        "gated": gated,
        "updates": len(updates),
        "early": sum(each.start < last for each in updates),
        "last_gradient_ms": 1e3 * last,
        "first_update_ms": 1e3 * min(each.start for each in updates),
        "step_ms": 1e3 * graph.seconds,
    }


def _bars(graph: StepGraph) -> pandas.DataFrame:
    import pandas as pd

    rows = [
        {
            "lane": lane,
            "kind": lane,
            "start": 1e3 * each.start,
            "length": 1e3 * (each.stop - each.start),
            "text": "",
            "said": f"{short(each.op)} {each.name}",
        }
        for lane, operations in _parts(graph).items()
        for each in operations
    ]
    return pd.DataFrame(rows)


def _mark(time: float) -> Trace:
    """A line through all lanes."""
    return {
        "x": [time] * len(LANES),
        "y": list(LANES),
        "mode": "lines",
        "line": {"color": INK, "dash": "dot", "width": 2},
        "hovertemplate": "the last gradient is there<extra></extra>",
        "showlegend": False,
    }
