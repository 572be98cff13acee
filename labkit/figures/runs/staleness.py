"""Staleness of gradients: the order of pushes and updates, histograms, and both clocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
from labkit.figures.kit.marks import bars
from labkit.figures.kit.sheet import Panel, Trace, lanes_axis, sheet
from labkit.records.run import Run

LANE = 30  # pixels a lane
MOST = 60  # gradients in a window: with more, arrows are a fog
_SHADES = 5  # the last is as stale, or staler
# From fresh to stale: light to dark of one scale (cividis), told apart with any colour vision.
_COLORS = ("#E0B33C", "#A59C74", "#7C7B78", "#4C5A8C", "#00306F")
_DROPPED = "#D55E00"


def interleaving(run: Run, first: int = 0, last: int | None = None) -> Figure:
    """A lane a worker and a server, and an arrow from a push's departure to its application.

    Its colour is the staleness: how many updates the weights had had since those that the gradient
    is of. A dot marks the delivery, where the gradient had to wait for others, or for the server.

    Args:
        run: on servers, of one seed.
        first, last: gradients to draw, counted in the order in which servers took them; by default
            as many from the first on as are legible.

    Raises:
        LabkitError: the run has no interleaving. InvalidInput: it has no such gradients.
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
        traces=[_pushes(own, names, kind) for kind, own in window.groupby(_kinds(window))],
        x_axis={"range": [least - room, most + room]},
        y_axis=lanes_axis(order),
    )
    title = f"Interleaving, {len(workers)} workers · {clock_and_network(shown)}"
    legend = [_look(kind) for kind in sorted(set(_kinds(window)))]
    words = [f"{shown[0].label}: {_in_words(window)}"]
    figure = sheet([[panel]], legend, title, [], words, plot=LANE * len(order))
    figure.update_layout(margin={"l": 80})
    return figure


def staleness(runs: Iterable[Run] | Run) -> Figure:
    """How stale the gradients were when servers applied them: a histogram a run, all seeds.

    Raises: LabkitError: there are no runs, or one has no interleaving.
    """
    shown = entries(runs)
    found = {entry.key: staleness_of(entry.run) for entry in shown}
    tables = []
    for place, entry in enumerate(shown):
        share = found[entry.key].value_counts(normalize=True).sort_index()
        hover = [f"{value:.1%} of gradients are {at:g} updates old" for at, value in share.items()]
        # Side by side: bars of several runs stand on one integer.
        at = share.index.to_numpy(float) + 0.8 * ((place + 0.5) / len(shown) - 0.5)
        tables.append(pd.DataFrame({"run": entry.key, "at": at, "share": share, "hover": hover}))
    traces = bars(pd.concat(tables), "at", "share", {entry.key: entry for entry in shown})
    panel = Panel(
        title="Staleness of applied gradients",
        x="updates since the weights that a gradient is of",
        y="share of gradients",
        traces=[trace | {"width": 0.8 / len(shown)} for trace in traces],
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )
    words = [
        f"{e.label}: mean {found[e.key].mean():.3g}, at most {found[e.key].max():g}" for e in shown
    ]
    title = f"Staleness · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, [], words, plot=280)


def staleness_reading(runs: Iterable[Run] | Run | dict[str, Run]) -> Markdown:
    """How old gradients were, beside what equal workers would make them; what was reached, when.

    Args: runs: or what to call each, and the run.
    """
    shown = entries(runs.values() if isinstance(runs, dict) else runs)
    names = list(runs) if isinstance(runs, dict) else [entry.label for entry in shown]
    return sentences(_finding(entry, name) for entry, name in zip(shown, names, strict=True))


def _finding(entry: Entry, name: str) -> Finding:
    old, workers = staleness_of(entry.run), int(entry.run.experiment["workers"])
    reached = entry.metrics.get("test_accuracy")
    judged = (
        f"test accuracy {reached:.1%}"
        if reached is not None
        else (f"test loss {entry.metrics['test_loss']:.4g}")
    )
    spent = (
        "no time, as its gate failed"
        if entry.gate_failed
        else (
            f"{seconds_text(entry.metrics['train_seconds'])} of the {entry.metrics['clock']} clock"
        )
    )
    return Finding(
        f"**{name}**",
        said=(
            f"a gradient is {old.mean():.3g} updates old on average, {old.max():g} at most "
            f"({workers} equal workers at one server that never wait: {workers - 1})",
            f"{judged} in {spent}",
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
    """The staleness of each gradient that was applied."""
    events = pd.concat([_events(each) for each in run.seeds or [run]])
    return events.loc[events["update"] >= 0, "staleness"]


def _kinds(events: pd.DataFrame) -> pd.Series[int]:
    """A number a colour: the staleness, at most the last shade; -1 where a server dropped it."""
    shades = events["staleness"].clip(upper=_SHADES - 1).astype(int)
    return shades.where(events["update"] >= 0, -1)


def _look(kind: int) -> Line:
    if kind < 0:
        return Line("dropped, came too late", _DROPPED, "dot", "x")
    name = "or more " * (kind == _SHADES - 1)
    return Line(f"staleness {kind} {name}".strip(), _COLORS[kind], "solid", "triangle-down")


def _pushes(own: pd.DataFrame, names: dict[int, str], kind: int) -> Trace:
    """Arrows of one colour as one trace: departure, delivery, application, and a gap."""
    look, gap = _look(kind), [None] * len(own)
    workers = [f"worker {worker}" for worker in own["worker"]]
    servers = [names[server] for server in own["server"]]
    times = [1e3 * own[column] for column in ("sent", "delivered", "applied")]
    said = [
        f"worker {row.worker:g}, step {row.step:g}: {what}<br>staleness {row.staleness:g}, sent "
        f"{1e3 * row.sent:.3f}, delivered {1e3 * row.delivered:.3f}, "
        f"{'applied' if row.update >= 0 else 'dropped'} {1e3 * row.applied:.3f} ms"
        for row in own.itertuples()
        for what in (f"update {row.update:g}" if row.update >= 0 else "no update",)
    ]
    return {
        "x": _woven(*times, gap),
        "y": _woven(workers, servers, servers, gap),
        "mode": "lines+markers",
        "line": {"color": look.color, "dash": look.dash, "width": 1.5},
        "marker": {
            "color": look.color,
            "symbol": ["line-ns", "circle", look.symbol, "circle"] * len(own),
            "size": [0, 5, 10, 0] * len(own),
            "line": {"color": INK, "width": 0},
        },
        "text": _woven(said, said, said, gap),
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    } | look.style


def _woven(*columns: Sequence[object] | pd.Series[float]) -> list[object]:
    """The first of each, then the second of each …"""
    return [value for row in zip(*columns, strict=True) for value in row]


def _in_words(window: pd.DataFrame) -> str:
    done = window[window["update"] >= 0]
    waits = (done["applied"] - done["delivered"]).to_numpy(float)
    said = [
        f"{len(done)} gradients applied between {seconds_text(window['sent'].min())} and "
        f"{seconds_text(window['applied'].max())}",
        f"staleness {done['staleness'].mean():.3g} on average, {done['staleness'].max():g} at most",
        f"a gradient waits {seconds_text(float(np.mean(waits)))} at its server",
    ]
    late = len(window) - len(done)
    return ", ".join([*said, *([f"{late} dropped"] if late else [])])


_CLOCKS = {"wall": "on ranks", "virtual": "on the virtual clock"}
_ACROSS = 3  # panels side by side
_MOST = 0.95  # of all gradients are drawn: a rank that starts late has one that is very old


def staleness_by_clock(runs: Iterable[Run]) -> Figure:
    """A panel a strategy: the histogram of its gradients' staleness, on ranks and virtually.

    Args:
        runs: of each strategy one on ranks and one on the virtual clock.
    """
    shown = [entry.run for entry in entries(runs)]
    looks = lines(_CLOCKS.values())
    ways = dict.fromkeys(map(way_of, shown))
    panels = [_panel(way, [run for run in shown if way_of(run) == way], looks) for way in ways]
    workers = sorted({int(run.experiment["workers"]) for run in shown})
    title = f"Staleness on both clocks · {' or '.join(map(str, workers))} workers"
    words = [finding.sentence.rstrip(".") for finding in _findings(shown)]
    rows = [panels[place : place + _ACROSS] for place in range(0, len(panels), _ACROSS)]
    return sheet(rows, looks.values(), title, [], words)


def staleness_by_clock_reading(runs: Sequence[Run]) -> Markdown:
    """How old the gradients of each strategy were on ranks, and how old on the virtual clock."""
    return sentences(_findings(runs))


def _panel(way: str, runs: Sequence[Run], looks: dict[str, Line]) -> Panel:
    tables = []
    most = max(staleness_of(run).quantile(_MOST) for run in runs)
    for place, run in enumerate(sorted(runs, key=_clock)):
        share = _shares(run)
        at = share.index.to_numpy(float) + 0.4 * (place - 0.5)
        said = [f"{value:.1%} are {old:g} updates old" for old, value in share.items()]
        tables.append(pd.DataFrame({"run": _clock(run), "at": at, "share": share, "hover": said}))
    return Panel(
        title=safe_text(way),
        x="updates",
        y="share of gradients",
        traces=[each | {"width": 0.4} for each in bars(pd.concat(tables), "at", "share", looks)],
        x_axis={"range": [-0.6, most + 0.6]},
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )


def _findings(runs: Sequence[Run]) -> Iterator[Finding]:
    for way in dict.fromkeys(map(way_of, runs)):
        own = sorted((run for run in runs if way_of(run) == way), key=_clock)
        found = [(_clock(run), staleness_of(run)) for run in own]
        said = (
            f"{clock} a gradient is {old.mean():.3g} updates old on average, 19 of 20 at most "
            f"{old.quantile(_MOST, interpolation='higher'):g}"
            for clock, old in found
        )
        yield Finding(f"**{way}**", said=tuple(said))


def _shares(run: Run) -> pd.Series[float]:
    return staleness_of(run).value_counts(normalize=True).sort_index()


def _clock(run: Run) -> str:
    return _CLOCKS[str(run.experiment["clock"])]


PLAIN = "at α₀"


def correction_text(remedy: str | None) -> str:
    told = {
        "per_gradient": "at α₀/τ",
        "mean": "at α₀ over the mean",
        "momentum": "less momentum",
        "delay_compensated": "delay-compensated",
    }
    return told.get(str(remedy), PLAIN)


def way_of(run: Run) -> str:
    """`synchronous`; `stale synchronous, s = 2`; `softsync 4, at α₀/τ`."""
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
