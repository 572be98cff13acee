"""The public figures and the table: panels from learning and speed, laid out on one canvas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.common.units import plural
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry, clock_and_network
from labkit.figures.kit.sheet import Sheet, busy
from labkit.figures.runs import speed
from labkit.figures.runs.learning import chosen, learning_panels
from labkit.records.analysis.columns import Value, differences
from labkit.records.run import KEY_METRICS, Run, key_metrics, logged, verdict

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure


def compare(runs: Iterable[Run] | Run) -> Figure:
    """Loss and test results over steps, seconds or bytes; samples/s, speed-up and efficiency.

    The legend names what tells the runs apart; seeds of one setting are a line with a band. A run
    whose equivalence gate failed has no speed. `figure.alt` says it in words. What it does not
    show: `labkit.figures.pareto`, `parallel_coordinates`, `heat_map`, `scatter`.

    Raises: LabkitError where there are no runs.
    """
    shown = naming.settings(runs)
    learning, speeds = _learning(shown), _speeds(shown)
    rows = [*learning.rows, *speeds.rows]
    words = [*learning.words, *speeds.words]
    return Sheet(rows, shown, _title(shown), learning.remarks, words).figure()


def sheets(shown: Sequence[Entry]) -> list[Sheet]:
    """What `compare` shows, as two sheets: learning, speeds."""
    return [_learning(shown), _speeds(shown)]


def curves(runs: Iterable[Run] | Run) -> Figure:
    """Loss and test results of runs, over steps, seconds of training or bytes on the wire."""
    return _learning(naming.settings(runs)).figure()


def throughput(runs: Iterable[Run] | Run) -> Figure:
    """Samples a second of each run, with the speeds of its slow and fast steps as whisker."""
    shown = naming.settings(runs)
    words = [speed.throughput_in_words(shown)]
    rows = [[speed.throughput_panel(shown)]]
    return Sheet(rows, shown, _title(shown), _remarks(shown), words).figure()


def speedup(runs: Iterable[Run] | Run) -> Figure:
    """Speed-up and efficiency of runs against those with workers=1, strong and weak."""
    shown = naming.settings(runs)
    words = [speed.speedup_in_words(shown) or speed.NO_BASELINE, speed.refusals(shown)]
    rows = [speed.scaling_panels(shown)]
    return Sheet(rows, shown, _title(shown), _remarks(shown), words).figure()


def table(runs: Iterable[Run] | Run) -> pandas.DataFrame:
    """One row a run: the differing parameters, state, the gate's verdict, key metrics.

    Raises: LabkitError where there are no runs.
    """
    import pandas as pd

    from labkit.figures.kit.readable import Table

    found = [runs] if isinstance(runs, Run) else list(runs)
    if not found:
        raise LabkitError(naming.NO_RUNS)
    differing_rows = differences(found)
    apart = [_apart(row) for row in differing_rows]
    rows = [
        row | {"state": _state(run), "gate": verdict(run)} | key_metrics(run)
        for run, row in zip(found, apart, strict=True)
    ]
    # A dict, for its order: parameters stand as the experiment has them.
    differing = dict.fromkeys(name for row in apart for name in row)
    every = dict.fromkeys((*KEY_METRICS, *(name for run in found for name in logged(run))))
    measured = [name for name in every if any(name in row for row in rows)]
    index = pd.Index(naming.named(found, differing_rows), name="run")
    return Table(rows, columns=[*differing, "state", "gate", *measured], index=index)


def _apart(row: dict[str, Value]) -> dict[str, Value]:
    """Parameters whose names are those of other columns, under names of their own."""
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
    """Throughput, speed-up and efficiency beside each other, and what they say."""
    words = [speed.throughput_in_words(shown), speed.speedup_in_words(shown)]
    panels = [speed.throughput_panel(shown), *speed.scaling_panels(shown)]
    return Sheet([panels], shown, _title(shown, "Speed"), busy(shown), words)


def _title(shown: Sequence[Entry], what: str = "") -> str:
    count = sum(len(entry.members) for entry in shown)
    parts = (what, plural(count, "run"), clock_and_network(shown))
    return " · ".join(part for part in parts if part)


def _remarks(shown: Sequence[Entry]) -> list[str]:
    """What a reader must know of all panels: too few cores, runs without results."""
    empty = [entry for entry in shown if not entry.metrics]
    # Two by name: more would fill the line, and the table has all.
    lines = [f"{e.label}: no results ({e.run.status['state']})" for e in empty[:2]]
    more = [f"{len(empty) - 2} more without results"] if len(empty) > 2 else []
    single = [entry for entry in shown if entry.metrics and _is_one_step(entry)]
    traced = [f"{len(single)} of one step: their speed is that of tracing it"] if single else []
    drawn = len(chosen(shown))
    thinned = [f"curves of {drawn}, results of all"] if drawn < len(shown) else []
    return [*busy(shown), *thinned, *traced, *lines, *more]


def _is_one_step(entry: Entry) -> bool:
    """Whether nothing came after the step in which TensorFlow traces."""
    first, whole = (entry.metrics.get(name) for name in ("first_step_ms", "train_seconds"))
    return bool(first and whole and first / 1e3 >= whole * (1 - 1e-9))


def _state(run: Run) -> str:
    status = run.status
    cause = scrub(str(status.get("cause") or ""))
    return f"{status['state']}: {cause}" if cause else str(status["state"])
