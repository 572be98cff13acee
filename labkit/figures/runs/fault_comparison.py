"""Comparison of strategies under equal faults: goodput, lost samples and recovery times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from labkit.common.units import seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Finding, Markdown, lines, sentences
from labkit.figures.kit.marks import bars, rule
from labkit.figures.kit.panels import Panel, lanes_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.analysis.spending import compare_faults
from labkit.records.run import Run

# `Pairs` maps each strategy to its run without faults, and to its run with faults or None.
Pairs = Mapping[str, tuple[Run, Run | None]]

_COLUMNS = {
    "name": "strategy",
    "clock": "clock",
    "finished": "finished",
    "calm_goodput": "undisturbed, samples/s",
    "goodput": "goodput, samples/s",
    "kept": "kept",
    "lost": "samples lost",
    "calm_accuracy": "undisturbed accuracy",
    "accuracy": "accuracy",
    "recovery": "recovery, s",
}


def fault_table(pairs: Pairs) -> pd.DataFrame:
    """Return a row per strategy, sorted by the fraction of goodput that remains under faults."""
    table = compare_faults(pairs).sort_values("kept", ascending=False, kind="stable")
    return table[list(_COLUMNS)].rename(columns=_COLUMNS).reset_index(drop=True)


def fault_costs(pairs: Pairs) -> pd.DataFrame:
    """Return a row per survived crash: its step, and the seconds of each recovery phase."""
    faults = [
        {"strategy": name, "step": fault["step"]}
        | {f"{part}, s": seconds for part, seconds in fault["seconds"].items()}
        for name, (_, hit) in pairs.items()
        for fault in (hit.metrics.get("faults", []) if hit is not None else [])
    ]
    return pd.DataFrame(faults)


def fault_comparison(pairs: Pairs, script: str = "") -> Figure:
    """Draw remaining goodput under faults and recovery time, with a bar per strategy.

    Args:
        pairs: For each strategy name, a run without faults and a run with faults. The second is
            None if the strategy cannot run with faults.
        script: Description of the injected faults, for the title.
    """
    table = compare_faults(pairs).sort_values("kept", ascending=False, kind="stable")
    looks = lines(table["name"])
    table["hover"] = [
        f"{row.name}: {row.kept:.0%} of the fault-free goodput, {row.lost:,} samples lost"
        if row.finished
        else f"{row.name}: did not finish"
        for row in table.set_index("name", drop=False).itertuples(index=False)
    ]
    finished = table[table["finished"]]
    panels = [
        Panel(
            title=f"{title}\n{under}",
            x=axis,
            y="",
            traces=[
                *bars(group, column, "name", looks, by="name", horizontal=True),
                *([rule([1, 1], [-0.5, len(table) - 0.5], "dash")] if column == "kept" else []),
            ],
            note="" if len(group) else "no run with faults has finished",
            x_axis={"rangemode": "tozero"},
            y_axis=lanes_axis(list(table["name"])),
        )
        for title, under, axis, group, column in (
            (
                "Goodput kept",
                "dashed: without faults",
                "goodput / goodput without faults",
                table,
                "kept",
            ),
            ("Recovery time", "strategies that finished", "recovery time, s", finished, "recovery"),
        )
    ]
    first, _ = next(iter(pairs.values()))
    clocks = " and ".join(sorted(set(table["clock"])))
    title = f"Faults · {clocks} clock · network {first.metrics.get('network') or 'not emulated'}"
    words = list(table["hover"])
    return sheet([panels], list(looks.values()), title, [script], words, plot=24 * len(table) + 40)


def summarize_fault(pairs: Pairs) -> Markdown:
    """Summarize failed strategies, extremes of the goodput that remains, and lost samples."""
    table = compare_faults(pairs)
    finished, failed = table[table["finished"]], table[~table["finished"]]
    return sentences(
        [*_unfinished(failed, len(table)), *_goodput_kept(finished), *_losses(finished)]
    )


def _unfinished(failed: pd.DataFrame, count: int) -> Iterator[Finding]:
    if len(failed):
        names = ", ".join(f"**{name}**" for name in failed["name"])
        details = f"{len(failed)} of {count}"
        yield Finding("Did not finish", details=(details, names))


def _goodput_kept(finished: pd.DataFrame) -> Iterator[Finding]:
    ranked = finished.sort_values("kept").to_dict("records")
    for what, row in (("Keeps the most", ranked[-1:]), ("Keeps the least", ranked[:1])):
        for result in row:
            rates = (
                f"{result['goodput']:.4g} samples/s, "
                f"without faults {result['calm_goodput']:.4g} samples/s"
            )
            recovery = f"recovery time {seconds_text(result['recovery'])}"
            text = "{:.1%}".format
            yield Finding(
                f"{what} of its goodput",
                result["name"],
                result["kept"],
                text=text,
                details=(rates, recovery),
            )


def _losses(finished: pd.DataFrame) -> Iterator[Finding]:
    """Yield findings about lost samples and about the largest loss of accuracy."""
    whole: Sequence[str] = list(finished[finished["lost"] == 0]["name"])
    if len(finished):
        yield Finding(
            "Runs with faults that finished without losing a sample",
            details=(f"{len(whole)} of {len(finished)}",),
        )
    for row in finished[finished["lost"] > 0].to_dict("records"):
        yield Finding("Samples lost", row["name"], row["lost"], text="{:,.0f}".format)
    fell = finished.assign(fell=finished["calm_accuracy"] - finished["accuracy"]).dropna(
        subset="fell"
    )
    for row in fell.sort_values("fell").to_dict("records")[-1:]:
        details = f"{row['accuracy']:.2%}, without faults {row['calm_accuracy']:.2%}"
        yield Finding("Largest loss of accuracy by faults", row["name"], details=(details,))
