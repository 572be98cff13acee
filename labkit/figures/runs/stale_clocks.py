"""How old gradients are on ranks, beside what the virtual clock says of the same strategies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from labkit.figures.kit.entries import Line, entries, lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import bars
from labkit.figures.kit.sheet import Panel, sheet
from labkit.figures.runs.interleaving import staleness_of
from labkit.figures.runs.stale import way_of
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

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
    import pandas as pd

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
