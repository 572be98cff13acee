"""What a step takes at each number of threads, and where more is less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.units import plural
from labkit.figures.kit.entries import Line, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import crosses, line_with_band
from labkit.figures.kit.sheet import Panel, Trace, sheet
from labkit.records.thread_counts import KINDS, ThreadSweep, more_is_less, thread_costs

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure


def thread_sweep(sweep: ThreadSweep) -> Figure:
    """A panel a batch: step time over threads within an operation, a line for those between.

    Medians over repeats in the band of their least and most. A cross stands where more is less, as
    `labkit.records.thread_counts.more_is_less` says: the shortest step is before it.
    """
    costs, turnings = thread_costs(sweep), more_is_less(sweep)
    costs = costs.assign(line=[_named(count) for count in costs["inter"]])
    looks = lines(costs["line"])
    panels = [
        _panel(costs[costs["batch"] == batch], turnings[turnings["batch"] == batch], looks)
        for batch in costs["batch"].unique()
    ]
    title = "Threads of a training step, 1 process · wall clock · network not used"
    remark = f"{plural(sweep.cores, 'core')}; crosses: from here on more is less"
    words = [_spoken(row) for row in turnings.to_dict("records")]
    return sheet([[panel] for panel in panels], looks.values(), title, [remark], words)


def thread_reading(sweep: ThreadSweep) -> Markdown:
    """For each batch: the best numbers of threads, and from which on more is less."""
    found = [Finding(_spoken(row)) for row in more_is_less(sweep).to_dict("records")]
    return sentences(found)


def _named(inter: int) -> str:
    return f"{inter} inter-op"


def _panel(costs: pandas.DataFrame, turnings: pandas.DataFrame, looks: dict[str, Line]) -> Panel:
    batch = costs["batch"].iloc[0]
    best = costs.loc[costs["step_ms"].idxmin()]
    said = f"shortest: {best['step_ms']:.3g} ms at {best['intra']} intra-op and {best['inter']}"
    counts = sorted(costs["intra"].unique())
    return Panel(
        title=f"{plural(int(batch), 'sample')} a step\n{said} inter-op threads",
        x="intra-op threads",
        y="ms a step",
        traces=[
            *line_with_band(costs, "intra", "step_ms", looks, by="line", marks=True),
            *_crosses(costs, turnings),
        ],
        x_axis={"type": "log", "tickvals": counts, "ticktext": [str(count) for count in counts]},
        y_axis={"rangemode": "tozero"},
    )


def _crosses(costs: pandas.DataFrame, turnings: pandas.DataFrame) -> list[Trace]:
    """Where the step is longer in every repeat, along each kind of threads."""
    found = []
    for row in turnings.dropna(subset="less_from").to_dict("records"):
        pair = {row["threads"]: row["less_from"], _other(row["threads"]): row["other"]}
        at = costs[(costs["intra"] == pair["intra"]) & (costs["inter"] == pair["inter"])]
        text = f"{pair[row['threads']]:.0f} {row['threads']}-op: longer"
        found.append(crosses(list(at["intra"]), list(at["step_ms"]), [text], "top left"))
    return found


def _other(kind: str) -> str:
    return KINDS[1 - KINDS.index(kind)]


def _spoken(row: dict[str, float | str]) -> str:
    """A batch and kind in words."""
    kind, other = str(row["threads"]), _other(str(row["threads"]))
    head = (
        f"**{row['batch']} samples a step**: with {row['other']} {other}-op the shortest step has "
        f"{plural(int(row['best']), f'{kind}-op thread')} ({row['best_ms']:.3g} ms)"
    )
    if row["best"] == row["most"]:
        return f"{head}, the most that were tried"
    if row["less_from"] != row["less_from"]:
        return f"{head}; up to {row['most']} no number was found from which on more is less"
    return (
        f"{head}; from {row['less_from']:.0f} on more is less: {row['ratio']:.3g}x the time "
        f"(repeats {row['ratio_low']:.3g} to {row['ratio_high']:.3g})"
    )
