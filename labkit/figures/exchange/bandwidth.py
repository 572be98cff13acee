"""Who wins at which bandwidth: measured work and bytes of each method, predicted on other links."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.units import bits_text, plural, seconds_axis, seconds_text
from labkit.figures.kit.entries import Entry, Line, clock_and_network, entries, labels, lines, names
from labkit.figures.kit.marks import crosses, curve, points
from labkit.figures.kit.sheet import Panel, Trace, busy, sheet
from labkit.figures.runs.speed import refusals
from labkit.records import bandwidths
from labkit.records.bandwidths import LATENCY, RANGE, Method, emulated, in_turn, winners
from labkit.records.compressors import fields_of, method
from labkit.records.run import Run

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

_ROOM = 0.7  # of the least time: below it the figure writes where the winner changes


def bandwidth(
    runs: Iterable[Run] | Run, latency: float = LATENCY, over: tuple[float, float] = RANGE
) -> Figure:
    """Predicted step time over bandwidth, a line a method; where the winner changes.

    Work and bytes are measured, the link is simulated by the closed forms; markers are the steps
    that were measured on emulated networks, median with p10 to p90. Runs whose equivalence gate
    failed are left out.

    Args: runs: to compare; latency: s of the simulated links; over: least and greatest bytes/s.
    Raises: LabkitError, where no run has a history of several ranks.
    """
    shown = entries(runs)
    found = methods(shown)
    wins = winners(found, latency, over)
    looks = lines(each.name for each in found)
    traces = [t for each in found for t in _traces(each, looks[each.name], latency, over)]
    times = [each.seconds(edge, latency) for each in found for edge in over]
    times += [seconds for each in found for _, _, steps in emulated(each) for seconds in steps]
    panel = Panel(
        title=f"Step time by bandwidth of the links\nfastest: {in_turn(wins)}",
        x="bandwidth of a link",
        y="time of a step",
        traces=[
            *traces,
            crosses(
                [8 * win.last for win in wins[:-1]],
                [win.method.seconds(win.last, latency) for win in wins[:-1]],
                [bits_text(win.last) for win in wins[:-1]],
                "bottom left",
            ),
        ],
        note=refusals(shown),
        always_note=bool(refusals(shown)),
        x_axis=_bandwidth_axis(*over),
        y_axis=seconds_axis(_ROOM * min(times), max(times)),
    )
    measured = clock_and_network(entries(run for each in found for run in each.runs))
    title = f"Who wins at which bandwidth · simulation · measured: {measured}"
    remarks = [
        f"lines: measured compute and codec + simulated links of {seconds_text(latency)}, "
        "no overlap; markers: measured; ✕: the winner changes"
    ]
    words = [f"fastest: {in_turn(wins)}", *(_in_words(each, over) for each in found)]
    said = [*words, refusals(shown)]
    return sheet([[panel]], looks.values(), title, [*remarks, *busy(shown)], said, plot=340)


def held_against(found: Iterable[Method]) -> str:
    """How far the simulation is off where steps were measured, as the end of a sentence."""
    sizes = [abs(error) for error in bandwidths.prediction_errors(found).values()]
    if not sizes:
        return "; none of these runs was on an emulated network to hold this against"
    off = " to ".join(dict.fromkeys(f"{size:.0%}" for size in (min(sizes), max(sizes))))
    return f"; in {plural(len(sizes), 'run')} on emulated networks it is off by {off}"


def methods(shown: Sequence[Entry]) -> list[Method]:
    """What the runs have measured, by method; medians over runs on several networks.

    Raises: LabkitError, where no run has a history of several ranks.
    """
    # One worker has no link whose bandwidth could matter.
    usable = [e for e in shown if not e.gate_failed and (e.metrics.get("workers") or 1) > 1]
    groups = {name: [e.run for e in group] for name, group in by_method(usable).items()}
    found = bandwidths.methods(groups)
    if not found:
        raise LabkitError(
            "no run to predict from: it takes a completed run on two or more workers whose "
            "equivalence gate did not fail"
        )
    return found


def by_method(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Runs that differ in network and seeds only, under the name of what they do."""
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        groups.setdefault(json.dumps(fields_of(entry.run), sort_keys=True), []).append(entry)
    firsts = [group[0].run for group in groups.values()]
    called = [method(run) for run in firsts]
    # Methods that differ in more than the compressor are called by what they differ in.
    is_told = len(set(called)) == len(called)
    short = names([{"compressor": each} for each in called], called) if is_told else labels(firsts)
    return dict(zip(short, groups.values(), strict=True))


def _traces(each: Method, look: Line, latency: float, over: tuple[float, float]) -> list[Trace]:
    import pandas as pd

    # Evenly over orders of magnitude, as the axis shows them.
    grid = np.geomspace(*over, 60)
    seconds = [each.seconds(one, latency) for one in grid.tolist()]
    said = [f"{bits_text(one)}: {seconds_text(t)}" for one, t in zip(grid, seconds, strict=True)]
    shown = {"text": said, "hoverinfo": "text", "hovertemplate": "%{text}, simulated"}
    errors = bandwidths.prediction_errors([each])
    measured = [
        (
            *(8 * link.bandwidth, *steps),
            f"{each.name} on {link}: {seconds_text(steps[0])}, measured; the simulation is off by "
            f"{abs(errors[run]):.0%}",
        )
        for run, link, steps in emulated(each)
    ]
    columns = ["bits", "seconds", "seconds_low", "seconds_high", "hover"]
    table = pd.DataFrame(measured, columns=columns)
    drawn = curve((8 * grid).tolist(), seconds, look, 2, **shown)
    return [drawn, points(table, "bits", "seconds", look, size=10)] if measured else [drawn]


def _bandwidth_axis(low: float, high: float) -> Trace:
    first, last = (int(np.round(np.log10(8 * edge))) for edge in (low, high))
    ticks = [10.0**power for power in range(first, last + 1)]
    return {
        "type": "log",
        "range": [np.log10(8 * low) - 0.1, np.log10(8 * high) + 0.1],
        "tickvals": ticks,
        "ticktext": [bits_text(tick / 8) for tick in ticks],
    }


def _in_words(each: Method, over: tuple[float, float]) -> str:
    slow, fast = (seconds_text(each.seconds(edge)) for edge in over)
    return f"{each.name}: {slow} at {bits_text(over[0])}, {fast} at {bits_text(over[1])}"
