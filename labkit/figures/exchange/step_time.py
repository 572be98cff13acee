"""Time of a training step: Gantt chart, overlap of communication, and parts of the step."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

import pandas as pd

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.exchange import SCHEDULES
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    PALETTE,
    Finding,
    LineStyle,
    Markdown,
    RunEntry,
    clock_and_network,
    entries,
    safe_text,
    sentences,
)
from labkit.figures.kit.lanes import BarKind, GanttPanel, lanes
from labkit.figures.kit.marks import part_bars, points
from labkit.figures.kit.panels import Panel, Trace, names_axis
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.speed import refusal, refusals
from labkit.records.run import Run, flatten
from labkit.records.step_costs import PARTS, StepCosts, step_costs
from labkit.records.timed_steps import (
    NO_SPEED,
    activities,
    hidden_parts,
    overlaps,
    step_seconds,
    timeline_of,
    typical_steps,
)

SHOWN = 3  # A Gantt chart shows `SHOWN` training steps by default.
MOST_RANKS = 8
LANE = 24  # One lane of a Gantt chart is `LANE` pixels high.
STEP = ", step %{customdata[0]}"
# The colours are from Okabe and Ito (2008); readers with any colour vision can tell them apart.
KINDS = {"compute": BarKind("compute", "#56B4E9", f"compute{STEP}")} | {
    kind: BarKind(f"{kind}{what}", color, f"{kind} bucket %{{customdata[1]}}{STEP}")
    for kind, what, color in (
        ("pack", " a bucket", "#009E73"),
        ("wait", " for a bucket", "#E69F00"),
        ("communicate", " a bucket", "#0072B2"),
    )
}


def timeline(runs: Iterable[Run] | Run, steps: Iterable[int] | None = None) -> Figure:
    """Draw a Gantt chart for each run, with two lanes per rank; all charts have one time scale.

    The lane "training" shows when a rank computes, packs gradients into buckets, and waits for
    buckets. The lane "communication" shows when the communication thread exchanges each bucket. The
    times of all ranks come from the clock of their host.

    Args:
        runs: Runs to draw.
        steps: Numbers of the training steps to draw. The default is three consecutive steps of
            typical duration, after the first 10 steps.

    Raises:
        LabkitError: A run has no timeline.
        InvalidInput: A run does not have the requested steps.
    """
    shown = entries(runs)
    wanted = None if steps is None else sorted(set(steps))
    drawn = {e.key: _activities(e, wanted) for e in shown if not e.equivalence_failed}
    # All runs have the same time scale, so that a shorter step looks shorter.
    ends = [rows[rows["kind"] == "step"]["stop"].max() for rows in drawn.values()]
    ranks = max((rows["rank"].nunique() for rows in drawn.values()), default=1)
    panels, words = [], []
    for entry in shown:
        if entry.equivalence_failed:
            panels.append(GanttPanel(entry.label, note=refusal(entry)))
            words.append(f"{entry.label}: {refusal(entry)}")
        else:
            details = _durations(drawn[entry.key])
            panels.append(_panel(f"{entry.label}\n{details}", drawn[entry.key]))
            words.append(f"{entry.label}: {details}; {_wait_text(entry, drawn[entry.key])}")
    title = f"Timeline, {ranks} ranks · {clock_and_network(shown)}"
    remark = f"the first {MOST_RANKS} ranks" if ranks > MOST_RANKS else ""
    return lanes(panels, KINDS, title, remark, words, LANE, 1e3 * max(ends, default=1e-3))


def _activities(entry: RunEntry, wanted: Sequence[int] | None) -> pd.DataFrame:
    events = timeline_of(entry.run)
    try:
        return activities(events, typical_steps(events, SHOWN) if wanted is None else wanted)
    except InvalidInput as error:
        raise InvalidInput(f"{entry.label} has {error}") from error


def _panel(title: str, rows: pd.DataFrame) -> GanttPanel:
    ranks = sorted(rows["rank"].unique())[:MOST_RANKS]
    rows = rows[rows["rank"].isin(ranks)]
    # Communication overlaps with training, so each rank has a separate lane for communication.
    served = rows["kind"] == "communicate"
    ways = served.map({True: "communication", False: "training"})
    bars = rows.assign(
        lane=[f"rank {rank} {way}" for rank, way in zip(rows["rank"], ways, strict=True)],
        start=1e3 * rows["start"],
        length=1e3 * (rows["stop"] - rows["start"]),
        text=rows["bucket"].map("{:.0f}".format).where(served, ""),
    )
    order = [f"rank {rank} {way}" for rank in ranks for way in ("training", "communication")]
    # A whole step has no bar, because this bar would cover the bars of its parts.
    steps = bars["kind"] == "step"
    details, below = ("step", "bucket"), [_step_marks(bars[steps])]
    return GanttPanel(title, order, bars[~steps], details, below)


def _step_marks(steps: pd.DataFrame) -> Trace:
    """Return marks that show when each step starts."""
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
    """List the durations of steps, such as `steps 20 to 22: 17.3, 17.9, 18.1 ms`."""
    seconds = 1e3 * step_seconds(rows)
    first, last = seconds.index.min(), seconds.index.max()
    named = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{named}: {', '.join(f'{value:.3g}' for value in seconds)} ms"


def _wait_text(entry: RunEntry, rows: pd.DataFrame) -> str:
    steps = set(rows[rows["kind"] == "step"]["step"])
    step_overlaps = [
        step_overlap
        for step_overlap in overlaps(timeline_of(entry.run))
        if step_overlap.step in steps
    ]
    divisor = max(len(step_overlaps), 1) / 1e3
    communication = sum(step_overlap.communication for step_overlap in step_overlaps) / divisor
    exposed = sum(step_overlap.exposed for step_overlap in step_overlaps) / divisor
    return (
        f"communication takes {communication:.3g} ms per step, and training waits for it "
        f"{exposed:.3g} ms"
    )


# `_FREE` names the fields in which compared runs may differ.
_FREE = ("name", "strategy.schedule", "strategy.bucket_bytes")


def overlap(runs: Iterable[Run] | Run) -> pd.DataFrame:
    r"""Return how much communication time overlap hides, and how much it could hide at most.

    The table has one row per run, with medians over its training steps after the first 10.
    `step_ms` is the step time of the slowest rank. `communication_ms`, \(C\) in formulas, is the
    exchange time summed over all buckets. `exposed_ms`, \(E\) in formulas, is the time in which
    training waits for communication; `hidden_ms` is \(C - E\). The column `ideal_ms` is the time
    that an ideal exchange would hide behind computation. An ideal exchange sends the buckets in the
    best order and without pauses. `reached` is `hidden_ms` / `ideal_ms`; the value is missing if no
    communication can be hidden. The column `against_sequential_ms` is the time that overlap saves
    per step.

    Raises:
        LabkitError: A run has no timeline.
    """
    shown = entries(runs)
    all_runs = [entry.run for entry in shown]
    rows = {e.label: NO_SPEED if e.equivalence_failed else hidden_parts(e.run) for e in shown}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")
    baselines = [_baseline(run, all_runs) for run in all_runs]
    steps = dict(zip(all_runs, table["step_ms"], strict=True))
    table["against_sequential_ms"] = [
        float("nan") if base is None else steps[base] - steps[run]
        for run, base in zip(all_runs, baselines, strict=True)
    ]
    return table


def summarize_exchange(runs: Iterable[Run] | Run) -> Markdown:
    """Summarize each run's communication time, the part that overlap hides, and the time saved."""
    shown = entries(runs)
    table = overlap([entry.run for entry in shown])
    findings = [
        Finding(
            f"**{entry.label}**",
            details=(refusal(entry),) if entry.equivalence_failed else _words(row),
        )
        for entry, row in zip(shown, table.to_dict("records"), strict=True)
    ]
    timed = table["step_ms"].dropna()
    if len(timed) > 1:
        best, worst = timed.idxmin(), timed.idxmax()
        findings.append(
            Finding(
                f"The shortest step of these runs is that of **{best}** ({timed[best]:.3g} ms), "
                f"the longest step is that of **{worst}** ({timed[worst]:.3g} ms)"
            )
        )
    return sentences(findings)


def _baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    """Return the run without overlap that equals `run` in all fields but schedule and buckets."""
    if _is_sequential(run):
        return None
    # All fields that are not in `_FREE` must be equal. With equal fields, only the schedule can
    # explain a difference in time.
    sequential = filter(_is_sequential, runs)
    return next((other for other in sequential if _other_fields(other) == _other_fields(run)), None)


def _is_sequential(run: Run) -> bool:
    """Whether the ranks of a run send all buckets after backpropagation, and do not take turns."""
    schedule = SCHEDULES.get(run.experiment["strategy"].get("schedule"))
    return schedule is not None and schedule.after and not schedule.turns


def _other_fields(run: Run) -> JSON:
    return {name: value for name, value in flatten(run.experiment).items() if name not in _FREE}


def _words(row: dict[str, float]) -> tuple[str, ...]:
    buckets = "its bucket takes" if row["buckets"] == 1 else f"its {row['buckets']} buckets take"
    details = [
        f"a step takes {row['step_ms']:.3g} ms; {buckets} {row['communication_ms']:.3g} ms, and "
        f"training waits {row['exposed_ms']:.3g} ms per step for communication"
    ]
    # `reached` is NaN, and thus not equal to itself, if overlap could hide no communication.
    if row["reached"] != row["reached"]:
        details.append(
            "no communication could be hidden, because training begins to wait before the first "
            "bucket is ready"
        )
    elif row["hidden_ms"] <= 0:
        details.append(
            f"{row['ideal_ms']:.3g} ms of communication could be hidden behind computation, "
            "but none is"
        )
    else:
        details.append(
            f"{row['hidden_ms']:.3g} ms of communication are hidden behind computation; at most "
            f"{row['ideal_ms']:.3g} ms could be hidden ({row['reached']:.0%} reached)"
        )
    if (gain := row["against_sequential_ms"]) == gain:
        share = f", {gain / row['ideal_ms']:.0%} of the ideal saving" if row["reached"] > 0 else ""
        details.append(
            f"its step is {abs(gain):.3g} ms {'shorter' if gain > 0 else 'longer'} than the step "
            f"of the sequential run{share if gain > 0 else ''}"
        )
    return tuple(details)


# Hatches make the parts of a step distinguishable without colour.
_LOOKS = dict(zip(PARTS, zip(PALETTE, ("", "/", "x", "."), strict=False), strict=True))
_LETTERS = 140  # All labels below the bars together have room for this number of letters per line.
_LINES, _LINE = 5, 14  # A label has at most `_LINES` lines; each line is `_LINE` pixels high.


def step_parts(runs: Iterable[Run] | Run) -> Figure:
    """Draw a stacked bar per run with the parts of a step: compute, codec, wire time, and waiting.

    Each part is a mean over ranks, and then a median over the measured steps. The diamond shows the
    measured step time, with p10 to p90. A run that failed its equivalence check has no bar.

    Raises:
        LabkitError: There are no runs.
    """
    shown = entries(runs)
    drawn = [(e, costs) for e in shown if not e.equivalence_failed and (costs := step_costs(e.run))]
    names = [_label_lines(entry.label, len(drawn)) for entry, _ in drawn]
    panel = Panel(
        title="Parts of a step's time\nmedian over steps, mean over ranks; ◆ measured step, "
        "p10 to p90",
        x="run",
        y="time per step, ms",
        traces=_traces(drawn),
        note=refusals(shown) or "no history",
        always_note=bool(refusals(shown)),
        x_axis=names_axis(["<br>".join(map(safe_text, lines)) for lines in names]),
        y_axis={"rangemode": "tozero"},
    )
    title = f"Parts of the step time · {clock_and_network(shown)}"
    words = [f"{entry.label}: {_in_words(costs)}" for entry, costs in drawn]
    looks = [LineStyle(part, color, "solid", "square") for part, (color, _) in _LOOKS.items()]
    below = 36 + _LINE * max(map(len, names), default=0)
    details = [*words, refusals(shown)]
    figure = sheet([[panel]], looks, title, overload(shown), details, plot=280, below=below)
    # Stacked bars show the sum of the parts of a step. A diamond marks the measured step time for
    # comparison.
    figure.update_layout(barmode="stack")
    return figure


def _in_words(costs: StepCosts) -> str:
    """Describe the parts of a step, such as `compute 3 ms, codec 1 ms`."""
    return ", ".join(f"{part} {seconds_text(getattr(costs, part))}" for part in PARTS)


def _traces(drawn: list[tuple[RunEntry, StepCosts]]) -> list[Trace]:
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


def _measured(drawn: list[tuple[RunEntry, StepCosts]]) -> Trace:
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
    return points(table, "place", "step", LineStyle("measured step", INK, "", "diamond"), size=9)


def _label_lines(label: str, bars: int) -> list[str]:
    """Break a label into lines; long words are broken after brackets and underscores."""
    # Each line has room for at least nine letters, because shorter lines would break every word.
    width = max(9, _LETTERS // bars)
    # A blank is inserted at each possible break of a word. Blanks without a line break are removed
    # later.
    words = [w if len(w) <= width else re.sub(r"(?<=[(_])", " ", w) for w in label.split()]
    label_lines = textwrap.wrap(" ".join(words), width, max_lines=_LINES, placeholder=" …")
    return [re.sub(r"(?<=[(_]) ", "", line) for line in label_lines]
