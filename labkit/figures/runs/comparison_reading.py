"""What a set of runs says as a whole: who is best at what, and what the seeds leave open."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from labkit.common.units import bytes_text
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry
from labkit.figures.kit.finding import Markdown
from labkit.figures.runs import speed
from labkit.figures.runs.measures import parameters, spread
from labkit.figures.runs.pareto import front, points
from labkit.records.run import Run
from labkit.records.verdict import accuracies, judge, seeds_of

_CHANCE = ("name", "seed", "repeats")  # runs that differ in these alone are one method
_NAMED = 6  # so many runs are named in a sentence; figures and table have all


@dataclass(frozen=True)
class Method:
    """Runs that differ in seeds only, under one name."""

    label: str
    runs: tuple[Entry, ...]

    @property
    def accuracies(self) -> list[float]:
        """Test accuracies, one a seed."""
        return [value for each in self.runs for value in accuracies(each.run).values()]

    @property
    def losses(self) -> list[float]:
        """Test losses, one a seed."""
        seeds = [seed for each in self.runs for seed in seeds_of(each.run)]
        return [v for seed in seeds if (v := seed.metrics.get("test_loss")) is not None]

    @property
    def speed(self) -> tuple[float, float, float] | None:
        """Samples/s: the median run, the slowest and the fastest; None where none may be said."""
        known = [e for e in self.runs if e.metrics.get("samples_per_second") and not e.gate_failed]
        if not known:
            return None
        middle = [float(e.metrics["samples_per_second"]) for e in known]
        ends = [edge for e in known for edge in spread(e, "samples_per_second") or ()]
        return median(middle), min(middle + ends), max(middle + ends)

    @property
    def bytes(self) -> float | None:
        """Bytes on the wire a step."""
        known = [e.metrics.get("wire_bytes_per_step") for e in self.runs]
        return median(each) if (each := [float(v) for v in known if v is not None]) else None


def comparison_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say what differs, how many passed the gate, and who is best in accuracy, speed and bytes.

    "Best" is said of methods: runs that differ in seeds only. A lead in accuracy is judged by the
    seeds (`verdict.judge`), a lead in speed by whether the seeds' spreads stay apart.

    Raises: LabkitError where there are no runs.
    """
    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    found = methods(shown)
    said = [_what_differs(shown, found), _gates(shown)]
    for head, same in _by_task(found).items():
        said += [f"{head}{line}" for line in (_best(same), _fastest(same), _fewest(same)) if line]
    said += [_on_the_front(shown), _scaling(shown)]
    return Markdown("\n".join(f"- {line}" for line in said if line))


def methods(shown: Sequence[Entry]) -> list[Method]:
    """Runs with results, by all their parameters but the seed."""
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        fields = {k: v for k, v in entry.run.experiment.items() if k not in _CHANCE}
        if entry.metrics:
            groups.setdefault(json.dumps(fields, sort_keys=True), []).append(entry)
    labels = naming.labels([group[0].run for group in groups.values()])
    return [Method(label, tuple(g)) for label, g in zip(labels, groups.values(), strict=True)]


def _by_task(found: Sequence[Method]) -> dict[str, list[Method]]:
    """Methods that do the same task stand against each other; the words that name it, if needed."""
    tasks: dict[str, list[Method]] = {}
    for method in found:
        row = naming.plain_parameters(method.runs[0].run)
        tasks.setdefault(f"{row.get('model')} on {row.get('dataset')}: ", []).append(method)
    return tasks if len(tasks) > 1 else {"": list(found)}


def _what_differs(shown: Sequence[Entry], found: Sequence[Method]) -> str:
    names = list(parameters(shown))
    states = Counter(str(entry.run.status["state"]) for entry in shown)
    ended = ", ".join(f"{count} {state}" for state, count in states.most_common())
    differ = f"that differ in {', '.join(names)}" if names else "with the same parameters"
    kinds = f"; but for the seed, {len(found)} kinds" if 0 < len(found) < len(shown) else ""
    return f"{_count(len(shown))} {differ} ({ended}{kinds})."


def _gates(shown: Sequence[Entry]) -> str:
    gates = [(entry.metrics.get("equivalence") or {}).get("verdict", "not run") for entry in shown]
    counts = Counter(gates)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    failed = [entry.label for entry in shown if entry.gate_failed]
    none = f"; no speed is shown of {_some(failed)}" if failed else ""
    return f"Equivalence gate: {words}{none}."


def _best(found: Sequence[Method]) -> str:
    ranked = sorted(
        (method for method in found if method.accuracies),
        key=lambda method: -mean(method.accuracies),
    )
    if not ranked:
        return _least_loss(found)
    first, *others = ranked
    text = f"Highest test accuracy: **{first.label}**, {_share(first)}"
    if not others:
        return f"{text}."
    verdict = judge(others[0].accuracies, first.accuracies)
    known = {
        "loss": "more than their seeds explain",
        "no loss": "its seeds reach as high",
        "none": "the seeds do not tell them apart",
    }[verdict.kind]
    if min(len(first.accuracies), len(others[0].accuracies)) < 2:
        known = "with one seed this may be chance"
    return f"{text}; next {others[0].label}, {_share(others[0])}: {known}."


def _least_loss(found: Sequence[Method]) -> str:
    """What tasks without an accuracy are judged by."""
    ranked = sorted((method for method in found if method.losses), key=lambda m: mean(m.losses))
    if not ranked:
        return "No completed run has a test result."
    first, *others = ranked
    text = f"Lowest test loss: **{first.label}**, {_loss(first)}"
    if not others:
        return f"{text}."
    own, other = first.losses, others[0].losses
    known = "which is within the spread of their seeds"
    if min(len(own), len(other)) < 2:
        known = "with one seed this may be chance"
    elif max(own) < min(other):
        known = "each of its seeds is lower"
    return f"{text}; next {others[0].label}, {_loss(others[0])}: {known}."


def _fastest(found: Sequence[Method]) -> str:
    timed = [(each, method) for method in found if (each := method.speed) is not None]
    if not timed:
        return "No speed may be said."
    ranked = sorted(timed, key=lambda pair: -pair[0][0])
    (best, first), *others = ranked
    text = f"Most samples/s: **{first.label}**, {_speed(best)}"
    if not others:
        return f"{text}."
    next_best, second = others[0]
    apart = "" if best[1] > next_best[2] else ", which is within the spread of their seeds"
    return f"{text}; next {second.label}, {_speed(next_best)}{apart}."


def _fewest(found: Sequence[Method]) -> str:
    sent = [(each, method) for method in found if (each := method.bytes)]
    if len({each for each, _ in sent}) < 2:
        return ""
    (least, first), *_, (most, last) = sorted(sent, key=lambda pair: pair[0])
    return (
        f"Fewest bytes on the wire: **{first.label}**, {bytes_text(least)} a step; most "
        f"{last.label}, {bytes_text(most)} ({most / least:.3g} times)."
    )


def _on_the_front(shown: Sequence[Entry]) -> str:
    best = front(points(shown), ("accuracy", "bytes", "seconds"))
    if len(shown) < 2 or not best:
        return ""
    names = _some([each.entry.label for each in best])
    return f"No run beats these in accuracy, bytes and seconds on their network: {names}."


def _scaling(shown: Sequence[Entry]) -> str:
    measured = [point for point in speed.scalings(shown) if point.workers > 1]
    if not measured:
        return ""
    most = max(measured, key=lambda point: point.speedup)
    return (
        f"Largest speed-up over one worker: **{most.entry.label}**, {most.speedup:.2f} "
        f"({most.kind} scaling, efficiency {most.speedup / most.workers:.0%})."
    )


def _share(method: Method) -> str:
    values = method.accuracies
    if len(values) == 1:
        return f"{values[0]:.2%}"
    return f"{mean(values):.2%} ({len(values)} seeds, {min(values):.2%} to {max(values):.2%})"


def _loss(method: Method) -> str:
    values = method.losses
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{mean(values):.4g} ({len(values)} seeds, {min(values):.4g} to {max(values):.4g})"


def _speed(values: tuple[float, float, float]) -> str:
    middle, low, high = values
    return f"{middle:,.0f}" if low == high else f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return f"{'; '.join(labels[:_NAMED])}{more}"


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"
