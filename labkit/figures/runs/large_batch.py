"""How large batches may grow with the workers: samples and seconds to a target, by rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from labkit.common.units import plural, seconds_text
from labkit.figures.kit.entries import Line, clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band, points
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.analysis.spending import to_target
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

_RATES = {"none": "fixed rate", "sqrt": "square root", "linear": "linear"}
_LINEAR, _WARM = "linear", "linear, warm-up"
_APART = 0.12  # of a doubling, between the crosses of two rules
_MEASURES = {"samples": "samples", "seconds": "seconds of training"}


def large_batch(runs: Iterable[Run], target: float) -> Figure:
    """Samples and seconds to a target over workers: a line a rule, a band of seeds.

    A cross stands where not all seeds reached it, at what the run had spent in all.

    Args:
        runs: of workers with batches of one size each, see `large_batch_table`.
        target: share of held-out rows that are told right.
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
            else f"reached by {row.reached} of {row.seeds} seeds"
        )
        for row in table.itertuples()
    ]
    title = f"To {target:.0%} by workers · {clock_and_network(shown)}"
    return sheet([panels], looks.values(), title, busy(shown), words, plot=300)


def large_batch_table(runs: Sequence[Run], target: float) -> pd.DataFrame:
    """A row a rule and number of workers: seeds, reached, samples and seconds with their ends.

    Samples and seconds are means over the seeds that reached the target; `all_samples` and
    `all_seconds` what was spent in all. With one worker, all rates of an optimizer are the same:
    one run of it counts for each rule that has none of its own.
    """
    table = to_target({str(number): run for number, run in enumerate(runs)}, target)
    table["optimizer"] = [run.experiment.get("optimizer", "sgd") for run in runs]
    table["rule"] = [rule_of(run) for run in runs]
    table["workers"] = [int(run.experiment["workers"]) for run in runs]
    seeds = [seeds_of(run) for run in runs]
    table["all_samples"] = [max(int(s.history["samples"].sum()) for s in own) for own in seeds]
    table["all_seconds"] = [max(s.metrics["train_seconds"] for s in own) for own in seeds]
    table = _with_one_worker(table, list(dict.fromkeys(map(rule_of, sorted(runs, key=_order)))))
    kept = ["seeds", "reached"]
    kept += [f"{each}{end}" for each in _MEASURES for end in ("", "_low", "_high")]
    kept += [f"all_{each}" for each in _MEASURES]
    return table.set_index(["rule", "workers"])[kept]


def large_batch_reading(runs: Sequence[Run], target: float) -> Markdown:
    """How far each rule goes, whether the published shapes came, and what is fastest.

    Published: up to a batch size the linear rule learns as much from as many samples, and warm-up
    takes it further (Goyal 2017, arXiv 1706.02677); LARS goes beyond both (You 2017, arXiv
    1708.03888), and so does LAMB (You 2019, arXiv 1904.00962).

    Args:
        runs, target: as of `large_batch`.
    """
    table = large_batch_table(runs, target).reset_index()
    rules = dict.fromkeys(table["rule"])
    reach = {rule: _reach(table, rule) for rule in rules}
    published = [*_linear(table), *_further(table, reach)]
    # What did not come is said first.
    published.sort(key=lambda finding: "**not**" not in finding.what)
    return sentences([*published, *_fastest(table, target), *_by_rule(table)])


def rule_of(run: Run) -> str:
    """`fixed rate`; `linear, warm-up`; `LARS, square root, warm-up`."""
    asked = run.experiment
    optimizer = str(asked.get("optimizer", "sgd"))
    words = [] if optimizer == "sgd" else [optimizer.upper()]
    words.append(_RATES[asked.get("learning_rate_scaling", "none")])
    return ", ".join([*words, *(["warm-up"] if asked.get("warmup_epochs") else [])])


def _order(run: Run) -> tuple[bool, str, int, bool]:
    """Plain rules first, from the least rate to the greatest; then those by layer, by name."""
    asked = run.experiment
    optimizer, rate = asked.get("optimizer", "sgd"), asked.get("learning_rate_scaling", "none")
    return optimizer != "sgd", optimizer, [*_RATES].index(rate), bool(asked.get("warmup_epochs"))


def _with_one_worker(table: pd.DataFrame, rules: list[str]) -> pd.DataFrame:
    """The rows of each rule in turn, with those of one worker that count for it."""
    import pandas as pd

    alone = table[table["workers"] == 1].drop_duplicates("optimizer").set_index("optimizer")
    more = [
        alone.loc[[optimizer]].reset_index().assign(rule=rule)
        for (optimizer, rule), own in table.groupby(["optimizer", "rule"], sort=False)
        if optimizer in alone.index and 1 not in set(own["workers"])
    ]
    whole = pd.concat([table, *more], ignore_index=True)
    return whole.sort_values(
        ["rule", "workers"],
        key=lambda column: column.map(rules.index) if column.name == "rule" else column,
    )


def _panel(table: pd.DataFrame, measure: str, looks: dict[str, Line], target: float) -> Panel:
    there = table["reached"] == table["seeds"]
    traces = line_with_band(table[there], "workers", measure, looks, by="rule", marks=True)
    for place, (rule, look) in enumerate(looks.items()):
        own = table[~there & (table["rule"] == rule)]
        if own.empty:
            continue
        # Beside each other, or the last rule's crosses would hide all others.
        own = own.assign(
            at=own["workers"] * 2 ** (_APART * (place - (len(looks) - 1) / 2)),
            hover=[f"{row.reached} of {row.seeds} seeds reached it" for row in own.itertuples()],
        )
        traces.append(points(own, "at", f"all_{measure}", replace(look, symbol="x")))
    title = f"{_MEASURES[measure].capitalize()} to {target:.0%}"
    return Panel(
        title=f"{title}\nmean over seeds; band: their spread; ✕: not reached by all",
        x="workers, each with a batch of its own",
        y="samples" if measure == "samples" else "s",
        traces=traces,
        x_axis={"type": "log", "tickvals": sorted(set(table["workers"]))},
        y_axis={"type": "log"},
    )


def _reach(table: pd.DataFrame, rule: str) -> int:
    """The most workers with which all seeds reached the target; 0: none."""
    own = table[(table["rule"] == rule) & (table["reached"] == table["seeds"])]
    return int(own["workers"].max()) if len(own) else 0


def _linear(table: pd.DataFrame) -> Iterator[Finding]:
    """Up to how many workers the linear rule wants no more samples than one."""
    own = table[table["rule"] == _LINEAR].set_index("workers")
    if 1 not in own.index or len(own) < 2 or own["reached"][1] < own["seeds"][1]:
        return
    one, holds = own.loc[1], 1
    for workers, row in own.drop(index=1).iterrows():
        if row["reached"] < row["seeds"] or row["samples_low"] > one["samples_high"]:
            break
        holds = workers
    more = own[own.index > holds]
    then = f"; with {_what_came(more.iloc[0], more.index[0])}" if len(more) else ""
    held = f"it held up to {holds} workers" if holds > 1 else f"with {_what_came(one, 1)}"
    yield Finding(
        "**With the linear rule more workers need no more samples than one, within the seeds** "
        f"(Goyal 2017): {it_came(holds > 1)}",
        said=(held + then,),
    )
    if len(more):
        fails = bool((more["reached"] < more["seeds"]).any())
        yield Finding(
            f"**And with many it fails** (Goyal 2017): {it_came(fails)}",
            said=("with " + _what_came(own.iloc[-1], own.index[-1]),),
        )


def _further(table: pd.DataFrame, reach: dict[str, int]) -> Iterator[Finding]:
    """Whether warm-up, LARS and LAMB reach the target with more workers."""
    warm = _WARM if _WARM in reach else _LINEAR
    pairs = [(_WARM, _LINEAR, "Goyal 2017")]
    known = {"LARS": "You 2017", "LAMB": "You 2019"}
    pairs += [(r, warm, known[r[:4]]) for r in reach if r[:4] in known]
    for ours, theirs, source in pairs:
        if ours not in reach or theirs not in reach or reach[theirs] == table["workers"].max():
            continue
        yield Finding(
            f"**{ours} reaches it with more workers than {theirs}** ({source}): "
            f"{it_came(reach[ours] > max(reach[theirs], 1))}",
            said=(f"with up to {reach[ours] or 'none'}, against {reach[theirs] or 'none'}",),
        )


def _fastest(table: pd.DataFrame, target: float) -> Iterator[Finding]:
    there = table[(table["reached"] == table["seeds"]) & table["seconds"].notna()]
    if there.empty:
        yield Finding(f"No rule reached {target:.0%} in all seeds")
        return
    best = there.loc[there["seconds"].idxmin()]
    one = there[there["workers"] == 1]
    said = ""
    if len(one) and best["workers"] > 1:
        alone = one.loc[one["seconds"].idxmin()]
        said = f"the fastest single worker, {alone['rule']}, takes {seconds_text(alone['seconds'])}"
    yield Finding(
        f"First at {target:.0%}",
        f"{best['rule']}, {plural(int(best['workers']), 'worker')}",
        best["seconds"],
        (best["seconds_low"], best["seconds_high"]),
        int(best["seeds"]),
        seconds_text,
        said=(said,),
    )


def _by_rule(table: pd.DataFrame) -> Iterator[Finding]:
    for rule, own in table.groupby("rule", sort=False):
        came = (_what_came(row, int(row["workers"])) for _, row in own.iterrows())
        yield Finding(f"**{rule}**", said=(f"with {', with '.join(came)}",))


def _what_came(row: pd.Series, workers: int) -> str:
    """`8 workers 12,288 samples (3 seeds, 10,240 to 14,336)`; `32 workers 0 of 3 seeds …`."""
    who = plural(workers, "worker")
    if row["reached"] < row["seeds"]:
        return f"{who} {row['reached']} of {row['seeds']} seeds reached it"
    text, seeds = "{:,.0f}".format, int(row["seeds"])
    ends = row["samples_low"], row["samples_high"]
    found = Finding("", "", row["samples"], ends, seeds, text, unit=" samples")
    return f"{who} {found.number}"
