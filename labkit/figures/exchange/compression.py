"""Figures of gradient compression: speed-up, bytes, accuracy, fastest method by bandwidth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

from labkit.common.errors import LabkitError
from labkit.common.units import bits_text, bytes_text, plural, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    LineStyle,
    Markdown,
    RunEntry,
    clock_and_network,
    entries,
    labels,
    lines,
    names,
    sentences,
)
from labkit.figures.kit.marks import crosses, curve, points
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.speed import refusal, refusals
from labkit.records import step_costs as bandwidths
from labkit.records.compressors import baseline_of, method, method_fields, task_fields
from labkit.records.run import Run
from labkit.records.step_costs import (
    LATENCY,
    RANGE,
    MethodCost,
    emulated_runs,
    step_costs,
    winners,
    winners_text,
)
from labkit.records.verdict import accuracies, arrivals, judge_runs

# The time axis begins at `_ROOM` times the shortest drawn time, to leave room for text.
_ROOM = 0.7


def bandwidth(
    runs: Iterable[Run] | Run, latency: float = LATENCY, over: tuple[float, float] = RANGE
) -> Figure:
    """Draw the predicted step time of each method over bandwidth, and mark the fastest methods.

    The predicted step time is the sum of compute, codec and link time. The compute and codec times
    are measured. The link time is the time that the links need for the measured bytes. Markers show
    steps that were measured on emulated networks (median, p10 to p90). The figure omits runs that
    failed their equivalence check.

    Args:
        runs: Runs to compare.
        latency: Latency of the simulated links in seconds.
        over: Range of link bandwidths that the figure shows, in bytes/s.

    Raises:
        LabkitError: No run with several ranks has a recorded history.
    """
    shown = entries(runs)
    candidates = methods(shown)
    wins = winners(candidates, latency, over)
    looks = lines(candidate.name for candidate in candidates)
    traces = [
        t
        for candidate in candidates
        for t in _traces(candidate, looks[candidate.name], latency, over)
    ]
    times = [candidate.seconds(edge, latency) for candidate in candidates for edge in over]
    times += [
        seconds
        for candidate in candidates
        for _, _, steps in emulated_runs(candidate)
        for seconds in steps
    ]
    panel = Panel(
        title=f"Step time by bandwidth of the links\nfastest: {winners_text(wins)}",
        x="bandwidth of a link",
        y="step time",
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
    measured = clock_and_network(entries(run for candidate in candidates for run in candidate.runs))
    title = f"Fastest method by bandwidth · simulation · measured: {measured}"
    remarks = [
        f"lines: measured compute and codec times + simulated links ({seconds_text(latency)} "
        "latency), no overlap; markers: measured steps; ✕: the fastest method changes"
    ]
    words = [
        f"fastest: {winners_text(wins)}",
        *(_in_words(candidate, over) for candidate in candidates),
    ]
    details = [*words, refusals(shown)]
    return sheet([[panel]], looks.values(), title, [*remarks, *overload(shown)], details, plot=340)


def simulation_error_text(results: Iterable[MethodCost]) -> str:
    """Return a phrase that states the relative errors of the predicted step times."""
    sizes = [abs(error) for error in bandwidths.prediction_errors(results).values()]
    if not sizes:
        return "; no run on an emulated network verifies this prediction"
    error_range = " to ".join(dict.fromkeys(f"{size:.0%}" for size in (min(sizes), max(sizes))))
    return (
        f"; the prediction error in {plural(len(sizes), 'run')} on emulated networks is "
        f"{error_range}"
    )


def methods(entries: Sequence[RunEntry]) -> list[MethodCost]:
    """Return the measured costs of each compression method, as medians over networks.

    Raises:
        LabkitError: No run with several ranks has a recorded history.
    """
    # Runs with a single worker are excluded, because they use no network link.
    usable = [
        e for e in entries if not e.equivalence_failed and (e.metrics.get("workers") or 1) > 1
    ]
    groups = {name: [e.run for e in group] for name, group in group_by_method(usable).items()}
    candidates = bandwidths.methods(groups)
    if not candidates:
        raise LabkitError(
            "no given run allows a prediction: give a completed run with two or more workers "
            "whose equivalence check did not fail"
        )
    return candidates


def group_by_method(entries: Sequence[RunEntry]) -> dict[str, list[RunEntry]]:
    """Group runs by method; runs of the same method differ only in network and seed."""
    groups: dict[str, list[RunEntry]] = {}
    for entry in entries:
        groups.setdefault(json.dumps(method_fields(entry.run), sort_keys=True), []).append(entry)
    firsts = [group[0].run for group in groups.values()]
    called = [method(run) for run in firsts]
    # A method is labelled by its compressor's name, unless the methods also differ in other
    # parameters.
    is_distinct = len(set(called)) == len(called)
    short = (
        names([{"compressor": name} for name in called], called) if is_distinct else labels(firsts)
    )
    return dict(zip(short, groups.values(), strict=True))


def _traces(
    candidate: MethodCost, look: LineStyle, latency: float, over: tuple[float, float]
) -> list[Trace]:
    grid = np.geomspace(*over, 60)
    seconds = [candidate.seconds(one, latency) for one in grid.tolist()]
    hover = [f"{bits_text(one)}: {seconds_text(t)}" for one, t in zip(grid, seconds, strict=True)]
    shown = {"text": hover, "hoverinfo": "text", "hovertemplate": "%{text}, simulated"}
    errors = bandwidths.prediction_errors([candidate])
    measured = [
        (
            *(8 * link.bandwidth, *steps),
            f"{candidate.name} on {link}: measured step {seconds_text(steps[0])}, simulation "
            f"error {abs(errors[run]):.0%}",
        )
        for run, link, steps in emulated_runs(candidate)
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


def _in_words(candidate: MethodCost, over: tuple[float, float]) -> str:
    slow, fast = (seconds_text(candidate.seconds(edge)) for edge in over)
    return f"{candidate.name}: {slow} at {bits_text(over[0])}, {fast} at {bits_text(over[1])}"


@dataclass(frozen=True)
class Gain:
    r"""The speed-up \(s = T_b / T_c\) of a run c over its baseline b in median step time.

    Attributes:
        entry, baseline: The compressed run c, and its baseline, the run b without compression.
        speed: Speed-up s.
        low, high: Bounds of the speed-up. `low` is the baseline's p10 step time divided by the
            run's p90 step time. `high` is the baseline's p90 step time divided by the run's p10
            step time.
    """

    entry: RunEntry
    baseline: RunEntry
    speed: float
    low: float
    high: float

    @property
    def judged(self) -> str:
        """The conclusion from the least and the greatest speed-up, as text."""
        if self.low > 1:
            return "it pays"
        if self.high < 1:
            return "it does not pay"
        return "no difference beyond the spread of the steps"


def summarize_compression(
    runs: Iterable[Run] | Run, baseline: Run | None = None, target: float | None = None
) -> Markdown:
    """Summarize gradient compression by network, method and bandwidth.

    The summary names the fastest run of each network, and the savings, costs and accuracy of each
    method. It also names the fastest method by bandwidth.

    Args:
        runs: Runs with and without gradient compression.
        baseline: Run with which all other runs are compared. By default, each compressed run is
            compared with the uncompressed run of equal other parameters.
        target: Accuracy that a run must reach; time and bytes are counted until then. Default: the
            lowest accuracy among the baseline's seeds.

    Raises:
        LabkitError: There are no runs.
    """
    shown = entries(runs)
    pairs = _pairs(shown, baseline)
    gains = {entry.key: gain for entry, base in pairs if (gain := _gain(entry, base))}
    lines = _networks(shown, gains, baseline)
    for entry, base in pairs:
        details = [*_costs(entry, base, gains.get(entry.key)), *_accuracy(entry, base, target)]
        lines.append(f"**{entry.label}** against {base.label}: {'; '.join(details)}")
    compared = {entry.key for pair in pairs for entry in pair}
    alone = [entry.label for entry in shown if entry.key not in compared]
    if alone:
        lines.append(f"Not compared with a run without compression: {', '.join(alone)}")
    lines += [*_without_gain(pairs, gains), *_bandwidths(shown, baseline)]
    return sentences(map(Finding, lines))


def _pairs(shown: Sequence[RunEntry], baseline: Run | None) -> list[tuple[RunEntry, RunEntry]]:
    """Return pairs (run, baseline) for all runs that have results and a baseline."""
    usable = [entry for entry in shown if entry.metrics]
    by_path = {entry.run.path: entry for entry in usable}
    if baseline is not None and baseline.path not in by_path:
        raise LabkitError(
            f"the baseline {baseline.name} is not one of the given runs, or has no results: "
            "give a completed run that is among the runs"
        )
    pairs = []
    for entry in usable:
        base = baseline or baseline_of(entry.run, [other.run for other in usable])
        if base is not None and base.path != entry.run.path:
            pairs.append((entry, by_path[base.path]))
    return pairs


def _gain(entry: RunEntry, base: RunEntry) -> Gain | None:
    """Return a run's speed-up; None if networks differ or an equivalence check failed."""
    # If the networks differed, the ratio of times would compare networks instead of methods.
    same = entry.run.experiment.get("network") == base.run.experiment.get("network")
    if not same or entry.equivalence_failed or base.equivalence_failed:
        return None
    group, other = entry.metrics["step_ms"], base.metrics["step_ms"]
    # The 10th and 90th percentiles of both runs' step times give the bounds of the speed-up.
    low, high = other["p10"] / group["p90"], other["p90"] / group["p10"]
    return Gain(entry, base, other["median"] / group["median"], low, high)


def _group_key(entry: RunEntry, baseline: Run | None) -> str:
    """Return the task as key of a run's comparison group, or "" if a baseline is given."""
    return "" if baseline else json.dumps(task_fields(entry.run), sort_keys=True)


def _networks(shown: Sequence[RunEntry], gains: dict[str, Gain], baseline: Run | None) -> list[str]:
    """Return a text for each network and task that names the run with the shortest step."""
    groups: dict[tuple[str, str], list[RunEntry]] = {}
    for entry in shown:
        if entry.metrics and not entry.equivalence_failed:
            network = json.dumps(entry.run.experiment.get("network"), sort_keys=True)
            groups.setdefault((network, _group_key(entry, baseline)), []).append(entry)
    texts = []
    for group in groups.values():
        if len(group) < 2:
            continue
        best = min(group, key=lambda entry: float(entry.metrics["step_ms"]["median"]))
        others = [entry.metrics["step_ms"]["median"] for entry in group if entry is not best]
        step = best.metrics["step_ms"]
        second = f"the next {seconds_text(min(others) / 1e3)}"
        gain = gains.get(best.key)
        by = f"; {gain.speed:.2f}x the speed of {gain.baseline.label}" if gain else ""
        texts.append(
            f"{clock_and_network(group)}: the shortest step is that of **{best.label}**, "
            f"{seconds_text(step['median'] / 1e3)} (p10 to p90 {seconds_text(step['p10'] / 1e3)} "
            f"to {seconds_text(step['p90'] / 1e3)}), {second}{by}"
        )
    return texts


def _costs(entry: RunEntry, base: RunEntry, gain: Gain | None) -> list[str]:
    """Return texts about the bytes that a run saves, its codec time and its speed-up."""
    details = []
    raw, payload = (
        compared_entry.metrics.get("payload_bytes_per_step") for compared_entry in (base, entry)
    )
    if raw and payload:
        details.append(
            f"{bytes_text(payload)} of payload per step instead of {bytes_text(raw)}, "
            f"compression ratio {raw / payload:.3g}"
        )
    if entry.equivalence_failed or base.equivalence_failed:
        failed = entry if entry.equivalence_failed else base
        return [*details, f"{failed.label}: {refusal(failed)}"]
    costs = step_costs(entry.run)
    if costs is not None:
        parts = ("codec", "wire", "wait")
        spent = ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in parts)
        details.append(f"{spent} per step")
    if gain is None:
        return [
            *details,
            "no speed-up is given, because no run without compression used this network",
        ]
    spread = f"spread {gain.low:.2f} to {gain.high:.2f}"
    return [*details, f"{gain.speed:.2f}x the speed ({spread}): {gain.judged}"]


def _accuracy(entry: RunEntry, base: RunEntry, target: float | None) -> list[str]:
    """Return texts about a run's accuracy over seeds, and its cost to reach the target accuracy."""
    details = [judge_runs(entry.run, base.run).sentence]
    by_seed = accuracies(base.run)
    if target is None and by_seed:
        # The default target is the lowest accuracy among the baseline's seeds, because every seed
        # reaches it.
        target = min(by_seed.values())
    if target is not None:
        ours, theirs = (_arrival(compared_entry, target) for compared_entry in (entry, base))
        details.append(f"accuracy {target:.2%}: {ours}, the baseline {theirs}")
    return details


def _arrival(entry: RunEntry, target: float) -> str:
    """Describe steps, time and bytes to the target (medians over seeds); omit invalid times."""
    by_seed = arrivals(entry.run, target)
    # Seeds that miss the target have no cost, so the text states how many seeds reach the target.
    reached = [arrival for arrival in by_seed.values() if arrival is not None]
    if not reached:
        return "not reached"
    details = [f"{median(arrival.step for arrival in reached):.0f} steps"]
    if not entry.equivalence_failed:
        codec = median(arrival.codec_seconds for arrival in reached)
        within = f" (the codec takes {seconds_text(codec)})" if codec else ""
        details.append(seconds_text(median(arrival.seconds for arrival in reached)) + within)
    details.append(bytes_text(median(arrival.wire_bytes for arrival in reached)))
    many = f" ({len(reached)} of {len(by_seed)} seeds)" if len(by_seed) > 1 else ""
    return f"reached after {', '.join(details)} on the wire{many}"


def _without_gain(pairs: Sequence[tuple[RunEntry, RunEntry]], gains: dict[str, Gain]) -> list[str]:
    judged = [gains[entry.key] for entry, _ in pairs if entry.key in gains]
    if not judged:
        return []
    without = [gain.entry.label for gain in judged if gain.low <= 1]
    if not without:
        return [f"All {len(judged)} comparisons with runs without compression show a speed-up"]
    return [
        f"No speed-up in {len(without)} of {len(judged)} comparisons with runs without "
        f"compression: {', '.join(without)}"
    ]


def _bandwidths(shown: Sequence[RunEntry], baseline: Run | None) -> list[str]:
    """Return texts about the predicted fastest method for each bandwidth, and prediction errors."""
    groups: dict[str, list[RunEntry]] = {}
    for entry in shown:
        if entry.metrics.get("workers", 1) > 1 and not entry.equivalence_failed:
            groups.setdefault(_group_key(entry, baseline), []).append(entry)
    texts = []
    for group in groups.values():
        candidates = methods(group)
        if len(candidates) < 2:
            continue
        wins = winners(candidates, LATENCY, RANGE)
        texts.append(
            "Simulation from measured compute times, codec times and bytes, on links of "
            f"{bits_text(RANGE[0])} to {bits_text(RANGE[1])}: the fastest method is "
            f"{winners_text(wins)}{simulation_error_text(candidates)}"
        )
    return texts
