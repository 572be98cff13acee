"""What a set of runs says as a whole: who is best at what, and what the seeds leave open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from labkit.common.canonical_json import is_number
from labkit.common.units import bytes_text, plural
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.records.analysis.columns import parameters, plain_parameters, spread
from labkit.records.analysis.scaling import scalings
from labkit.records.analysis.spending import MEASURES, front, spending, steps_of
from labkit.records.run import Run, own_results
from labkit.records.verdict import accuracies, judge, seeds_of

_CHANCE = ("name", "seed", "repeats", "gate")  # none of them makes a run another
_NAMED = 6  # so many runs are named in a sentence; figures and table have all


def comparison_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say what differs, how many passed the gate, and who is best in accuracy, speed and bytes.

    "Best" is said of settings (runs that differ in seeds only) that did the same task for as many
    samples on the same clock; what else differs between the two is said, too. A lead in accuracy is
    judged by the seeds (`verdict.judge`), a lead in speed by whether the seeds' spreads stay apart;
    where there is none, the sentence begins with that.

    Raises: LabkitError where there are no runs.
    """
    shown = naming.settings(runs)
    said = [_what_differs(shown), _gates(shown)]
    found = _alike([entry for entry in shown if entry.metrics])
    compared = {head: same for head, same in found.items() if len(same) > 1 or len(found) == 1}
    for head, same in compared.items():
        own = _of_ones_own(same)
        judged = _best(same) or (None if own else Finding("No completed run has a test result"))
        best = (judged, *own, _fastest(same), _fewest(same), *_on_the_front(same))
        said += [replace(each, what=f"{head}{each.what}") for each in best if each]
    alone = [
        f"{same[0].label} ({head.removesuffix(': ')})"
        for head, same in found.items()
        if head not in compared
    ]
    if alone:
        head = "Not compared, for no other run has their task, length and clock"
        said.append(Finding(head, said=(_some(alone),)))
    return sentences([*said, *_scaling(shown)])


def _accuracy(entry: Entry) -> Finding | None:
    """Test accuracy, the mean over seeds."""
    values = list(accuracies(entry.run).values())
    return _of_seeds(entry, "test accuracy", values, "{:.2%}".format)


def _loss(entry: Entry) -> Finding | None:
    """Test loss, the mean over seeds."""
    found = (seed.metrics.get("test_loss") for seed in seeds_of(entry.run))
    return _of_seeds(entry, "test loss", [v for v in found if v is not None], "{:.4g}".format)


def _of_seeds(
    entry: Entry, what: str, values: Sequence[float], text: Callable[[float], str]
) -> Finding | None:
    if not values:
        return None
    band = min(values), max(values)
    return Finding(what, entry.label, mean(values), band, len(values), text)


def _speed(entry: Entry) -> Finding | None:
    """Samples/s: the median seed, the slowest and the fastest; None where none may be said."""
    value = entry.metrics.get("samples_per_second")
    if not value or entry.gate_failed:
        return None
    seeds = int(entry.metrics.get("repeats") or 1)
    ends = spread(entry.run, "samples_per_second") or (value, value)
    return Finding("samples/s", entry.label, value, ends, seeds, "{:,.0f}".format)


def _bytes(entry: Entry) -> Finding | None:
    """Bytes on the wire a step; None where nothing is sent."""
    value = entry.metrics.get("wire_bytes_per_step")
    if not value:
        return None
    return Finding("bytes", entry.label, float(value), text=bytes_text, unit=" a step")


def _alike(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Those that did the same task for as many samples on the same clock, by what tells them apart.

    Modelled seconds are no seconds, so that runs of both clocks are never one ranking.
    """
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in shown:
        row, steps = plain_parameters(entry.run), steps_of(entry.run)
        # Of steps and batch the product: with weak scaling there are fewer, larger steps.
        samples = steps * int(row.get("batch_size") or 1) if steps else None
        length = f"{samples:,} samples" if samples else "unknown length"
        task, clock = f"{row.get('model')} on {row.get('dataset')}", entry.metrics.get("clock")
        groups.setdefault((task, length, f"{clock or 'wall'} clock"), []).append(entry)
    told = [place for place in range(3) if len({key[place] for key in groups}) > 1]
    return {
        f"{', '.join(key[place] for place in told)}: " if told else "": same
        for key, same in groups.items()
    }


def _what_differs(shown: Sequence[Entry]) -> Finding:
    names = [n for n in parameters([entry.run for entry in shown]) if n not in _CHANCE]
    states = Counter(str(run.status["state"]) for entry in shown for run in entry.members)
    ended = ", ".join(f"{count} {state}" for state, count in states.most_common())
    differ = f"that differ in {', '.join(names)}" if names else "with the same parameters"
    kinds = f"; but for the seed, {len(shown)} kinds" if len(shown) < states.total() else ""
    return Finding(f"{plural(states.total(), 'run')} {differ} ({ended}{kinds})")


def _gates(shown: Sequence[Entry]) -> Finding:
    gates = [(entry.metrics.get("equivalence") or {}).get("verdict", "not run") for entry in shown]
    counts = Counter(gates)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    failed = [entry.label for entry in shown if entry.gate_failed]
    none = f"no speed is shown of {_some(failed)}" if failed else ""
    return Finding("Equivalence gate", said=(words, none))


_Place = tuple[Finding, Entry]


def _ranked(
    found: Sequence[Entry], measure: Callable[[Entry], Finding | None], sign: int
) -> list[_Place]:
    """Those with a value, the best first: the greatest for sign 1, the least for -1."""
    known = [(finding, entry) for entry in found if (finding := measure(entry)) is not None]
    return sorted(known, key=lambda each: -sign * (each[0].value or 0.0))


def _lead(
    ranked: Sequence[_Place], most: str, judged: Callable[[_Place, _Place], str], more: str = ""
) -> Finding:
    """The best beside the next best; where the seeds do not tell them apart, that comes first."""
    best, *others = ranked
    if not others:
        return replace(best[0], what=f"{most} {best[0].what}")
    verdict = judged(best, others[0])
    differing = [n for n in parameters([best[1].run, others[0][1].run]) if n not in _CHANCE]
    said = [f"next {others[0][0].who}, {others[0][0].number}", more]
    if len(differing) > 1:
        said.append(f"the two differ in {' and '.join(differing)}")
    what = f"{most} {best[0].what}" if verdict else f"{_NULL} {best[0].what}"
    if not verdict and min(best[0].seeds, others[0][0].seeds) < 2:
        what = f"{_ONE_SEED} {best[0].what}"
    return replace(best[0], what=what, said=tuple(said), verdict=verdict)


_NULL = "No difference beyond the spread of their seeds in"
_ONE_SEED = "One seed cannot tell chance from a difference in"


def _best(found: Sequence[Entry]) -> Finding | None:
    if ranked := _ranked(found, _accuracy, 1):
        return _lead(ranked, "Highest", _by_seeds)
    # What tasks without an accuracy are judged by.
    ranked = _ranked(found, _loss, -1)
    return _lead(ranked, "Lowest", _lower) if ranked else None


def _of_ones_own(found: Sequence[Entry]) -> list[Finding]:
    """Numbers under names of the user's own; whether more of them is better, only they know."""
    names = dict.fromkeys(name for entry in found for name in own_results(entry.run))
    ranked = [_ranked(found, partial(_result, name), 1) for name in names]
    ranked = [each for each in ranked if each]
    said = [_lead(each, "Greatest", _greater, _least(each)) for each in ranked[:_NAMED]]
    more = plural(len(ranked) - _NAMED, "more number")
    return said + ([Finding(f"{more} of their own are in the table")] if ranked[_NAMED:] else [])


def _result(name: str, entry: Entry) -> Finding | None:
    """A result under a name of the user's own, the mean over seeds."""
    found = (seed.metrics.get(name) for seed in seeds_of(entry.run))
    return _of_seeds(entry, name, [v for v in found if is_number(v)], "{:.4g}".format)


def _least(ranked: Sequence[_Place]) -> str:
    last = ranked[-1][0]
    return f"least {last.who}, {last.number}" if len(ranked) > 2 else ""


def _by_seeds(first: _Place, second: _Place) -> str:
    own, others = (list(accuracies(entry.run).values()) for _, entry in (first, second))
    # The other way round: whether the second loses accuracy against the first.
    lost = min(len(own), len(others)) > 1 and judge(others, own).kind == "loss"
    return "more than their seeds explain" if lost else ""


def _lower(first: _Place, second: _Place) -> str:
    return "each of its seeds is lower" if _apart(second, first) else ""


def _greater(first: _Place, second: _Place) -> str:
    return "each of its seeds is greater" if _apart(first, second) else ""


def _faster(first: _Place, second: _Place) -> str:
    return "each of its seeds is faster" if _apart(first, second) else ""


def _apart(high: _Place, low: _Place) -> bool:
    """Whether every seed of the one is above every seed of the other; not told of one seed."""
    one, other = high[0], low[0]
    if not one.band or not other.band or min(one.seeds, other.seeds) < 2:
        return False
    return one.band[0] > other.band[1]


def _fastest(found: Sequence[Entry]) -> Finding:
    ranked = _ranked(found, _speed, 1)
    return _lead(ranked, "Most", _faster) if ranked else Finding("No speed may be said")


def _fewest(found: Sequence[Entry]) -> Finding | None:
    ranked = _ranked(found, _bytes, -1)
    # All send the same: there is no fewest.
    if len({finding.value for finding, _ in ranked}) < 2:
        return None
    least, most = ranked[0][0], ranked[-1][0]
    times = (most.value or 0.0) / (least.value or 1.0)
    said = (f"most {most.who}, {most.number} ({times:.3g} times)",)
    return replace(least, what="Fewest bytes on the wire", said=said)


def _on_the_front(shown: Sequence[Entry]) -> list[Finding]:
    spent = spending({entry.label: entry.run for entry in shown})
    best = front(spent, MEASURES)
    # A single run is beaten by nobody.
    if len(shown) < 2 or best.empty:
        return []
    if len(best) == len(spent):
        what = "No run beats another in all of accuracy, bytes and seconds on its network"
        return [Finding(what)]
    what = "No run beats these in accuracy, bytes and seconds on their network"
    return [Finding(what, said=(_some(list(best["run"])),))]


def _scaling(shown: Sequence[Entry]) -> list[Finding]:
    table = scalings({entry.label: entry.run for entry in shown})
    measured = table[table["workers"] > 1]
    if measured.empty:
        return []
    most = measured.loc[measured["speedup"].idxmax()]
    seeds = int(most["seeds"])
    # One seed has no spread of its own; that of its steps is known.
    ends = ("slowest_seed", "fastest_seed") if seeds > 1 else ("speedup_low", "speedup_high")
    low, high = (float(most[end]) for end in ends)
    over = "seeds" if seeds > 1 else "steps"
    head = "Largest speed-up over one worker"
    if low <= 1:
        head = f"No speed-up over one worker beyond the spread of the {over}; the largest"
    said = [f"{most['kind']} scaling, efficiency {most['efficiency'] / 100:.0%}"]
    said += ["one seed, the spread is that of its steps"] if seeds < 2 else []
    told = seeds if seeds > 1 else 0
    text = "{:.2f}".format
    return [Finding(head, most["run"], most["speedup"], (low, high), told, text, said=tuple(said))]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return f"{'; '.join(labels[:_NAMED])}{more}"
