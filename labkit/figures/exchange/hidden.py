"""What overlap could hide of the communication, and what it did hide, from a run's timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labkit.common.errors import LabkitError
from labkit.exchange.overlap import overlaps
from labkit.figures.kit import entries as naming
from labkit.figures.kit.finding import Markdown
from labkit.figures.runs.speed import refused
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

WARM = 10  # steps at the begin that count as warm-up
NOTHING = 0.01  # of the communication: with less to hide, no share of it is told
_FREE = ("name", "strategy.schedule", "strategy.bucket_bytes")  # may differ from the baseline's


def hidden(runs: Iterable[Run] | Run) -> pandas.DataFrame:
    r"""What overlap hid of the communication beside what an ideal order of the same buckets could.

    A row a run, medians over its steps, without the first 10: `step_ms` (the slowest rank's),
    `communication_ms` \(C\), all buckets one after the other; `exposed_ms` \(E\), for which
    computation stood still; `hidden_ms` \(C - E\), the saving that was reached; `ideal_ms`, that
    of a line that serves the same buckets, ready when they were, in the best order without delay;
    `reached` = hidden / ideal, missing where there is nothing to hide. `against_sequential_ms`:
    how much shorter the step is than that of the sequential run among these, where there is one.

    Raises: LabkitError, where a run has no timeline.
    """
    import pandas as pd

    found = [runs] if isinstance(runs, Run) else list(runs)
    rows = {
        label: _no_speed() if entry.gate_failed else _row(entry.run)
        for entry in naming.entries(found)
        for label in [entry.label]
    }
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")
    baselines = [_baseline(run, found) for run in found]
    steps = dict(zip(found, table["step_ms"], strict=True))
    table["against_sequential_ms"] = [
        float("nan") if base is None else steps[base] - steps[run]
        for run, base in zip(found, baselines, strict=True)
    ]
    return table


def exchange_reading(runs: Iterable[Run] | Run) -> Markdown:
    """For each run: what its exchange cost, what was hidden of it, and whether that paid."""
    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    table = hidden([entry.run for entry in shown])
    lines = []
    for entry, row in zip(shown, table.to_dict("records"), strict=True):
        said = refused(entry) if entry.gate_failed else "; ".join(_words(row))
        lines.append(f"- **{entry.label}**: {said}.")
    timed = table["step_ms"].dropna()
    if len(timed) > 1:
        best, worst = timed.idxmin(), timed.idxmax()
        lines.append(
            f"- The shortest step here is that of **{best}** ({timed[best]:.3g} ms), the longest "
            f"that of **{worst}** ({timed[worst]:.3g} ms)."
        )
    return Markdown("\n".join(lines))


def steady(steps: Iterable[int]) -> list[int]:
    """Steps without the first 10; of a short run, without its first half."""
    ordered = sorted(set(steps))
    return ordered[min(WARM, len(ordered) // 2) :]


def timeline_of(run: Run) -> pandas.DataFrame:
    """A run's timeline, that of its first seed where it has repeats; raises LabkitError."""
    for each in (run, *run.seeds):
        if (each.timeline["kind"] == "communicate").any():
            return each.timeline
    raise LabkitError(
        f"{run.name} has no timeline of an exchange (state: {run.status['state']}); a completed "
        "run on two or more workers that exchange gradients has one"
    )


def step_seconds(timeline: pandas.DataFrame) -> pandas.Series[float]:
    """Seconds of each step, by its number: the slowest rank's."""
    steps = timeline[timeline["kind"] == "step"]
    seconds: pandas.Series[float] = (steps["stop"] - steps["start"]).groupby(steps["step"]).max()
    return seconds


def _row(run: Run) -> dict[str, Any]:
    import numpy as np

    timeline = timeline_of(run)
    every = overlaps(timeline)
    chosen = set(steady(each.step for each in every))
    kept = [each for each in every if each.step in chosen]
    seconds = step_seconds(timeline)
    communication, exposed, ideal = (
        1e3 * np.array([getattr(each, name) for each in kept])
        for name in ("communication", "exposed", "ideal")
    )
    possible = float(np.median(communication - ideal))
    reached = float(np.median(communication - exposed))
    worth = possible > NOTHING * float(np.median(communication))
    return {
        "steps": len(kept),
        "buckets": len(kept[0].ready),
        "step_ms": 1e3 * float(seconds[seconds.index.isin(chosen)].median()),
        "communication_ms": float(np.median(communication)),
        "exposed_ms": float(np.median(exposed)),
        "hidden_ms": reached,
        "ideal_ms": possible,
        "reached": reached / possible if worth else float("nan"),
    }


def _no_speed() -> dict[str, Any]:
    names = ("step_ms", "communication_ms", "exposed_ms", "hidden_ms", "ideal_ms", "reached")
    return {"steps": 0, "buckets": 0} | dict.fromkeys(names, float("nan"))


def _baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    """The sequential run that differs from this one in nothing but how buckets travel."""
    if run.experiment["strategy"].get("schedule") == "sequential":
        return None
    for other in runs:
        if other.experiment["strategy"].get("schedule") == "sequential" and _rest(other) == _rest(
            run
        ):
            return other
    return None


def _rest(run: Run) -> dict[str, Any]:
    from labkit.records.run import flatten

    return {name: value for name, value in flatten(run.experiment).items() if name not in _FREE}


def _words(row: dict[str, Any]) -> list[str]:
    many = "its bucket takes" if row["buckets"] == 1 else f"its {row['buckets']} buckets take"
    said = [
        f"a step takes {row['step_ms']:.3g} ms; {many} {row['communication_ms']:.3g} ms, and "
        f"training waits {row['exposed_ms']:.3g} ms a step"
    ]
    if row["reached"] != row["reached"]:
        said.append("nothing could be hidden, for no bucket is ready before training waits for it")
    elif row["hidden_ms"] <= 0:
        said.append(f"{row['ideal_ms']:.3g} ms could be hidden, and nothing was")
    else:
        said.append(
            f"{row['hidden_ms']:.3g} ms are hidden of {row['ideal_ms']:.3g} ms that could be "
            f"({row['reached']:.0%})"
        )
    if (gain := row["against_sequential_ms"]) == gain:
        share = f", {gain / row['ideal_ms']:.0%} of the ideal saving" if row["reached"] > 0 else ""
        said.append(
            f"its step is {abs(gain):.3g} ms {'shorter' if gain > 0 else 'longer'} than that of "
            f"the sequential run{share if gain > 0 else ''}"
        )
    return said
