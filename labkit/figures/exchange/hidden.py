"""What overlap could hide of the communication, and what it did hide, from a run's timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.exchange import SCHEDULES
from labkit.figures.kit.entries import entries
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.runs.speed import refused
from labkit.records.overlap import NO_SPEED, hidden_parts
from labkit.records.run import Run, flatten

if TYPE_CHECKING:
    import pandas

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

    shown = entries(runs)
    found = [entry.run for entry in shown]
    rows = {e.label: NO_SPEED if e.gate_failed else hidden_parts(e.run) for e in shown}
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
    shown = entries(runs)
    table = hidden([entry.run for entry in shown])
    found = [
        Finding(f"**{entry.label}**", said=(refused(entry),) if entry.gate_failed else _words(row))
        for entry, row in zip(shown, table.to_dict("records"), strict=True)
    ]
    timed = table["step_ms"].dropna()
    if len(timed) > 1:
        best, worst = timed.idxmin(), timed.idxmax()
        found.append(
            Finding(
                f"The shortest step here is that of **{best}** ({timed[best]:.3g} ms), the longest "
                f"that of **{worst}** ({timed[worst]:.3g} ms)"
            )
        )
    return sentences(found)


def _baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    """The sequential run that differs from this one in nothing but how buckets travel."""
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
    said = [
        f"a step takes {row['step_ms']:.3g} ms; {many} {row['communication_ms']:.3g} ms, and "
        f"training waits {row['exposed_ms']:.3g} ms a step"
    ]
    # NaN: there was nothing to hide.
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
    return tuple(said)
