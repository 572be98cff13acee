"""Entries of a figure: how runs and other lines are labelled, coloured, dashed and marked."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import accumulate
from typing import Any, TypeAlias

from labkit.common.canonical_json import is_number
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.records.analysis.columns import Value, differences
from labkit.records.analysis.settings import Seeds, gathered
from labkit.records.compressors import called
from labkit.records.run import Run, gate_failed

LONGEST = 60  # letters of a name, without its number
_MOST_PARAMETERS = 60  # parameters of which names are made
_WORD = 28  # letters of one of its parts
# From what tells most to what tells least: where two tell the same, the former stays. Chance comes
# last.
_ORDER = ("name", "strategy", "compressor", "network", "workers", "model", "dataset", "algorithm")
_LAST = ("repeats", "seed")
# Values that say by themselves what they are.
_BARE = {*_ORDER} - {"workers"}
_SHORT = {"learning_rate": "lr", "batch_size": "batch"}
_CALL = re.compile(r"(?:\w+\()*(\w+)(?:\((\w+=[^(),]+(?:, \w+=[^(),]+)*)\))?\)*")

Row = Mapping[str, Value]


def names(rows: Sequence[Row], fallback: Sequence[str]) -> list[str]:
    """Return a distinct name for each row, of the fewest parameters that tell the rows apart.

    Absent values are left out if names stay distinct. Rows without a difference get numbers.

    Args:
        rows: the parameters in which runs differ, by name.
        fallback: the name of each row without parameters.
    """
    parameters = _needed_parameters(rows)
    # If the compressor is the method, its absence is a method, too.
    dense = "compressor" if "strategy" not in parameters else ""
    words = [
        [
            (name == dense or row.get(name) is not None, texts[repr(row.get(name))])
            for name, texts in parameters.items()
        ]
        for row in rows
    ]
    parts = [tuple(word for _, word in row) for row in words]
    for drop_usual in (True, False):
        brief = _brief(words, drop_usual)
        if all(brief) and len(set(brief)) == len(set(parts)):
            parts = brief
            break
    joined = [", ".join(row) or other for row, other in zip(parts, fallback, strict=True)]
    return _add_numbers([_cut(text, LONGEST) for text in joined])


def _brief(words: Sequence[Sequence[tuple[bool, str]]], drop_usual: bool) -> list[tuple[str, ...]]:
    """Return the words of each row without those of absent values and of most rows."""
    placed = [list(enumerate(word for _, word in row)) for row in words]
    counts = Counter(pair for row in placed for pair in row)
    names = []
    for row, pairs in zip(words, placed, strict=True):
        present = [pair for pair, (is_present, _) in zip(pairs, row, strict=True) if is_present]
        rare = [pair for pair in present if 2 * counts[pair] <= len(words)]
        absent = [pair for pair in pairs if pair not in present]
        # An absent value names the row if all its other values are usual.
        rare = rare or [pair for pair in absent if 2 * counts[pair] <= len(words)][:1]
        # A single rare word follows a usual one, because it says little by itself.
        few = rare if len(rare) > 1 else present[: 2 - len(rare)] + rare
        names.append(tuple(word for _, word in sorted(set(few if drop_usual else present))))
    return names


def _needed_parameters(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Return the parameters that are needed to tell rows apart, with the words of their values."""
    known = dict.fromkeys(name for row in rows for name in row)
    # Longer names are unreadable, and each parameter is compared with all others.
    ranked = sorted(known, key=_rank)[:_MOST_PARAMETERS]
    needed = {name: _words(name, [row.get(name) for row in rows]) for name in ranked}
    count = _count_distinct(rows, needed)
    for name in ranked[::-1]:
        others = {other: words for other, words in needed.items() if other != name}
        if _count_distinct(rows, others) == count:
            needed = others
    return needed


def _rank(name: str) -> int:
    if name in _LAST:
        return len(_ORDER) + 1 + _LAST.index(name)
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _count_distinct(rows: Sequence[Row], words: Mapping[str, Mapping[str, str]]) -> int:
    return len({tuple(texts[repr(row.get(n))] for n, texts in words.items()) for row in rows})


def _words(name: str, values: Sequence[Value]) -> dict[str, str]:
    """Return a word for each value, as short as possible without two equal words."""
    distinct = {repr(value): _plain(name, value) for value in values}
    forms: list[Callable[[str], str]] = [_cut]
    if name == "compressor":
        forms = [compressor_text, partial(compressor_text, with_feedback=True)]
    for form in forms:
        short = {key: _cut(form(text)) for key, text in distinct.items()}
        if len(set(short.values())) == len(short):
            return short
    return {key: _cut(text, LONGEST) for key, text in distinct.items()}


def _plain(name: str, value: Value) -> str:
    if name == "compressor":
        return called(value)
    if value is None:
        return f"no {name.replace('_', ' ')}"
    text = f"{value:.6g}" if isinstance(value, float) else scrub(str(value))
    bare = name in _BARE and not is_number(value)
    return text if bare else f"{_SHORT.get(name, name.replace('_', ' '))} {text}"


def compressor_text(compressor: str, with_feedback: bool = False) -> str:
    """Return `TopK 1 %` for `ErrorFeedback(TopK(ratio=0.01))`; other names stay as they are."""
    call = _CALL.fullmatch(compressor)
    if call is None or " " in compressor.partition("(")[0]:
        return _cut(compressor)
    parts = [call[1]]
    for key, _, value in (field.partition("=") for field in (call[2] or "").split(", ") if field):
        is_share = key == "ratio" and re.fullmatch(r"[\d.e-]+", value)
        text = f"{100 * float(value):.3g} %" if is_share else f"{key.split('_')[-1]} {value}"
        parts.append(text)
    outer = ["EF"] if with_feedback and compressor.startswith("ErrorFeedback(") else []
    return " ".join([*outer, *parts])


def _cut(text: str, letters: int = _WORD) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _add_numbers(names: Sequence[str]) -> list[str]:
    """Return the names, with a number for each that occurs twice."""
    counts, used, distinct = Counter(names), set(names), []
    for text in names:
        name, number = text, 0
        while counts[text] > 1 and (name == text or name in used):
            number += 1
            name = f"{text} ({number})"
        used.add(name)
        distinct.append(name)
    return distinct


# Okabe and Ito (2008): distinct for any colour vision; without their black and yellow, which
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


# Keys of every trace of one look: its name, its legend group, and the keys of its runs.
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
        """The runs of this entry: one, or the runs of its seeds."""
        return self.run.members if isinstance(self.run, Seeds) else (self.run,)

    @property
    def gate_failed(self) -> bool:
        """Whether no speed of this run may be drawn."""
        return gate_failed(self.run)

    @property
    def style(self) -> Style:
        """Keys of every trace of the run: name, legend group, and run key for the report."""
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
        """Keys of every trace of the line: name, legend group, and the keys of its runs."""
        style = {"legendgroup": self.label, "name": safe_text(self.label)}
        return style | ({"meta": {"runs": list(self.runs)}} if self.runs else {})


def lines(names: Iterable[str]) -> dict[str, Line]:
    """Return a line for each name; neighbours differ in colour and in symbol."""
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
    """Return the runs with labels and colours; raise LabkitError for no runs."""
    all_runs = [runs] if isinstance(runs, Run) else list(runs)
    if not all_runs:
        raise LabkitError(NO_RUNS)
    # Runs without results are not drawn and use no colour.
    places = accumulate((bool(run.metrics) for run in all_runs), initial=0)
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
        for place, run, label in zip(places, all_runs, labels(all_runs), strict=False)
    ]


def settings(runs: Iterable[Run] | Run) -> list[Entry]:
    """Return entries of settings: runs that differ only in their seeds are one, with a band."""
    return entries(gathered([runs] if isinstance(runs, Run) else list(runs)))


def completed_entries(runs: Iterable[Run] | Run) -> list[Entry]:
    """Return entries of runs with results; raise LabkitError for a run without any."""
    shown = entries(runs)
    missing = [entry.label for entry in shown if not entry.metrics]
    if missing:
        raise LabkitError(f"no results of {', '.join(missing)}: give completed runs")
    return shown


def key(run: Run) -> str:
    """Return the key of a run in all figures: a digest of its content and start."""
    # With the start: the same experiment may have been run twice.
    text = json.dumps([run.experiment, run.status.get("started")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run, of the parameters in which the runs differ."""
    return distinct_labels(runs, differences(runs))


def distinct_labels(runs: Sequence[Run], rows: Sequence[dict[str, Value]]) -> list[str]:
    """Return names from known differences; a star marks ranks that share cores."""
    plain_names = names(rows, [run.name for run in runs])
    stars = (" *" if run.metrics.get("oversubscribed") else "" for run in runs)
    return [f"{name}{star}" for name, star in zip(plain_names, stars, strict=True)]


def safe_text(text: str) -> str:
    """Return text for Plotly with its tags and links escaped."""
    return escape(text, quote=False)


def transparent(color: str, alpha: float) -> str:
    """Return `#0072B2` with an opacity, as CSS."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def clock_and_network(shown: Sequence[Entry]) -> str:
    """Return `wall clock · network 1GbE`, for titles of figures with times."""
    known = [entry for entry in shown if entry.metrics] or shown
    clocks = sorted({str(entry.metrics.get("clock", "wall")) for entry in known})
    networks = sorted({str(entry.metrics.get("network") or "none") for entry in known})
    network = networks[0] if len(networks) == 1 else f"{', '.join(networks)} (by run)"
    words = "not emulated" if network == "none" else network
    return f"{' and '.join(clocks)} clock · network {words}"
