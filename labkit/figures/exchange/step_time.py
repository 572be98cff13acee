"""Time of a step: the Gantt of its exchange, overlap of communication, and parts of the step."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

import pandas as pd

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.exchange import SCHEDULES
from labkit.figures.kit.axes import names_axis
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    PALETTE,
    Entry,
    Line,
    clock_and_network,
    entries,
    safe_text,
)
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.marks import part_bars, points
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.speed import refusal, refusals
from labkit.records.overlap import NO_SPEED, hidden_parts, overlaps
from labkit.records.run import Run, flatten
from labkit.records.step_costs import PARTS, StepCosts, step_costs
from labkit.records.timed_steps import activities, step_seconds, timeline_of, usual

SHOWN = 3  # steps, where none are named
MOST_RANKS = 8  # of more, the first are drawn
LANE = 24  # pixels a lane
STEP = ", step %{customdata[0]}"
# Colours of Okabe and Ito (2008), as in `entries`, distinct for any colour vision.
KINDS = {"compute": Kind("compute", "#56B4E9", f"compute{STEP}")} | {
    kind: Kind(f"{kind}{what}", color, f"{kind} bucket %{{customdata[1]}}{STEP}")
    for kind, what, color in (
        ("pack", " a bucket", "#009E73"),
        ("wait", " for a bucket", "#E69F00"),
        ("communicate", " a bucket", "#0072B2"),
    )
}


def timeline(runs: Iterable[Run] | Run, steps: Iterable[int] | None = None) -> Figure:
    """Draw a Gantt chart a run on the same scale of time, with two lanes a rank.

    training: compute (the step without packing and waiting), pack, wait; communication:
    the rank's communication thread, bucket by bucket. All ranks are on one clock, that of the host.

    Args:
        runs: one or several.
        steps: which to draw; default: three in a row that take as long as is usual, without the
            first 10.

    Raises:
        LabkitError: a run has no timeline. InvalidInput: it has none of these steps.
    """
    shown = entries(runs)
    wanted = None if steps is None else sorted(set(steps))
    drawn = {e.key: _activities(e, wanted) for e in shown if not e.gate_failed}
    # One scale for all runs, so that a shorter step looks shorter.
    ends = [rows[rows["kind"] == "step"]["stop"].max() for rows in drawn.values()]
    ranks = max((rows["rank"].nunique() for rows in drawn.values()), default=1)
    panels, words = [], []
    for entry in shown:
        if entry.gate_failed:
            panels.append(Lanes(entry.label, note=refusal(entry)))
            words.append(f"{entry.label}: {refusal(entry)}")
        else:
            details = _durations(drawn[entry.key])
            panels.append(_panel(f"{entry.label}\n{details}", drawn[entry.key]))
            words.append(f"{entry.label}: {details}; {_waits(entry, drawn[entry.key])}")
    title = f"Timeline, {ranks} ranks · {clock_and_network(shown)}"
    remark = f"the first {MOST_RANKS} ranks" if ranks > MOST_RANKS else ""
    return lanes(panels, KINDS, title, remark, words, LANE, 1e3 * max(ends, default=1e-3))


def _activities(entry: Entry, wanted: Sequence[int] | None) -> pd.DataFrame:
    events = timeline_of(entry.run)
    try:
        return activities(events, usual(events, SHOWN) if wanted is None else wanted)
    except InvalidInput as error:
        raise InvalidInput(f"{entry.label} has {error}") from error


def _panel(title: str, rows: pd.DataFrame) -> Lanes:
    ranks = sorted(rows["rank"].unique())[:MOST_RANKS]
    rows = rows[rows["rank"].isin(ranks)]
    # Communication overlaps training, so that their bars need separate lanes.
    served = rows["kind"] == "communicate"
    ways = served.map({True: "communication", False: "training"})
    bars = rows.assign(
        lane=[f"rank {rank} {way}" for rank, way in zip(rows["rank"], ways, strict=True)],
        start=1e3 * rows["start"],
        length=1e3 * (rows["stop"] - rows["start"]),
        text=rows["bucket"].map("{:.0f}".format).where(served, ""),
    )
    order = [f"rank {rank} {way}" for rank in ranks for way in ("training", "communication")]
    # A step holds all of its parts: as a bar it would lie over them.
    steps = bars["kind"] == "step"
    details, below = ("step", "bucket"), [_begins(bars[steps])]
    return Lanes(title, order, bars[~steps], details, below)


def _begins(steps: pd.DataFrame) -> Trace:
    """Return marks at the beginnings of steps."""
    return {
        "mode": "markers",
        "x": steps["start"],
        "y": steps["lane"],
        "customdata": steps["step"],
        "marker": {"symbol": "line-ns", "size": LANE, "line": {"color": INK, "width": 2}},
        "hovertemplate": "step %{customdata} begins<extra>%{y}</extra>",
        "showlegend": False,
    }


def _durations(rows: pd.DataFrame) -> str:
    """Return `steps 20 to 22: 17.3, 17.9, 18.1 ms`."""
    seconds = 1e3 * step_seconds(rows)
    first, last = seconds.index.min(), seconds.index.max()
    named = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{named}: {', '.join(f'{value:.3g}' for value in seconds)} ms"


def _waits(entry: Entry, rows: pd.DataFrame) -> str:
    steps = set(rows[rows["kind"] == "step"]["step"])
    kept = [each for each in overlaps(timeline_of(entry.run)) if each.step in steps]
    many = max(len(kept), 1) / 1e3
    communication = sum(each.communication for each in kept) / many
    exposed = sum(each.exposed for each in kept) / many
    return f"communication takes {communication:.3g} ms a step, and training waits {exposed:.3g} ms"


_FREE = ("name", "strategy.schedule", "strategy.bucket_bytes")  # may differ from the baseline's


def overlap(runs: Iterable[Run] | Run) -> pd.DataFrame:
    r"""Return the communication hidden by overlap, beside that of an ideal order of buckets.

    A row a run, medians over its steps, without the first 10: `step_ms` (the slowest rank's),
    `communication_ms` \(C\), all buckets one after the other; `exposed_ms` \(E\), for which
    computation stood still; `hidden_ms` \(C - E\), the saving that was reached; `ideal_ms`, that
    of a line that serves the same buckets, ready when they were, in the best order without delay;
    `reached` = hidden / ideal, missing where there is nothing to hide. `against_sequential_ms`:
    how much shorter the step is than that of the sequential run among these, where there is one.

    Raises: LabkitError, where a run has no timeline.
    """
    shown = entries(runs)
    all_runs = [entry.run for entry in shown]
    rows = {e.label: NO_SPEED if e.gate_failed else hidden_parts(e.run) for e in shown}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")
    baselines = [_baseline(run, all_runs) for run in all_runs]
    steps = dict(zip(all_runs, table["step_ms"], strict=True))
    table["against_sequential_ms"] = [
        float("nan") if base is None else steps[base] - steps[run]
        for run, base in zip(all_runs, baselines, strict=True)
    ]
    return table


def exchange_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say what the exchange of each run cost, what was hidden of it, and whether that paid."""
    shown = entries(runs)
    table = overlap([entry.run for entry in shown])
    findings = [
        Finding(
            f"**{entry.label}**", details=(refusal(entry),) if entry.gate_failed else _words(row)
        )
        for entry, row in zip(shown, table.to_dict("records"), strict=True)
    ]
    timed = table["step_ms"].dropna()
    if len(timed) > 1:
        best, worst = timed.idxmin(), timed.idxmax()
        findings.append(
            Finding(
                f"The shortest step here is that of **{best}** ({timed[best]:.3g} ms), the longest "
                f"that of **{worst}** ({timed[worst]:.3g} ms)"
            )
        )
    return sentences(findings)


def _baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    """Return the sequential run that differs from this one only in the transport of buckets."""
    if _is_sequential(run):
        return None
    # All else has to be equal, or the difference would not be the schedule's.
    sequential = filter(_is_sequential, runs)
    return next((other for other in sequential if _rest(other) == _rest(run)), None)


def _is_sequential(run: Run) -> bool:
    """Whether all buckets travel after backpropagation, and no rank waits for its turn."""
    schedule = SCHEDULES.get(run.experiment["strategy"].get("schedule"))
    return schedule is not None and schedule.after and not schedule.turns


def _rest(run: Run) -> JSON:
    return {name: value for name, value in flatten(run.experiment).items() if name not in _FREE}


def _words(row: dict[str, float]) -> tuple[str, ...]:
    many = "its bucket takes" if row["buckets"] == 1 else f"its {row['buckets']} buckets take"
    details = [
        f"a step takes {row['step_ms']:.3g} ms; {many} {row['communication_ms']:.3g} ms, and "
        f"training waits {row['exposed_ms']:.3g} ms a step"
    ]
    # NaN: there was nothing to hide.
    if row["reached"] != row["reached"]:
        details.append(
            "nothing could be hidden, for no bucket is ready before training waits for it"
        )
    elif row["hidden_ms"] <= 0:
        details.append(f"{row['ideal_ms']:.3g} ms could be hidden, and nothing was")
    else:
        details.append(
            f"{row['hidden_ms']:.3g} ms are hidden of {row['ideal_ms']:.3g} ms that could be "
            f"({row['reached']:.0%})"
        )
    if (gain := row["against_sequential_ms"]) == gain:
        share = f", {gain / row['ideal_ms']:.0%} of the ideal saving" if row["reached"] > 0 else ""
        details.append(
            f"its step is {abs(gain):.3g} ms {'shorter' if gain > 0 else 'longer'} than that of "
            f"the sequential run{share if gain > 0 else ''}"
        )
    return tuple(details)


# Hatches distinguish the parts without colour, too.
_LOOKS = dict(zip(PARTS, zip(PALETTE, ("", "/", "x", "."), strict=False), strict=True))
_LETTERS = 140  # of a line under all bars
_LINES, _LINE = 5, 14  # lines a bar at most, hovering shows the rest; pixels of a line


def step_parts(runs: Iterable[Run] | Run) -> Figure:
    """Draw the seconds of a step as a stacked bar a run: compute, codec, wire and wait.

    Medians over the steady steps, mean over ranks; the diamond is the measured step, with p10 to
    p90. A run whose equivalence gate failed has no bar. Raises LabkitError where there are no runs.
    """
    shown = entries(runs)
    drawn = [(e, costs) for e in shown if not e.gate_failed and (costs := step_costs(e.run))]
    names = [_short(entry.label, len(drawn)) for entry, _ in drawn]
    panel = Panel(
        title="Seconds of a step\nmedian over steps, mean over ranks; ◆ measured step, p10 to p90",
        x="run",
        y="ms a step",
        traces=_traces(drawn),
        note=refusals(shown) or "no history",
        always_note=bool(refusals(shown)),
        x_axis=names_axis(["<br>".join(map(safe_text, lines)) for lines in names]),
        y_axis={"rangemode": "tozero"},
    )
    title = f"Where a step goes · {clock_and_network(shown)}"
    words = [f"{entry.label}: {_in_words(costs)}" for entry, costs in drawn]
    looks = [Line(part, color, "solid", "square") for part, (color, _) in _LOOKS.items()]
    below = 36 + _LINE * max(map(len, names), default=0)
    details = [*words, refusals(shown)]
    figure = sheet([[panel]], looks, title, overload(shown), details, plot=280, below=below)
    # The parts add up to a step, which the diamond shows as measured.
    figure.update_layout(barmode="stack")
    return figure


def _in_words(costs: StepCosts) -> str:
    """Return `compute 3 ms, codec 1 ms, wire 2 ms, wait 0 s`."""
    return ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in PARTS)


def _traces(drawn: list[tuple[Entry, StepCosts]]) -> list[Trace]:
    if not drawn:
        return []
    places = list(range(len(drawn)))
    labels = [safe_text(entry.label) for entry, _ in drawn]
    bars = [
        part_bars(
            places,
            [1e3 * getattr(costs, part) for _, costs in drawn],
            part,
            *look,
            f"%{{text}}<br>{part} %{{y:.3g}} ms",
            text=labels,
            textposition="none",
        )
        for part, look in _LOOKS.items()
    ]
    return [*bars, _measured(drawn)]


def _measured(drawn: list[tuple[Entry, StepCosts]]) -> Trace:
    steps = [entry.metrics["step_ms"] for entry, _ in drawn]
    table = pd.DataFrame(
        {
            "place": range(len(drawn)),
            "step": [step["median"] for step in steps],
            "step_low": [step["p10"] for step in steps],
            "step_high": [step["p90"] for step in steps],
            "hover": [f"measured step {step['median']:.3g} ms" for step in steps],
        }
    )
    return points(table, "place", "step", Line("measured step", INK, "", "diamond"), size=9)


def _short(label: str, bars: int) -> list[str]:
    """Return the lines of a label; long words are broken after brackets and underscores."""
    # Nine letters at least: less would break every word.
    width = max(9, _LETTERS // bars)
    # A blank where a word may be broken; it is taken out again below.
    words = [w if len(w) <= width else re.sub(r"(?<=[(_])", " ", w) for w in label.split()]
    label_lines = textwrap.wrap(" ".join(words), width, max_lines=_LINES, placeholder=" …")
    return [re.sub(r"(?<=[(_]) ", "", line) for line in label_lines]
