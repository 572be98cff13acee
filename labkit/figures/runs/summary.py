"""Text summaries: the results of each run, and the comparison of a set of runs."""

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
from labkit.figures.kit.entries import Finding, Markdown, RunEntry, sentences, settings
from labkit.figures.runs import speed
from labkit.records.analysis.columns import parameters, plain_parameters, seed_range
from labkit.records.analysis.scaling import scalings
from labkit.records.analysis.spending import MEASURES, front, spending, steps_of
from labkit.records.provenance import differing_inputs
from labkit.records.run import Run, logged_results, verdict
from labkit.records.verdict import accuracies, completed_seeds, judge

_MOST_METRICS = 6  # greatest number of user-defined metrics in a sentence


def summarize(runs: Iterable[Run] | Run) -> Markdown:
    """Summarize each run: result, equivalence check, parts of the step time, and speed-up.

    The summary compares ranges of step times (p10 to p90). A speed-up over one worker is a
    difference only if the ranges do not overlap. The summary reports accuracies from a single seed,
    but does not compare them.
    """
    shown = settings(runs)
    findings = [
        Finding(f"**{entry.label}**", details=tuple(_run_details(entry))) for entry in shown
    ]
    findings += _speedup_findings(shown)
    findings += [Finding(speed.refusal(entry)) for entry in shown if entry.equivalence_failed]
    return sentences(findings)


def _run_details(entry: RunEntry) -> list[str]:
    metrics = entry.metrics
    if not metrics:
        return [f"no results ({entry.run.status['state']})"]
    details = []
    if metrics.get("test_accuracy") is not None:
        details.append(f"test accuracy {metrics['test_accuracy']:.1%}")
    elif metrics.get("test_loss") is not None:
        details.append(f"test loss {metrics['test_loss']:.4g}")
    group = islice(logged_results(entry.run).items(), _MOST_METRICS)
    details += [f"{name} {value:.4g}" for name, value in group]
    details.append(f"equivalence check {verdict(entry.run)}")
    history = entry.run.history
    parts = ("compute_seconds", "communicate_seconds", "wait_seconds")
    # The first training step is excluded, because TensorFlow traces and compiles the model in this
    # step.
    steady = history[history["step"] > 0]
    total = steady["seconds"].sum()
    # The summary states the parts of the step time for several workers only. A single worker
    # neither exchanges gradients nor waits.
    if metrics.get("workers", 1) > 1 and total > 0:
        shares = " / ".join(f"{max(steady[part].sum(), 0) / total:.0%}" for part in parts)
        details.append(
            f"shares of the step time for computation / exchange / waiting for ranks: {shares}"
        )
    return details


def _speedup_findings(shown: Sequence[RunEntry]) -> list[Finding]:
    """Return a finding on the speed-up of each run that has a baseline of one worker."""
    labels = {entry.key: entry.label for entry in shown}
    table = speed.scalings_by_key(shown)
    return [
        Finding(
            f"**{labels[row.run]}** against {labels[row.baseline]} ({row.kind} scaling)",
            value=row.speedup,
            band=(row.speedup_low, row.speedup_high),
            text="{:.2f}".format,
            unit="x the samples per second",
            details=(f"efficiency {row.efficiency / 100:.0%}",),
            verdict=speed_verdict(row.speedup_low, row.speedup_high, "it does not pay"),
        )
        for row in table[table["workers"] > 1].itertuples()
    ]


def speed_verdict(low: float, high: float, below_text: str) -> str:
    """Return whether a speed ratio's range lies above 1, below 1, or includes 1, as a text."""
    if low > 1:
        return "it pays"
    return below_text if high < 1 else "no difference beyond the spread of the step times"


_CHANCE = (
    "name",
    "seed",
    "repeats",
    "verify",
)  # Runs that differ only in the parameters of `_CHANCE` count as runs with equal settings.
_NAMED = 6  # greatest number of runs that a sentence names


def summarize_comparison(runs: Iterable[Run] | Run) -> Markdown:
    """Summarize differing parameters, equivalence checks, and the best runs.

    Runs that differ only in their random seed are treated as one setting. The summary names the
    settings with the best accuracy, speed and bytes. Each task, number of samples and clock has its
    own best settings. The summary lists the parameters in which the best and the next setting
    differ. A statistical test over seeds (`verdict.judge`) decides whether a lead in accuracy is
    significant. A lead in speed is significant if the ranges of speed over seeds do not overlap. If
    a lead is not significant, its sentence says so first.

    Raises:
        LabkitError: There are no runs.
    """
    shown = naming.settings(runs)
    findings = [_what_differs(shown), *_differing_inputs(shown), _gate_counts(shown)]
    groups = _comparable_groups([entry for entry in shown if entry.metrics])
    compared = {head: same for head, same in groups.items() if len(same) > 1 or len(groups) == 1}
    for head, same in compared.items():
        user = _user_metrics(same)
        best = _best_result(same) or (
            None if user else Finding("No completed run has a test result")
        )
        findings_of_group = (
            best,
            *user,
            _fastest(same),
            _fewest_bytes(same),
            *_undominated_runs(same),
        )
        findings += [
            replace(finding, head=f"{head}{finding.head}")
            for finding in findings_of_group
            if finding
        ]
    alone = [
        f"{same[0].label} ({head.removesuffix(': ')})"
        for head, same in groups.items()
        if head not in compared
    ]
    if alone:
        head = "Not compared, because no other run has the same model, data set, length and clock"
        findings.append(Finding(head, details=(_join_labels(alone),)))
    return sentences([*findings, *_largest_speedup(shown)])


def _accuracy(entry: RunEntry) -> Finding | None:
    """Return the statement on mean test accuracy over seeds; None if the run has no accuracy."""
    return _over_seeds(entry, "test accuracy", accuracies(entry.run).values(), "{:.2%}".format)


def _metric(name: str, what: str, entry: RunEntry) -> Finding | None:
    """Return the statement on a metric's mean over seeds; None if the run lacks the metric."""
    values = (seed.metrics.get(name) for seed in completed_seeds(entry.run))
    return _over_seeds(entry, what, filter(is_number, values), "{:.4g}".format)


def _over_seeds(
    entry: RunEntry, what: str, values: Iterable[float], text: Callable[[float], str]
) -> Finding | None:
    if not (numbers := list(values)):
        return None
    band = min(numbers), max(numbers)
    return Finding(what, entry.label, mean(numbers), band, len(numbers), text)


def _speed(entry: RunEntry) -> Finding | None:
    """Return the statement on samples per second; None if the run failed its equivalence check."""
    value = entry.metrics.get("samples_per_second")
    if not value or entry.equivalence_failed:
        return None
    seeds = int(entry.metrics.get("repeats") or 1)
    ends = seed_range(entry.run, "samples_per_second") or (value, value)
    return Finding("samples/s", entry.label, value, ends, seeds, "{:,.0f}".format)


def _bytes(entry: RunEntry) -> Finding | None:
    """Return the finding on the bytes on the wire per step; None if the run sent none."""
    value = entry.metrics.get("wire_bytes_per_step")
    if not value:
        return None
    return Finding("bytes", entry.label, float(value), text=bytes_text, unit=" per step")


def _comparable_groups(shown: Sequence[RunEntry]) -> dict[str, list[RunEntry]]:
    """Group runs by task, number of samples and clock; each key names what sets its group apart.

    Measured runs (wall clock) and simulated runs (virtual clock) are never ranked together.
    """
    groups: dict[tuple[str, str, str], list[RunEntry]] = {}
    for entry in shown:
        row, steps = plain_parameters(entry.run), steps_of(entry.run)
        # The summary groups runs by samples instead of steps. With weak scaling, more workers mean
        # larger batches and fewer steps.
        samples = steps * int(row.get("batch_size") or 1) if steps else None
        length = f"{samples:,} samples" if samples else "unknown length"
        task, clock = f"{row.get('model')} on {row.get('dataset')}", entry.metrics.get("clock")
        groups.setdefault((task, length, f"{clock or 'wall'} clock"), []).append(entry)
    differing = [place for place in range(3) if len({key[place] for key in groups}) > 1]
    return {
        f"{', '.join(key[place] for place in differing)}: " if differing else "": same
        for key, same in groups.items()
    }


def _what_differs(shown: Sequence[RunEntry]) -> Finding:
    names = [n for n in parameters([entry.run for entry in shown]) if n not in _CHANCE]
    states = Counter(str(run.status["state"]) for entry in shown for run in entry.members)
    ended = ", ".join(f"{count} {state}" for state, count in states.most_common())
    differ = f"that differ in {', '.join(names)}" if names else "with the same parameters"
    kinds = (
        f"; {len(shown)} settings that differ in more than the seed"
        if len(shown) < states.total()
        else ""
    )
    return Finding(f"{plural(states.total(), 'run')} {differ} ({ended}{kinds})")


def _differing_inputs(shown: Sequence[RunEntry]) -> list[Finding]:
    """Return a finding that names the files, packages and commits in which the runs differ."""
    inputs = differing_inputs(run.provenance for entry in shown for run in entry.members)
    return [Finding(f"The runs used different inputs: {inputs}")] if inputs else []


def _gate_counts(shown: Sequence[RunEntry]) -> Finding:
    gates = [(entry.metrics.get("equivalence") or {}).get("verdict", "not run") for entry in shown]
    counts = Counter(gates)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    failed = [entry.label for entry in shown if entry.equivalence_failed]
    none = f"no speed is shown for {_join_labels(failed)}" if failed else ""
    return Finding("Equivalence check", details=(words, none))


_Place = tuple[Finding, RunEntry]


def _ranked(
    shown: Sequence[RunEntry], measure: Callable[[RunEntry], Finding | None], sign: int
) -> list[_Place]:
    """Return the runs with a measured value, in descending order if `sign` is 1, else ascending."""
    known = [(finding, entry) for entry in shown if (finding := measure(entry)) is not None]
    return sorted(known, key=lambda place: -sign * (place[0].value or 0.0))


def _lead(
    ranked: Sequence[_Place], most: str, judge_lead: Callable[[_Place, _Place], str], more: str = ""
) -> Finding:
    """Compare the best run with the next, and state whether the lead is significant."""
    best, *others = ranked
    if not others:
        return replace(best[0], head=f"{most} {best[0].head}")
    verdict = judge_lead(best, others[0])
    differing = [n for n in parameters([best[1].run, others[0][1].run]) if n not in _CHANCE]
    details = [f"next {others[0][0].subject}, {others[0][0].number}", more]
    if len(differing) > 1:
        details.append(f"the best and the next run differ in {' and '.join(differing)}")
    head = f"{most} {best[0].head}" if verdict else f"{_NO_DIFFERENCE} {best[0].head}"
    if not verdict and min(best[0].seeds, others[0][0].seeds) < 2:
        head = f"{_ONE_SEED} {best[0].head}"
    return replace(best[0], head=head, details=tuple(details), verdict=verdict)


_NO_DIFFERENCE = "No difference beyond the spread of the seeds in"
_ONE_SEED = "One seed cannot separate a difference from chance in"


def _best_result(shown: Sequence[RunEntry]) -> Finding | None:
    if ranked := _ranked(shown, _accuracy, 1):
        return _lead(ranked, "Highest", _judge_by_seeds)
    # Runs of tasks without an accuracy are ranked by test loss.
    ranked = _ranked(shown, partial(_metric, "test_loss", "test loss"), -1)
    return _lead(ranked, "Lowest", partial(_all_seeds_better, "lower")) if ranked else None


def _user_metrics(shown: Sequence[RunEntry]) -> list[Finding]:
    """Return findings on user-defined metrics, without a ranking of the runs."""
    names = dict.fromkeys(name for entry in shown for name in logged_results(entry.run))
    ranked = [_ranked(shown, partial(_metric, name, name), 1) for name in names]
    present, judge_lead = (
        [ranking for ranking in ranked if ranking],
        partial(_all_seeds_better, "greater"),
    )
    findings = [
        _lead(ranking, "Greatest", judge_lead, _lowest_text(ranking))
        for ranking in present[:_NAMED]
    ]
    more = plural(len(present) - _NAMED, "other user-defined metric")
    return findings + [Finding(f"The table has {more}")] * bool(present[_NAMED:])


def _lowest_text(ranked: Sequence[_Place]) -> str:
    last = ranked[-1][0]
    return f"least {last.subject}, {last.number}" if len(ranked) > 2 else ""


def _judge_by_seeds(first: _Place, second: _Place) -> str:
    ours, theirs = (list(accuracies(entry.run).values()) for _, entry in (first, second))
    # `judge` tests whether a candidate is less accurate than a reference. In the call of `judge`,
    # the second run is the candidate, and the first run is the reference.
    lost = min(len(ours), len(theirs)) > 1 and judge(theirs, ours).kind == "loss"
    return "the difference exceeds the spread of the seeds" if lost else ""


def _all_seeds_better(comparative: str, first: _Place, second: _Place) -> str:
    """Return a text if every seed of the first run beats every seed of the second, else ""."""
    (high, _), (low, _) = (second, first) if comparative == "lower" else (first, second)
    if not high.band or not low.band or min(high.seeds, low.seeds) < 2:
        return ""
    return f"every seed is {comparative} than every seed of the next run" * (
        high.band[0] > low.band[1]
    )


def _fastest(shown: Sequence[RunEntry]) -> Finding:
    ranked = _ranked(shown, _speed, 1)
    return (
        _lead(ranked, "Highest", partial(_all_seeds_better, "faster"))
        if ranked
        else Finding("No run has a speed that may be compared")
    )


def _fewest_bytes(shown: Sequence[RunEntry]) -> Finding | None:
    ranked = _ranked(shown, _bytes, -1)
    if len({finding.value for finding, _ in ranked}) < 2:
        return None
    least, most = ranked[0][0], ranked[-1][0]
    times = (most.value or 0.0) / (least.value or 1.0)
    details = (f"most {most.subject}, {most.number} ({times:.3g} times)",)
    return replace(least, head="Fewest bytes on the wire", details=details)


def _undominated_runs(shown: Sequence[RunEntry]) -> list[Finding]:
    spent = spending({entry.label: entry.run for entry in shown})
    best = front(spent, MEASURES)
    if len(shown) < 2 or best.empty:
        return []
    if len(best) == len(spent):
        what = "No run is better than another on the same network in accuracy, bytes and seconds"
        return [Finding(what)]
    what = "Not surpassed in accuracy, bytes and seconds by another run on the same network"
    return [Finding(what, details=(_join_labels(list(best["run"])),))]


def _largest_speedup(shown: Sequence[RunEntry]) -> list[Finding]:
    table = scalings({entry.label: entry.run for entry in shown})
    measured = table[table["workers"] > 1]
    if measured.empty:
        return []
    most = measured.loc[measured["speedup"].idxmax()]
    seeds = int(most["seeds"])
    # The speed-up usually has a range over several seeds. With only one seed, the spread is
    # measured over the steps of the run.
    ends = ("slowest_seed", "fastest_seed") if seeds > 1 else ("speedup_low", "speedup_high")
    low, high = (float(most[end]) for end in ends)
    over = "seeds" if seeds > 1 else "steps"
    head = "Largest speed-up over one worker"
    if low <= 1:
        head = f"No speed-up over one worker exceeds the spread of the {over}; the largest"
    details = [f"{most['kind']} scaling, efficiency {most['efficiency'] / 100:.0%}"]
    details += ["the spread is over the steps of the run's only seed"] if seeds < 2 else []
    text = "{:.2f}".format
    finding = Finding(head, most["run"], most["speedup"], (low, high), text=text)
    return [replace(finding, seeds=seeds if seeds > 1 else 0, details=tuple(details))]


def _join_labels(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return f"{'; '.join(labels[:_NAMED])}{more}"
