"""How each run is called, coloured and dashed: the same in every panel, legend and table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, TypeAlias

from labkit.common.errors import LabkitError
from labkit.figures.kit.naming import names
from labkit.records.analysis.columns import Value, differences
from labkit.records.analysis.settings import Seeds, gathered
from labkit.records.run import Run, gate_failed

# Okabe and Ito (2008): told apart with any colour vision; without their black and yellow, which
# vanish on a dark or a light page. The seventh run starts over with another dash.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross")

INK = "#7a7a7a"  # text and lines that are legible on white and on black

MANY = 24  # above so many runs the report's picker and the table are the legend
OVERSUBSCRIBED = "* ranks \N{MULTIPLICATION SIGN} threads above cores"
NO_RUNS = (
    "no runs to compare: run a notebook first (labkit run notebooks/tour.ipynb), then give the "
    "folder in which its runs lie (usually runs/)"
)


# What every trace of one look carries: its name, its legend group, and whose it is.
Style: TypeAlias = dict[str, str | dict[str, str | list[str]]]


@dataclass(frozen=True)
class Entry:
    """One run in a figure; metrics are read once."""

    run: Run
    key: str
    label: str
    color: str
    dash: str
    symbol: str
    metrics: dict[str, Any]

    @property
    def members(self) -> tuple[Run, ...]:
        """The runs that it stands for: one, or those of its seeds."""
        return self.run.members if isinstance(self.run, Seeds) else (self.run,)

    @property
    def gate_failed(self) -> bool:
        """Whether no speed of this run may be drawn."""
        return gate_failed(self.run)

    @property
    def style(self) -> Style:
        """What every trace of the run carries: the legend's group and the report's handle."""
        return {"legendgroup": self.key, "meta": {"run": self.key}, "name": safe_text(self.label)}


@dataclass(frozen=True)
class Line:
    """How a name that is no run is coloured, dashed and marked: an algorithm, a network, a part."""

    label: str
    color: str
    dash: str
    symbol: str
    runs: tuple[str, ...] = ()  # keys of those that it stands for, so that it is chosen with them

    @property
    def style(self) -> Style:
        """What every trace of the line carries: a click on the legend hides them all."""
        style = {"legendgroup": self.label, "name": safe_text(self.label)}
        return style | ({"meta": {"runs": list(self.runs)}} if self.runs else {})


def lines(names: Iterable[str]) -> dict[str, Line]:
    """A line for each name, in order; neighbours differ in colour and in symbol."""
    return {
        name: Line(
            label=name,
            color=PALETTE[place % len(PALETTE)],
            dash=DASHES[place // len(PALETTE) % len(DASHES)],
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
        for place, name in enumerate(dict.fromkeys(names))
    }


def entries(runs: Iterable[Run] | Run) -> list[Entry]:
    """The runs with their labels and colours; raises LabkitError where there is none."""
    found = [runs] if isinstance(runs, Run) else list(runs)
    if not found:
        raise LabkitError(NO_RUNS)
    # What has no results is drawn nowhere, and takes nobody's colour.
    places = accumulate((bool(run.metrics) for run in found), initial=0)
    return [
        Entry(
            run=run,
            key=key(run),
            label=label,
            color=PALETTE[place % len(PALETTE)] if run.metrics else INK,
            dash=DASHES[place // len(PALETTE) % len(DASHES)],
            # Symbols change with the dashes, when colours come round again.
            symbol=SYMBOLS[place // len(PALETTE) % len(SYMBOLS)],
            metrics=run.metrics,
        )
        for place, run, label in zip(places, found, labels(found), strict=False)
    ]


def settings(runs: Iterable[Run] | Run) -> list[Entry]:
    """The same of settings: runs that differ in their seeds alone are one, with a band."""
    return entries(gathered([runs] if isinstance(runs, Run) else list(runs)))


def completed(runs: Iterable[Run] | Run) -> list[Entry]:
    """The same, of runs with results; raises LabkitError where one has none."""
    shown = entries(runs)
    missing = [entry.label for entry in shown if not entry.metrics]
    if missing:
        raise LabkitError(f"no results of {', '.join(missing)}: give completed runs")
    return shown


def key(run: Run) -> str:
    """What names the run in all figures, wherever its folder is moved: content and start."""
    # With the start: the same experiment may have been run twice.
    text = json.dumps([run.experiment, run.status.get("started")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def labels(runs: Sequence[Run]) -> list[str]:
    """One name a run, of the parameters in which the runs differ; the same twice gets a number."""
    return named(runs, differences(runs))


def named(runs: Sequence[Run], rows: Sequence[dict[str, Value]]) -> list[str]:
    """The same, where the differences are known; a star says that ranks had to share cores."""
    found = names(rows, [run.name for run in runs])
    stars = (" *" if run.metrics.get("oversubscribed") else "" for run in runs)
    return [f"{name}{star}" for name, star in zip(found, stars, strict=True)]


def safe_text(text: str) -> str:
    """Text for Plotly, which reads tags and links in what it draws."""
    return escape(text, quote=False)


def transparent(color: str, alpha: float) -> str:
    """`#0072B2` at an opacity, as CSS."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def clock_and_network(shown: Sequence[Entry]) -> str:
    """`wall clock · network 1GbE`: what every title with a time in it has to say."""
    known = [entry for entry in shown if entry.metrics] or shown
    clocks = sorted({str(entry.metrics.get("clock", "wall")) for entry in known})
    networks = sorted({str(entry.metrics.get("network") or "none") for entry in known})
    network = networks[0] if len(networks) == 1 else f"{', '.join(networks)} (by run)"
    words = "not emulated" if network == "none" else network
    return f"{' and '.join(clocks)} clock · network {words}"
