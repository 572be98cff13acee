"""Summaries in sentences: what each run reached, and what a set of runs says as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import mean

from labkit.common.canonical_json import is_number
from labkit.common.units import bytes_text, plural
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry, settings
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.runs import speed
from labkit.records.analysis.columns import parameters, plain_parameters, spread
from labkit.records.analysis.scaling import scalings
from labkit.records.analysis.spending import MEASURES, front, spending, steps_of
from labkit.records.run import Run, own_results, verdict
from labkit.records.verdict import accuracies, judge, seeds_of

_OWN = 6  # user-defined metrics in a sentence


def reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say for each run its result, its gate verdict, the parts of its steps, and
    whether it pays against one worker.

    A difference in speed counts only where the spreads (p10 to p90 of the step time) stay apart;
    a difference in accuracy of one seed each is reported, not judged.
    """
    shown = settings(runs)
    findings = [Finding(f"**{entry.label}**", details=tuple(_of_run(entry))) for entry in shown]
    findings += _of_scalings(shown)
    findings += [Finding(speed.refusal(entry)) for entry in shown if entry.gate_failed]
    return sentences(findings)


def _of_run(entry: Entry) -> list[str]:
    metrics = entry.metrics
    if not metrics:
        return [f"no results ({entry.run.status['state']})"]
    details = []
    if metrics.get("test_accuracy") is not None:
        details.append(f"{metrics['test_accuracy']:.1%} of the test data right")
    elif metrics.get("test_loss") is not None:
        details.append(f"test loss {metrics['test_loss']:.4g}")
    group = islice(own_results(entry.run).items(), _OWN)
    details += [f"{name} {value:.4g}" for name, value in group]
    details.append(f"equivalence {verdict(entry.run)}")
    history = entry.run.history
    parts = ("compute_seconds", "communicate_seconds", "wait_seconds")
    # The first step traces and compiles, which no later one does.
    steady = history[history["step"] > 0]
    total = steady["seconds"].sum()
    # One worker neither exchanges nor waits.
    if metrics.get("workers", 1) > 1 and total > 0:
        shares = " / ".join(f"{max(steady[part].sum(), 0) / total:.0%}" for part in parts)
        details.append(
            f"of its step time {shares} went into computing / exchange / waiting for ranks"
        )
    return details


def _of_scalings(shown: Sequence[Entry]) -> list[Finding]:
    """Return a finding a run with a baseline of one worker."""
    labels = {entry.key: entry.label for entry in shown}
    table = speed.scalings_by_key(shown)
    return [
        Finding(
            f"**{labels[row.run]}** against {labels[row.baseline]} ({row.kind} scaling)",
            value=row.speedup,
            band=(row.speedup_low, row.speedup_high),
            text="{:.2f}".format,
            unit="x the samples a second",
            details=(f"efficiency {row.efficiency / 100:.0%}",),
            verdict=speed_verdict(
                row.speedup_low, row.speedup_high, "it costs more than it brings"
            ),
        )
        for row in table[table["workers"] > 1].itertuples()
    ]


def speed_verdict(low: float, high: float, lost: str) -> str:
    """Return what the range of a ratio of speeds allows to say."""
    if low > 1:
        return "it pays"
    return lost if high < 1 else "no difference beyond the spread of the steps"


_CHANCE = ("name", "seed", "repeats", "gate")  # none of them makes a run another
_NAMED = 6  # so many runs are named in a sentence; figures and table have all


def comparison_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say what differs, how many passed the gate, and the best in accuracy, speed and bytes.

    "Best" compares settings (runs that differ in seeds only) of the same task for as many
    samples on the same clock, and names further differences between the two. The seeds judge a lead
    in accuracy (`verdict.judge`); a lead in speed needs ranges over seeds that do not meet. A
    sentence begins with the missing lead, if there is none.

    Raises: LabkitError where there are no runs.
    """
    shown = naming.settings(runs)
    findings = [_what_differs(shown), _gates(shown)]
    groups = _alike([entry for entry in shown if entry.metrics])
    compared = {head: same for head, same in groups.items() if len(same) > 1 or len(groups) == 1}
    for head, same in compared.items():
        user = _user_metrics(same)
        best = _best(same) or (None if user else Finding("No completed run has a test result"))
        every = (best, *user, _fastest(same), _fewest(same), *_on_the_front(same))
        findings += [replace(each, what=f"{head}{each.what}") for each in every if each]
    alone = [
        f"{same[0].label} ({head.removesuffix(': ')})"
        for head, same in groups.items()
        if head not in compared
    ]
    if alone:
        head = "Not compared, for no other run has their task, length and clock"
        findings.append(Finding(head, details=(_some(alone),)))
    return sentences([*findings, *_scaling(shown)])


def _accuracy(entry: Entry) -> Finding | None:
    """Return the test accuracy, the mean over seeds."""
    return _over_seeds(entry, "test accuracy", accuracies(entry.run).values(), "{:.2%}".format)


def _metric(name: str, what: str, entry: Entry) -> Finding | None:
    """Return a metric of runs, the mean over seeds."""
    values = (seed.metrics.get(name) for seed in seeds_of(entry.run))
    return _over_seeds(entry, what, filter(is_number, values), "{:.4g}".format)


def _over_seeds(
    entry: Entry, what: str, values: Iterable[float], text: Callable[[float], str]
) -> Finding | None:
    if not (numbers := list(values)):
        return None
    band = min(numbers), max(numbers)
    return Finding(what, entry.label, mean(numbers), band, len(numbers), text)


def _speed(entry: Entry) -> Finding | None:
    """Return samples/s of the median seed with the slowest and fastest, unless the gate failed."""
    value = entry.metrics.get("samples_per_second")
    if not value or entry.gate_failed:
        return None
    seeds = int(entry.metrics.get("repeats") or 1)
    ends = spread(entry.run, "samples_per_second") or (value, value)
    return Finding("samples/s", entry.label, value, ends, seeds, "{:,.0f}".format)


def _bytes(entry: Entry) -> Finding | None:
    """Return bytes on the wire a step; None for no bytes."""
    value = entry.metrics.get("wire_bytes_per_step")
    if not value:
        return None
    return Finding("bytes", entry.label, float(value), text=bytes_text, unit=" a step")


def _alike(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return runs of the same task, number of samples and clock, by what tells the groups apart.

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
    differing = [place for place in range(3) if len({key[place] for key in groups}) > 1]
    return {
        f"{', '.join(key[place] for place in differing)}: " if differing else "": same
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
    return Finding("Equivalence gate", details=(words, none))


_Place = tuple[Finding, Entry]


def _ranked(
    shown: Sequence[Entry], measure: Callable[[Entry], Finding | None], sign: int
) -> list[_Place]:
    """Return the runs with a value, the greatest first for sign 1, the least for -1."""
    known = [(finding, entry) for entry in shown if (finding := measure(entry)) is not None]
    return sorted(known, key=lambda each: -sign * (each[0].value or 0.0))


def _lead(
    ranked: Sequence[_Place], most: str, judge_lead: Callable[[_Place, _Place], str], more: str = ""
) -> Finding:
    """Return the best beside the next best, or first that the seeds do not tell them apart."""
    best, *others = ranked
    if not others:
        return replace(best[0], what=f"{most} {best[0].what}")
    verdict = judge_lead(best, others[0])
    differing = [n for n in parameters([best[1].run, others[0][1].run]) if n not in _CHANCE]
    details = [f"next {others[0][0].who}, {others[0][0].number}", more]
    if len(differing) > 1:
        details.append(f"the two differ in {' and '.join(differing)}")
    what = f"{most} {best[0].what}" if verdict else f"{_NULL} {best[0].what}"
    if not verdict and min(best[0].seeds, others[0][0].seeds) < 2:
        what = f"{_ONE_SEED} {best[0].what}"
    return replace(best[0], what=what, details=tuple(details), verdict=verdict)


_NULL = "No difference beyond the spread of their seeds in"
_ONE_SEED = "One seed cannot tell chance from a difference in"


def _best(shown: Sequence[Entry]) -> Finding | None:
    if ranked := _ranked(shown, _accuracy, 1):
        return _lead(ranked, "Highest", _by_seeds)
    # Tasks without an accuracy are judged by their loss.
    ranked = _ranked(shown, partial(_metric, "test_loss", "test loss"), -1)
    return _lead(ranked, "Lowest", partial(_apart, "lower")) if ranked else None


def _user_metrics(shown: Sequence[Entry]) -> list[Finding]:
    """Return findings on user-defined metrics, of which only the user knows the direction."""
    names = dict.fromkeys(name for entry in shown for name in own_results(entry.run))
    every = [_ranked(shown, partial(_metric, name, name), 1) for name in names]
    ranked, judge_lead = [each for each in every if each], partial(_apart, "greater")
    findings = [_lead(each, "Greatest", judge_lead, _least(each)) for each in ranked[:_NAMED]]
    more = plural(len(ranked) - _NAMED, "more number")
    return findings + [Finding(f"{more} of their own are in the table")] * bool(ranked[_NAMED:])


def _least(ranked: Sequence[_Place]) -> str:
    last = ranked[-1][0]
    return f"least {last.who}, {last.number}" if len(ranked) > 2 else ""


def _by_seeds(first: _Place, second: _Place) -> str:
    ours, theirs = (list(accuracies(entry.run).values()) for _, entry in (first, second))
    # In reverse: the second loses accuracy against the first.
    lost = min(len(ours), len(theirs)) > 1 and judge(theirs, ours).kind == "loss"
    return "more than their seeds explain" if lost else ""


def _apart(comparative: str, first: _Place, second: _Place) -> str:
    """Return the verdict that every seed of the first is better; empty for one seed."""
    (high, _), (low, _) = (second, first) if comparative == "lower" else (first, second)
    if not high.band or not low.band or min(high.seeds, low.seeds) < 2:
        return ""
    return f"each of its seeds is {comparative}" * (high.band[0] > low.band[1])


def _fastest(shown: Sequence[Entry]) -> Finding:
    ranked = _ranked(shown, _speed, 1)
    return (
        _lead(ranked, "Most", partial(_apart, "faster"))
        if ranked
        else Finding("No speed may be said")
    )


def _fewest(shown: Sequence[Entry]) -> Finding | None:
    ranked = _ranked(shown, _bytes, -1)
    # All send the same: there is no fewest.
    if len({finding.value for finding, _ in ranked}) < 2:
        return None
    least, most = ranked[0][0], ranked[-1][0]
    times = (most.value or 0.0) / (least.value or 1.0)
    details = (f"most {most.who}, {most.number} ({times:.3g} times)",)
    return replace(least, what="Fewest bytes on the wire", details=details)


def _on_the_front(shown: Sequence[Entry]) -> list[Finding]:
    spent = spending({entry.label: entry.run for entry in shown})
    best = front(spent, MEASURES)
    # A single run has no competitor.
    if len(shown) < 2 or best.empty:
        return []
    if len(best) == len(spent):
        what = "No run beats another in all of accuracy, bytes and seconds on its network"
        return [Finding(what)]
    what = "No run beats these in accuracy, bytes and seconds on their network"
    return [Finding(what, details=(_some(list(best["run"])),))]


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
    details = [f"{most['kind']} scaling, efficiency {most['efficiency'] / 100:.0%}"]
    details += ["one seed, the spread is that of its steps"] if seeds < 2 else []
    text = "{:.2f}".format
    finding = Finding(head, most["run"], most["speedup"], (low, high), text=text)
    return [replace(finding, seeds=seeds if seeds > 1 else 0, details=tuple(details))]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return f"{'; '.join(labels[:_NAMED])}{more}"
