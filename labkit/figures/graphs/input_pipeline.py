"""Input pipelines and threads: idle time and overhead of inputs, and steps by thread counts."""

from __future__ import annotations

import textwrap

import pandas as pd

from labkit.common.errors import InvalidInput, short
from labkit.common.units import bytes_text, plural
from labkit.figures.kit.axes import counts_axis, names_axis
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, Line, lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.marks import crosses, line_with_band, part_bars, points, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.records.input_wait import SYNTHETIC, InputTrace, input_costs
from labkit.records.thread_counts import KINDS, ThreadSweep, more_is_less, thread_costs

SHOWN = 5  # steps, where nothing else is asked for
LANE = 24  # pixels a lane
MOST_LANES = 4  # batches that are made at a time, of which more would make the figure too high
STEP_HOVER = "step %{customdata[0]:.0f}"
# Colours of Okabe and Ito (2008), as in `entries`, distinct for any colour vision.
INPUT_KINDS = {
    "compute": Kind("training computes", "#56B4E9", f"computes, {STEP_HOVER}"),
    "idle": Kind("training waits for its batch", "#E69F00", f"waits for its batch, {STEP_HOVER}"),
    "made": Kind("a batch is made", "#009E73", f"the batch of {STEP_HOVER} is made"),
}


def input_timeline(trace: InputTrace, steps: int = SHOWN) -> Figure:
    """Draw a Gantt chart a way: training, and below it the batches under preparation.

    Drawn are steps in a row from the middle of the turn whose median step is the median of all
    turns of that way, on one scale of time. Orange is what one would like to be rid of.

    Args:
        trace: of `labkit.bench.input_pipeline.measure`.
        steps: how many.

    Raises:
        InvalidInput: fewer than one step.
    """
    if steps < 1:
        raise InvalidInput(f"steps={short(steps)}: draw at least 1")
    table, costs = trace.frame(), input_costs(trace)
    drawn = {way: _middle(table[table["way"] == way], steps) for way in trace.ways}
    end = max(float(rows[rows["kind"] != "made"]["stop"].max()) for rows in drawn.values())
    panels, words = [], []
    for way, rows in drawn.items():
        group = costs.loc[way]
        details = f"idle {group['idle_share']:.0%} of the time in all steps"
        panels.append(_input_lanes(f"{way}\n{details}", rows, end))
        words.append(f"{way}: {details}, {group['idle_ms']:.3g} ms a step at the median")
    title = "Input of a training step, 1 process · wall clock · network not used"
    return lanes(panels, INPUT_KINDS, title, "", words, LANE, end)


def _middle(steps: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return the bars of steps of a median turn, in ms since its first step."""
    medians = steps.groupby("repeat")["step_ms"].median().sort_values()
    turn = steps[steps["repeat"] == medians.index[len(medians) // 2]].sort_values("step")
    first = max((len(turn) - count) // 2, 0)
    shown = turn.iloc[first : first + count]
    zero, last = shown["start"].min(), shown["stop"].max()
    parts = [
        _bars(shown, "idle", "start", "ready"),
        _bars(shown, "compute", "ready", "stop"),
        # Batches of later steps, too, where they are made in this time.
        _bars(turn[turn["made_start"] < last], "made", "made_start", "made_stop"),
    ]
    bars = pd.concat(parts, ignore_index=True)
    bars[["start", "stop"]] = 1e3 * (bars[["start", "stop"]] - zero)
    bars = bars[bars["stop"] > 0]
    made = bars["kind"] == "made"
    bars.loc[made, "lane"] = _stacked(bars[made])
    return bars


def _bars(rows: pd.DataFrame, kind: str, start: str, stop: str) -> pd.DataFrame:
    bars = rows[["step", start, stop]].set_axis(["step", "start", "stop"], axis=1)
    return bars.assign(kind=kind, lane="training")


def _stacked(bars: pd.DataFrame) -> list[str]:
    """Return a lane for each batch: the first free one at its start."""
    free: list[float] = []
    lane_names = {}
    for row in bars.sort_values("start").itertuples():
        lane = next((n for n, end in enumerate(free) if end <= row.start), len(free))
        free[lane : lane + 1] = [row.stop]
        lane_names[row.Index] = f"input {min(lane, MOST_LANES - 1) + 1}"
    return [lane_names[place] for place in bars.index]


def _input_lanes(title: str, rows: pd.DataFrame, end: float) -> Lanes:
    # Batches under preparation are cut at the end of the last step.
    start, stop = rows["start"].clip(lower=0), rows["stop"].clip(upper=end)
    bars = rows.assign(start=start, length=stop - start, text="")
    order = ["training", *sorted(set(rows["lane"]) - {"training"})]
    return Lanes(title, order, bars[bars["length"] > 0], ("step",))


# Hatches distinguish the parts without colour, too.
PARTS = {"compute_ms": ("compute", "#56B4E9", ""), "idle_ms": ("idle", "#E69F00", "/")}
MEASURED_STEP = Line("measured step", INK, "solid", "diamond")
OVERHEAD = Line("I/O overhead", "#D55E00", "solid", "circle")
_LETTERS = 12  # of a line below a bar


def input_overhead(trace: InputTrace) -> Figure:
    """Draw compute and idle time of a step by input, and the I/O overhead of each input.

    Medians over repeats, bars from the least repeat to the greatest; the overhead is that of
    `labkit.records.input_wait.input_costs`, and 0 the synthetic input.
    """
    costs = input_costs(trace)
    repeats = trace.frame()["repeat"].nunique()
    names = ["<br>".join(textwrap.wrap(safe_text(way), _LETTERS)) for way in costs.index]
    rows = costs.reset_index().assign(place=range(len(costs)))
    steps = [f"measured step {value:.3g} ms" for value in rows["step_ms"]]
    zero = rule([-0.6, len(rows) - 0.4], [0, 0], "dot")
    parts = Panel(
        title=f"Where a step goes\nmedian of {repeats} repeats; ◆ measured step, least to greatest",
        x="input",
        y="ms a step",
        traces=[
            *(
                part_bars(rows["place"], rows[column], *look, f"{look[0]} %{{y:.3g}} ms")
                for column, look in PARTS.items()
            ),
            points(rows.assign(hover=steps), "place", "step_ms", MEASURED_STEP, size=9),
        ],
        note=_passed(trace),
        always_note=True,
        x_axis=names_axis(names),
        y_axis={"rangemode": "tozero"},
    )
    over = Panel(
        title="I/O overhead\n(real − synthetic) / synthetic, pairs of one repeat",
        x="input",
        y="overhead",
        traces=[zero, _overheads(rows[rows["way"] != SYNTHETIC])],
        x_axis=names_axis(names),
        y_axis={"tickformat": "+.0%"},
    )
    looks = [Line(details, color, "solid", "square") for details, color, _ in PARTS.values()]
    words = [
        f"{way}: step {row['step_ms']:.3g} ms, idle {row['idle_ms']:.3g} ms, "
        f"overhead {row['overhead']:.0%}"
        for way, row in costs.iterrows()
    ]
    title = "Synthetic and real input, 1 process · wall clock · network not used"
    figure = sheet([[parts], [over]], [*looks, MEASURED_STEP, OVERHEAD], title, (), words, below=62)
    # Compute and idle add up to the step, which the diamond shows as measured.
    figure.update_layout(barmode="stack")
    return figure


def input_reading(trace: InputTrace) -> Markdown:
    """Say what each input costs, and which comes nearest to tensors in memory."""
    costs = input_costs(trace)
    real = costs.drop(SYNTHETIC)
    repeats = trace.frame()["repeat"].nunique()
    base = costs.loc[SYNTHETIC]
    findings = [
        Finding(
            f"**{SYNTHETIC}**",
            details=(f"a step takes {base['step_ms']:.3g} ms where its batch lies in memory",),
        )
    ]
    findings += [_finding(way, row, repeats) for way, row in real.iterrows()]
    findings.append(Finding(_passed(trace)))
    least = real["overhead"].idxmin()
    findings.append(Finding(_answer(least, real.loc[least])))
    return sentences(findings)


def _finding(way: str, row: pd.Series, repeats: int) -> Finding:
    spread = f"repeats {row['overhead_low']:.0%} to {row['overhead_high']:.0%}"
    number = f"{row['overhead']:.0%}" + (f" ({spread})" if repeats > 1 else "")
    return Finding(
        f"**{way}**",
        details=(
            f"a step takes {row['step_ms']:.3g} ms, and training is idle {row['idle_share']:.0%} "
            "of its time",
            f"I/O overhead {number}",
        ),
        verdict="within noise, for repeats lie on both sides of 0"
        if row["overhead_low"] <= 0 <= row["overhead_high"]
        else "",
    )


def _passed(trace: InputTrace) -> str:
    """Return what filling the cache costs once."""
    return (
        f"The first pass, which filled the cache, took {trace.filled:.3g} s; the file has "
        f"{bytes_text(trace.nbytes)}"
    )


def _answer(way: str, row: pd.Series) -> str:
    """Return the conclusion on the best input."""
    if row["overhead_low"] <= 0:
        return f"**{way}** comes nearest to tensors in memory, and its difference lies within noise"
    return (
        f"**{way}** comes nearest to tensors in memory; {row['overhead']:.0%} of a synthetic step "
        "are still the price of real input"
    )


def _overheads(rows: pd.DataFrame) -> Trace:
    details = [
        f"{way}: {middle:+.0%} ({low:+.0%} to {high:+.0%})"
        for way, middle, low, high in zip(
            rows["way"], rows["overhead"], rows["overhead_low"], rows["overhead_high"], strict=True
        )
    ]
    return points(rows.assign(hover=details), "place", "overhead", OVERHEAD, size=9)


def thread_sweep(sweep: ThreadSweep) -> Figure:
    """Draw step time over intra-op threads, a panel a batch, a line a number of inter-op threads.

    Medians over repeats in the band of their least and most. A cross stands where more is less, as
    `labkit.records.thread_counts.more_is_less` says: the shortest step is before it.
    """
    costs, turnings = thread_costs(sweep), more_is_less(sweep)
    costs = costs.assign(line=[f"{count} inter-op" for count in costs["inter"]])
    looks = lines(costs["line"])
    panels = [
        _threads_panel(costs[costs["batch"] == batch], turnings[turnings["batch"] == batch], looks)
        for batch in costs["batch"].unique()
    ]
    title = "Threads of a training step, 1 process · wall clock · network not used"
    remark = f"{plural(sweep.cores, 'core')}; crosses: from here on more is less"
    words = [_spoken(row) for row in turnings.to_dict("records")]
    return sheet([[panel] for panel in panels], looks.values(), title, [remark], words)


def thread_reading(sweep: ThreadSweep) -> Markdown:
    """Name the best numbers of threads for each batch, and from which on more cost time."""
    findings = [Finding(_spoken(row)) for row in more_is_less(sweep).to_dict("records")]
    return sentences(findings)


def _threads_panel(costs: pd.DataFrame, turnings: pd.DataFrame, looks: dict[str, Line]) -> Panel:
    batch = costs["batch"].iloc[0]
    best = costs.loc[costs["step_ms"].idxmin()]
    details = f"shortest: {best['step_ms']:.3g} ms at {best['intra']} intra-op and {best['inter']}"
    return Panel(
        title=f"{plural(int(batch), 'sample')} a step\n{details} inter-op threads",
        x="intra-op threads",
        y="ms a step",
        traces=[
            *line_with_band(costs, "intra", "step_ms", looks, by="line", marks=True),
            *_crosses(costs, turnings),
        ],
        x_axis=counts_axis(costs["intra"].unique()),
        y_axis={"rangemode": "tozero"},
    )


def _crosses(costs: pd.DataFrame, turnings: pd.DataFrame) -> list[Trace]:
    """Return crosses where the step is longer in every repeat, for each kind of threads."""
    traces = []
    for row in turnings.dropna(subset="less_from").to_dict("records"):
        pair = {row["threads"]: row["less_from"], _other(row["threads"]): row["other"]}
        at = costs[(costs["intra"] == pair["intra"]) & (costs["inter"] == pair["inter"])]
        text = f"{pair[row['threads']]:.0f} {row['threads']}-op: longer"
        traces.append(crosses(list(at["intra"]), list(at["step_ms"]), [text], "top left"))
    return traces


def _other(kind: str) -> str:
    return KINDS[1 - KINDS.index(kind)]


def _spoken(row: dict[str, float | str]) -> str:
    """Return the finding of a batch and kind of threads as text."""
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
