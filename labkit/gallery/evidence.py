"""Numbers that a text quotes, and those that a run shows: what sentences are held against."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.gallery.index_entry import PLOTLY, Output
from labkit.records.store import Record
from labkit.records.verdict import CONFIDENCE, accuracies, arrivals, judge_runs

if TYPE_CHECKING:
    from labkit.records.run import Run

Values: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"

FEW = 40  # values of a column up to which a sentence may hold one against another
SHORT = 40  # points of a trace up to which each counts: among more any number is found

# What a unit is a unit of, and how much of it: a time is looked for among times.
UNITS = {
    **{unit: ("time", scale) for unit, scale in (("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))},
    "s": ("time", 1.0),
    "min": ("time", 60.0),
    **{unit: ("bytes", 2.0 ** (10 * p)) for p, unit in enumerate(("B", "KiB", "MiB", "GiB"))},
    **{unit: ("rate", scale) for unit, scale in (("kb/s", 1e3), ("Mb/s", 1e6), ("Gb/s", 1e9))},
    "%": ("plain", 1e-2),
    "points": ("plain", 1e-2),
    "samples/s": ("plain", 1.0),
    **dict.fromkeys(("x", "×", "times"), ("plain", 1.0)),
}
_UNIT = "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True)))
# No part of a name (`w2`, `1f1b`), nor a field's value (`ratio=0.01`).
_NUMBER = re.compile(
    r"(?<![\w.=])(?<!\d,)(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?P<decimals>\.\d+)?"
    rf"(?P<power>e[-+]?\d+)?(?:[ \u202f]?(?P<unit>{_UNIT})(?!\w))?(?!\w)"
)
_NAMED = (  # kind and scale of a column, by its name
    (re.compile(r"(^|[_\s,.])ms\b|_ms(\.|$)"), "time", 1e-3),
    (re.compile(r"seconds|, s$|_s$"), "time", 1.0),
    (re.compile(r"bytes|payload|memory|weights|gradients|optimizer|activations"), "bytes", 1.0),
)


# What is said of a number that holds one value against another: "1.5x", "0.5 of one process".
_FACTOR = re.compile(r" of (one|what|the ideal)\b|\)?:? ?(faster|slower)")
_SPREAD = re.compile(
    r"(spread|ratio|repeats)( [\d.]+ to)? $|predicted $|co-located have ([\d.]+ on \d+, )*$"
)


class Number(NamedTuple):
    """A number in a text: what it is of, its value, and half of its last digit.

    Attributes:
        counts: it is whole and without a unit: a count, a name, a setting.
        compares: it holds one value against another.
    """

    text: str
    kind: str
    value: float
    half: float
    counts: bool
    compares: bool

    def among(self, values: Values) -> bool:
        """Whether one of these reads so, in the digits that are given; signs are words."""
        return bool((np.abs(np.abs(values) - self.value) <= 1.001 * self.half).any())


def numbers(text: str) -> Iterator[Number]:
    """The numbers of a text.

    >>> [(each.text, each.kind, each.value) for each in numbers("2 ranks: 0.5x, 12.5 ms")]
    [('2', 'plain', 2.0), ('0.5x', 'plain', 0.5), ('12.5 ms', 'time', 0.0125)]
    """
    for found in _NUMBER.finditer(text):
        decimals, power, unit = (found[name] or "" for name in ("decimals", "power", "unit"))
        kind, scale = UNITS.get(unit, ("plain", 1.0))
        scale *= 10.0 ** int(power[1:] or 0)
        value = float(found["digits"].replace(",", "") + decimals)
        half = 0.5 * 10.0 ** -max(len(decimals) - 1, 0)
        counts = not (decimals or power or unit)
        before, after = text[: found.start()], text[found.end() :]
        compares = unit in ("x", "×", "times") or bool(
            _FACTOR.match(after) or _SPREAD.search(before)
        )
        yield Number(found[0], kind, value * scale, half * scale, counts, compares)


class Evidence:
    """What the tables and figures of an executed notebook show, and its runs have measured.

    Args:
        outputs: of the notebook's cells.
        runs: that it made, or read.
        target: the accuracy to which it counts, if it has one.
    """

    def __init__(
        self, outputs: Iterable[Output], runs: Sequence[Run], target: float | None = None
    ) -> None:
        self._columns: dict[tuple[str, str], list[float]] = {}
        for place, output in enumerate(outputs):
            figure = output.data.get(PLOTLY)
            if isinstance(figure, dict):
                self._figure(str(place), figure)
            elif not output.text:
                self._tables(str(place), "".join(map(str, output.data.get("text/html", ""))))
        for run in runs:
            self._metrics("", run.metrics)
            for seed in run.seeds:
                self._metrics("seed", seed.metrics)
            self._history(run)
        self._verdicts(runs, target)
        kinds = {kind for _, kind in self._columns}
        self._shown = {kind: np.unique(np.concatenate([*self._of(kind)])) for kind in kinds}
        self._factors = np.unique(np.concatenate([np.zeros(1), *self._against()]))

    def has(self, number: Number) -> bool:
        """Whether the run shows this number, in the digits in which it is quoted."""
        shown = self._shown.get(number.kind, np.zeros(0))
        return number.among(shown) or (number.compares and number.among(self._factors))

    def _of(self, kind: str) -> Iterator[Values]:
        for (_, own), column in self._columns.items():
            if own == kind:
                yield np.unique(np.array(column, float))

    def _against(self) -> Iterator[Values]:
        """Each value of a column of costs against each other."""
        for (name, _), column in self._columns.items():
            values = np.unique(np.array(column, float))
            values = values[values != 0]
            if _COSTS.search(name) and len(values) <= FEW:
                yield (values[:, None] / values).ravel()

    def _add(self, name: str, values: Iterable[float]) -> None:
        kinds = ((kind, scale) for form, kind, scale in _NAMED if form.search(name))
        kind, scale = next(kinds, ("plain", 1.0))
        found = (scale * value for value in values)
        self._columns.setdefault((name, kind), []).extend(v for v in found if np.isfinite(v))

    def _words(self, place: str, text: str) -> None:
        for number in numbers(text):
            if not number.counts:
                self._columns.setdefault((f"{place} time", number.kind), []).append(number.value)

    def _metrics(self, name: str, value: JSON) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                # Of one column are the median and the ends of steps: spreads are held against them.
                self._metrics(name if name.endswith("step_ms") else f"{name}.{key}", each)
        elif isinstance(value, list):
            for each in value:
                self._metrics(f"{name} each", each)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._add(name, [value])

    def _history(self, run: Run) -> None:
        """Where the time of all steps but the first went, and how old gradients were."""
        history = run.history
        if "step" in history:
            sums = history[history["step"] > 0].filter(regex="seconds$").sum()
            self._add(f"{run.path.name} shares", (sums / max(sums.max(), 1e-12)).tolist())
        if len(events := run.interleaving):
            self._add("staleness", [events.loc[events["update"] >= 0, "staleness"].mean()])

    def _verdicts(self, runs: Sequence[Run], target: float | None) -> None:
        """What the seeds of each two runs say, and what it took to come to an accuracy."""
        known = {run.path: found for run in runs if (found := accuracies(run))}
        judged = [run for run in runs if run.path in known]
        for one, other in permutations(judged, 2):
            said = judge_runs(one, other)
            ends = (said.difference, said.low, said.high, said.mean_low, said.mean_high)
            self._add("verdict", [CONFIDENCE, *ends, *(100 * end for end in ends)])  # and points
        targets = {min(found.values()) for found in known.values()} if target is None else {target}
        for run, least in product(judged, targets):
            self._add("target", [least])
            came = [arrival for arrival in arrivals(run, least).values() if arrival]
            for name in ("seconds", "codec_seconds", "wire_bytes"):
                values = [float(getattr(each, name)) for each in came]
                self._add(f"{run.path.name} arrival {name}", _middle(values))

    def _tables(self, place: str, text: str) -> None:
        """The columns of pandas' tables; their middles, in all and in each group of rows."""
        for number, table in enumerate(re.findall(r'(?s)class="dataframe">.*?</table>', text)):
            head, *rows = [_CELL.findall(row) for row in _ROW.findall(table)]
            group, labelled, found = "", False, []
            for row in rows:
                own = [html.unescape(words) for kind, words in row if kind == "td"]
                # Rows belong together under a label; where they are numbered, under a text.
                labels = [words for kind, words in row if kind == "th"][:1]
                labels = [words for words in labels if not _PLAIN.fullmatch(words)]
                self._words(f"{place} {number} label", " ".join(map(html.unescape, labels)))
                texts = [words for words in own if not _PLAIN.fullmatch(words)]
                labelled = labelled or bool(labels)
                group = next(iter(labels if labelled else texts), group)
                # Columns of columns have fewer heads than cells.
                heads = [""] * len(own) + [html.unescape(words) for _, words in head]
                names = heads[len(heads) - len(own) :]
                found += [(group, name, words) for name, words in zip(names, own, strict=True)]
            self._cells(f"{place} {number}", found)

    def _cells(self, place: str, cells: Sequence[tuple[str, str, str]]) -> None:
        groups: dict[tuple[str, str], list[float]] = {}
        for group, name, words in cells:
            if _PLAIN.fullmatch(words):
                self._add(f"{place} {name}", [float(words)])
                for key in {(group, name), ("", name)}:
                    groups.setdefault(key, []).append(float(words))
            else:
                self._words(place, words)
        for (_, name), values in groups.items():
            self._add(f"middle of {name}", _middle(values))

    def _figure(self, place: str, figure: Record) -> None:
        """Words but the summary, which a reading may have written; traces: if long, their ends."""
        layout = figure.get("layout") or {}
        for note in layout.get("annotations") or []:
            self._words(place, str(note.get("text", "")))
        for trace in figure.get("data") or []:
            for axis in ("x", "y"):
                values, title = _floats(trace.get(axis)), _title(layout, trace, axis)
                if not len(values):
                    continue
                shown = [values.min(), values.max()] if len(values) > SHORT else values
                self._add(f"{place} points {title}", [*shown, *_middle(values.tolist())])
                self._add(f"{place} {trace.get(f'{axis}axis')} last {title}", [values[-1]])
            for words in ("text", "hovertext", "customdata", "hovertemplate"):
                for string in _strings(trace.get(words)):
                    self._words(f"{place} {words}", string)


# Columns of which one value may be held against another.
_COSTS = re.compile(r"per_second|_ms|bytes|memory|speedup|bound|seconds|time")
_ROW, _CELL = re.compile(r"(?s)<tr.*?</tr>"), re.compile(r"(?s)<(t[hd])[^>]*>(.*?)</\1>")
_PLAIN = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")


def _middle(values: Sequence[float]) -> list[float]:
    """Mean, and median without signs."""
    return [float(np.mean(values)), float(np.median(np.abs(values)))] if values else []


def _title(layout: Record, trace: Record, axis: str) -> str:
    """The title of the axis on which a trace stands: it says the unit."""
    own = str(trace.get(f"{axis}axis", axis))
    title = (layout.get(f"{axis}axis{own[1:]}") or {}).get("title") or ""
    return str(title.get("text", "") if isinstance(title, dict) else title)


def _floats(values: JSON) -> Values:
    """The finite numbers of a trace, which Plotly packs where they are many."""
    if isinstance(values, dict) and "bdata" in values:
        found = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).astype(float)
    else:
        listed = values if isinstance(values, list) else []
        found = np.array([each for each in listed if isinstance(each, int | float)], float)
    finite: Values = found[np.isfinite(found)]
    return finite


def _strings(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
