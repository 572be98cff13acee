"""Numbers that a notebook's text quotes, and numbers that its outputs and runs contain."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.jobs.gallery.index_entry import PLOTLY, Output
from labkit.records.store import Record
from labkit.records.verdict import CONFIDENCE, accuracies, arrivals, judge_runs

if TYPE_CHECKING:
    from labkit.records.run import Run


Values: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"

FEW = 40  # A text may quote ratios of two values only if their column has at most `FEW` values.
# A text may quote every point of a trace with at most `SHORT` points. The points of a longer trace
# would match any number.
SHORT = 40

# For each unit, `UNITS` contains its quantity, and the factor that converts values to the base
# unit. The check compares a time only with other times.
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
# Digits inside names (`w2`) or field values (`ratio=0.01`) do not count as numbers.
_NUMBER = re.compile(
    r"(?<![\w.=])(?<!\d,)(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?P<decimals>\.\d+)?"
    rf"(?P<power>e[-+]?\d+)?(?:[ \u202f]?(?P<unit>{_UNIT})(?!\w))?(?!\w)"
)
# `_NAMED` gives, for each pattern of column names, the quantity and the factor to the base unit.
_NAMED = (
    (re.compile(r"(^|[_\s,.])ms\b|_ms(\.|$)"), "time", 1e-3),
    (re.compile(r"seconds|, s$|_s$"), "time", 1.0),
    (re.compile(r"bytes|payload|memory|weights|gradients|optimizer|activations"), "bytes", 1.0),
)


# The pattern `_FACTOR` finds comparisons of two values in a text. Two examples are "1.5x faster"
# and "0.5 of one process".
_FACTOR = re.compile(r" of (one|what|the ideal)\b|\)?:? ?(faster|slower)")
_SPREAD = re.compile(
    r"(spread|ratio|repeats)( [\d.]+ to)? $|predicted $|co-located have ([\d.]+ on \d+, )*$"
)


class Number(NamedTuple):
    """A number that a text quotes.

    Attributes:
        text: Quoted text, with the unit.
        kind: Physical quantity: "time", "bytes" or "rate"; "plain" for every other number.
        value: Value of the number in base units.
        half: Greatest rounding error in base units, which is half a unit of the last quoted digit.
        counts: Whether the number is whole and has no unit, and thus is a count or a setting.
        compares: Whether the text presents the number as a ratio of two values.
    """

    text: str
    kind: str
    value: float
    half: float
    counts: bool
    compares: bool

    def matches(self, values: Values) -> bool:
        """Whether the number equals any of the values after rounding; signs are ignored."""
        return bool((np.abs(np.abs(values) - self.value) <= 1.001 * self.half).any())


def numbers(text: str) -> Iterator[Number]:
    """Yield the numbers in a text.

    >>> [(number.text, number.kind, number.value) for number in numbers("2 ranks: 0.5x, 12.5 ms")]
    [('2', 'plain', 2.0), ('0.5x', 'plain', 0.5), ('12.5 ms', 'time', 0.0125)]
    """
    for match in _NUMBER.finditer(text):
        decimals, power, unit = (match[name] or "" for name in ("decimals", "power", "unit"))
        kind, scale = UNITS.get(unit, ("plain", 1.0))
        scale *= 10.0 ** int(power[1:] or 0)
        value = float(match["digits"].replace(",", "") + decimals)
        half = 0.5 * 10.0 ** -max(len(decimals) - 1, 0)
        counts = not (decimals or power or unit)
        before, after = text[: match.start()], text[match.end() :]
        compares = unit in ("x", "×", "times") or bool(
            _FACTOR.match(after) or _SPREAD.search(before)
        )
        yield Number(match[0], kind, value * scale, half * scale, counts, compares)


class Evidence:
    """Numbers that an executed notebook may quote: those in its tables, figures and runs.

    Args:
        outputs: Outputs of the notebook's cells.
        runs: Runs that the notebook made or read.
        target: Target accuracy of the notebook's time-to-accuracy comparison. By default, the
            lowest accuracy of each run over its seeds is a target.
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
        self._shown = {kind: np.unique(np.concatenate([*self._values_of(kind)])) for kind in kinds}
        self._factors = np.unique(np.concatenate([np.zeros(1), *self._ratios()]))

    def contains(self, number: Number) -> bool:
        """Whether an output or a record contains `number`, rounded to its quoted digits."""
        shown = self._shown.get(number.kind, np.zeros(0))
        return number.matches(shown) or (number.compares and number.matches(self._factors))

    def _values_of(self, kind: str) -> Iterator[Values]:
        for (_, column_kind), column in self._columns.items():
            if column_kind == kind:
                yield np.unique(np.array(column, float))

    def _ratios(self) -> Iterator[Values]:
        """Yield the ratios of all pairs of values in each short column of times or other costs."""
        for (name, _), column in self._columns.items():
            values = np.unique(np.array(column, float))
            values = values[values != 0]
            if _COSTS.search(name) and len(values) <= FEW:
                yield (values[:, None] / values).ravel()

    def _add(self, name: str, values: Iterable[float]) -> None:
        kinds = ((kind, scale) for form, kind, scale in _NAMED if form.search(name))
        kind, scale = next(kinds, ("plain", 1.0))
        scaled = (scale * value for value in values)
        self._columns.setdefault((name, kind), []).extend(v for v in scaled if np.isfinite(v))

    def _words(self, place: str, text: str) -> None:
        for number in numbers(text):
            if not number.counts:
                self._columns.setdefault((f"{place} time", number.kind), []).append(number.value)

    def _metrics(self, name: str, value: JSON) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                # Median and percentiles of step times form one column, because a text may quote
                # their ratios.
                self._metrics(name if name.endswith("step_ms") else f"{name}.{key}", item)
        elif isinstance(value, list):
            for item in value:
                self._metrics(f"{name} each", item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._add(name, [value])

    def _history(self, run: Run) -> None:
        """Add each part's share of step time (without the first step), and the mean staleness."""
        history = run.history
        if "step" in history:
            sums = history[history["step"] > 0].filter(regex="seconds$").sum()
            self._add(f"{run.path.name} shares", (sums / max(sums.max(), 1e-12)).tolist())
        if len(events := run.update_log):
            self._add("staleness", [events.loc[events["update"] >= 0, "staleness"].mean()])

    def _verdicts(self, runs: Sequence[Run], target: float | None) -> None:
        """Add comparisons over seeds for all pairs of runs, and the costs to reach an accuracy."""
        known = {run.path: values for run in runs if (values := accuracies(run))}
        judged = [run for run in runs if run.path in known]
        for one, other in permutations(judged, 2):
            verdict = judge_runs(one, other)
            ends = (
                verdict.difference,
                verdict.low,
                verdict.high,
                verdict.mean_low,
                verdict.mean_high,
            )
            # Each difference is also added in percentage points, because summaries quote fractions
            # and percentage points.
            self._add("verdict", [CONFIDENCE, *ends, *(100 * end for end in ends)])
        targets = (
            {min(values.values()) for values in known.values()} if target is None else {target}
        )
        for run, least in product(judged, targets):
            self._add("target", [least])
            reached = [arrival for arrival in arrivals(run, least).values() if arrival]
            for name in ("seconds", "codec_seconds", "wire_bytes"):
                costs = [float(getattr(arrival, name)) for arrival in reached]
                self._add(f"{run.path.name} arrival {name}", _averages(costs))

    def _tables(self, place: str, text: str) -> None:
        """Collect the columns and averages of the tables in a notebook's output."""
        for number, table in enumerate(re.findall(r'(?s)class="dataframe">.*?</table>', text)):
            head, *rows = [_CELL.findall(row) for row in _ROW.findall(table)]
            group, labelled, entries = "", False, []
            for row in rows:
                body_cells = [html.unescape(words) for kind, words in row if kind == "td"]
                # The label in a table's index determines the group of a row. If the table's index
                # is numeric, the first cell with text determines the group of a row.
                labels = [words for kind, words in row if kind == "th"][:1]
                labels = [words for words in labels if not _PLAIN.fullmatch(words)]
                self._words(f"{place} {number} label", " ".join(map(html.unescape, labels)))
                texts = [words for words in body_cells if not _PLAIN.fullmatch(words)]
                labelled = labelled or bool(labels)
                group = next(iter(labels if labelled else texts), group)
                # The header has fewer cells than the body if columns have several levels. Empty
                # names fill the missing cells of the header.
                heads = [""] * len(body_cells) + [html.unescape(words) for _, words in head]
                names = heads[len(heads) - len(body_cells) :]
                entries += [
                    (group, name, words) for name, words in zip(names, body_cells, strict=True)
                ]
            self._cells(f"{place} {number}", entries)

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
            self._add(f"middle of {name}", _averages(values))

    def _figure(self, place: str, figure: Record) -> None:
        """Add the numbers in a figure's notes and traces, but only a few numbers of a long trace.

        The alternative text of the figure is ignored, because it may repeat the text of a summary.
        """
        layout = figure.get("layout") or {}
        for note in layout.get("annotations") or []:
            self._words(place, str(note.get("text", "")))
        for trace in figure.get("data") or []:
            for axis in ("x", "y"):
                values, title = _floats(trace.get(axis)), _title(layout, trace, axis)
                if not len(values):
                    continue
                shown = [values.min(), values.max()] if len(values) > SHORT else values
                self._add(f"{place} points {title}", [*shown, *_averages(values.tolist())])
                self._add(f"{place} {trace.get(f'{axis}axis')} last {title}", [values[-1]])
            for words in ("text", "hovertext", "customdata", "hovertemplate"):
                for string in _strings(trace.get(words)):
                    self._words(f"{place} {words}", string)


# A text may quote ratios of two values in a column whose name matches the pattern `_COSTS`.
_COSTS = re.compile(r"per_second|_ms|bytes|memory|speedup|bound|seconds|time")
_ROW, _CELL = re.compile(r"(?s)<tr.*?</tr>"), re.compile(r"(?s)<(t[hd])[^>]*>(.*?)</\1>")
_PLAIN = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")


def _averages(values: Sequence[float]) -> list[float]:
    """Return the mean of the values and the median of their absolute values."""
    return [float(np.mean(values)), float(np.median(np.abs(values)))] if values else []


def _title(layout: Record, trace: Record, axis: str) -> str:
    """Return the title of a trace's axis, which states the unit of the values."""
    axis_name = str(trace.get(f"{axis}axis", axis))
    title = (layout.get(f"{axis}axis{axis_name[1:]}") or {}).get("title") or ""
    return str(title.get("text", "") if isinstance(title, dict) else title)


def _floats(values: JSON) -> Values:
    """Return the finite numbers of a trace's axis, which Plotly may encode in base64."""
    if isinstance(values, dict) and "bdata" in values:
        array = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).astype(float)
    else:
        listed = values if isinstance(values, list) else []
        array = np.array([value for value in listed if isinstance(value, int | float)], float)
    finite: Values = array[np.isfinite(array)]
    return finite


def _strings(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
