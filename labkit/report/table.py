"""The runs of a page as a table: what tells them apart, what they reached, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from labkit.common.content import JSON, is_number
from labkit.common.privacy import scrub
from labkit.figures.kit.axes import title_of, word
from labkit.figures.kit.entries import Entry
from labkit.records.questions.columns import Value, differences, plain_parameters, spread
from labkit.records.run import KEY_METRICS, key_metrics, verdict

_TWICE = ("seed", "repeats", "gate")  # columns of seeds and verdicts say them
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
    """A row a setting; columns that are the same in all rows stand above it."""

    shown: Sequence[Entry]
    columns: list[Column]

    @cached_property
    def told(self) -> list[Column]:
        """The columns that tell rows apart."""
        return [column for column in self.columns if not column.is_same]

    @property
    def same(self) -> list[tuple[str, Cell]]:
        """Heads and cells of the others, and of the parameters that matter to every reader."""
        rows = [plain_parameters(entry.run) for entry in self.shown]
        shared = {k: v for k, v in rows[0].items() if all(r.get(k, self) == v for r in rows)}
        given = [
            (title_of(n), _parameter(n, shared[n])) for n in _TOLD if shared.get(n) is not None
        ]
        return given + [(each.head, each.one) for each in self.columns if each.is_same]

    @property
    def has_seeds(self) -> bool:
        """Whether a row stands for several seeds."""
        return any(entry.metrics.get("repeats", 1) > 1 for entry in self.shown)

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters among the columns, by which rows are coloured and grouped."""
        known = {column.name for column in self.told}
        names = (name for row in _differing(self.shown) for name in row)
        return [name for name in dict.fromkeys(names) if name in known]

    def known(self) -> dict[str, JSON]:
        """What a filter may ask for: values that all share, and each row's own."""
        rows = [_values(entry) for entry in self.shown]
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
    rows = _differing(shown)
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [
        Column(name, name.replace("_", " "), [_parameter(name, row.get(name)) for row in rows])
        for name in names
    ]
    columns += [
        Column("seeds", "seeds", [_seeds(entry) for entry in shown]),
        Column("state", "state", [_state(entry) for entry in shown]),
        Column("gate", "gate", [_gate(entry) for entry in shown]),
    ]
    found = [key_metrics(entry.run) for entry in shown]
    measured = [name for name in KEY_METRICS if any(name in row for row in found)]
    columns += [_numbers(name, shown, [row.get(name) for row in found]) for name in measured]
    return Table(shown, columns)


def _differing(shown: Sequence[Entry]) -> list[dict[str, Value]]:
    rows = differences([entry.run for entry in shown])
    return [{k: v for k, v in row.items() if k not in _TWICE} for row in rows]


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
    """A column of numbers in one unit, which stands in its head."""
    known = [abs(float(value)) for value in values if is_number(value)]
    head, factor = _HEADS.get(name, title_of(name)), 1.0
    if "bytes" in name:
        power = next((p for p in range(4, 0, -1) if max(known) >= 1024**p), 0)
        head, factor = f"payload, {_UNITS[power]} a step", 1 / 1024**power
    elif name.endswith("accuracy"):
        head, factor = f"{head}, %", 100.0
    cells = []
    for entry, value in zip(shown, values, strict=True):
        if not is_number(value):
            cells.append(Cell("—"))
            continue
        ends = spread(entry.run, name)
        seeds = f"{entry.metrics.get('repeats')} seeds, "
        hint = f"{seeds}{_digits(factor * ends[0])} to {_digits(factor * ends[1])}" if ends else ""
        cells.append(Cell(_digits(factor * value), _six(value), hint))
    return Column(name, head, cells)


def _digits(value: float) -> str:
    """Three or four figures; from a thousand on whole numbers."""
    size = abs(value)
    if size >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 99.95 else f"{value:.2f}" if size >= 9.995 else f"{value:#.3g}"


def _values(entry: Entry) -> dict[str, Value]:
    """All that a filter may ask of a row, under the shortest clear names."""
    given = plain_parameters(entry.run)
    ends = [name.rpartition(".")[2] for name in given]
    row: dict[str, Value] = {
        (end if ends.count(end) == 1 else name): scrub(value) if isinstance(value, str) else value
        for (name, value), end in zip(given.items(), ends, strict=True)
        if end not in _TWICE
    }
    row |= {"state": _state(entry).text, "gate": _gate(entry).text, "label": entry.label}
    row |= {"seeds": int(entry.metrics.get("repeats") or 1)}
    found = key_metrics(entry.run).items()
    return row | {k: _six(v) if isinstance(v, float) else v for k, v in found}


def _six(value: float) -> float:
    """Six figures: more sort and filter nothing apart that a reader would."""
    return float(f"{value:.6g}")
