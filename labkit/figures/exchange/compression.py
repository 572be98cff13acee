"""Compression of gradients: speed-up, bytes, accuracy, and the fastest method by bandwidth."""

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
from labkit.figures.kit.entries import Entry, Line, clock_and_network, entries, labels, lines, names
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import crosses, curve, points
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.speed import refusal, refusals
from labkit.records import bandwidths
from labkit.records.bandwidths import LATENCY, RANGE, Method, emulated, in_turn, winners
from labkit.records.compressors import baseline_of, fields_of, method, task
from labkit.records.run import Run
from labkit.records.step_costs import step_costs
from labkit.records.verdict import accuracies, arrivals, judge_runs

_ROOM = 0.7  # of the least time: below it the figure writes where the winner changes


def bandwidth(
    runs: Iterable[Run] | Run, latency: float = LATENCY, over: tuple[float, float] = RANGE
) -> Figure:
    """Draw the predicted step time of each method over bandwidth, and where the fastest changes.

    Work and bytes are measured, the link is simulated by the closed forms; markers are the steps
    that were measured on emulated networks, median with p10 to p90. Runs whose equivalence gate
    failed are left out.

    Args: runs: to compare; latency: s of the simulated links; over: least and greatest bytes/s.
    Raises: LabkitError, where no run has a history of several ranks.
    """
    shown = entries(runs)
    candidates = methods(shown)
    wins = winners(candidates, latency, over)
    looks = lines(each.name for each in candidates)
    traces = [t for each in candidates for t in _traces(each, looks[each.name], latency, over)]
    times = [each.seconds(edge, latency) for each in candidates for edge in over]
    times += [seconds for each in candidates for _, _, steps in emulated(each) for seconds in steps]
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
    measured = clock_and_network(entries(run for each in candidates for run in each.runs))
    title = f"Who wins at which bandwidth · simulation · measured: {measured}"
    remarks = [
        f"lines: measured compute and codec + simulated links of {seconds_text(latency)}, "
        "no overlap; markers: measured; ✕: the winner changes"
    ]
    words = [f"fastest: {in_turn(wins)}", *(_in_words(each, over) for each in candidates)]
    details = [*words, refusals(shown)]
    return sheet([[panel]], looks.values(), title, [*remarks, *overload(shown)], details, plot=340)


def simulation_error_text(results: Iterable[Method]) -> str:
    """Return the errors of the simulation against measured steps, as the end of a sentence."""
    sizes = [abs(error) for error in bandwidths.prediction_errors(results).values()]
    if not sizes:
        return "; none of these runs was on an emulated network to hold this against"
    off = " to ".join(dict.fromkeys(f"{size:.0%}" for size in (min(sizes), max(sizes))))
    return f"; in {plural(len(sizes), 'run')} on emulated networks it is off by {off}"


def methods(shown: Sequence[Entry]) -> list[Method]:
    """Return what runs measured, by method, with medians over networks.

    Raises: LabkitError, where no run has a history of several ranks.
    """
    # A single worker uses no link.
    usable = [e for e in shown if not e.gate_failed and (e.metrics.get("workers") or 1) > 1]
    groups = {name: [e.run for e in group] for name, group in group_by_method(usable).items()}
    candidates = bandwidths.methods(groups)
    if not candidates:
        raise LabkitError(
            "no run to predict from: it takes a completed run on two or more workers whose "
            "equivalence gate did not fail"
        )
    return candidates


def group_by_method(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return runs by method; the runs of a method differ in network and seed only."""
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
    # Evenly over orders of magnitude, as the axis shows them.
    grid = np.geomspace(*over, 60)
    seconds = [each.seconds(one, latency) for one in grid.tolist()]
    hover = [f"{bits_text(one)}: {seconds_text(t)}" for one, t in zip(grid, seconds, strict=True)]
    shown = {"text": hover, "hoverinfo": "text", "hovertemplate": "%{text}, simulated"}
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


@dataclass(frozen=True)
class Gain:
    r"""Speed of a run against its baseline, \(s = T_b / T_c\), of median steps.

    low, high: the baseline's p10 over the run's p90, its p90 over the run's p10.
    """

    entry: Entry
    baseline: Entry
    speed: float
    low: float
    high: float

    @property
    def judged(self) -> str:
        """The verdict that the ranges of steps allow."""
        if self.low > 1:
            return "it pays"
        if self.high < 1:
            return "it does not pay"
        return "no difference beyond the spread of the steps, it does not pay"


def compression_reading(
    runs: Iterable[Run] | Run, baseline: Run | None = None, target: float | None = None
) -> Markdown:
    """Name the fastest run of each network, what each method saved and cost, whether
    accuracy was lost, what did not pay, and the fastest method at each bandwidth.

    Args:
        runs: with and without compression.
        baseline: to compare all others with; default: for each compressed run the one
            without compression that is equal otherwise.
        target: accuracy to which time and bytes are counted; default: the least of the
            baseline's seeds.

    Raises: LabkitError, where there are no runs.
    """
    shown = entries(runs)
    pairs = _pairs(shown, baseline)
    gains = {entry.key: gain for entry, base in pairs if (gain := _gain(entry, base))}
    lines = _networks(shown, gains, baseline)
    for entry, base in pairs:
        details = [*_costs(entry, base, gains.get(entry.key)), *_accuracy(entry, base, target)]
        lines.append(f"**{entry.label}** against {base.label}: {'; '.join(details)}")
    held = {entry.key for pair in pairs for entry in pair}
    alone = [entry.label for entry in shown if entry.key not in held]
    if alone:
        lines.append(f"Not held against a run without compression: {', '.join(alone)}")
    lines += [*_did_not_pay(pairs, gains), *_bandwidths(shown, baseline)]
    return sentences(map(Finding, lines))


def _pairs(shown: Sequence[Entry], baseline: Run | None) -> list[tuple[Entry, Entry]]:
    """Return each run with results, and its baseline."""
    usable = [entry for entry in shown if entry.metrics]
    by_path = {entry.run.path: entry for entry in usable}
    if baseline is not None and baseline.path not in by_path:
        raise LabkitError(f"the baseline {baseline.name} has to be among the runs, with results")
    pairs = []
    for entry in usable:
        base = baseline or baseline_of(entry.run, [other.run for other in usable])
        if base is not None and base.path != entry.run.path:
            pairs.append((entry, by_path[base.path]))
    return pairs


def _gain(entry: Entry, base: Entry) -> Gain | None:
    """Return the gain of a run; None for another network, or after a failed gate."""
    # On another network a ratio of times would be that of the networks.
    same = entry.run.experiment.get("network") == base.run.experiment.get("network")
    if not same or entry.gate_failed or base.gate_failed:
        return None
    group, other = entry.metrics["step_ms"], base.metrics["step_ms"]
    # The worst and the best that the spreads allow: between them no difference is claimed.
    low, high = other["p10"] / group["p90"], other["p90"] / group["p10"]
    return Gain(entry, base, other["median"] / group["median"], low, high)


def _together(entry: Entry, baseline: Run | None) -> str:
    """Return a key: runs of one task, or all runs with one baseline, are compared."""
    return "" if baseline else json.dumps(task(entry.run), sort_keys=True)


def _networks(shown: Sequence[Entry], gains: dict[str, Gain], baseline: Run | None) -> list[str]:
    """Name the run with the shortest step on each network."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in shown:
        if entry.metrics and not entry.gate_failed:
            network = json.dumps(entry.run.experiment.get("network"), sort_keys=True)
            groups.setdefault((network, _together(entry, baseline)), []).append(entry)
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


def _costs(entry: Entry, base: Entry, gain: Gain | None) -> list[str]:
    """Return texts on saved bytes, codec seconds and speed."""
    details = []
    raw, payload = (each.metrics.get("payload_bytes_per_step") for each in (base, entry))
    if raw and payload:
        details.append(
            f"{bytes_text(payload)} of payload a step for {bytes_text(raw)}, "
            f"compression ratio {raw / payload:.3g}"
        )
    if entry.gate_failed or base.gate_failed:
        failed = entry if entry.gate_failed else base
        return [*details, f"{failed.label}: {refusal(failed)}"]
    costs = step_costs(entry.run)
    if costs is not None:
        parts = ("codec", "wire", "wait")
        spent = ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in parts)
        details.append(f"{spent} a step")
    # A null result is reported like any other.
    if gain is None:
        return [*details, "no run without compression on this network, so no speed to compare"]
    spread = f"spread {gain.low:.2f} to {gain.high:.2f}"
    return [*details, f"{gain.speed:.2f}x the speed ({spread}): {gain.judged}"]


def _accuracy(entry: Entry, base: Entry, target: float | None) -> list[str]:
    """Return texts on the verdict of the seeds and on the cost of the target."""
    details = [judge_runs(entry.run, base.run).sentence]
    by_seed = accuracies(base.run)
    if target is None and by_seed:
        # The least of the baseline's seeds: a target that every one of them reaches.
        target = min(by_seed.values())
    if target is not None:
        mine, yours = (_arrival(each, target) for each in (entry, base))
        details.append(f"{target:.2%}: {mine}, the baseline {yours}")
    return details


def _arrival(entry: Entry, target: float) -> str:
    """Return the median cost of the target over seeds, without seconds after a failed gate."""
    by_seed = arrivals(entry.run, target)
    # Seeds below the target have no time; the text names the number of the others.
    reached = [each for each in by_seed.values() if each is not None]
    if not reached:
        return "not reached"
    details = [f"{median(each.step for each in reached):.0f} steps"]
    if not entry.gate_failed:
        codec = median(each.codec_seconds for each in reached)
        within = f" ({seconds_text(codec)} of them codec)" if codec else ""
        details.append(seconds_text(median(each.seconds for each in reached)) + within)
    details.append(bytes_text(median(each.wire_bytes for each in reached)))
    many = f" ({len(reached)} of {len(by_seed)} seeds)" if len(by_seed) > 1 else ""
    return f"reached after {', '.join(details)} on the wire{many}"


def _did_not_pay(pairs: Sequence[tuple[Entry, Entry]], gains: dict[str, Gain]) -> list[str]:
    judged = [gains[entry.key] for entry, _ in pairs if entry.key in gains]
    if not judged:
        return []
    without = [gain.entry.label for gain in judged if gain.low <= 1]
    if not without:
        return [f"All {len(judged)} comparisons pay in speed"]
    return [f"In speed {len(without)} of {len(judged)} did not pay: {', '.join(without)}"]


def _bandwidths(shown: Sequence[Entry], baseline: Run | None) -> list[str]:
    """Name the fastest method by bandwidth, and the error of the prediction."""
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        if entry.metrics.get("workers", 1) > 1 and not entry.gate_failed:
            groups.setdefault(_together(entry, baseline), []).append(entry)
    texts = []
    for group in groups.values():
        candidates = methods(group)
        if len(candidates) < 2:
            continue
        wins = winners(candidates, LATENCY, RANGE)
        texts.append(
            f"Simulation, from measured compute, codec and bytes on links of "
            f"{bits_text(RANGE[0])} to {bits_text(RANGE[1])}, the fastest is {in_turn(wins)}"
            f"{simulation_error_text(candidates)}"
        )
    return texts
