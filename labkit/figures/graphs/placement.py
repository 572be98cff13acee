"""Placement of operations on devices: plans, predicted and measured steps, and products by size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.common.units import bits_text, bytes_text, plural, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, Line, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.lanes import Kind, Lanes, connections, lanes
from labkit.figures.kit.marks import bars, line_with_band, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.records.placed import WAY, Examined, Measured, Row
from labkit.simulate.placement import Machine, Plan

BAND = "band: least to largest of the repeats"
NONE = (
    "TensorFlow lists no GPU here, so products and copies of one are not measured; on a machine "
    "with one this cell draws them, and the size from which on the way there pays."
)


def break_even_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a row a size: seconds on host and device, with and without copies.

    Args:
        rows: of `labkit.worker.devices.Examined.speeds`.

    Returns:
        n, host_ms, device_ms, in_ms and out_ms (of one matrix); there_ms, in which two matrices go
        there, the product is made and comes back; pays, whether that is less than on the host, in
        all repeats.
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
    """Draw the time of products by size on both devices, of copies, and of the round trip.

    Bands span the repeats. Without rows, which is without a GPU, a sentence and no figure.
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
        title=f"n × n products and copies, float32, {threads} of the CPU\n{BAND}",
        x="n",
        y="time, ms",
        traces=drawn,
        x_axis={"type": "log", "tickvals": way["n"].tolist()},
        y_axis={"type": "log"},
    )
    title = f"Product on {host} and {device} by size · wall clock · network not emulated"
    return sheet([[panel]], looks.values(), title, [], [_verdict(way, host, device)], plot=320)


def break_even_finding(rows: Sequence[Row]) -> Finding:
    """Return from which size on the round trip to the device pays."""
    if not rows:
        return Finding(NONE.removesuffix("."))
    devices = list(dict.fromkeys(str(row["device"]) for row in rows if row["what"] == "product"))
    return Finding(_verdict(break_even_table(rows), *devices))


def _verdict(way: pd.DataFrame, host: str, device: str) -> str:
    pays = way["pays"].tolist()
    if not pays[-1]:
        most = way["n"].iloc[-1]
        there = f"a product on {device} with its copies"
        return f"Up to n = {most} {there} is not done before one on {host}"
    since = len(pays) - next((at for at, each in enumerate(pays[::-1]) if not each), len(pays))
    row = way.iloc[since]
    return (
        f"From n = {row['n']:.0f} on a product on {device} with its copies takes less "
        f"({row['there_ms']:.3g} ms) than on {host} ({row['host_ms']:.3g} ms), in all repeats"
    )


LANE = 34  # pixels a device
PREDICTED, MEASURED = "predicted", "measured"
FREE = 1e12  # bits/s; a faster link is memory that both ends share
SHARED = "logical CPU devices share the cores of this machine"
# Okabe and Ito (2008), as in `entries`.
PARTS = {
    "forward": Kind("forward", "#56B4E9", "%{customdata[0]}"),
    "gradient": Kind("gradient", "#E69F00", "%{customdata[0]}"),
    "update": Kind("update of a variable", "#009E73", "%{customdata[0]}"),
}

COPY = Kind("copy between devices", INK)


def placement_table(
    plans: Mapping[str, Sequence[Plan]], measured: Sequence[Measured] = ()
) -> pd.DataFrame:
    """Return a row a link and rule: predicted steps, and measured ones for the first link.

    Args:
        plans: by the name of the link; random ones are one row, with the spread over seeds.
        measured: steps of the plans of the first link.

    Returns:
        link, rule, plans; predicted_ms with its least and greatest over plans; copies and
        copied_bytes (medians over plans); balance, the mean share of the step for which a device
        computes; measured_ms, the median of all steps, with p10 and p90, and as a part
        of_predicted; bound_ms, which no plan can beat (`TaskGraph.shortest`).
    """
    seconds = {each.name: each.seconds for each in measured}
    first = next(iter(plans), "")
    rows = []
    for link, made in plans.items():
        for rule_name in dict.fromkeys(map(_rule, made)):
            group = [plan for plan in made if _rule(plan) == rule_name]
            times = [1e3 * plan.makespan for plan in group]
            taken = [1e3 * s for plan in group for s in seconds.get(plan.name, ()) if link == first]
            low, middle, high = np.percentile(taken, [10, 50, 90]) if taken else [np.nan] * 3
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


def makespans(plans: Mapping[str, Sequence[Plan]], measured: Sequence[Measured] = ()) -> Figure:
    """Draw predicted steps by rule, a panel a link, and measured steps.

    Whiskers: of predictions the random plans of all seeds; of steps p10 to p90. The dashed line is
    the time that no plan can beat.

    Args: as `placement_table`.
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
    title = f"A step by placement, {count} devices · {clocks} · network by panel"
    legend = [*looks.values(), Line("no plan can be shorter", INK, "dash", "line-ew")]
    remarks = ["whiskers: random plans of all seeds; steps from p10 to p90"]
    return sheet(rows, legend, title, remarks, [_in_words(row) for row in _rows(table)], plot=230)


def placement_gantt(plans: Sequence[Plan]) -> Figure:
    """Draw a Gantt chart a plan: computations of each device, and copies between devices."""
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
        panels.append(Lanes(title, names, frame, ("task",), [_copy_lines(plan)]))
        words.append(title.replace("\n", "; "))
    end = 1e3 * max(plan.makespan for plan in plans)
    title = "Plans of a step · simulation · network in each title"
    return lanes(panels, PARTS, title, "empty: the device waits", words, LANE, end, [COPY])


def part_of(name: str) -> str:
    """Return the part of a step that an operation belongs to, by the scope in its name."""
    if name.startswith("gradient_tape"):
        return "gradient"
    return "update" if name.startswith("descent") else "forward"


def link_text(machine: Machine) -> str:
    """Return `a link of 101 µs at 1 Gb/s`."""
    latency = f"a link of {seconds_text(machine.latency)}"
    if 8 * machine.bandwidth >= FREE:
        return f"{latency}, bytes hardly count"
    return f"{latency} at {bits_text(machine.bandwidth)}"


def _copy_lines(plan: Plan) -> Trace:
    names = plan.machine.devices
    times = [(1e3 * copy.start, 1e3 * copy.stop) for copy in plan.copies]
    return connections(COPY, times, [(names[c.sender], names[c.receiver]) for c in plan.copies])


def _panel(title: str, group: pd.DataFrame, what: str, looks: Mapping[str, Line]) -> Panel:
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
        y=f"a step, {what}, ms",
        traces=[*shown, rule(ends, bound, "dash")],
        y_axis={"rangemode": "tozero"},
    )


def _in_words(row: Mapping[str, Any]) -> str:
    details = f"{row['link']}, {row['rule']}: predicted {row['predicted_ms']:.3g} ms"
    measured = row["measured_ms"]
    return details if np.isnan(measured) else f"{details}, measured {measured:.3g} ms"


def _rule(plan: Plan) -> str:
    return plan.name.partition(",")[0]


LIST, ONE = "list scheduling", "all on one"


def placer_reading(results: Examined) -> Markdown:
    """Say what the placer of TensorFlow did with scopes, soft placement and missing kernels."""
    return sentences([*_scopes(results), *_kernels(results), *_rules(results)])


def placement_reading(
    results: Examined,
    plans: Mapping[str, Sequence[Plan]],
    measured: Sequence[Measured],
) -> Markdown:
    """Compare placements, predicted and measured, and say whether they compute the same step.

    Args:
        found: of which the plans were made.
        plans, measured: as `placement_table`.
    """
    table = placement_table(plans, measured)
    first = next(iter(plans))
    group = {row["rule"]: row for row in _rows(table[table["link"] == first])}
    findings = [
        _predicted(link, _rows(part), list(group))
        for link, part in table.groupby("link", sort=False)
    ]
    if measured:
        findings += [_copies_finding(plans[first], measured), _same(measured), _measured(group)]
    findings.append(break_even_finding(results.speeds))
    return sentences([*findings, _answer(group, _dear(table))])


def _scopes(results: Examined) -> Iterator[Finding]:
    on = {each.name: each for each in results.scoped.operations}
    towers = {_tower(name): each.device for name, each in on.items() if name.startswith("tower")}
    asked = {
        name: towers[_tower(name.removeprefix("gradient_tape/"))]
        for name in on
        if name.startswith("gradient_tape/tower")
    }
    apart = [name for name, device in asked.items() if on[name].device != device]
    yield Finding(
        f"Device scopes around the towers: {len(apart)} of {len(asked)} gradient operations of "
        f"towers ran on another device than their tower{', as the tape has no scope' * bool(apart)}"
    )
    named = {name: device for name, device in results.log.items() if name in on}
    wrong = sorted(name for name, device in named.items() if on[name].device != device)
    agree = f"all but {', '.join(wrong[:3])}" if wrong else "each"
    yield Finding(
        f"TensorFlow's placement log of this step names {len(named)} of the {len(on)} operations "
        f"that ran, and {agree} ran where it says; the others were made after placing, by the "
        "optimizer or where devices meet"
    )


def _kernels(results: Examined) -> Iterator[Finding]:
    types = {str(row["device"]): str(row["types"]).split(", ") for row in results.kernels}
    for kind in ("float32", "int32"):
        have = [device for device, known in types.items() if kind in known]
        lack = [device for device in types if device not in have]
        without = f", none for {' and '.join(lack)}" if lack else ""
        yield Finding(
            f"MatMul of {kind}: the registry has a kernel for {' and '.join(have) or 'no device'}"
            f"{without}"
        )


def _rules(results: Examined) -> Iterator[Finding]:
    """Return a finding a question, with both modes of placement if their answers differ."""
    asked: dict[str, dict[str, list[str]]] = {}
    for row in results.rules:
        refused = row["ran_on"] == "nowhere"
        details = f"refused ({_first(str(row['error']))})" if refused else f"ran on {row['ran_on']}"
        what = f"{row['question']}, {row['op']} asked onto {row['asked']}"
        way = "soft placement" if row["soft"] else "strict placement"
        asked.setdefault(what, {}).setdefault(details, []).append(way)
    for what, answers in asked.items():
        texts = [f"with {' and '.join(ways)} {details}" for details, ways in answers.items()]
        yield Finding(f"{what[0].upper()}{what[1:]}", details=(*texts,))


def _predicted(link: str, rows: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> Finding:
    """Return the predictions of a link; rules without a plan did not fit the memory."""
    texts = [_promise(row) for row in rows if row["rule"] != LIST]
    lost = [name for name in rules if name not in [row["rule"] for row in rows]]
    texts += [f"without room: {', '.join(lost)}"] if lost else []
    best = next((row for row in rows if row["rule"] == LIST), None)
    if best is not None:
        copies = round(best["copies"])
        texts.insert(0, f"**{_promise(best)}** with {copies} copied tensors or signals")
        texts[0] += f" of {bytes_text(best['copied_bytes'])} in all" if copies else ""
    bound = rows[0]["bound_ms"]
    return Finding(
        f"Predicted, {link}", details=(*texts, f"no plan is shorter than {bound:.3g} ms")
    )


def _promise(row: Mapping[str, Any]) -> str:
    return f"{row['rule']} {row['predicted_ms']:.3g} ms"


def _copies_finding(plans: Sequence[Plan], measured: Sequence[Measured]) -> Finding:
    planned = {plan.name: len(plan.copies) for plan in plans}
    other = [each.name for each in measured if each.copies != planned[each.name]]
    if other:
        return Finding(f"TensorFlow sent other copies than planned with {', '.join(other)}")
    return Finding(
        "TensorFlow sent as many tensors and signals between devices as each plan says, "
        f"from {min(planned.values())} to {max(planned.values())} a step"
    )


def _same(measured: Sequence[Measured]) -> Finding:
    first = measured[0]
    other = [each.name for each in measured if list(each.losses) != list(first.losses)]
    if not other:
        return Finding(
            f"The same step: the first {len(first.losses)} losses are equal in all bits, wherever "
            "it is placed"
        )
    return Finding(f"Not the same step: the losses of {', '.join(other)} differ from {first.name}")


def _measured(group: Mapping[str, Mapping[str, Any]]) -> Finding:
    details = [
        f"{name} {row['measured_ms']:.3g} ms (spread {row['measured_low_ms']:.3g} ms to "
        f"{row['measured_high_ms']:.3g} ms), {row['measured_ms'] / row['predicted_ms']:.2f} of the "
        "prediction"
        for name, row in group.items()
    ]
    return Finding("Measured on logical devices, which share the cores", details=(*details,))


def _dear(table: pd.DataFrame) -> list[str]:
    """Return the links on which list scheduling is predicted to be slower than one device."""
    by = table.pivot_table(index="link", columns="rule", values="predicted_ms", sort=False)
    if not {LIST, ONE} <= {*by.columns}:
        return []
    return [str(link) for link in by.index[by[LIST] > by[ONE]]]


def _answer(group: Mapping[str, Mapping[str, Any]], dear: Sequence[str]) -> Finding:
    best = group[LIST]
    beaten = [name for name, row in group.items() if row["predicted_ms"] > best["predicted_ms"]]
    against = f"a shorter step than {' and '.join(beaten)}" if beaten else "no shorter step"
    head = f"A cost model of {len(group)} rules' plans promises **{LIST}** {against}"
    lost = (f"but a longer one than {ONE} with {' and '.join(dear)}",) if dear else ()
    if ONE not in group or best["measured_ms"] != best["measured_ms"]:
        return Finding(head, details=lost)
    if best["measured_high_ms"] < group[ONE]["measured_low_ms"]:
        kept = "measured steps are shorter than all on one, beyond their spread"
    elif best["measured_low_ms"] > group[ONE]["measured_high_ms"]:
        kept = "measured steps are longer than all on one, beyond their spread"
    else:
        kept = "measured steps and those of all on one do not differ beyond their spread"
    return Finding(head, details=(*lost, f"on the cores of this machine, {kept}"))


def _tower(name: str) -> str:
    return name.partition("/")[0]


def _first(error: str) -> str:
    """Return the first words of an error of TensorFlow, without names of its functions."""
    return error.partition(" [Op:")[0].partition(" used by")[0].rstrip(".")


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = table.to_dict("records")
    return results
