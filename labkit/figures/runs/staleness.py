"""Staleness of gradients: update log, histograms, and comparison of measurement and simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.units import seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    Finding,
    LineStyle,
    Markdown,
    RunEntry,
    clock_and_network,
    entries,
    lines,
    safe_text,
    sentences,
)
from labkit.figures.kit.marks import Looks, bars
from labkit.figures.kit.panels import Panel, Trace, lanes_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.run import Run

LANE = 30  # height of the lane of a worker or server in pixels
MOST = 60  # greatest number of gradients to draw; more arrows are indistinguishable
SHADES = 5  # number of colours; the last colour includes all higher staleness
# The colours go from light (fresh gradients) to dark (stale gradients). People with any colour
# vision can distinguish the colours of the colour map cividis.
COLORS = ("#E0B33C", "#A59C74", "#7C7B78", "#4C5A8C", "#00306F")
DROPPED = "#D55E00"
CLOCKS = {"wall": "on ranks", "virtual": "on the virtual clock"}
ACROSS = 3  # number of panels side by side
# share of gradients that the staleness axis covers. The staleness axis omits the highest values,
# which late starts of workers cause.
MOST_AGES = 0.95
PLAIN = "at α₀"  # label of softsync runs that do not correct the learning rate for staleness


def update_log(run: Run, first: int = 0, last: int | None = None) -> Figure:
    """Draw the update log: a lane per worker and parameter server, and an arrow per gradient.

    An arrow starts when a worker sends a gradient. The arrow ends when a server applies the
    gradient. The colour of an arrow shows the staleness of its gradient. Staleness is the number of
    updates since the worker fetched the weights. A dot marks the arrival of the gradient at its
    server. After the dot, the gradient waits for other gradients or for the server.

    Args:
        run: Run with parameter servers and one seed.
        first, last: Numbers of the first and last gradient to draw, in order of application. By
            default, the figure begins at gradient 0 and draws at most 60 gradients.

    Raises:
        LabkitError: The run has no update log.
        InvalidInput: The run has no gradients between `first` and `last`.
    """
    shown, events = entries(run), _events(run)
    last = min(first + MOST, len(events)) - 1 if last is None else last
    if not 0 <= first <= last < len(events):
        raise InvalidInput(
            f"first={first}, last={last}, but there are {len(events)} gradients; "
            f"give 0 <= first <= last <= {len(events) - 1}"
        )
    window = events.iloc[first : last + 1]
    servers = sorted(events["server"].unique())
    names = {number: f"server {place}" for place, number in enumerate(servers)}
    workers = [f"worker {worker}" for worker in sorted(events["worker"].unique())]
    order = [*workers, *names.values()]
    least, most = 1e3 * window["sent"].min(), 1e3 * window["applied"].max()
    room = 0.02 * (most - least)
    panel = Panel(
        title=f"Gradients {first} to {last} of {len(events)}\n↓ from push to application; "
        "• delivered to the server",
        x="time, ms",
        y="",
        traces=[
            _arrows(group, names, kind) for kind, group in window.groupby(_color_indices(window))
        ],
        x_axis={"range": [least - room, most + room]},
        y_axis=lanes_axis(order),
    )
    title = f"Update log, {len(workers)} workers · {clock_and_network(shown)}"
    legend = [_color_line(kind) for kind in sorted(set(_color_indices(window)))]
    words = [f"{shown[0].label}: {_window_text(window)}"]
    figure = sheet([[panel]], legend, title, [], words, plot=LANE * len(order))
    figure.update_layout(margin={"l": 80})
    return figure


def staleness(runs: Iterable[Run] | Run) -> Figure:
    """Draw a histogram per run of the staleness of its applied gradients, over all seeds.

    Raises:
        LabkitError: There are no runs, or a run has no update log.
    """
    shown = entries(runs)
    ages = {entry.key: staleness_of(entry.run) for entry in shown}
    panel = Panel(
        title="Staleness of applied gradients",
        x="staleness (updates since the weights were fetched)",
        y="share of gradients",
        traces=_histogram(ages, {entry.key: entry for entry in shown}, 0.8 / len(shown)),
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )
    words = [
        f"{e.label}: mean {ages[e.key].mean():.3g}, at most {ages[e.key].max():g}" for e in shown
    ]
    title = f"Staleness · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, [], words, plot=280)


def _histogram(ages: Mapping[str, pd.Series[float]], looks: Looks, width: float) -> list[Trace]:
    """Return bars with the share of gradients by staleness, side by side for several runs."""
    tables = []
    for place, (name, values) in enumerate(ages.items()):
        share = values.value_counts(normalize=True).sort_index()
        at = share.index.to_numpy(float) + width * (place - (len(ages) - 1) / 2)
        hover = [f"{part:.1%} of gradients have staleness {age:g}" for age, part in share.items()]
        tables.append(pd.DataFrame({"run": name, "at": at, "share": share, "hover": hover}))
    return [bar | {"width": width} for bar in bars(pd.concat(tables), "at", "share", looks)]


def summarize_staleness(runs: Iterable[Run] | Run | dict[str, Run]) -> Markdown:
    """Summarize each run's staleness and result, compared with theory for equally fast workers.

    Args:
        runs: Runs, or a dictionary of runs by name.
    """
    shown = entries(runs.values() if isinstance(runs, dict) else runs)
    names = list(runs) if isinstance(runs, dict) else [entry.label for entry in shown]
    return sentences(_finding(entry, name) for entry, name in zip(shown, names, strict=True))


def _finding(entry: RunEntry, name: str) -> Finding:
    ages, workers = staleness_of(entry.run), int(entry.run.experiment["workers"])
    metrics = entry.metrics
    accuracy = metrics.get("test_accuracy")
    has_accuracy = accuracy is not None
    result = (
        f"test accuracy {accuracy:.1%}" if has_accuracy else f"test loss {metrics['test_loss']:.4g}"
    )
    spent = "unknown time, because the equivalence check failed"
    if not entry.equivalence_failed:
        spent = f"{seconds_text(metrics['train_seconds'])} of the {metrics['clock']} clock"
    return Finding(
        f"**{name}**",
        details=(
            f"staleness {ages.mean():.3g} updates on average, {ages.max():g} at most "
            f"({workers} equally fast workers that never wait have {workers - 1})",
            f"{result} in {spent}",
        ),
    )


def _events(run: Run) -> pd.DataFrame:
    events = run.update_log
    if events.empty:
        where = "; give the run of a single seed, which has an update log" if run.seeds else ""
        raise LabkitError(
            f"{run.name} has no update log (state: {run.status['state']}); completed runs with "
            f"ParameterServer have one{where}"
        )
    return events.sort_values(["applied", "server", "update"], kind="stable", ignore_index=True)


def staleness_of(run: Run) -> pd.Series[float]:
    """Return the staleness, in updates, of each applied gradient of all seeds."""
    events = pd.concat([_events(seed_run) for seed_run in run.seeds or [run]])
    return events.loc[events["update"] >= 0, "staleness"]


def _color_indices(events: pd.DataFrame) -> pd.Series[int]:
    """Return each gradient's colour index: staleness, at most `SHADES` - 1, or -1 if dropped."""
    shades = events["staleness"].clip(upper=SHADES - 1).astype(int)
    return shades.where(events["update"] >= 0, -1)


def _color_line(kind: int) -> LineStyle:
    if kind < 0:
        return LineStyle("dropped, because it arrived too late", DROPPED, "dot", "x")
    name = "or more " * (kind == SHADES - 1)
    return LineStyle(f"staleness {kind} {name}".strip(), COLORS[kind], "solid", "triangle-down")


def _arrows(group: pd.DataFrame, names: dict[int, str], kind: int) -> Trace:
    """Return all arrows of one colour as a single Plotly trace."""
    look, gap = _color_line(kind), [None] * len(group)
    workers = [f"worker {worker}" for worker in group["worker"]]
    servers = [names[server] for server in group["server"]]
    times = [1e3 * group[column] for column in ("sent", "delivered", "applied")]
    hover = [
        f"worker {row.worker:g}, step {row.step:g}: {what}<br>staleness {row.staleness:g}, sent "
        f"{1e3 * row.sent:.3f}, delivered {1e3 * row.delivered:.3f}, "
        f"{'applied' if row.update >= 0 else 'dropped'} {1e3 * row.applied:.3f} ms"
        for row in group.itertuples()
        for what in (f"update {row.update:g}" if row.update >= 0 else "no update",)
    ]
    return {
        "x": _interleave(*times, gap),
        "y": _interleave(workers, servers, servers, gap),
        "mode": "lines+markers",
        "line": {"color": look.color, "dash": look.dash, "width": 1.5},
        "marker": {
            "color": look.color,
            "symbol": ["line-ns", "circle", look.symbol, "circle"] * len(group),
            "size": [0, 5, 10, 0] * len(group),
            "line": {"color": INK, "width": 0},
        },
        "text": _interleave(hover, hover, hover, gap),
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    } | look.style


def _interleave(*columns: Sequence[object] | pd.Series[float]) -> list[object]:
    """Return the first values of all columns, then the second values of all columns, and so on."""
    return [value for row in zip(*columns, strict=True) for value in row]


def _window_text(window: pd.DataFrame) -> str:
    applied = window[window["update"] >= 0]
    waits = (applied["applied"] - applied["delivered"]).to_numpy(float)
    texts = [
        f"{len(applied)} gradients applied between {seconds_text(window['sent'].min())} and "
        f"{seconds_text(window['applied'].max())}",
        f"staleness {applied['staleness'].mean():.3g} on average, "
        f"{applied['staleness'].max():g} at most",
        f"a gradient waits {seconds_text(float(np.mean(waits)))} at its server on average",
    ]
    late = len(window) - len(applied)
    return ", ".join([*texts, *([f"{late} dropped"] if late else [])])


def staleness_by_clock(runs: Iterable[Run]) -> Figure:
    """Draw histograms of measured and of simulated staleness of gradients, one panel per strategy.

    Args:
        runs: For each strategy, one measured run (wall clock) and one simulated run (virtual
            clock).
    """
    shown = [entry.run for entry in entries(runs)]
    looks = lines(CLOCKS.values())
    panels = [_clock_panel(way, ages, looks) for way, ages in _ages_by_way(shown).items()]
    workers = sorted({int(run.experiment["workers"]) for run in shown})
    title = f"Staleness on both clocks · {' or '.join(map(str, workers))} workers"
    words = [finding.sentence.rstrip(".") for finding in _clock_findings(shown)]
    rows = [panels[place : place + ACROSS] for place in range(0, len(panels), ACROSS)]
    return sheet(rows, looks.values(), title, [], words)


def summarize_staleness_by_clock(runs: Sequence[Run]) -> Markdown:
    """Summarize the measured and the simulated (virtual clock) staleness of each strategy."""
    return sentences(_clock_findings(runs))


def _ages_by_way(runs: Sequence[Run]) -> dict[str, dict[str, pd.Series[float]]]:
    """Return the staleness of all gradients, by strategy and by clock."""
    ages: dict[str, dict[str, pd.Series[float]]] = {way_of(run): {} for run in runs}
    for run in sorted(runs, key=lambda run: CLOCKS[str(run.experiment["clock"])]):
        ages[way_of(run)][CLOCKS[str(run.experiment["clock"])]] = staleness_of(run)
    return ages


def _clock_panel(way: str, ages: dict[str, pd.Series[float]], looks: Looks) -> Panel:
    return Panel(
        title=safe_text(way),
        x="staleness, updates",
        y="share of gradients",
        traces=_histogram(ages, looks, 0.4),
        x_axis={"range": [-0.6, max(age.quantile(MOST_AGES) for age in ages.values()) + 0.6]},
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )


def _clock_findings(runs: Sequence[Run]) -> Iterator[Finding]:
    for way, ages in _ages_by_way(runs).items():
        details = (
            f"{clock}: staleness {age.mean():.3g} updates on average, at most "
            f"{age.quantile(MOST_AGES, interpolation='higher'):g} for 19 of 20 gradients"
            for clock, age in ages.items()
        )
        yield Finding(f"**{way}**", details=tuple(details))


def correction_text(remedy: str | None) -> str:
    """Return the label of a staleness correction in figures, such as `at α₀/τ`."""
    texts = {
        "per_gradient": "at α₀/τ",
        "mean": "at α₀ / mean staleness",
        "momentum": "reduced momentum",
        "delay_compensated": "delay-compensated",
    }
    return texts.get(str(remedy), PLAIN)


def way_of(run: Run) -> str:
    """Return the label of a strategy, such as `softsync 4, at α₀/τ`."""
    strategy = run.experiment["strategy"]
    name, correction = str(strategy["name"]), strategy.get("staleness_correction")
    suffix = f", {correction_text(correction)}" if correction else ""
    if name == "StaleSynchronous":
        return f"stale synchronous, s = {strategy['staleness']}{suffix}"
    if name == "SoftSync":
        return f"softsync {strategy['n']}{suffix}"
    if name == "Downpour":
        return f"downpour, every {strategy['fetch_every']}"
    if name == "ParameterServer":
        return "synchronous" if strategy["synchronous"] else "asynchronous"
    return safe_text(name)
