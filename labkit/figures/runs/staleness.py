"""Staleness of gradients: the order of pushes and updates, histograms, and both clocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.units import seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    Entry,
    Line,
    clock_and_network,
    entries,
    lines,
    safe_text,
)
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import Looks, bars
from labkit.figures.kit.panels import Panel, Trace, lanes_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.run import Run

LANE = 30  # pixels a lane
MOST = 60  # gradients in a window; more arrows cannot be told apart
SHADES = 5  # the last one is for this staleness and all higher ones
# From fresh to stale: light to dark of one scale (cividis), told apart with any colour vision.
COLORS = ("#E0B33C", "#A59C74", "#7C7B78", "#4C5A8C", "#00306F")
DROPPED = "#D55E00"
CLOCKS = {"wall": "on ranks", "virtual": "on the virtual clock"}
ACROSS = 3  # panels side by side
MOST_AGES = 0.95  # share of gradients that is drawn; a rank that starts late has a very old one
PLAIN = "at α₀"


def interleaving(run: Run, first: int = 0, last: int | None = None) -> Figure:
    """Draw a lane a worker and a server, and an arrow from each push to its application.

    The colour of an arrow is the staleness of its gradient: the number of updates since the weights
    of the gradient. A dot marks the delivery, where the gradient waited for others or the server.

    Args:
        run: on servers, of one seed.
        first, last: gradients to draw, in the order of their application; the default is the
            largest legible number from the first one on.

    Raises:
        LabkitError: the run has no log of updates. InvalidInput: it has no such gradients.
    """
    shown, events = entries(run), _events(run)
    last = min(first + MOST, len(events)) - 1 if last is None else last
    if not 0 <= first <= last < len(events):
        raise InvalidInput(
            f"first={first}, last={last} of {len(events)} gradients; give 0 <= first <= last <= "
            f"{len(events) - 1}"
        )
    window = events.iloc[first : last + 1]
    servers = sorted(events["server"].unique())
    names = {number: f"server {place}" for place, number in enumerate(servers)}
    workers = [f"worker {worker}" for worker in sorted(events["worker"].unique())]
    order = [*workers, *names.values()]
    least, most = 1e3 * window["sent"].min(), 1e3 * window["applied"].max()
    room = 0.02 * (most - least)
    panel = Panel(
        title=f"Gradients {first} to {last} of {len(events)}\n↓ from departure to application; "
        "• delivered",
        x="time, ms",
        y="",
        traces=[_arrows(group, names, kind) for kind, group in window.groupby(_shades(window))],
        x_axis={"range": [least - room, most + room]},
        y_axis=lanes_axis(order),
    )
    title = f"Interleaving, {len(workers)} workers · {clock_and_network(shown)}"
    legend = [_shade_line(kind) for kind in sorted(set(_shades(window)))]
    words = [f"{shown[0].label}: {_window_text(window)}"]
    figure = sheet([[panel]], legend, title, [], words, plot=LANE * len(order))
    figure.update_layout(margin={"l": 80})
    return figure


def staleness(runs: Iterable[Run] | Run) -> Figure:
    """Draw the staleness of applied gradients of all seeds, a histogram a run.

    Raises: LabkitError: there are no runs, or one has no interleaving.
    """
    shown = entries(runs)
    ages = {entry.key: staleness_of(entry.run) for entry in shown}
    panel = Panel(
        title="Staleness of applied gradients",
        x="updates since the weights that a gradient is of",
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
    """Return the share of gradients of each age as bars, those of several names side by side."""
    tables = []
    for place, (name, values) in enumerate(ages.items()):
        share = values.value_counts(normalize=True).sort_index()
        at = share.index.to_numpy(float) + width * (place - (len(ages) - 1) / 2)
        hover = [f"{part:.1%} of gradients are {age:g} updates old" for age, part in share.items()]
        tables.append(pd.DataFrame({"run": name, "at": at, "share": share, "hover": hover}))
    return [bar | {"width": width} for bar in bars(pd.concat(tables), "at", "share", looks)]


def staleness_reading(runs: Iterable[Run] | Run | dict[str, Run]) -> Markdown:
    """Say how stale gradients were, beside those of equal workers, and what the run reached.

    Args:
        runs: runs, or runs by their names.
    """
    shown = entries(runs.values() if isinstance(runs, dict) else runs)
    names = list(runs) if isinstance(runs, dict) else [entry.label for entry in shown]
    return sentences(_finding(entry, name) for entry, name in zip(shown, names, strict=True))


def _finding(entry: Entry, name: str) -> Finding:
    ages, workers = staleness_of(entry.run), int(entry.run.experiment["workers"])
    metrics = entry.metrics
    accuracy = metrics.get("test_accuracy")
    has_accuracy = accuracy is not None
    result = (
        f"test accuracy {accuracy:.1%}" if has_accuracy else f"test loss {metrics['test_loss']:.4g}"
    )
    spent = "no time, as its gate failed"
    if not entry.gate_failed:
        spent = f"{seconds_text(metrics['train_seconds'])} of the {metrics['clock']} clock"
    return Finding(
        f"**{name}**",
        details=(
            f"a gradient is {ages.mean():.3g} updates old on average, {ages.max():g} at most "
            f"({workers} equal workers at one server that never wait: {workers - 1})",
            f"{result} in {spent}",
        ),
    )


def _events(run: Run) -> pd.DataFrame:
    events = run.interleaving
    if events.empty:
        where = "; its seeds have one each" if run.seeds else ""
        raise LabkitError(
            f"{run.name} has no interleaving (state: {run.status['state']}); a completed run on "
            f"ParameterServer has one{where}"
        )
    return events.sort_values(["applied", "server", "update"], kind="stable", ignore_index=True)


def staleness_of(run: Run) -> pd.Series[float]:
    """Return the staleness of each applied gradient, of all seeds."""
    events = pd.concat([_events(each) for each in run.seeds or [run]])
    return events.loc[events["update"] >= 0, "staleness"]


def _shades(events: pd.DataFrame) -> pd.Series[int]:
    """Return the shade of each event: the staleness, at most the last shade; -1 if dropped."""
    shades = events["staleness"].clip(upper=SHADES - 1).astype(int)
    return shades.where(events["update"] >= 0, -1)


def _shade_line(kind: int) -> Line:
    if kind < 0:
        return Line("dropped, came too late", DROPPED, "dot", "x")
    name = "or more " * (kind == SHADES - 1)
    return Line(f"staleness {kind} {name}".strip(), COLORS[kind], "solid", "triangle-down")


def _arrows(group: pd.DataFrame, names: dict[int, str], kind: int) -> Trace:
    """Return arrows of one colour as one trace: departure, delivery, application, and a gap."""
    look, gap = _shade_line(kind), [None] * len(group)
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
        "x": _interleaved(*times, gap),
        "y": _interleaved(workers, servers, servers, gap),
        "mode": "lines+markers",
        "line": {"color": look.color, "dash": look.dash, "width": 1.5},
        "marker": {
            "color": look.color,
            "symbol": ["line-ns", "circle", look.symbol, "circle"] * len(group),
            "size": [0, 5, 10, 0] * len(group),
            "line": {"color": INK, "width": 0},
        },
        "text": _interleaved(hover, hover, hover, gap),
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    } | look.style


def _interleaved(*columns: Sequence[object] | pd.Series[float]) -> list[object]:
    """Return the first of each column, then the second of each, and so on."""
    return [value for row in zip(*columns, strict=True) for value in row]


def _window_text(window: pd.DataFrame) -> str:
    done = window[window["update"] >= 0]
    waits = (done["applied"] - done["delivered"]).to_numpy(float)
    texts = [
        f"{len(done)} gradients applied between {seconds_text(window['sent'].min())} and "
        f"{seconds_text(window['applied'].max())}",
        f"staleness {done['staleness'].mean():.3g} on average, {done['staleness'].max():g} at most",
        f"a gradient waits {seconds_text(float(np.mean(waits)))} at its server",
    ]
    late = len(window) - len(done)
    return ", ".join([*texts, *([f"{late} dropped"] if late else [])])


def staleness_by_clock(runs: Iterable[Run]) -> Figure:
    """Draw the staleness of gradients on ranks and on the virtual clock, a panel a strategy.

    Args:
        runs: of each strategy one on ranks and one on the virtual clock.
    """
    shown = [entry.run for entry in entries(runs)]
    looks = lines(CLOCKS.values())
    panels = [_clock_panel(way, ages, looks) for way, ages in _ages_by_way(shown).items()]
    workers = sorted({int(run.experiment["workers"]) for run in shown})
    title = f"Staleness on both clocks · {' or '.join(map(str, workers))} workers"
    words = [finding.sentence.rstrip(".") for finding in _clock_findings(shown)]
    rows = [panels[place : place + ACROSS] for place in range(0, len(panels), ACROSS)]
    return sheet(rows, looks.values(), title, [], words)


def staleness_by_clock_reading(runs: Sequence[Run]) -> Markdown:
    """Say how old the gradients of each strategy were on ranks, and on the virtual clock."""
    return sentences(_clock_findings(runs))


def _ages_by_way(runs: Sequence[Run]) -> dict[str, dict[str, pd.Series[float]]]:
    """Return the ages of gradients by strategy and clock."""
    ages: dict[str, dict[str, pd.Series[float]]] = {way_of(run): {} for run in runs}
    for run in sorted(runs, key=lambda run: CLOCKS[str(run.experiment["clock"])]):
        ages[way_of(run)][CLOCKS[str(run.experiment["clock"])]] = staleness_of(run)
    return ages


def _clock_panel(way: str, ages: dict[str, pd.Series[float]], looks: Looks) -> Panel:
    return Panel(
        title=safe_text(way),
        x="updates",
        y="share of gradients",
        traces=_histogram(ages, looks, 0.4),
        x_axis={"range": [-0.6, max(each.quantile(MOST_AGES) for each in ages.values()) + 0.6]},
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )


def _clock_findings(runs: Sequence[Run]) -> Iterator[Finding]:
    for way, ages in _ages_by_way(runs).items():
        details = (
            f"{clock} a gradient is {age.mean():.3g} updates old on average, 19 of 20 at most "
            f"{age.quantile(MOST_AGES, interpolation='higher'):g}"
            for clock, age in ages.items()
        )
        yield Finding(f"**{way}**", details=tuple(details))


def correction_text(remedy: str | None) -> str:
    """Return the words for a staleness correction in figures."""
    texts = {
        "per_gradient": "at α₀/τ",
        "mean": "at α₀ over the mean",
        "momentum": "less momentum",
        "delay_compensated": "delay-compensated",
    }
    return texts.get(str(remedy), PLAIN)


def way_of(run: Run) -> str:
    """Return `synchronous`, `stale synchronous, s = 2` or `softsync 4, at α₀/τ`."""
    strategy = run.experiment["strategy"]
    name, remedy = str(strategy["name"]), strategy.get("remedy")
    mended = f", {correction_text(remedy)}" if remedy else ""
    if name == "StaleSynchronous":
        return f"stale synchronous, s = {strategy['staleness']}{mended}"
    if name == "SoftSync":
        return f"softsync {strategy['splits']}{mended}"
    if name == "Downpour":
        return f"downpour, every {strategy['fetch_every']}"
    if name == "ParameterServer":
        return "synchronous" if strategy["synchronous"] else "asynchronous"
    return safe_text(name)
