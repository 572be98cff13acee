"""Large-batch training: cost of a target accuracy by workers and learning-rate rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pandas as pd

from labkit.common.units import plural, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    LineStyle,
    Markdown,
    clock_and_network,
    entries,
    lines,
    published,
    sentences,
)
from labkit.figures.kit.marks import line_with_band, points
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.records.analysis.spending import to_target
from labkit.records.run import Run
from labkit.records.verdict import completed_seeds

_RATES = {"none": "fixed rate", "sqrt": "square root", "linear": "linear"}
_LINEAR, _WARM = "linear", "linear, warm-up"
# distance between the crosses of two learning-rate rules, in log2 of the number of workers
_APART = 0.12
_MEASURES = {"samples": "samples", "seconds": "seconds of training"}


def large_batch(runs: Iterable[Run], target: float) -> Figure:
    """Draw samples and seconds to a target accuracy over workers: a line per learning-rate rule.

    The bands show the range over seeds. A cross marks a run in which some seeds missed the target
    accuracy. Its y value is the cost of the whole training, in samples or seconds.

    Args:
        runs: Runs with the same batch size per worker; see `large_batch_table`.
        target: Target accuracy on the validation data.
    """
    shown = entries(runs)
    table = large_batch_table([entry.run for entry in shown], target).reset_index()
    looks = lines(table["rule"])
    panels = [_panel(table, measure, looks, target) for measure in _MEASURES]
    words = [
        f"{row.rule}, {plural(row.workers, 'worker')}: "
        + (
            f"{row.samples:,.0f} samples, {seconds_text(row.seconds)}"
            if row.reached == row.seeds
            else f"target reached by {row.reached} of {row.seeds} seeds"
        )
        for row in table.itertuples()
    ]
    title = (
        f"Samples and time to reach {target:.0%} accuracy, by number of workers · "
        f"{clock_and_network(shown)}"
    )
    return sheet([panels], looks.values(), title, overload(shown), words, plot=300)


def large_batch_table(runs: Sequence[Run], target: float) -> pd.DataFrame:
    """Return a row per learning-rate rule and number of workers, with the cost to the target.

    `reached` is the number of seeds that reached the target accuracy. The columns `samples` and
    `seconds` are the cost to reach the target accuracy. Each cost has a mean and a range over the
    seeds that reached the target. `all_samples` and `all_seconds` are the cost of the whole
    training (maximum over seeds). With one worker, all rules of an optimizer give the same learning
    rate. A rule may have no run with one worker. The rule then uses a one-worker run of another
    rule with the same optimizer.
    """
    table = to_target({str(number): run for number, run in enumerate(runs)}, target)
    table["optimizer"] = [run.experiment.get("optimizer", "sgd") for run in runs]
    table["rule"] = [rule_of(run) for run in runs]
    table["workers"] = [int(run.experiment["workers"]) for run in runs]
    seeds = [completed_seeds(run) for run in runs]
    table["all_samples"] = [max(int(s.history["samples"].sum()) for s in group) for group in seeds]
    table["all_seconds"] = [max(s.metrics["train_seconds"] for s in group) for group in seeds]
    table = _with_one_worker(table, list(dict.fromkeys(map(rule_of, sorted(runs, key=_order)))))
    columns = ["seeds", "reached"]
    columns += [f"{measure}{end}" for measure in _MEASURES for end in ("", "_low", "_high")]
    columns += [f"all_{measure}" for measure in _MEASURES]
    return table.set_index(["rule", "workers"])[columns]


def summarize_large_batch(runs: Sequence[Run], target: float) -> Markdown:
    """Summarize which published claims hold, the fastest rule, and the samples that rules need.

    Published: up to some batch size, training with the linear rule needs a constant number of
        samples; warm-up extends this range of batch sizes (Goyal 2017, arXiv 1706.02677). LARS (You
        2017, arXiv 1708.03888) and LAMB (You 2019, arXiv 1904.00962) keep the number of samples
        constant up to larger batch sizes.

    Args:
        runs, target: Runs and target accuracy, the same as in `large_batch`.
    """
    table = large_batch_table(runs, target).reset_index()
    rules = dict.fromkeys(table["rule"])
    reach = {rule: _largest_scale(table, rule) for rule in rules}
    claims = [*_linear_rule(table), *_rule_comparisons(table, reach)]
    # The summary lists claims that do not hold before claims that hold.
    claims.sort(key=lambda finding: "**not**" not in finding.head)
    return sentences([*claims, *_fastest(table, target), *_by_rule(table)])


def rule_of(run: Run) -> str:
    """Return the label of a learning-rate rule, such as `LARS, square root, warm-up`."""
    experiment = run.experiment
    optimizer = str(experiment.get("optimizer", "sgd"))
    words = [] if optimizer == "sgd" else [optimizer.upper()]
    words.append(_RATES[experiment.get("learning_rate_scaling", "none")])
    return ", ".join([*words, *(["warm-up"] if experiment.get("warmup_epochs") else [])])


def _order(run: Run) -> tuple[bool, str, int, bool]:
    """Return the sort key of a run: SGD by learning-rate rule, then other optimizers by name."""
    experiment = run.experiment
    optimizer, rate = (
        experiment.get("optimizer", "sgd"),
        experiment.get("learning_rate_scaling", "none"),
    )
    return (
        optimizer != "sgd",
        optimizer,
        [*_RATES].index(rate),
        bool(experiment.get("warmup_epochs")),
    )


def _with_one_worker(table: pd.DataFrame, rules: list[str]) -> pd.DataFrame:
    """Sort rows by rule; if a rule has no one-worker row, copy that of its optimizer."""
    single_worker = table[table["workers"] == 1].drop_duplicates("optimizer").set_index("optimizer")
    more = [
        single_worker.loc[[optimizer]].reset_index().assign(rule=rule)
        for (optimizer, rule), group in table.groupby(["optimizer", "rule"], sort=False)
        if optimizer in single_worker.index and 1 not in set(group["workers"])
    ]
    whole = pd.concat([table, *more], ignore_index=True)
    return whole.sort_values(
        ["rule", "workers"],
        key=lambda column: column.map(rules.index) if column.name == "rule" else column,
    )


def _panel(table: pd.DataFrame, measure: str, looks: dict[str, LineStyle], target: float) -> Panel:
    complete = table["reached"] == table["seeds"]
    traces = line_with_band(table[complete], "workers", measure, looks, by="rule", marks=True)
    for place, (rule, look) in enumerate(looks.items()):
        group = table[~complete & (table["rule"] == rule)]
        if group.empty:
            continue
        # Crosses of different learning-rate rules are shifted, because crosses at the same position
        # would hide each other.
        group = group.assign(
            at=group["workers"] * 2 ** (_APART * (place - (len(looks) - 1) / 2)),
            hover=[
                f"{row.reached} of {row.seeds} seeds reached the target"
                for row in group.itertuples()
            ],
        )
        traces.append(points(group, "at", f"all_{measure}", replace(look, symbol="x")))
    title = f"{_MEASURES[measure].capitalize()} to {target:.0%}"
    return Panel(
        title=f"{title}\nmean over seeds; band: range over seeds; ✕: some seeds missed the target",
        x="workers (the batch per worker is constant)",
        y="samples" if measure == "samples" else "s",
        traces=traces,
        x_axis={"type": "log", "tickvals": sorted(set(table["workers"]))},
        y_axis={"type": "log"},
    )


def _largest_scale(table: pd.DataFrame, rule: str) -> int:
    """Return the largest number of workers with which all seeds reached the target, or 0."""
    group = table[(table["rule"] == rule) & (table["reached"] == table["seeds"])]
    return int(group["workers"].max()) if len(group) else 0


def _linear_rule(table: pd.DataFrame) -> Iterator[Finding]:
    """State up to how many workers the linear rule needs no more samples than one worker."""
    group = table[table["rule"] == _LINEAR].set_index("workers")
    if 1 not in group.index or len(group) < 2 or group["reached"][1] < group["seeds"][1]:
        return
    one, holds = group.loc[1], 1
    for workers, row in group.drop(index=1).iterrows():
        if row["reached"] < row["seeds"] or row["samples_low"] > one["samples_high"]:
            break
        holds = workers
    more = group[group.index > holds]
    then = f"; with {_samples_text(more.iloc[0], more.index[0])}" if len(more) else ""
    scope = (
        f"the claim holds up to {holds} workers" if holds > 1 else f"with {_samples_text(one, 1)}"
    )
    claim = (
        "With the linear scaling rule, more workers need no more samples than one worker, "
        "within the range of the seeds"
    )
    yield published(claim, "Goyal 2017", holds > 1, scope + then)
    if len(more):
        fails = bool((more["reached"] < more["seeds"]).any())
        last = f"with {_samples_text(group.iloc[-1], group.index[-1])}"
        yield published(
            "The linear scaling rule fails with many workers", "Goyal 2017", fails, last
        )


def _rule_comparisons(table: pd.DataFrame, reach: dict[str, int]) -> Iterator[Finding]:
    """Judge whether warm-up, LARS and LAMB reach the target with more workers than other rules."""
    warm = _WARM if _WARM in reach else _LINEAR
    pairs = [(_WARM, _LINEAR, "Goyal 2017")]
    known = {"LARS": "You 2017", "LAMB": "You 2019"}
    pairs += [(r, warm, known[r[:4]]) for r in reach if r[:4] in known]
    for ours, theirs, source in pairs:
        if ours not in reach or theirs not in reach or reach[theirs] == table["workers"].max():
            continue
        claim = f"{ours} reaches the target with more workers than {theirs}"
        counts = (
            f"it reaches the target with up to {reach[ours] or 'no'} workers, against "
            f"{reach[theirs] or 'no'} with {theirs}"
        )
        yield published(claim, source, reach[ours] > max(reach[theirs], 1), counts)


def _fastest(table: pd.DataFrame, target: float) -> Iterator[Finding]:
    complete = table[(table["reached"] == table["seeds"]) & table["seconds"].notna()]
    if complete.empty:
        yield Finding(f"No learning-rate rule reached {target:.0%} accuracy with all seeds")
        return
    best = complete.loc[complete["seconds"].idxmin()]
    one = complete[complete["workers"] == 1]
    details = ""
    if len(one) and best["workers"] > 1:
        single_worker = one.loc[one["seconds"].idxmin()]
        details = (
            f"the fastest rule with one worker, {single_worker['rule']}, takes "
            f"{seconds_text(single_worker['seconds'])}"
        )
    yield Finding(
        f"Fastest to {target:.0%} accuracy",
        f"{best['rule']}, {plural(int(best['workers']), 'worker')}",
        best["seconds"],
        (best["seconds_low"], best["seconds_high"]),
        int(best["seeds"]),
        seconds_text,
        details=(details,),
    )


def _by_rule(table: pd.DataFrame) -> Iterator[Finding]:
    for rule, group in table.groupby("rule", sort=False):
        samples = (_samples_text(row, int(row["workers"])) for _, row in group.iterrows())
        yield Finding(f"**{rule}**", details=(f"with {', with '.join(samples)}",))


def _samples_text(row: pd.Series, workers: int) -> str:
    """Format samples as `8 workers 12,288 samples (3 seeds, …)`, or count successful seeds."""
    workers_text = plural(workers, "worker")
    if row["reached"] < row["seeds"]:
        return f"{workers_text} {row['reached']} of {row['seeds']} seeds reached the target"
    text, seeds = "{:,.0f}".format, int(row["seeds"])
    ends = row["samples_low"], row["samples_high"]
    results = Finding("", "", row["samples"], ends, seeds, text, unit=" samples")
    return f"{workers_text} {results.number}"
