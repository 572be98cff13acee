"""Comparison of runs: a figure of learning curves and speeds, and a table of all runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.common.units import bytes_text, number_text, plural
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import RunEntry, clock_and_network
from labkit.figures.kit.sheet import Sheet, overload
from labkit.figures.runs import speed
from labkit.figures.runs.learning import learning_panels, select_curves
from labkit.records.analysis.columns import Value, differences
from labkit.records.run import KEY_METRICS, Run, key_metrics, logged_names, verdict

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure


class ComparisonTable(pd.DataFrame):
    """A DataFrame that notebooks display with rounded numbers; the stored values do not change.

    The display rounds numbers below a thousand to four digits, and larger numbers to integers.
    Columns with "bytes" in their name are displayed with units, such as MB. Selections from the
    table, and results of operations on the table, also have this type.
    """

    @property
    def _constructor(self) -> type[ComparisonTable]:
        return ComparisonTable

    def _repr_html_(self) -> str | None:
        # Each cell of the table is formatted by its own type. A column of type object may contain
        # numbers and texts.
        texts = [
            self.iloc[:, place].map(_cell_formatter(name))
            for place, name in enumerate(self.columns)
        ]
        plain = pd.DataFrame(dict(enumerate(texts)), index=self.index)
        html: str | None = plain.set_axis(self.columns, axis=1)._repr_html_()
        return html


def format_table(table: pd.DataFrame) -> ComparisonTable:
    """Return the table with readable display: numbers with four digits, bytes with units."""
    return ComparisonTable(table)


def _cell_formatter(column: Any) -> Any:
    """Return a function that formats the cells of a column."""
    has_bytes = "bytes" in re.split("[^a-z]", str(column))

    def format_cell(value: Any) -> Any:
        if pd.api.types.is_bool(value) or not pd.api.types.is_number(value):
            return value
        if pd.isna(value):
            return ""
        if has_bytes:
            return bytes_text(value)
        return number_text(value) if pd.api.types.is_float(value) else f"{value:,}"

    return format_cell


def compare(runs: Iterable[Run] | Run) -> Figure:
    """Draw learning curves over steps, seconds or bytes, and samples/s, speed-up and efficiency.

    The legend names only the parameters that distinguish the runs. Runs that differ only in their
    seeds are drawn as one line with a band. If a run failed its equivalence check, its speed is not
    shown. `figure.alt` describes the figure in words. Related figures: `labkit.figures.pareto`,
    `parallel_coordinates`, `heat_map`, `scatter`.

    Raises:
        LabkitError: There are no runs.
    """
    shown = naming.settings(runs)
    learning, speeds = _learning(shown), _speeds(shown)
    rows = [*learning.rows, *speeds.rows]
    words = [*learning.words, *speeds.words]
    return Sheet(rows, shown, _title(shown), learning.remarks, words).figure()


def sheets(entries: Sequence[RunEntry]) -> list[Sheet]:
    """Return the two sheets of `compare`: learning curves and speeds."""
    return [_learning(entries), _speeds(entries)]


def curves(runs: Iterable[Run] | Run) -> Figure:
    """Draw training loss and test results over steps, seconds, or bytes on the wire."""
    return _learning(naming.settings(runs)).figure()


def throughput(runs: Iterable[Run] | Run) -> Figure:
    """Draw each run's samples per second, with whiskers for the rates at p90 and p10 step times."""
    shown = naming.settings(runs)
    words = [speed.throughput_in_words(shown)]
    rows = [[speed.throughput_panel(shown)]]
    return Sheet(rows, shown, _title(shown), _remarks(shown), words).figure()


def speedup(runs: Iterable[Run] | Run) -> Figure:
    """Draw speed-up and efficiency relative to one worker, for strong and for weak scaling."""
    shown = naming.settings(runs)
    words = [speed.speedup_in_words(shown) or speed.NO_BASELINE, speed.refusals(shown)]
    rows = [speed.scaling_panels(shown)]
    return Sheet(rows, shown, _title(shown), _remarks(shown), words).figure()


def table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    """Return a row per run: differing parameters, state, equivalence check, and key metrics.

    Raises:
        LabkitError: There are no runs.
    """
    all_runs = [runs] if isinstance(runs, Run) else list(runs)
    if not all_runs:
        raise LabkitError(naming.NO_RUNS)
    differing_rows = differences(all_runs)
    apart = [_rename_clashes(row) for row in differing_rows]
    rows = [
        row | {"state": _state(run), "equivalence": verdict(run)} | key_metrics(run)
        for run, row in zip(all_runs, apart, strict=True)
    ]
    # A dictionary, unlike a set, preserves the order of the experiment's fields.
    differing = dict.fromkeys(name for row in apart for name in row)
    every = dict.fromkeys((*KEY_METRICS, *(name for run in all_runs for name in logged_names(run))))
    measured = [name for name in every if any(name in row for row in rows)]
    index = pd.Index(naming.distinct_labels(all_runs, differing_rows), name="run")
    return ComparisonTable(
        rows, columns=[*differing, "state", "equivalence", *measured], index=index
    )


def _rename_clashes(row: dict[str, Value]) -> dict[str, Value]:
    """Rename parameters that are named like another column of the table."""
    # Parameters named `state` or `equivalence` are renamed, because the table has its own columns
    # of these names.
    return {f"{k} (parameter)" if k in ("state", "equivalence") else k: v for k, v in row.items()}


def show(figure: Figure) -> None:
    """Display a figure in a notebook; in a script, open it in a browser."""
    from labkit.figures.kit.canvas import CONFIG

    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    # Checking whether IPython is installed is not enough, because it may be installed although no
    # notebook is running.
    if get_ipython is not None and get_ipython() is not None:
        display(figure)
    else:
        figure.show(config=CONFIG)


def _learning(shown: Sequence[RunEntry]) -> Sheet:
    panels, remarks, words = learning_panels(shown)
    title = _title(shown, "Learning")
    return Sheet(panels, shown, title, [*_remarks(shown), *remarks], [words], plot=240)


def _speeds(shown: Sequence[RunEntry]) -> Sheet:
    """Return the sheet with throughput, speed-up and efficiency."""
    words = [speed.throughput_in_words(shown), speed.speedup_in_words(shown)]
    panels = [speed.throughput_panel(shown), *speed.scaling_panels(shown)]
    return Sheet([panels], shown, _title(shown, "Speed"), overload(shown), words)


def _title(shown: Sequence[RunEntry], what: str = "") -> str:
    count = sum(len(entry.members) for entry in shown)
    parts = (what, plural(count, "run"), clock_and_network(shown))
    return " · ".join(part for part in parts if part)


def _remarks(shown: Sequence[RunEntry]) -> list[str]:
    """Return remarks for the subtitle, for example about too few cores or runs without results."""
    empty = [entry for entry in shown if not entry.metrics]
    # For lack of room, the subtitle names at most two runs without results. The table lists all
    # runs, with or without results.
    lines = [f"{e.label}: no results ({e.run.status['state']})" for e in empty[:2]]
    more = [f"{len(empty) - 2} more without results"] if len(empty) > 2 else []
    single = [entry for entry in shown if entry.metrics and _is_one_step(entry)]
    traced = (
        [
            f"{plural(len(single), 'run')} of only one step, whose time includes "
            "TensorFlow's tracing of the step"
        ]
        if single
        else []
    )
    drawn = len(select_curves(shown))
    thinned = (
        [f"the panels show curves of {drawn} of {len(shown)} runs"] if drawn < len(shown) else []
    )
    return [*overload(shown), *thinned, *traced, *lines, *more]


def _is_one_step(entry: RunEntry) -> bool:
    """Whether the run has a single training step, whose time includes TensorFlow's tracing."""
    first, whole = (entry.metrics.get(name) for name in ("first_step_ms", "train_seconds"))
    return bool(first and whole and first / 1e3 >= whole * (1 - 1e-9))


def _state(run: Run) -> str:
    status = run.status
    cause = scrub(str(status.get("cause") or ""))
    return f"{status['state']}: {cause}" if cause else str(status["state"])
