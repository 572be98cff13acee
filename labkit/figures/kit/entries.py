"""Legend entries of runs (label, colour, dash, marker), and findings, which become sentences."""

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
from labkit.records.analysis.columns import Seeds, Value, differences, group_seeds
from labkit.records.compressors import compressor_expression
from labkit.records.run import Run, equivalence_failed

# A label has at most this number of letters, not counting the number that distinguishes equal
# labels.
LONGEST = 60
_MOST_PARAMETERS = 60  # maximum number of parameters from which labels are built
_WORD = 28  # maximum letters of one part of a label
# Labels use parameters in the order of their priority. If two parameters distinguish the same runs,
# the label uses the first in `_ORDER`. Parameters that only cause random differences, such as
# seeds, come last.
_ORDER = ("name", "strategy", "compressor", "network", "workers", "model", "dataset", "algorithm")
_LAST = ("repeats", "seed")
# In labels, the values of the parameters in `_BARE` are clear without the parameter's name.
_BARE = {*_ORDER} - {"workers"}
_SHORT = {"learning_rate": "lr", "batch_size": "batch"}
_CALL = re.compile(r"(?:\w+\()*(\w+)(?:\((\w+=[^(),]+(?:, \w+=[^(),]+)*)\))?\)*")

Row = Mapping[str, Value]


def names(rows: Sequence[Row], fallback: Sequence[str]) -> list[str]:
    """Return a distinct name per run, made of as few distinguishing parameters as possible.

    A run's name omits the parameters that the run does not have. The omission must keep the names
    of all runs distinct. If runs have equal parameters, numbers are appended to their names.

    Args:
        rows: For each run, a dict of the parameters in which the runs differ.
        fallback: For each run, the name that is used if no parameter distinguishes the run.
    """
    parameters = _needed_parameters(rows)
    # If runs differ by compressor but not by strategy, names state a missing compressor.
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
    """Shorten names: omit absent values, and words that occur in most of the names."""
    placed = [list(enumerate(word for _, word in row)) for row in words]
    counts = Counter(pair for row in placed for pair in row)
    names = []
    for row, pairs in zip(words, placed, strict=True):
        present = [pair for pair, (is_present, _) in zip(pairs, row, strict=True) if is_present]
        rare = [pair for pair in present if 2 * counts[pair] <= len(words)]
        absent = [pair for pair in pairs if pair not in present]
        # A run may differ from most runs only because it lacks a parameter. The run's name then
        # names the missing parameter, such as `no schedule`.
        rare = rare or [pair for pair in absent if 2 * counts[pair] <= len(words)][:1]
        # One rare word alone would be hard to interpret, so the name also contains a more frequent
        # word.
        few = rare if len(rare) > 1 else present[: 2 - len(rare)] + rare
        names.append(tuple(word for _, word in sorted(set(few if drop_usual else present))))
    return names


def _needed_parameters(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Return only the parameters that are necessary to distinguish the rows."""
    known = dict.fromkeys(name for row in rows for name in row)
    # The limit `_MOST_PARAMETERS` keeps names readable, and limits the time to compare parameters.
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
    """Return a word per value of a parameter: the shortest form in which all words differ."""
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
        return compressor_expression(value)
    if value is None:
        return f"no {name.replace('_', ' ')}"
    text = f"{value:.6g}" if isinstance(value, float) else scrub(str(value))
    bare = name in _BARE and not is_number(value)
    return text if bare else f"{_SHORT.get(name, name.replace('_', ' '))} {text}"


def compressor_text(compressor: str, with_feedback: bool = False) -> str:
    """Shorten a compressor's text, such as `ErrorFeedback(TopK(ratio=0.01))` to `TopK 1 %`."""
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
    """Return the names in order, with a number appended to each duplicate."""
    counts, used, distinct = Counter(names), set(names), []
    for text in names:
        name, number = text, 0
        while counts[text] > 1 and (name == text or name in used):
            number += 1
            name = f"{text} ({number})"
        used.add(name)
        distinct.append(name)
    return distinct


# The colours are from Okabe and Ito (2008); readers with any colour vision can tell them apart.
# The palette omits black, because black is invisible on a dark page. The palette omits yellow,
# because yellow is invisible on a light page. There are six colours: the seventh run uses the first
# colour again, with a different dash.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross")

INK = "#7a7a7a"  # colour of text and lines, legible on white and on black pages

MANY = 24  # A figure with more than this number of runs has a run picker instead of a legend.
OVERSUBSCRIBED = "* more threads (ranks \N{MULTIPLICATION SIGN} threads per rank) than cores"
NO_RUNS = (
    "no runs to compare: run a notebook first (labkit run notebooks/tour.ipynb; labkit "
    "examples notebooks copies it), then give the folder that contains its runs (usually runs/)"
)


# A style contains the Plotly keys that all traces of one legend entry share. A style contains the
# name, the legend group, and the keys of the entry's runs.
Style: TypeAlias = dict[str, str | dict[str, str | list[str]]]


@dataclass(frozen=True)
class RunEntry:
    """A run as figures show it; the metrics are read from disk only once."""

    run: Run
    key: str
    label: str
    color: str
    dash: str
    symbol: str
    metrics: dict[str, Any]

    @property
    def members(self) -> tuple[Run, ...]:
        """The runs that the entry represents: a single run, or one run per seed."""
        return self.run.members if isinstance(self.run, Seeds) else (self.run,)

    @property
    def equivalence_failed(self) -> bool:
        """Whether the run failed its equivalence check, in which case figures omit its speed."""
        return equivalence_failed(self.run)

    @property
    def style(self) -> Style:
        """The Plotly keys that all traces of the run share: name, legend group, and run key."""
        return {"legendgroup": self.key, "meta": {"run": self.key}, "name": safe_text(self.label)}


@dataclass(frozen=True)
class LineStyle:
    """Label, colour, dash and marker of a line that is not a run, such as an algorithm's line."""

    label: str
    color: str
    dash: str
    symbol: str
    runs: tuple[str, ...] = ()  # keys of the runs that the line represents, for linked selection

    @property
    def style(self) -> Style:
        """The Plotly keys that all traces of the line share: name, legend group, and run keys."""
        style = {"legendgroup": self.label, "name": safe_text(self.label)}
        return style | ({"meta": {"runs": list(self.runs)}} if self.runs else {})


def lines(names: Iterable[str]) -> dict[str, LineStyle]:
    """Return a line style for each name; consecutive names differ in colour and symbol."""
    return {
        name: LineStyle(
            label=name,
            color=PALETTE[place % len(PALETTE)],
            dash=DASHES[place // len(PALETTE) % len(DASHES)],
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
        for place, name in enumerate(dict.fromkeys(names))
    }


def entries(runs: Iterable[Run] | Run) -> list[RunEntry]:
    """Return a legend entry for each run; raise LabkitError if there are no runs."""
    all_runs = [runs] if isinstance(runs, Run) else list(runs)
    if not all_runs:
        raise LabkitError(NO_RUNS)
    # Runs without results are not drawn, so they use up no colour.
    places = accumulate((bool(run.metrics) for run in all_runs), initial=0)
    return [
        RunEntry(
            run=run,
            key=key(run),
            label=label,
            color=PALETTE[place % len(PALETTE)] if run.metrics else INK,
            dash=DASHES[place // len(PALETTE) % len(DASHES)],
            # When the colours repeat, the dash and the symbol both change.
            symbol=SYMBOLS[place // len(PALETTE) % len(SYMBOLS)],
            metrics=run.metrics,
        )
        for place, run, label in zip(places, all_runs, labels(all_runs), strict=False)
    ]


def settings(runs: Iterable[Run] | Run) -> list[RunEntry]:
    """Return one entry per setting; runs that differ only in their seed share an entry."""
    return entries(group_seeds([runs] if isinstance(runs, Run) else list(runs)))


def completed_entries(runs: Iterable[Run] | Run) -> list[RunEntry]:
    """Return an entry for each run; raise LabkitError if a run has no results."""
    shown = entries(runs)
    missing = [entry.label for entry in shown if not entry.metrics]
    if missing:
        raise LabkitError(f"{', '.join(missing)} has no results: give completed runs")
    return shown


def key(run: Run) -> str:
    """Return a run's key for all figures: a digest of its experiment and its start time."""
    # The key includes the start time, which distinguishes repeated runs of the same experiment.
    text = json.dumps([run.experiment, run.status.get("started")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run, from the parameters in which the runs differ."""
    return distinct_labels(runs, differences(runs))


def distinct_labels(runs: Sequence[Run], rows: Sequence[dict[str, Value]]) -> list[str]:
    """Return labels from the given parameters; a star marks runs with more threads than cores."""
    plain_names = names(rows, [run.name for run in runs])
    stars = (" *" if run.metrics.get("oversubscribed") else "" for run in runs)
    return [f"{name}{star}" for name, star in zip(plain_names, stars, strict=True)]


def safe_text(text: str) -> str:
    """Escape tags and links in a text, because Plotly would interpret them."""
    return escape(text, quote=False)


def transparent(color: str, alpha: float) -> str:
    """Return a colour such as `#0072B2` with an opacity, as a CSS `rgba` value."""
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def clock_and_network(entries: Sequence[RunEntry]) -> str:
    """State the clock and the network of the runs for titles: `wall clock · network 1GbE`."""
    known = [entry for entry in entries if entry.metrics] or entries
    clocks = sorted({str(entry.metrics.get("clock", "wall")) for entry in known})
    networks = sorted({str(entry.metrics.get("network") or "none") for entry in known})
    network = networks[0] if len(networks) == 1 else f"{', '.join(networks)} (by run)"
    words = "not emulated" if network == "none" else network
    return f"{' and '.join(clocks)} clock · network {words}"


class Markdown(str):
    """Text that a notebook renders as Markdown."""

    def _repr_markdown_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Finding:
    """One statement of a text summary: a subject, its value with a range, and a conclusion.

    Attributes:
        head: Start of the sentence, before the colon; `**` marks bold names.
        subject: The run or other subject that the value describes; empty if the head names the
            subject.
        value: Number in the unit that `text` expects; None if the finding has no number.
        band: Least and greatest value over seeds or training steps, or None without a range.
        seeds: Number of seeds over which the value is a mean. The value of `seeds` is 0 if the band
            is a range over steps.
        text: Function that formats the number and the ends of the band.
        unit: Unit of measurement, written after the number.
        details: Further texts after the number, in order.
        verdict: The conclusion, which ends the sentence.
    """

    head: str = ""
    subject: str = ""
    value: float | None = None
    band: tuple[float, float] | None = None
    seeds: int = 0
    text: Callable[[float], str] = "{:.4g}".format
    unit: str = ""
    details: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def number(self) -> str:
        """The value with its range: `91.20% (3 seeds, 90.10% to 92.00%)`; empty without a value."""
        if self.value is None:
            return ""
        number = f"{self.text(self.value)}{self.unit}"
        # The range is omitted for a single seed and for equal values, because there is no spread.
        if self.band is None or self.seeds == 1 or self.band[0] == self.band[1]:
            return number
        count = f"{self.seeds} seeds, " if self.seeds else "spread "
        return f"{number} ({count}{self.text(self.band[0])} to {self.text(self.band[1])})"

    @property
    def sentence(self) -> str:
        """The finding as a sentence: `Head: **subject**, number; details: verdict.`"""
        subject = ", ".join(
            part for part in (f"**{self.subject}**" * bool(self.subject), self.number) if part
        )
        parts = "; ".join(part for part in (subject, *self.details) if part)
        return ": ".join(part for part in (self.head, parts, self.verdict) if part) + "."


def reproduced_text(holds: bool) -> str:
    """Return the phrase that states whether the runs reproduce a published result."""
    return "reproduced" if holds else "**not** reproduced"


def published(claim: str, source: str, holds: bool, *details: str) -> Finding:
    """Return a finding that states whether the runs reproduce a published claim."""
    return Finding(f"**{claim}** ({source}): {reproduced_text(holds)}", details=details)


def ratio_verdict(
    low: float, high: float, worse: str = "it does not pay", same: str = "no difference"
) -> str:
    """Return the conclusion from a speed ratio's range: above 1, below 1, or including 1."""
    return "it pays" if low > 1 else worse if high < 1 else same


def sentences(findings: Iterable[Finding], head: str = "") -> Markdown:
    """Return a Markdown list with one sentence per finding, after an optional head line."""
    lines = [f"- {finding.sentence}" for finding in findings]
    return Markdown("\n".join([head, "", *lines] if head else lines))
