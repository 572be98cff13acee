"""Input pipelines and threads: waiting for input, I/O overhead, and step time by threads."""

from __future__ import annotations

import textwrap

import pandas as pd

from labkit.common.errors import InvalidInput, short
from labkit.common.units import bytes_text, plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    Finding,
    LineStyle,
    Markdown,
    lines,
    safe_text,
    sentences,
)
from labkit.figures.kit.lanes import BarKind, GanttPanel, lanes
from labkit.figures.kit.marks import crosses, line_with_band, part_bars, points, rule
from labkit.figures.kit.panels import Panel, Trace, counts_axis, names_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.step_costs import KINDS, ThreadSweep, more_is_less, thread_costs
from labkit.records.timed_steps import SYNTHETIC, InputTrace, input_costs

SHOWN = 5  # default number of training steps in the Gantt chart
LANE = 24  # height of one lane of the Gantt chart, in pixels
# At most this number of lanes shows concurrent batches, so that the height of the chart is limited.
MOST_LANES = 4
STEP_HOVER = "step %{customdata[0]:.0f}"
# The colours are from Okabe and Ito (2008); readers with any colour vision can tell them apart.
INPUT_KINDS = {
    "compute": BarKind("training computes", "#56B4E9", f"computes, {STEP_HOVER}"),
    "idle": BarKind(
        "training waits for its batch", "#E69F00", f"waits for its batch, {STEP_HOVER}"
    ),
    "made": BarKind(
        "input prepares a batch", "#009E73", f"input prepares the batch of {STEP_HOVER}"
    ),
}


def input_timeline(trace: InputTrace, steps: int = SHOWN) -> Figure:
    """Draw a Gantt chart per kind of input, with training above and batch preparation below.

    Each chart shows consecutive steps from the middle of one repeat. The step time of this repeat
    is the median of all repeats. All charts have the same time scale. Orange bars show when
    training waits for input.

    Args:
        trace: Measured steps and batches, the result of `labkit.bench.input_pipeline.measure`.
        steps: Number of training steps to draw.

    Raises:
        InvalidInput: The number of steps is below one.
    """
    if steps < 1:
        raise InvalidInput(f"steps={short(steps)} cannot be drawn: give a number of at least 1")
    table, costs = trace.to_dataframe(), input_costs(trace)
    drawn = {way: _median_repeat(table[table["way"] == way], steps) for way in trace.ways}
    end = max(float(rows[rows["kind"] != "made"]["stop"].max()) for rows in drawn.values())
    panels, words = [], []
    for way, rows in drawn.items():
        group = costs.loc[way]
        details = f"training is idle in {group['idle_share']:.0%} of the time of all steps"
        panels.append(_input_lanes(f"{way}\n{details}", rows, end))
        words.append(f"{way}: {details}, {group['idle_ms']:.3g} ms per step (median)")
    title = "Input of a training step, 1 process · wall clock · network not used"
    return lanes(panels, INPUT_KINDS, title, "", words, LANE, end)


def _median_repeat(steps: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return bars for `count` steps of the median repeat; times start at the first drawn step."""
    medians = steps.groupby("repeat")["step_ms"].median().sort_values()
    turn = steps[steps["repeat"] == medians.index[len(medians) // 2]].sort_values("step")
    first = max((len(turn) - count) // 2, 0)
    shown = turn.iloc[first : first + count]
    zero, last = shown["start"].min(), shown["stop"].max()
    parts = [
        _bars(shown, "idle", "start", "ready"),
        _bars(shown, "compute", "ready", "stop"),
        # The bars also show batches for later steps, if their preparation starts during the drawn
        # steps.
        _bars(turn[turn["made_start"] < last], "made", "made_start", "made_stop"),
    ]
    bars = pd.concat(parts, ignore_index=True)
    bars[["start", "stop"]] = 1e3 * (bars[["start", "stop"]] - zero)
    bars = bars[bars["stop"] > 0]
    is_preparation = bars["kind"] == "made"
    bars.loc[is_preparation, "lane"] = _input_lane_names(bars[is_preparation])
    return bars


def _bars(rows: pd.DataFrame, kind: str, start: str, stop: str) -> pd.DataFrame:
    bars = rows[["step", start, stop]].set_axis(["step", "start", "stop"], axis=1)
    return bars.assign(kind=kind, lane="training")


def _input_lane_names(bars: pd.DataFrame) -> list[str]:
    """Return the lane of each batch: the first free lane at the start of its preparation."""
    free: list[float] = []
    lane_names = {}
    for row in bars.sort_values("start").itertuples():
        lane = next((n for n, end in enumerate(free) if end <= row.start), len(free))
        free[lane : lane + 1] = [row.stop]
        lane_names[row.Index] = f"input {min(lane, MOST_LANES - 1) + 1}"
    return [lane_names[place] for place in bars.index]


def _input_lanes(title: str, rows: pd.DataFrame, end: float) -> GanttPanel:
    # If a batch is still in preparation at the end of the drawn steps, its bar ends there.
    start, stop = rows["start"].clip(lower=0), rows["stop"].clip(upper=end)
    bars = rows.assign(start=start, length=stop - start, text="")
    order = ["training", *sorted(set(rows["lane"]) - {"training"})]
    return GanttPanel(title, order, bars[bars["length"] > 0], ("step",))


# Hatches make the parts of a step distinguishable without colour.
PARTS = {"compute_ms": ("compute", "#56B4E9", ""), "idle_ms": ("idle", "#E69F00", "/")}
MEASURED_STEP = LineStyle("measured step", INK, "solid", "diamond")
OVERHEAD = LineStyle("I/O overhead", "#D55E00", "solid", "circle")
_LETTERS = 12  # maximum number of letters in one line below a bar


def input_overhead(trace: InputTrace) -> Figure:
    """Draw a step's compute time, idle time and I/O overhead, for each kind of input.

    The drawn values are medians over repeats, with the range over repeats.
    `labkit.records.timed_steps.input_costs` defines the overhead, which is 0 for the synthetic
    input.
    """
    costs = input_costs(trace)
    repeats = trace.to_dataframe()["repeat"].nunique()
    names = ["<br>".join(textwrap.wrap(safe_text(way), _LETTERS)) for way in costs.index]
    rows = costs.reset_index().assign(place=range(len(costs)))
    steps = [f"measured step {value:.3g} ms" for value in rows["step_ms"]]
    zero = rule([-0.6, len(rows) - 0.4], [0, 0], "dot")
    parts = Panel(
        title=f"Parts of a step's time\nmedian of {repeats} repeats; ◆ measured step, minimum "
        "to maximum",
        x="input",
        y="time per step, ms",
        traces=[
            *(
                part_bars(rows["place"], rows[column], *look, f"{look[0]} %{{y:.3g}} ms")
                for column, look in PARTS.items()
            ),
            points(rows.assign(hover=steps), "place", "step_ms", MEASURED_STEP, size=9),
        ],
        note=_cache_cost(trace),
        always_note=True,
        x_axis=names_axis(names),
        y_axis={"rangemode": "tozero"},
    )
    over = Panel(
        title="I/O overhead\n(real − synthetic step) / synthetic step, in pairs of the same repeat",
        x="input",
        y="overhead",
        traces=[zero, _overheads(rows[rows["way"] != SYNTHETIC])],
        x_axis=names_axis(names),
        y_axis={"tickformat": "+.0%"},
    )
    looks = [LineStyle(details, color, "solid", "square") for details, color, _ in PARTS.values()]
    words = [
        f"{way}: step {row['step_ms']:.3g} ms, idle {row['idle_ms']:.3g} ms, "
        f"overhead {row['overhead']:.0%}"
        for way, row in costs.iterrows()
    ]
    title = "Synthetic and real input, 1 process · wall clock · network not used"
    figure = sheet([[parts], [over]], [*looks, MEASURED_STEP, OVERHEAD], title, (), words, below=62)
    # The bars are stacked, so that the height of each bar is compute time plus idle time. A diamond
    # shows the measured step time, for comparison with the sum of its parts.
    figure.update_layout(barmode="stack")
    return figure


def summarize_input(trace: InputTrace) -> Markdown:
    """Summarize the cost of each way to read input data, and name the cheapest."""
    costs = input_costs(trace)
    real = costs.drop(SYNTHETIC)
    repeats = trace.to_dataframe()["repeat"].nunique()
    base = costs.loc[SYNTHETIC]
    findings = [
        Finding(
            f"**{SYNTHETIC}**",
            details=(f"a step takes {base['step_ms']:.3g} ms when its batch is already in memory",),
        )
    ]
    findings += [_finding(way, row, repeats) for way, row in real.iterrows()]
    findings.append(Finding(_cache_cost(trace)))
    least = real["overhead"].idxmin()
    findings.append(Finding(_answer(least, real.loc[least])))
    return sentences(findings)


def _finding(way: str, row: pd.Series, repeats: int) -> Finding:
    spread = f"repeats {row['overhead_low']:.0%} to {row['overhead_high']:.0%}"
    number = f"{row['overhead']:.0%}" + (f" ({spread})" if repeats > 1 else "")
    return Finding(
        f"**{way}**",
        details=(
            f"a step takes {row['step_ms']:.3g} ms, and training is idle in "
            f"{row['idle_share']:.0%} of this time",
            f"I/O overhead {number}",
        ),
        verdict="within noise, because repeats differ in the sign of the overhead"
        if row["overhead_low"] <= 0 <= row["overhead_high"]
        else "",
    )


def _cache_cost(trace: InputTrace) -> str:
    """Return a sentence about the time to fill an input's cache in the first pass over the data."""
    return (
        f"The first pass over the data, which fills the cache, took {trace.filled:.3g} s; the "
        f"cache file has {bytes_text(trace.nbytes)}"
    )


def _answer(way: str, row: pd.Series) -> str:
    """Return a sentence about the kind of input with the least overhead."""
    if row["overhead_low"] <= 0:
        return (
            f"**{way}** is the input whose step time is nearest to that of tensors in "
            "memory; the difference is within noise"
        )
    return (
        f"**{way}** is the input whose step time is nearest to that of tensors in memory; its "
        f"overhead is {row['overhead']:.0%} of a step with synthetic input"
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
    """Draw step time over intra-op threads: one panel per batch size, one line per inter-op count.

    Lines show medians over repeats, and bands show ranges over repeats. A cross marks the thread
    count from which all repeats are slower than the shortest step (see
    `labkit.records.step_costs.more_is_less`).
    """
    costs, slowdowns = thread_costs(sweep), more_is_less(sweep)
    costs = costs.assign(line=[f"{count} inter-op" for count in costs["inter"]])
    looks = lines(costs["line"])
    panels = [
        _threads_panel(
            costs[costs["batch"] == batch], slowdowns[slowdowns["batch"] == batch], looks
        )
        for batch in costs["batch"].unique()
    ]
    title = "Threads of a training step, 1 process · wall clock · network not used"
    remark = (
        f"{plural(sweep.cores, 'core')}; crosses: from this number of threads on, more "
        "threads are slower"
    )
    words = [_thread_finding(row) for row in slowdowns.to_dict("records")]
    return sheet([[panel] for panel in panels], looks.values(), title, [remark], words)


def summarize_thread(sweep: ThreadSweep) -> Markdown:
    """State the best number of threads for each batch size, and the first number that is slower."""
    findings = [Finding(_thread_finding(row)) for row in more_is_less(sweep).to_dict("records")]
    return sentences(findings)


def _threads_panel(
    costs: pd.DataFrame, slowdowns: pd.DataFrame, looks: dict[str, LineStyle]
) -> Panel:
    batch = costs["batch"].iloc[0]
    best = costs.loc[costs["step_ms"].idxmin()]
    details = (
        f"shortest step: {best['step_ms']:.3g} ms with {best['intra']} intra-op and {best['inter']}"
    )
    return Panel(
        title=f"{plural(int(batch), 'sample')} per step\n{details} inter-op threads",
        x="intra-op threads",
        y="time per step, ms",
        traces=[
            *line_with_band(costs, "intra", "step_ms", looks, by="line", marks=True),
            *_crosses(costs, slowdowns),
        ],
        x_axis=counts_axis(costs["intra"].unique()),
        y_axis={"rangemode": "tozero"},
    )


def _crosses(costs: pd.DataFrame, slowdowns: pd.DataFrame) -> list[Trace]:
    """Return crosses that mark the numbers of threads at which steps become slower."""
    traces = []
    for row in slowdowns.dropna(subset="less_from").to_dict("records"):
        pair = {row["threads"]: row["less_from"], _other(row["threads"]): row["other"]}
        at = costs[(costs["intra"] == pair["intra"]) & (costs["inter"] == pair["inter"])]
        text = f"{pair[row['threads']]:.0f} {row['threads']}-op: slower"
        traces.append(crosses(list(at["intra"]), list(at["step_ms"]), [text], "top left"))
    return traces


def _other(kind: str) -> str:
    return KINDS[1 - KINDS.index(kind)]


def _thread_finding(row: dict[str, float | str]) -> str:
    """Describe the result for one batch size and one kind of threads (intra-op or inter-op)."""
    kind, other = str(row["threads"]), _other(str(row["threads"]))
    head = (
        f"**{row['batch']} samples per step**: with {row['other']} {other}-op, the shortest step "
        f"has {plural(int(row['best']), f'{kind}-op thread')} ({row['best_ms']:.3g} ms)"
    )
    if row["best"] == row["most"]:
        return f"{head}, the largest number of threads in the sweep"
    if row["less_from"] != row["less_from"]:
        return f"{head}; more threads, up to {row['most']}, are not clearly slower"
    return (
        f"{head}; {row['less_from']:.0f} and more threads are slower: {row['ratio']:.3g}x the time "
        f"(repeats {row['ratio_low']:.3g} to {row['ratio_high']:.3g})"
    )
