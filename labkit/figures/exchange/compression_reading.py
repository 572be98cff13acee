"""What compression brought in these runs, in sentences made from their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.common.errors import LabkitError
from labkit.common.units import bits_text, bytes_text, seconds_text
from labkit.figures.exchange.bandwidth import held_against, methods
from labkit.figures.kit.entries import Entry, clock_and_network, entries
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.runs.speed import refused
from labkit.records.bandwidths import LATENCY, RANGE, in_turn, winners
from labkit.records.compressors import baseline_of, task
from labkit.records.run import Run
from labkit.records.step_costs import step_costs
from labkit.records.verdict import accuracies, arrivals, judge_runs


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
        """What the spreads allow to say."""
        if self.low > 1:
            return "it pays"
        if self.high < 1:
            return "it does not pay"
        return "no difference beyond the spread of the steps, it does not pay"


def compression_reading(
    runs: Iterable[Run] | Run, baseline: Run | None = None, target: float | None = None
) -> Markdown:
    """Say who wins on each network and by how much, what each method saved and cost, whether
    accuracy was lost, what did not pay, and who would win at which bandwidth.

    Args:
        runs: with and without compression.
        baseline: against which to hold all others; default: for each compressed run the one
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
        said = [*_costs(entry, base, gains.get(entry.key)), *_accuracy(entry, base, target)]
        lines.append(f"**{entry.label}** against {base.label}: {'; '.join(said)}")
    held = {entry.key for pair in pairs for entry in pair}
    alone = [entry.label for entry in shown if entry.key not in held]
    if alone:
        lines.append(f"Not held against a run without compression: {', '.join(alone)}")
    lines += [*_did_not_pay(pairs, gains), *_bandwidths(shown, baseline)]
    return sentences(map(Finding, lines))


def _pairs(shown: Sequence[Entry], baseline: Run | None) -> list[tuple[Entry, Entry]]:
    """Each run with results beside its baseline."""
    usable = [entry for entry in shown if entry.metrics]
    by_path = {entry.run.path: entry for entry in usable}
    if baseline is not None and baseline.path not in by_path:
        raise LabkitError(f"the baseline {baseline.name} has to be among the runs, with results")
    found = []
    for entry in usable:
        base = baseline or baseline_of(entry.run, [other.run for other in usable])
        if base is not None and base.path != entry.run.path:
            found.append((entry, by_path[base.path]))
    return found


def _gain(entry: Entry, base: Entry) -> Gain | None:
    """None where one of the two may show no speed, or where their networks differ."""
    # On another network a ratio of times would be that of the networks.
    same = entry.run.experiment.get("network") == base.run.experiment.get("network")
    if not same or entry.gate_failed or base.gate_failed:
        return None
    own, other = entry.metrics["step_ms"], base.metrics["step_ms"]
    # The worst and the best that the spreads allow: between them no difference is claimed.
    low, high = other["p10"] / own["p90"], other["p90"] / own["p10"]
    return Gain(entry, base, other["median"] / own["median"], low, high)


def _together(entry: Entry, baseline: Run | None) -> str:
    """Runs of which this is equal are compared: of the same task, or all with one baseline."""
    return "" if baseline else json.dumps(task(entry.run), sort_keys=True)


def _networks(shown: Sequence[Entry], gains: dict[str, Gain], baseline: Run | None) -> list[str]:
    """Who has the shortest step on the same network."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in shown:
        if entry.metrics and not entry.gate_failed:
            network = json.dumps(entry.run.experiment.get("network"), sort_keys=True)
            groups.setdefault((network, _together(entry, baseline)), []).append(entry)
    said = []
    for group in groups.values():
        if len(group) < 2:
            continue
        best = min(group, key=lambda entry: float(entry.metrics["step_ms"]["median"]))
        others = [entry.metrics["step_ms"]["median"] for entry in group if entry is not best]
        step = best.metrics["step_ms"]
        second = f"the next {seconds_text(min(others) / 1e3)}"
        gain = gains.get(best.key)
        by = f"; {gain.speed:.2f}x the speed of {gain.baseline.label}" if gain else ""
        said.append(
            f"{clock_and_network(group)}: the shortest step is that of **{best.label}**, "
            f"{seconds_text(step['median'] / 1e3)} (p10 to p90 {seconds_text(step['p10'] / 1e3)} "
            f"to {seconds_text(step['p90'] / 1e3)}), {second}{by}"
        )
    return said


def _costs(entry: Entry, base: Entry, gain: Gain | None) -> list[str]:
    """Bytes saved, codec seconds spent, speed."""
    said = []
    raw, payload = (each.metrics.get("payload_bytes_per_step") for each in (base, entry))
    if raw and payload:
        said.append(
            f"{bytes_text(payload)} of payload a step for {bytes_text(raw)}, "
            f"compression ratio {raw / payload:.3g}"
        )
    if entry.gate_failed or base.gate_failed:
        failed = entry if entry.gate_failed else base
        return [*said, f"{failed.label}: {refused(failed)}"]
    costs = step_costs(entry.run)
    if costs is not None:
        parts = ("codec", "wire", "wait")
        spent = ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in parts)
        said.append(f"{spent} a step")
    # As a null result, said like any other.
    if gain is None:
        return [*said, "no run without compression on this network, so no speed to compare"]
    spread = f"spread {gain.low:.2f} to {gain.high:.2f}"
    return [*said, f"{gain.speed:.2f}x the speed ({spread}): {gain.judged}"]


def _accuracy(entry: Entry, base: Entry, target: float | None) -> list[str]:
    """The verdict of the seeds; what it took to come to the target."""
    said = [judge_runs(entry.run, base.run).sentence]
    found = accuracies(base.run)
    if target is None and found:
        # The least of the baseline's seeds: a target that every one of them reaches.
        target = min(found.values())
    if target is not None:
        mine, yours = (_arrival(each, target) for each in (entry, base))
        said.append(f"{target:.2%}: {mine}, the baseline {yours}")
    return said


def _arrival(entry: Entry, target: float) -> str:
    """Medians over seeds; without seconds where the gate failed."""
    found = arrivals(entry.run, target)
    # Seeds that did not reach it have no time; how many did is said beside.
    reached = [each for each in found.values() if each is not None]
    if not reached:
        return "not reached"
    said = [f"{median(each.step for each in reached):.0f} steps"]
    if not entry.gate_failed:
        codec = median(each.codec_seconds for each in reached)
        within = f" ({seconds_text(codec)} of them codec)" if codec else ""
        said.append(seconds_text(median(each.seconds for each in reached)) + within)
    said.append(bytes_text(median(each.wire_bytes for each in reached)))
    many = f" ({len(reached)} of {len(found)} seeds)" if len(found) > 1 else ""
    return f"reached after {', '.join(said)} on the wire{many}"


def _did_not_pay(pairs: Sequence[tuple[Entry, Entry]], gains: dict[str, Gain]) -> list[str]:
    judged = [gains[entry.key] for entry, _ in pairs if entry.key in gains]
    if not judged:
        return []
    without = [gain.entry.label for gain in judged if gain.low <= 1]
    if not without:
        return [f"All {len(judged)} comparisons pay in speed"]
    return [f"In speed {len(without)} of {len(judged)} did not pay: {', '.join(without)}"]


def _bandwidths(shown: Sequence[Entry], baseline: Run | None) -> list[str]:
    """Who wins at which bandwidth, and how good the prediction is where measured."""
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        if entry.metrics.get("workers", 1) > 1 and not entry.gate_failed:
            groups.setdefault(_together(entry, baseline), []).append(entry)
    said = []
    for group in groups.values():
        found = methods(group)
        if len(found) < 2:
            continue
        wins = winners(found, LATENCY, RANGE)
        said.append(
            f"Simulation, from measured compute, codec and bytes on links of "
            f"{bits_text(RANGE[0])} to {bits_text(RANGE[1])}, the fastest is {in_turn(wins)}"
            f"{held_against(found)}"
        )
    return said
