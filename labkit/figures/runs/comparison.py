"""Comparison of runs: learning curves and speeds on one canvas, and a table of all runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.common.units import bytes_text, number_text, plural
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry, clock_and_network
from labkit.figures.kit.sheet import Sheet, overload
from labkit.figures.runs import speed
from labkit.figures.runs.learning import learning_panels, select_curves
from labkit.records.analysis.columns import Value, differences
from labkit.records.run import KEY_METRICS, Run, key_metrics, logged, verdict

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure


class Table(pd.DataFrame):
    """A DataFrame that a notebook shows as people read it; its values stay what they are.

    Numbers have four digits, whole ones from a thousand on; columns whose names have the word
    bytes have units. Selections and results of it are such tables, too.
    """

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def _repr_html_(self) -> str | None:
        # By its values: a column of mixed things holds numbers, too.
        texts = [self.iloc[:, place].map(_reader(name)) for place, name in enumerate(self.columns)]
        plain = pd.DataFrame(dict(enumerate(texts)), index=self.index)
        html: str | None = plain.set_axis(self.columns, axis=1)._repr_html_()
        return html


def format_table(table: pd.DataFrame) -> Table:
    """Return the table with a readable display: four digits, bytes in units."""
    return Table(table)


def _reader(column: Any) -> Any:
    """Return the function that formats the cells of a column."""
    of_bytes = "bytes" in re.split("[^a-z]", str(column))

    def read(value: Any) -> Any:
        if pd.api.types.is_bool(value) or not pd.api.types.is_number(value):
            return value
        if pd.isna(value):
            return ""
        if of_bytes:
            return bytes_text(value)
        return number_text(value) if pd.api.types.is_float(value) else f"{value:,}"

    return read


def compare(runs: Iterable[Run] | Run) -> Figure:
    """Draw loss and test results over steps, seconds or bytes; samples/s, speed-up and efficiency.

    The legend names what tells the runs apart; seeds of one setting are a line with a band. A run
    whose equivalence gate failed has no speed. `figure.alt` has the figure in words. Related
    figures: `labkit.figures.pareto`, `parallel_coordinates`, `heat_map`, `scatter`.

    Raises: LabkitError where there are no runs.
    """
    shown = naming.settings(runs)
    learning, speeds = _learning(shown), _speeds(shown)
    rows = [*learning.rows, *speeds.rows]
    words = [*learning.words, *speeds.words]
    return Sheet(rows, shown, _title(shown), learning.remarks, words).figure()


def sheets(shown: Sequence[Entry]) -> list[Sheet]:
    """Return the sheets of `compare`: learning, speeds."""
    return [_learning(shown), _speeds(shown)]


def curves(runs: Iterable[Run] | Run) -> Figure:
    """Draw loss and test results over steps, seconds of training, or bytes on the wire."""
    return _learning(naming.settings(runs)).figure()


def throughput(runs: Iterable[Run] | Run) -> Figure:
    """Draw samples a second of each run, with whiskers from slow to fast steps."""
    shown = naming.settings(runs)
    words = [speed.throughput_in_words(shown)]
    rows = [[speed.throughput_panel(shown)]]
    return Sheet(rows, shown, _title(shown), _remarks(shown), words).figure()


def speedup(runs: Iterable[Run] | Run) -> Figure:
    """Draw speed-up and efficiency against runs with workers=1, strong and weak."""
    shown = naming.settings(runs)
    words = [speed.speedup_in_words(shown) or speed.NO_BASELINE, speed.refusals(shown)]
    rows = [speed.scaling_panels(shown)]
    return Sheet(rows, shown, _title(shown), _remarks(shown), words).figure()


def table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    """Return a row a run: the differing parameters, state, gate verdict and key metrics.

    Raises: LabkitError where there are no runs.
    """
    all_runs = [runs] if isinstance(runs, Run) else list(runs)
    if not all_runs:
        raise LabkitError(naming.NO_RUNS)
    differing_rows = differences(all_runs)
    apart = [_apart(row) for row in differing_rows]
    rows = [
        row | {"state": _state(run), "gate": verdict(run)} | key_metrics(run)
        for run, row in zip(all_runs, apart, strict=True)
    ]
    # A dict, for its order: parameters stand as the experiment has them.
    differing = dict.fromkeys(name for row in apart for name in row)
    every = dict.fromkeys((*KEY_METRICS, *(name for run in all_runs for name in logged(run))))
    measured = [name for name in every if any(name in row for row in rows)]
    index = pd.Index(naming.distinct_labels(all_runs, differing_rows), name="run")
    return Table(rows, columns=[*differing, "state", "gate", *measured], index=index)


def _apart(row: dict[str, Value]) -> dict[str, Value]:
    """Rename parameters that have the name of another column."""
    # A strategy or a model may call a field of its own like that.
    return {f"{k} (asked)" if k in ("state", "gate") else k: v for k, v in row.items()}


def show(figure: Figure) -> None:
    """Display a figure in a notebook, or in a browser from a script; nothing offers a cloud."""
    from labkit.figures.kit.canvas import CONFIG

    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    # IPython may be installed where no notebook runs.
    if get_ipython is not None and get_ipython() is not None:
        display(figure)
    else:
        figure.show(config=CONFIG)


def _learning(shown: Sequence[Entry]) -> Sheet:
    panels, remarks, words = learning_panels(shown)
    title = _title(shown, "Learning")
    return Sheet(panels, shown, title, [*_remarks(shown), *remarks], [words], plot=240)


def _speeds(shown: Sequence[Entry]) -> Sheet:
    """Return the sheet of throughput, speed-up and efficiency."""
    words = [speed.throughput_in_words(shown), speed.speedup_in_words(shown)]
    panels = [speed.throughput_panel(shown), *speed.scaling_panels(shown)]
    return Sheet([panels], shown, _title(shown, "Speed"), overload(shown), words)


def _title(shown: Sequence[Entry], what: str = "") -> str:
    count = sum(len(entry.members) for entry in shown)
    parts = (what, plural(count, "run"), clock_and_network(shown))
    return " · ".join(part for part in parts if part)


def _remarks(shown: Sequence[Entry]) -> list[str]:
    """Return remarks on all panels: too few cores, runs without results."""
    empty = [entry for entry in shown if not entry.metrics]
    # Two by name: more would fill the line, and the table has all.
    lines = [f"{e.label}: no results ({e.run.status['state']})" for e in empty[:2]]
    more = [f"{len(empty) - 2} more without results"] if len(empty) > 2 else []
    single = [entry for entry in shown if entry.metrics and _is_one_step(entry)]
    traced = [f"{len(single)} of one step: their speed is that of tracing it"] if single else []
    drawn = len(select_curves(shown))
    thinned = [f"curves of {drawn}, results of all"] if drawn < len(shown) else []
    return [*overload(shown), *thinned, *traced, *lines, *more]


def _is_one_step(entry: Entry) -> bool:
    """Whether nothing came after the step in which TensorFlow traces."""
    first, whole = (entry.metrics.get(name) for name in ("first_step_ms", "train_seconds"))
    return bool(first and whole and first / 1e3 >= whole * (1 - 1e-9))


def _state(run: Run) -> str:
    status = run.status
    cause = scrub(str(status.get("cause") or ""))
    return f"{status['state']}: {cause}" if cause else str(status["state"])
