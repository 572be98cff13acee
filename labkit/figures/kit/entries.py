"""How each run is called, coloured and dashed: the same in every panel, legend and table."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.figures.kit.axes import Value
from labkit.records.compressors import called
from labkit.records.run import Run, flatten, gate_failed

# Okabe and Ito (2008): told apart with any colour vision; without their black and yellow, which
# vanish on a dark or a light page. The seventh run starts over with another dash.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross")

INK = "#7a7a7a"  # text and lines that are legible on white and on black

MANY = 24  # above so many runs the report's picker and the table are the legend
LONGEST_LABEL = 80
OVERSUBSCRIBED = "* ranks \N{MULTIPLICATION SIGN} threads above cores"
NO_RUNS = (
    "no runs to compare: run a notebook first (labkit run notebooks/tour.ipynb), then give the "
    "folder in which its runs lie (usually runs/)"
)
_LONG = ("source", "sha256")  # of a user's own callable or arrays: its name stands for them


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
    return [
        Entry(
            run=run,
            key=key(run),
            label=label,
            color=PALETTE[place % len(PALETTE)],
            dash=DASHES[place // len(PALETTE) % len(DASHES)],
            # Symbols change with the dashes, when colours come round again.
            symbol=SYMBOLS[place // len(PALETTE) % len(SYMBOLS)],
            metrics=run.metrics,
        )
        for place, (run, label) in enumerate(zip(found, labels(found), strict=True))
    ]


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
    """The same, where the differences are known."""
    names = [
        ", ".join(_word(name, value) for name, value in row.items()) or run.name
        for run, row in zip(runs, rows, strict=True)
    ]
    names = [n if len(n) <= LONGEST_LABEL else n[: LONGEST_LABEL - 1] + "…" for n in names]
    seen: dict[str, int] = {}
    found, alike = [], Counter(names)
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        # Runs that differ in nothing that is recorded still need two names.
        marker = "" if alike[name] == 1 else f" ({seen[name]})"
        star = " *" if runs[place].metrics.get("oversubscribed") else ""
        found.append(f"{name}{marker}{star}")
    return found


def differences(runs: Sequence[Run]) -> list[dict[str, Value]]:
    """Each run's parameters that are not the same in all, under their shortest clear names."""
    rows = [plain_parameters(run) for run in runs]
    # By field, so that a compressor's ratio stands beside it although other runs have none.
    fields = list(dict.fromkeys(name.partition(".")[0] for row in rows for name in row))
    names = sorted(
        dict.fromkeys(name for row in rows for name in row),
        key=lambda name: fields.index(name.partition(".")[0]),
    )
    differing = [name for name in names if _differs(name, rows)]
    last = [name.rpartition(".")[2] for name in differing]
    short = {
        name: end if last.count(end) == 1 else name
        for name, end in zip(differing, last, strict=True)
    }
    return [{short[name]: row[name] for name in differing if name in row} for row in rows]


def _differs(name: str, rows: Sequence[dict[str, Value]]) -> bool:
    """Whether a parameter tells runs apart; of a strategy's own, among runs of that strategy.

    Where strategies differ, all of their fields do, and their names alone say more.
    """
    if not name.startswith("strategy."):
        return len({repr(row.get(name)) for row in rows}) > 1
    # By strategy: its fields mean nothing to runs of another one.
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(repr(row.get("strategy")), set()).add(repr(row.get(name)))
    return any(len(values) > 1 for values in kinds.values())


def plain_parameters(run: Run) -> dict[str, Value]:
    """Flat parameters; a strategy or callable stands under its field's own name, not its source.

    A compressor with all that is in it is one parameter.
    """
    record = dict(run.experiment)
    strategy = record.get("strategy")
    if isinstance(strategy, dict) and strategy.get("compressor") is not None:
        record["strategy"] = strategy | {"compressor": called(strategy["compressor"])}
    flat = flatten(record)
    kept = {name: value for name, value in flat.items() if name.rpartition(".")[2] not in _LONG}
    return {re.sub(r"\.(name|callable)$", "", name): value for name, value in kept.items()}


def _word(name: str, value: Value) -> str:
    """`workers 2`; a name that the user gave stands for itself, and so does a compressor."""
    # The name of a compressor says what it is.
    if name == "compressor":
        return called(value)
    shown = "none" if value is None else scrub(str(value))
    return shown if name == "name" else f"{name} {shown}"


def safe_text(text: str) -> str:
    """Text for Plotly, which reads tags and links in what it draws."""
    return escape(text, quote=False)


def transparent(color: str, alpha: float) -> str:
    """`#0072B2` at an opacity, as CSS."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def clock_and_network(shown: Sequence[Entry]) -> str:
    """`wall clock · network 1GbE`: what every title with a time in it has to say."""
    clocks = sorted({str(entry.metrics.get("clock", "wall")) for entry in shown})
    networks = sorted({str(entry.metrics.get("network") or "none") for entry in shown})
    network = networks[0] if len(networks) == 1 else f"{', '.join(networks)} (by run)"
    words = "not emulated" if network == "none" else network
    return f"{' and '.join(clocks)} clock · network {words}"
