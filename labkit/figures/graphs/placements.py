"""Placements side by side: how long their steps are predicted to take, and take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import bits_text, seconds_text
from labkit.figures.kit.entries import INK, Line, lines
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.marks import bars, rule
from labkit.figures.kit.sheet import Panel, sheet
from labkit.records.placed import Measured
from labkit.simulate.placement import Machine, Plan

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

LANE = 34  # pixels a device
PREDICTED, MEASURED = "predicted", "measured"
FREE = 1e12  # bits/s; what is faster is memory that both ends share
SHARED = "logical CPU devices share the cores of this machine"
# Okabe and Ito (2008), as in `entries`.
PARTS = {
    "forward": Kind("forward", "#56B4E9", "%{customdata[0]}"),
    "gradient": Kind("gradient", "#E69F00", "%{customdata[0]}"),
    "update": Kind("update of a variable", "#009E73", "%{customdata[0]}"),
}


def placement_table(
    plans: Mapping[str, Sequence[Plan]], measured: Sequence[Measured] = ()
) -> pd.DataFrame:
    """A row a link and rule: what is predicted and, of the first link, measured.

    Args:
        plans: by the name of the link; random ones are one row, with the spread over seeds.
        measured: steps of the plans of the first link.

    Returns:
        link, rule, plans; predicted_ms with its least and greatest over plans; copies and
        copied_bytes (medians over plans); balance, the mean share of the step for which a device
        computes; measured_ms, the median of all steps, with p10 and p90, and as a part
        of_predicted; bound_ms, which no plan can beat (`TaskGraph.shortest`).
    """
    import pandas as pd

    seconds = {each.name: each.seconds for each in measured}
    first = next(iter(plans), "")
    rows = []
    for link, made in plans.items():
        for rule_name in dict.fromkeys(map(_rule, made)):
            own = [plan for plan in made if _rule(plan) == rule_name]
            times = [1e3 * plan.makespan for plan in own]
            taken = [1e3 * s for plan in own for s in seconds.get(plan.name, ()) if link == first]
            low, middle, high = np.percentile(taken, [10, 50, 90]) if taken else [np.nan] * 3
            rows.append(
                {
                    "link": link,
                    "rule": rule_name,
                    "plans": len(own),
                    "predicted_ms": float(np.median(times)),
                    "predicted_low_ms": min(times),
                    "predicted_high_ms": max(times),
                    "copies": float(np.median([len(plan.copies) for plan in own])),
                    "copied_bytes": float(np.median([plan.copied_bytes for plan in own])),
                    "balance": float(np.mean([plan.busy for plan in own])),
                    "measured_ms": middle,
                    "measured_low_ms": low,
                    "measured_high_ms": high,
                    "of_predicted": middle / float(np.median(times)),
                    "bound_ms": 1e3 * own[0].graph.shortest(own[0].machine),
                }
            )
    return pd.DataFrame(rows)


def makespans(plans: Mapping[str, Sequence[Plan]], measured: Sequence[Measured] = ()) -> Figure:
    """A panel a link with the predicted step of each rule, and one with what was measured.

    Whiskers: of predictions the random plans of all seeds; of steps p10 to p90. The dashed line is
    the time that no plan can beat.

    Args: as `placement_table`.
    """
    table = placement_table(plans, measured)
    looks = lines(table["rule"])
    panels = []
    for link, own in table.groupby("link", sort=False):
        machine = next(iter(plans[link])).machine
        panels.append(_panel(f"{PREDICTED}, {link}\n{link_text(machine)}", own, PREDICTED, looks))
        if own["measured_ms"].notna().any():
            panels.append(_panel(f"{MEASURED}, {link}\n{SHARED}", own, MEASURED, looks))
    rows = [panels[at : at + 2] for at in range(0, len(panels), 2)]
    count = len(next(iter(plans[table["link"].iloc[0]])).machine.devices)
    clocks = "simulation and wall clock" if len(measured) else "simulation"
    title = f"A step by placement, {count} devices · {clocks} · network by panel"
    legend = [*looks.values(), Line("no plan can be shorter", INK, "dash", "line-ew")]
    remarks = ["whiskers: random plans of all seeds; steps from p10 to p90"]
    return sheet(
        rows, legend, title, remarks, [_in_words(row) for row in _records(table)], plot=230
    )


def placement_gantt(plans: Sequence[Plan]) -> Figure:
    """A Gantt a plan: what each device computes when, and the copies between them as lines."""
    import pandas as pd

    panels, words = [], []
    for plan in plans:
        names = list(plan.machine.devices)
        tasks = plan.graph.by_name
        frame = pd.DataFrame(
            [
                {
                    "lane": names[plan.devices[name]],
                    "kind": part_of(name),
                    "start": 1e3 * start,
                    "length": 1e3 * (stop - start),
                    "text": "",
                    "task": f"{name} ({tasks[name].kind})",
                }
                for name, (start, stop) in plan.spans.items()
                if stop > start
            ]
        )
        told = f"{plan.name}: {seconds_text(plan.makespan)}"
        title = f"{told}\n{len(plan.copies)} copies over {link_text(plan.machine)}"
        panels.append(Lanes(title, names, frame, ("task",), [_copies(plan)]))
        words.append(title.replace("\n", "; "))
    end = 1e3 * max(plan.makespan for plan in plans)
    more = [Kind("copy between devices", INK)]
    title = "Plans of a step · simulation · network in each title"
    return lanes(panels, PARTS, title, "empty: the device waits", words, LANE, end, more)


def part_of(name: str) -> str:
    """Which part of a step an operation belongs to, by the scope in its name."""
    if name.startswith("gradient_tape"):
        return "gradient"
    return "update" if name.startswith("descent") else "forward"


def link_text(machine: Machine) -> str:
    """`a link of 101 µs at 1 Gb/s`"""
    latency = f"a link of {seconds_text(machine.latency)}"
    if 8 * machine.bandwidth >= FREE:
        return f"{latency}, bytes hardly count"
    return f"{latency} at {bits_text(machine.bandwidth)}"


def _copies(plan: Plan) -> dict[str, object]:
    names = plan.machine.devices
    return {
        "mode": "lines",
        "x": [t for c in plan.copies for t in (1e3 * c.start, 1e3 * c.stop, None)],
        "y": [t for c in plan.copies for t in (names[c.sender], names[c.receiver], None)],
        "line": {"color": INK, "width": 1},
        "opacity": 0.6,
        "hoverinfo": "skip",
        "legendgroup": "copy between devices",
        "name": "copy between devices",
        "showlegend": False,
    }


def _panel(title: str, own: pd.DataFrame, what: str, looks: Mapping[str, Line]) -> Panel:
    rows = own.assign(
        hover=[f"{r['rule']}: {r[f'{what}_ms']:.3g} ms" for r in _records(own)],
        ms=own[f"{what}_ms"],
        ms_low=own[f"{what}_low_ms"],
        ms_high=own[f"{what}_high_ms"],
    )
    shown = bars(rows, "rule", "ms", looks, by="rule")
    bound = [float(own["bound_ms"].iloc[0])] * 2
    ends = [own["rule"].iloc[0], own["rule"].iloc[-1]]
    return Panel(
        title=title,
        x="",
        y=f"a step, {what}, ms",
        traces=[*shown, rule(ends, bound, "dash")],
        y_axis={"rangemode": "tozero"},
    )


def _in_words(row: Mapping[str, float]) -> str:
    said = f"{row['link']}, {row['rule']}: predicted {row['predicted_ms']:.3g} ms"
    measured = row["measured_ms"]
    return said if np.isnan(measured) else f"{said}, measured {measured:.3g} ms"


def _records(table: pd.DataFrame) -> list[dict[str, float]]:
    found: list[dict[str, float]] = table.to_dict("records")
    return found


def _rule(plan: Plan) -> str:
    return plan.name.partition(",")[0]
