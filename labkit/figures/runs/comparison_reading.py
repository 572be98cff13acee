"""What a set of runs says as a whole: who is best at what, and what the seeds leave open."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from labkit.common.units import bytes_text, plural
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.records.questions.columns import parameters, plain_parameters, spread
from labkit.records.questions.scaling import scalings
from labkit.records.questions.spending import MEASURES, front, spending
from labkit.records.run import Run
from labkit.records.verdict import accuracies, judge, seeds_of

_CHANCE = ("name", "seed", "repeats")  # runs that differ in these alone are one method
_NAMED = 6  # so many runs are named in a sentence; figures and table have all


@dataclass(frozen=True)
class Method:
    """Runs that differ in seeds only, under one name."""

    label: str
    runs: tuple[Entry, ...]

    def accuracy(self) -> Finding | None:
        """Test accuracy, the mean over seeds."""
        values = [value for each in self.runs for value in accuracies(each.run).values()]
        return self._of_seeds("Highest test accuracy", values, "{:.2%}".format)

    def loss(self) -> Finding | None:
        """Test loss, the mean over seeds."""
        seeds = [seed for each in self.runs for seed in seeds_of(each.run)]
        values = [v for seed in seeds if (v := seed.metrics.get("test_loss")) is not None]
        return self._of_seeds("Lowest test loss", values, "{:.4g}".format)

    def speed(self) -> Finding | None:
        """Samples/s: the median run, the slowest and the fastest; None where none may be said."""
        known = [e for e in self.runs if e.metrics.get("samples_per_second") and not e.gate_failed]
        middle = [float(e.metrics["samples_per_second"]) for e in known]
        # Ends of seeds within a run, and of runs among each other.
        ends = middle + [edge for e in known for edge in spread(e.run, "samples_per_second") or ()]
        if not known:
            return None
        band = min(ends), max(ends)
        text = "{:,.0f}".format
        return Finding("Most samples/s", self.label, median(middle), band, text=text)

    def bytes(self) -> Finding | None:
        """Bytes on the wire a step; None where nothing is sent."""
        known = [e.metrics.get("wire_bytes_per_step") for e in self.runs]
        values = [float(value) for value in known if value is not None]
        if not values or not median(values):
            return None
        head = "Fewest bytes on the wire"
        return Finding(head, self.label, median(values), text=bytes_text, unit=" a step")

    def _of_seeds(
        self, what: str, values: Sequence[float], text: Callable[[float], str]
    ) -> Finding | None:
        if not values:
            return None
        band = min(values), max(values)
        return Finding(what, self.label, mean(values), band, len(values), text)


def comparison_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say what differs, how many passed the gate, and who is best in accuracy, speed and bytes.

    "Best" is said of methods: runs that differ in seeds only. A lead in accuracy is judged by the
    seeds (`verdict.judge`), a lead in speed by whether the seeds' spreads stay apart.

    Raises: LabkitError where there are no runs.
    """
    shown = naming.settings(runs)
    found = methods(shown)
    said = [_what_differs(shown, found), _gates(shown)]
    for head, same in _by_task(found).items():
        best = (_best(same), _fastest(same), _fewest(same))
        said += [replace(each, what=f"{head}{each.what}") for each in best if each]
    return sentences([*said, *_on_the_front(shown), *_scaling(shown)])


def methods(shown: Sequence[Entry]) -> list[Method]:
    """Runs with results, by all their parameters but the seed."""
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        # Runs that differ by chance are one method, on however many folders they lie.
        fields = {k: v for k, v in entry.run.experiment.items() if k not in _CHANCE}
        if entry.metrics:
            groups.setdefault(json.dumps(fields, sort_keys=True), []).append(entry)
    # By the first run of each: the others differ in chance only.
    labels = naming.labels([group[0].run for group in groups.values()])
    return [Method(label, tuple(g)) for label, g in zip(labels, groups.values(), strict=True)]


def _by_task(found: Sequence[Method]) -> dict[str, list[Method]]:
    """Methods that do the same task stand against each other; the words that name it, if needed."""
    tasks: dict[str, list[Method]] = {}
    for method in found:
        row = plain_parameters(method.runs[0].run)
        tasks.setdefault(f"{row.get('model')} on {row.get('dataset')}: ", []).append(method)
    return tasks if len(tasks) > 1 else {"": list(found)}


def _what_differs(shown: Sequence[Entry], found: Sequence[Method]) -> Finding:
    names = list(parameters([entry.run for entry in shown]))
    states = Counter(str(entry.run.status["state"]) for entry in shown)
    ended = ", ".join(f"{count} {state}" for state, count in states.most_common())
    differ = f"that differ in {', '.join(names)}" if names else "with the same parameters"
    kinds = f"; but for the seed, {len(found)} kinds" if 0 < len(found) < len(shown) else ""
    return Finding(f"{plural(len(shown), 'run')} {differ} ({ended}{kinds})")


def _gates(shown: Sequence[Entry]) -> Finding:
    gates = [(entry.metrics.get("equivalence") or {}).get("verdict", "not run") for entry in shown]
    counts = Counter(gates)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    failed = [entry.label for entry in shown if entry.gate_failed]
    none = f"no speed is shown of {_some(failed)}" if failed else ""
    return Finding("Equivalence gate", said=(words, none))


def _ranked(measured: Iterable[tuple[Finding | None, Method]], sign: int) -> list[_Place]:
    """Those with a value, the best first: the greatest for sign 1, the least for -1."""
    known = [(finding, method) for finding, method in measured if finding is not None]
    return sorted(known, key=lambda each: -sign * (each[0].value or 0.0))


_Place = tuple[Finding, Method]


def _lead(ranked: Sequence[_Place], verdict: Callable[[_Place, _Place], str]) -> Finding:
    """The best beside the next best, and what may be said of their difference."""
    best, *others = ranked
    return best[0].ahead_of(others[0][0], verdict(best, others[0])) if others else best[0]


def _best(found: Sequence[Method]) -> Finding:
    if ranked := _ranked(((method.accuracy(), method) for method in found), 1):
        return _lead(ranked, _by_seeds)
    # What tasks without an accuracy are judged by.
    ranked = _ranked(((method.loss(), method) for method in found), -1)
    return _lead(ranked, _lower) if ranked else Finding("No completed run has a test result")


def _by_seeds(first: _Place, second: _Place) -> str:
    if _of_one(first, second):
        return _CHANCE_OF_ONE
    own, others = (
        [value for run in method.runs for value in accuracies(run.run).values()]
        for _, method in (first, second)
    )
    # The other way round: whether the second loses accuracy against the first.
    return {
        "loss": "more than their seeds explain",
        "no loss": "its seeds reach as high",
        "none": "the seeds do not tell them apart",
    }[judge(others, own).kind]


def _lower(first: _Place, second: _Place) -> str:
    if _of_one(first, second):
        return _CHANCE_OF_ONE
    one, other = first[0].band, second[0].band
    apart = one and other and one[1] < other[0]
    return "each of its seeds is lower" if apart else "within the spread of their seeds"


_CHANCE_OF_ONE = "with one seed this may be chance"


def _of_one(one: _Place, other: _Place) -> bool:
    return min(one[0].seeds, other[0].seeds) < 2


def _fastest(found: Sequence[Method]) -> Finding:
    ranked = _ranked(((method.speed(), method) for method in found), 1)
    return _lead(ranked, _faster) if ranked else Finding("No speed may be said")


def _faster(first: _Place, second: _Place) -> str:
    one, other = first[0].band, second[0].band
    return "" if one and other and one[0] > other[1] else "within the spread of their seeds"


def _fewest(found: Sequence[Method]) -> Finding | None:
    ranked = _ranked(((method.bytes(), method) for method in found), -1)
    # All send the same: there is no fewest.
    if len({finding.value for finding, _ in ranked}) < 2:
        return None
    least, most = ranked[0][0], ranked[-1][0]
    times = (most.value or 0.0) / (least.value or 1.0)
    return replace(least, said=(f"most {most.who}, {most.number} ({times:.3g} times)",))


def _on_the_front(shown: Sequence[Entry]) -> list[Finding]:
    best = front(spending({entry.label: entry.run for entry in shown}), MEASURES)
    # A single run is beaten by nobody.
    if len(shown) < 2 or best.empty:
        return []
    what = "No run beats these in accuracy, bytes and seconds on their network"
    return [Finding(what, said=(_some(list(best["run"])),))]


def _scaling(shown: Sequence[Entry]) -> list[Finding]:
    table = scalings({entry.label: entry.run for entry in shown})
    measured = table[table["workers"] > 1]
    if measured.empty:
        return []
    most = measured.loc[measured["speedup"].idxmax()]
    kind = f"{most['kind']} scaling, efficiency {most['efficiency'] / 100:.0%}"
    head = "Largest speed-up over one worker"
    return [Finding(head, most["run"], most["speedup"], text="{:.2f}".format, unit=f" ({kind})")]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return f"{'; '.join(labels[:_NAMED])}{more}"
