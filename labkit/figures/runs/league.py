"""A league of faults: what each strategy keeps of its goodput, what it loses, when it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.common.units import seconds_text
from labkit.figures.kit.entries import lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import bars, rule
from labkit.figures.kit.panels import Panel, lanes_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.analysis.fault_costs import disturbed
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

Pairs = Mapping[str, tuple[Run, Run | None]]  # by name, undisturbed and disturbed

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
    """A row a strategy, who keeps most first."""
    table = disturbed(pairs).sort_values("kept", ascending=False, kind="stable")
    return table[list(_COLUMNS)].rename(columns=_COLUMNS).reset_index(drop=True)


def fault_costs(pairs: Pairs) -> pd.DataFrame:
    """A row a death that others have outlived: at which step, and what it took, s."""
    import pandas as pd

    faults = [
        {"strategy": name, "step": fault["step"]}
        | {f"{part}, s": seconds for part, seconds in fault["seconds"].items()}
        for name, (_, hit) in pairs.items()
        for fault in (hit.metrics.get("faults", []) if hit is not None else [])
    ]
    return pd.DataFrame(faults)


def fault_league(pairs: Pairs, script: str = "") -> Figure:
    """Goodput that is kept, and the time until each goes on: a bar a strategy.

    Args:
        pairs: by name, the undisturbed run and that with faults.
        script: what faults, in words.
    """
    table = disturbed(pairs).sort_values("kept", ascending=False, kind="stable")
    looks = lines(table["name"])
    table["hover"] = [
        f"{row.name}: {row.kept:.0%} of its goodput, {row.lost:,} samples lost"
        if row.finished
        else f"{row.name}: did not finish, nothing is left"
        for row in table.set_index("name", drop=False).itertuples(index=False)
    ]
    over = table[table["finished"]]
    panels = [
        Panel(
            title=f"{title}\n{under}",
            x=axis,
            y="",
            traces=[
                *bars(own, column, "name", looks, by="name", horizontal=True),
                *([rule([1, 1], [-0.5, len(table) - 0.5], "dash")] if column == "kept" else []),
            ],
            note="" if len(own) else "no run has finished",
            x_axis={"rangemode": "tozero"},
            y_axis=lanes_axis(list(table["name"])),
        )
        for title, under, axis, own, column in (
            ("Goodput kept", "dashed: undisturbed", "goodput / undisturbed", table, "kept"),
            ("Recovery", "those that finished", "recovery, s", over, "recovery"),
        )
    ]
    first, _ = next(iter(pairs.values()))
    clocks = " and ".join(sorted(set(table["clock"])))
    title = f"Faults · {clocks} clock · network {first.metrics.get('network') or 'not emulated'}"
    words = list(table["hover"])
    return sheet([panels], list(looks.values()), title, [script], words, plot=24 * len(table) + 40)


def fault_reading(pairs: Pairs) -> Markdown:
    """Who does not finish comes first; then who keeps most and least, and what was lost."""
    table = disturbed(pairs)
    over, failed = table[table["finished"]], table[~table["finished"]]
    return sentences([*_failed(failed, len(table)), *_kept(over), *_lost(over)])


def _failed(failed: pd.DataFrame, count: int) -> Iterator[Finding]:
    if len(failed):
        names = ", ".join(f"**{name}**" for name in failed["name"])
        said = f"{len(failed)} of {count}"
        yield Finding("Did not finish, so that nothing is left", said=(said, names))


def _kept(over: pd.DataFrame) -> Iterator[Finding]:
    ranked = over.sort_values("kept").to_dict("records")
    for what, row in (("Keeps most", ranked[-1:]), ("Keeps least", ranked[:1])):
        for each in row:
            rates = (
                f"{each['goodput']:.4g} samples/s, undisturbed {each['calm_goodput']:.4g} samples/s"
            )
            late = f"recovery {seconds_text(each['recovery'])}"
            text = "{:.1%}".format
            yield Finding(
                f"{what} of its goodput", each["name"], each["kept"], text=text, said=(rates, late)
            )


def _lost(over: pd.DataFrame) -> Iterator[Finding]:
    """Samples, and accuracy where it fell most."""
    whole: Sequence[str] = list(over[over["lost"] == 0]["name"])
    if len(over):
        yield Finding(
            "Finished without the loss of a sample", said=(f"{len(whole)} of {len(over)}",)
        )
    for row in over[over["lost"] > 0].to_dict("records"):
        yield Finding("Samples lost", row["name"], row["lost"], text="{:,.0f}".format)
    fell = over.assign(fell=over["calm_accuracy"] - over["accuracy"]).dropna(subset="fell")
    for row in fell.sort_values("fell").to_dict("records")[-1:]:
        said = f"{row['accuracy']:.2%}, undisturbed {row['calm_accuracy']:.2%}"
        yield Finding("Accuracy fell most", row["name"], said=(said,))
