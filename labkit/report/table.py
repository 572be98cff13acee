"""The runs of a page as a table: what tells them apart, what they reached, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from labkit.common.canonical_json import JSON, is_number
from labkit.common.privacy import scrub
from labkit.common.units import plural
from labkit.figures.kit.axes import TITLES, title_of, word
from labkit.figures.kit.entries import Entry
from labkit.records.analysis.columns import (
    Value,
    begun,
    clear,
    differing,
    plain_parameters,
    spread,
)
from labkit.records.run import KEY_METRICS, Run, key_metrics, verdict

_TWICE = ("seed", "repeats", "gate")  # columns of seeds and verdicts say them
_OURS = ("label", "state", "gate", "seeds")  # columns that every table has
_MOST = 24  # so many results are columns; a filter knows all
_HINTS = 3  # so many distinct ones of a column are told
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HEADS = {
    "samples_per_second": "samples/s",
    "step_ms.median": "step, ms",
    "train_seconds": "training, s",
}


@dataclass(frozen=True)
class Cell:
    """What is seen, what it is sorted by, and what it says under the pointer."""

    text: str
    order: float | None = None
    hint: str = ""

    @property
    def asked(self) -> Value:
        """What a filter holds against what is typed: in the unit that is seen."""
        return self.text if self.order is None else self.order


@dataclass(frozen=True)
class Column:
    """name: as one types it in a filter; head: with the unit of its cells."""

    name: str
    head: str
    cells: list[Cell] = field(default_factory=list)

    @cached_property
    def is_words(self) -> bool:
        """Whether no cell is a number."""
        return all(cell.order is None for cell in self.cells)

    @cached_property
    def is_same(self) -> bool:
        """Whether it tells no two rows apart."""
        return len({cell.text for cell in self.cells}) == 1 and len(self.cells) > 1

    @property
    def one(self) -> Cell:
        """What stands for all cells where they are the same, with what each of them hints at."""
        hints = list(dict.fromkeys(cell.hint for cell in self.cells if cell.hint))
        more = [f"and {len(hints) - _HINTS} more"] if len(hints) > _HINTS else []
        return Cell(self.cells[0].text, hint="; ".join(hints[:_HINTS] + more))


@dataclass(frozen=True)
class Table:
    """A row a setting; columns that are the same in all rows stand above it.

    Attributes:
        shown: the settings.
        columns: parameters that differ, states, results.
        names: of the parameters among the columns.
        values: what a filter may ask of each row, in the units that are seen.
        more: how many results have no column.
    """

    shown: Sequence[Entry]
    columns: list[Column]
    names: list[str]
    values: list[dict[str, Value]]
    more: int

    @cached_property
    def told(self) -> list[Column]:
        """The columns that tell rows apart."""
        return [column for column in self.columns if not column.is_same]

    @property
    def same(self) -> list[tuple[str, Cell]]:
        """Heads and cells of the others, and of the parameters that matter to every reader."""
        rows = [plain_parameters(run) for run in self._begun]
        shared = {k: v for k, v in rows[0].items() if all(r.get(k, self) == v for r in rows)}
        given = [
            (title_of(n), _parameter(n, shared[n])) for n in _TOLD if shared.get(n) is not None
        ]
        return given + [(column.head, column.one) for column in self.columns if column.is_same]

    @property
    def same_in(self) -> str:
        """Of whom that is said: of jobs that failed before their experiment nothing is known."""
        apart = len(self.shown) - len(self._begun)
        return (
            f"all but {plural(apart, 'job')} that failed before an experiment" if apart else "all"
        )

    @cached_property
    def _begun(self) -> list[Run]:
        """The runs that came as far as an experiment; all, where none did."""
        runs = [entry.run for entry in self.shown]
        return [run for run, own in zip(runs, begun(runs), strict=True) if own] or runs

    @property
    def has_seeds(self) -> bool:
        """Whether a row stands for several seeds."""
        return any(entry.metrics.get("repeats", 1) > 1 for entry in self.shown)

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters among the columns, by which rows are coloured and grouped."""
        known = {column.name for column in self.told}
        return [name for name in self.names if name in known]

    def known(self) -> dict[str, JSON]:
        """What a filter may ask for: values that all share, and each row's own."""
        rows = self.values
        shared = {k: v for k, v in rows[0].items() if all(r.get(k, self) == v for r in rows)}
        runs: dict[str, JSON] = {
            entry.key: {
                "label": entry.label,
                "color": entry.color,
                "values": {k: v for k, v in row.items() if k not in shared},
            }
            for entry, row in zip(self.shown, rows, strict=True)
        }
        return {"shared": shared, "runs": runs}


_TOLD = ("model", "dataset", "strategy", "workers", "network", "epochs", "batch_size", "precision")


def table_of(shown: Sequence[Entry]) -> Table:
    """The table of settings."""
    given = [plain_parameters(entry.run) for entry in shown]
    found = [key_metrics(entry.run) for entry in shown]
    every = dict.fromkeys((*KEY_METRICS, *(name for row in found for name in row)))
    measured = [name for name in every if any(name in row for row in found)]
    names = _names(given, (*_OURS, *measured))
    apart = differing(given, begun([entry.run for entry in shown]))
    told = [name for name in apart if name not in _TWICE]
    columns = [_given(names[name], [row.get(name) for row in given]) for name in told]
    columns += [
        Column("seeds", "seeds", [_seeds(entry) for entry in shown]),
        Column("state", "state", [_state(entry) for entry in shown]),
        Column("gate", "gate", [_gate(entry) for entry in shown]),
    ]
    results = [_numbers(name, shown, [row.get(name) for row in found]) for name in measured]
    values = [
        {names[name]: _plain(value) for name, value in row.items() if name in names}
        | _fixed(entry)
        | {
            result.name: result.cells[place].asked
            for result in results
            if result.name in found[place]
        }
        for place, (entry, row) in enumerate(zip(shown, given, strict=True))
    ]
    columns += results[:_MOST]
    return Table(shown, columns, [names[n] for n in told], values, len(results[_MOST:]))


def _names(given: Sequence[dict[str, Value]], taken: Sequence[str]) -> dict[str, str]:
    """What columns and filters call each parameter: its shortest clear name that no other has.

    Args: given, the parameters of all rows; taken, names of other columns.
    """
    every = [name for name in dict.fromkeys(n for row in given for n in row) if name not in _TWICE]
    found = {}
    for name in every:
        short = clear(name, every)
        if short in taken:
            short = name if "." in name else f"{name} (asked)"
        found[name] = short
    return found


def _fixed(entry: Entry) -> dict[str, Value]:
    """What every row has."""
    words = {"label": entry.label, "state": _state(entry).text, "gate": _gate(entry).text}
    return words | {"seeds": int(entry.metrics.get("repeats") or 1)}


def _plain(value: Value) -> Value:
    return scrub(value) if isinstance(value, str) else value


def _given(name: str, values: Sequence[Value]) -> Column:
    """A column of parameters."""
    return Column(name, name.replace("_", " "), [_parameter(name, value) for value in values])


def _parameter(name: str, value: Value) -> Cell:
    text = word(name, value)
    full = scrub(str(value))
    hint = full if value is not None and full != text else ""
    return Cell(text, float(value) if is_number(value) else None, hint)


def _seeds(entry: Entry) -> Cell:
    count = int(entry.metrics.get("repeats") or 1)
    return Cell(str(count), count)


def _state(entry: Entry) -> Cell:
    status = entry.run.status
    return Cell(str(status["state"]), None, scrub(str(status.get("cause") or "")))


def _gate(entry: Entry) -> Cell:
    said = scrub(verdict(entry.run))
    first = said.partition(" (")[0]
    return Cell({"not applicable": "n/a", "not run": "none"}.get(first, first), None, said)


def _numbers(name: str, shown: Sequence[Entry], values: Sequence[Value]) -> Column:
    """A column of results in one unit, which stands in its head; one's own may be texts, too."""
    known = [abs(float(value)) for value in values if is_number(value)]
    head, factor = _HEADS.get(name) or TITLES.get(name) or name.replace("_", " "), 1.0
    if name == "payload_bytes_per_step":
        power = next((p for p in range(4, 0, -1) if max(known, default=0) >= 1024**p), 0)
        head, factor = f"payload, {_UNITS[power]} a step", 1 / 1024**power
    # Who logs accuracies of his own may count them in per cent.
    elif name.endswith("accuracy") and max(known, default=0) <= 1:
        head, factor = f"{head}, %", 100.0
    cells = []
    for entry, value in zip(shown, values, strict=True):
        if not is_number(value):
            cells.append(Cell("—") if value is None else _parameter(name, value))
            continue
        ends = spread(entry.run, name)
        seeds = f"{entry.metrics.get('repeats')} seeds, "
        hint = f"{seeds}{_digits(factor * ends[0])} to {_digits(factor * ends[1])}" if ends else ""
        cells.append(Cell(_digits(factor * value), _six(factor * value), hint))
    return Column(name, head, cells)


def _digits(value: float) -> str:
    """Three or four figures; from a thousand on whole numbers."""
    size = abs(value)
    if size >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 99.95 else f"{value:.2f}" if size >= 9.995 else f"{value:#.3g}"


def _six(value: float) -> float:
    """Six figures: more sort and filter nothing apart that a reader would."""
    return float(f"{value:.6g}")
