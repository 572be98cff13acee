"""Placement of operations on devices: plans, predicted and measured steps, GPU break-even."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.common.units import bits_text, bytes_text, plural, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, Finding, LineStyle, Markdown, lines, sentences
from labkit.figures.kit.lanes import BarKind, GanttPanel, connections, lanes
from labkit.figures.kit.marks import bars, line_with_band, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.records.step_graph import WAY, PlacementMeasurements, PlanMeasurement, Row
from labkit.simulate.placement import DeviceGroup, PlacementPlan

BAND = "band: range of the repeats"
NONE = (
    "TensorFlow finds no GPU on this machine, so matrix products and copies on a GPU are not "
    "measured. On a machine with a GPU, this cell draws the times, and the matrix size from "
    "which a product on the GPU is faster, copies included."
)


def break_even_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a row for each matrix size: times on host and device, with and without copies.

    Args:
        rows: Measured times of products and copies, from `labkit.worker.devices.speeds_of`.

    Returns: A table with the size n of n × n matrices. host_ms and device_ms are the times of one
        product on host and device. in_ms and out_ms are the times to copy one matrix to and from
        the device. there_ms is the time of two copies in, one product, and one copy out. pays is
        true if there_ms is less than the host's time in all repeats.
    """
    table = pd.DataFrame(rows)
    table["ms"] = 1e3 * table["seconds"]
    host, device = table[table["what"] == "product"]["device"].unique()
    by = table.pivot_table(index="n", columns="device", values="ms")
    columns = pd.DataFrame(
        {
            "host_ms": by[host],
            "device_ms": by[device],
            "in_ms": by[f"{host} to {device}"],
            "out_ms": by[f"{device} to {host}"],
        }
    )
    way = table[table["what"] == WAY].set_index("n")
    alone = table[(table["what"] == "product") & (table["device"] == host)].set_index("n")
    columns["there_ms"] = way["ms"]
    columns["pays"] = way["seconds_high"] < alone["seconds_low"]
    return columns.reset_index()


def break_even(rows: Sequence[Row]) -> Figure | Markdown:
    """Draw times by matrix size: products on host and device, copies, and round trips.

    Bands show the range of times over the repeats. If `rows` is empty, because there is no GPU, the
    function returns a sentence instead of a figure.
    """
    if not rows:
        return Markdown(NONE)
    table = pd.DataFrame(rows)
    for end in ("", "_low", "_high"):
        table[f"ms{end}"] = 1e3 * table[f"seconds{end}"]
    table["line"] = table["what"] + ", " + table["device"]
    way = break_even_table(rows)
    host, device = table[table["what"] == "product"]["device"].unique()
    looks = lines(table["line"].unique())
    drawn = line_with_band(table, "n", "ms", looks, by="line", marks=True)
    threads = plural(int(table["threads"].iloc[0]), "thread")
    panel = Panel(
        title=f"n × n matrix products and copies, float32, {threads} of the CPU\n{BAND}",
        x="n",
        y="time, ms",
        traces=drawn,
        x_axis={"type": "log", "tickvals": way["n"].tolist()},
        y_axis={"type": "log"},
    )
    title = f"Matrix product on {host} and {device} by size · wall clock · network not emulated"
    return sheet([[panel]], looks.values(), title, [], [_verdict(way, host, device)], plot=320)


def break_even_finding(rows: Sequence[Row]) -> Finding:
    """Return a finding: from which matrix size the round trip to the device is faster."""
    if not rows:
        return Finding(NONE.removesuffix("."))
    devices = list(dict.fromkeys(str(row["device"]) for row in rows if row["what"] == "product"))
    return Finding(_verdict(break_even_table(rows), *devices))


def _verdict(way: pd.DataFrame, host: str, device: str) -> str:
    pays = way["pays"].tolist()
    if not pays[-1]:
        most = way["n"].iloc[-1]
        there = f"a matrix product on {device} with its copies"
        return f"Up to n = {most}, {there} is not faster than a matrix product on {host}"
    since = len(pays) - next((at for at, each in enumerate(pays[::-1]) if not each), len(pays))
    row = way.iloc[since]
    return (
        f"From n = {row['n']:.0f} on, a matrix product on {device} with its copies takes less "
        f"time ({row['there_ms']:.3g} ms) than on {host} ({row['host_ms']:.3g} ms), in all "
        "repeats"
    )


LANE = 34  # height of one device's lane in the Gantt chart, in pixels
PREDICTED, MEASURED = "predicted", "measured"
# A link with at least this bandwidth (bits/s) counts as unlimited, because it represents shared
# memory.
FREE = 1e12
SHARED = "logical CPU devices share the cores of this machine"
# The colours are from Okabe and Ito (2008); readers with any colour vision can tell them apart.
PARTS = {
    "forward": BarKind("forward", "#56B4E9", "%{customdata[0]}"),
    "gradient": BarKind("gradient", "#E69F00", "%{customdata[0]}"),
    "update": BarKind("update of a variable", "#009E73", "%{customdata[0]}"),
}

COPY = BarKind("copy between devices", INK)


def placement_table(
    plans: Mapping[str, Sequence[PlacementPlan]], measured: Sequence[PlanMeasurement] = ()
) -> pd.DataFrame:
    """Return one row per link and placement rule, with predicted and measured step times.

    Args:
        plans: For each name of a link between devices, placements of a step's operations. All
            random placements for one link form one row.
        measured: Measured step times of the plans for the first link; default: no measurements.

    Returns: A table with the columns link, rule and plans (the number of plans). predicted_ms is
        the median over plans, with the least and greatest value. copies and copied_bytes per step
        are medians over plans. balance is the mean fraction of the step in which a device computes.
        measured_ms is the median of all steps, with p10 and p90. of_predicted is the ratio of
        measured and predicted step time. bound_ms is the lower bound for any plan's step time
        (`TaskGraph.shortest`).
    """
    seconds = {timing.name: timing.seconds for timing in measured}
    first = next(iter(plans), "")
    rows = []
    for link, made in plans.items():
        for rule_name in dict.fromkeys(map(_rule, made)):
            group = [plan for plan in made if _rule(plan) == rule_name]
            times = [1e3 * plan.makespan for plan in group]
            measured_times = [
                1e3 * s for plan in group for s in seconds.get(plan.name, ()) if link == first
            ]
            low, middle, high = (
                np.percentile(measured_times, [10, 50, 90]) if measured_times else [np.nan] * 3
            )
            rows.append(
                {
                    "link": link,
                    "rule": rule_name,
                    "plans": len(group),
                    "predicted_ms": float(np.median(times)),
                    "predicted_low_ms": min(times),
                    "predicted_high_ms": max(times),
                    "copies": float(np.median([len(plan.copies) for plan in group])),
                    "copied_bytes": float(np.median([plan.copied_bytes for plan in group])),
                    "balance": float(np.mean([plan.busy for plan in group])),
                    "measured_ms": middle,
                    "measured_low_ms": low,
                    "measured_high_ms": high,
                    "of_predicted": middle / float(np.median(times)),
                    "bound_ms": 1e3 * group[0].graph.shortest(group[0].machine),
                }
            )
    return pd.DataFrame(rows)


def makespans(
    plans: Mapping[str, Sequence[PlacementPlan]], measured: Sequence[PlanMeasurement] = ()
) -> Figure:
    """Draw predicted step times by placement rule, one panel per link, and measured step times.

    Whiskers of predictions show the range over random plans of all seeds. Whiskers of measured
    steps show p10 to p90. The dashed line is the lower bound of the step time of any plan. The
    arguments are the same as those of `placement_table`.
    """
    table = placement_table(plans, measured)
    looks = lines(table["rule"])
    panels = []
    for link, group in table.groupby("link", sort=False):
        machine = next(iter(plans[link])).machine
        panels.append(_panel(f"{PREDICTED}, {link}\n{link_text(machine)}", group, PREDICTED, looks))
        if group["measured_ms"].notna().any():
            panels.append(_panel(f"{MEASURED}, {link}\n{SHARED}", group, MEASURED, looks))
    rows = [panels[at : at + 2] for at in range(0, len(panels), 2)]
    count = len(next(iter(plans[table["link"].iloc[0]])).machine.devices)
    clocks = "simulation and wall clock" if len(measured) else "simulation"
    title = f"Step time by placement, {count} devices · {clocks} · network by panel"
    legend = [*looks.values(), LineStyle("lower bound for all placements", INK, "dash", "line-ew")]
    remarks = [
        "whiskers: range of the random placements of all seeds (predicted), p10 to p90 of "
        "the steps (measured)"
    ]
    return sheet(rows, legend, title, remarks, [_in_words(row) for row in _rows(table)], plot=230)


def placement_gantt(plans: Sequence[PlacementPlan]) -> Figure:
    """Draw a Gantt chart per plan: computations on each device, and copies between devices."""
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
        head = f"{plan.name}: {seconds_text(plan.makespan)}"
        title = f"{head}\n{len(plan.copies)} copies over {link_text(plan.machine)}"
        panels.append(GanttPanel(title, names, frame, ("task",), [_copy_lines(plan)]))
        words.append(title.replace("\n", "; "))
    end = 1e3 * max(plan.makespan for plan in plans)
    title = "Planned placements of a step's operations · simulation · network in each title"
    return lanes(panels, PARTS, title, "gaps: the device waits", words, LANE, end, [COPY])


def part_of(name: str) -> str:
    """Return an operation's phase (forward, gradient or update), from the scope in its name."""
    if name.startswith("gradient_tape"):
        return "gradient"
    return "update" if name.startswith("descent") else "forward"


def link_text(machine: DeviceGroup) -> str:
    """Describe the link between devices, such as `a link of 101 µs at 1 Gb/s`."""
    latency = f"a link of {seconds_text(machine.latency)}"
    if 8 * machine.bandwidth >= FREE:
        return f"{latency}, unlimited bandwidth"
    return f"{latency} at {bits_text(machine.bandwidth)}"


def _copy_lines(plan: PlacementPlan) -> Trace:
    names = plan.machine.devices
    times = [(1e3 * copy.start, 1e3 * copy.stop) for copy in plan.copies]
    return connections(COPY, times, [(names[c.sender], names[c.receiver]) for c in plan.copies])


def _panel(title: str, group: pd.DataFrame, what: str, looks: Mapping[str, LineStyle]) -> Panel:
    rows = group.assign(
        hover=[f"{r['rule']}: {r[f'{what}_ms']:.3g} ms" for r in _rows(group)],
        ms=group[f"{what}_ms"],
        ms_low=group[f"{what}_low_ms"],
        ms_high=group[f"{what}_high_ms"],
    )
    shown = bars(rows, "rule", "ms", looks, by="rule")
    bound = [float(group["bound_ms"].iloc[0])] * 2
    ends = [group["rule"].iloc[0], group["rule"].iloc[-1]]
    return Panel(
        title=title,
        x="",
        y=f"{what} step time, ms",
        traces=[*shown, rule(ends, bound, "dash")],
        y_axis={"rangemode": "tozero"},
    )


def _in_words(row: Mapping[str, Any]) -> str:
    details = f"{row['link']}, {row['rule']}: predicted {row['predicted_ms']:.3g} ms"
    measured = row["measured_ms"]
    return details if np.isnan(measured) else f"{details}, measured {measured:.3g} ms"


def _rule(plan: PlacementPlan) -> str:
    return plan.name.partition(",")[0]


LIST, ONE = "list scheduling", "all on one"


def summarize_placer(results: PlacementMeasurements) -> Markdown:
    """Summarize TensorFlow's placement rules: device scopes, soft placement, missing kernels."""
    return sentences([*_scopes(results), *_kernels(results), *_rules(results)])


def summarize_placement(
    results: PlacementMeasurements,
    plans: Mapping[str, Sequence[PlacementPlan]],
    measured: Sequence[PlanMeasurement],
) -> Markdown:
    """Compare predicted and measured placements, and state whether all steps have equal losses.

    Args:
        results: Measurements of the machine, from which the plans were made.
        plans, measured: Plans for each link, and measured step times, as in `placement_table`.
    """
    table = placement_table(plans, measured)
    first = next(iter(plans))
    group = {row["rule"]: row for row in _rows(table[table["link"] == first])}
    findings = [
        _predicted(link, _rows(part), list(group))
        for link, part in table.groupby("link", sort=False)
    ]
    if measured:
        findings += [
            _copies_finding(plans[first], measured),
            _same_losses(measured),
            _measured(group),
        ]
    findings.append(break_even_finding(results.speeds))
    return sentences([*findings, _answer(group, _slower_links(table))])


def _scopes(results: PlacementMeasurements) -> Iterator[Finding]:
    operations = {operation.name: operation for operation in results.scoped.operations}
    towers = {
        _tower(name): operation.device
        for name, operation in operations.items()
        if name.startswith("tower")
    }
    tower_devices = {
        name: towers[_tower(name.removeprefix("gradient_tape/"))]
        for name in operations
        if name.startswith("gradient_tape/tower")
    }
    misplaced = [
        name for name, device in tower_devices.items() if operations[name].device != device
    ]
    yield Finding(
        f"With device scopes around the towers, {len(misplaced)} of {len(tower_devices)} "
        "gradient operations ran on a different device than their "
        f"tower{', because the gradient tape is outside the device scopes' * bool(misplaced)}"
    )
    named = {name: device for name, device in results.log.items() if name in operations}
    wrong = sorted(name for name, device in named.items() if operations[name].device != device)
    agreement = f"all but {', '.join(wrong[:3])}" if wrong else "each"
    yield Finding(
        f"TensorFlow's placement log of this step names {len(named)} of the {len(operations)} "
        f"operations that ran, and {agreement} ran on the logged device; TensorFlow created the "
        "other operations after the placement, by optimization or at device boundaries"
    )


def _kernels(results: PlacementMeasurements) -> Iterator[Finding]:
    types = {str(row["device"]): str(row["types"]).split(", ") for row in results.kernels}
    for kind in ("float32", "int32"):
        have = [device for device, known in types.items() if kind in known]
        lack = [device for device in types if device not in have]
        without = f", but none for {' and '.join(lack)}" if lack else ""
        yield Finding(
            f"MatMul of {kind}: TensorFlow's registry has a kernel for "
            f"{' and '.join(have) or 'no device'}{without}"
        )


def _rules(results: PlacementMeasurements) -> Iterator[Finding]:
    """Yield one finding per tested placement; compare soft with strict placement if they differ."""
    answers_by_question: dict[str, dict[str, list[str]]] = {}
    for row in results.rules:
        refused = row["ran_on"] == "nowhere"
        details = (
            f"refused ({_error_head(str(row['error']))})" if refused else f"ran on {row['ran_on']}"
        )
        what = f"{row['question']}, {row['op']} requested on {row['asked']}"
        way = "soft placement" if row["soft"] else "strict placement"
        answers_by_question.setdefault(what, {}).setdefault(details, []).append(way)
    for what, answers in answers_by_question.items():
        texts = [f"with {' and '.join(ways)} {details}" for details, ways in answers.items()]
        yield Finding(f"{what[0].upper()}{what[1:]}", details=(*texts,))


def _predicted(link: str, rows: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> Finding:
    """Return the predictions for a link; name placement rules that exceed a device's memory."""
    texts = [_prediction_text(row) for row in rows if row["rule"] != LIST]
    missing = [name for name in rules if name not in [row["rule"] for row in rows]]
    texts += [f"memory exceeded: {', '.join(missing)}"] if missing else []
    best = next((row for row in rows if row["rule"] == LIST), None)
    if best is not None:
        copies = round(best["copies"])
        texts.insert(
            0,
            f"**{_prediction_text(best)}** with {copies} copies of tensors or control signals "
            "between devices",
        )
        texts[0] += f", {bytes_text(best['copied_bytes'])} in all" if copies else ""
    bound = rows[0]["bound_ms"]
    return Finding(f"Predicted, {link}", details=(*texts, f"lower bound {bound:.3g} ms"))


def _prediction_text(row: Mapping[str, Any]) -> str:
    return f"{row['rule']} {row['predicted_ms']:.3g} ms"


def _copies_finding(plans: Sequence[PlacementPlan], measured: Sequence[PlanMeasurement]) -> Finding:
    planned = {plan.name: len(plan.copies) for plan in plans}
    differing = [timing.name for timing in measured if timing.copies != planned[timing.name]]
    if differing:
        return Finding(
            "The number of copies that TensorFlow made differs from the planned number for "
            f"{', '.join(differing)}"
        )
    return Finding(
        "The number of tensors and control signals that TensorFlow sent between devices equals "
        f"the number in each plan, {min(planned.values())} to {max(planned.values())} per step"
    )


def _same_losses(measured: Sequence[PlanMeasurement]) -> Finding:
    first = measured[0]
    differing = [timing.name for timing in measured if list(timing.losses) != list(first.losses)]
    if not differing:
        return Finding(
            f"All placements train the same step: the first {len(first.losses)} losses are "
            "bitwise equal"
        )
    return Finding(
        f"The placements do not train the same step: the losses of {', '.join(differing)} differ "
        f"from those of {first.name}"
    )


def _measured(group: Mapping[str, Mapping[str, Any]]) -> Finding:
    details = [
        f"{name} {row['measured_ms']:.3g} ms (spread {row['measured_low_ms']:.3g} ms to "
        f"{row['measured_high_ms']:.3g} ms), {row['measured_ms'] / row['predicted_ms']:.2f} "
        "times the predicted time"
        for name, row in group.items()
    ]
    return Finding(
        "Step times measured on logical devices, which share the cores", details=(*details,)
    )


def _slower_links(table: pd.DataFrame) -> list[str]:
    """Name the links for which a list-scheduled plan is slower than one device (predicted)."""
    by = table.pivot_table(index="link", columns="rule", values="predicted_ms", sort=False)
    if not {LIST, ONE} <= {*by.columns}:
        return []
    return [str(link) for link in by.index[by[LIST] > by[ONE]]]


def _answer(group: Mapping[str, Mapping[str, Any]], slower_links: Sequence[str]) -> Finding:
    best = group[LIST]
    beaten = [name for name, row in group.items() if row["predicted_ms"] > best["predicted_ms"]]
    against = f"a shorter step than {' and '.join(beaten)}" if beaten else "no shorter step"
    head = (
        f"The cost model, which compares {len(group)} placement rules, predicts {against} "
        f"for **{LIST}**"
    )
    exception = (
        (f"but a longer step than {ONE} with {' and '.join(slower_links)}",) if slower_links else ()
    )
    if ONE not in group or best["measured_ms"] != best["measured_ms"]:
        return Finding(head, details=exception)
    if best["measured_high_ms"] < group[ONE]["measured_low_ms"]:
        comparison = (
            "measured steps are shorter than with all operations on one device, beyond the spread"
        )
    elif best["measured_low_ms"] > group[ONE]["measured_high_ms"]:
        comparison = (
            "measured steps are longer than with all operations on one device, beyond the spread"
        )
    else:
        comparison = (
            "measured steps and steps with all operations on one device do not differ beyond "
            "the spread"
        )
    return Finding(head, details=(*exception, f"on the cores of this machine, {comparison}"))


def _tower(name: str) -> str:
    return name.partition("/")[0]


def _error_head(error: str) -> str:
    """Return the first words of a TensorFlow error, without function names."""
    return error.partition(" [Op:")[0].partition(" used by")[0].rstrip(".")


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = table.to_dict("records")
    return results
