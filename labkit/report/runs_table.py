"""The table of runs in a report: differing parameters, results, and shared parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from labkit.common.canonical_json import JSON, is_number
from labkit.common.privacy import scrub
from labkit.common.units import plural
from labkit.figures.kit.entries import RunEntry
from labkit.figures.kit.panels import TITLES, title_of, word
from labkit.records.analysis.columns import (
    Value,
    differing_parameters,
    plain_parameters,
    reached_experiment,
    seed_range,
    shortest_name,
)
from labkit.records.run import KEY_METRICS, Run, key_metrics, verdict

# The table shows the parameters `seed`, `repeats` and `verify` in columns with other names.
_SHOWN_ELSEWHERE = ("seed", "repeats", "verify")
_FIXED_COLUMNS = ("label", "state", "equivalence", "seeds")
_MAX_RESULTS = 24  # Filters of the table also accept results that have no column.
# The constant _MAX_HINTS is the maximum number of tooltips in a cell that stands for a whole
# column.
_MAX_HINTS = 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HEADS = {
    "samples_per_second": "samples/s",
    "step_ms.median": "step, ms",
    "train_seconds": "training, s",
}


@dataclass(frozen=True)
class TableCell:
    """A table cell with its text, its sort key (None means to sort by text), and its tooltip."""

    text: str
    order: float | None = None
    hint: str = ""

    @property
    def filter_value(self) -> Value:
        """Value that filters compare, in the unit that the table shows."""
        return self.text if self.order is None else self.order


@dataclass(frozen=True)
class TableColumn:
    """A table column with its name in filters, its heading with the unit, and its cells."""

    name: str
    head: str
    cells: list[TableCell] = field(default_factory=list)

    @cached_property
    def is_words(self) -> bool:
        """True if no cell is a number."""
        return all(cell.order is None for cell in self.cells)

    @cached_property
    def is_same(self) -> bool:
        """True if the column has several cells and all of them are equal."""
        return len({cell.text for cell in self.cells}) == 1 and len(self.cells) > 1

    @property
    def summary(self) -> TableCell:
        """One cell for a column of equal cells, with all distinct tooltips of the column."""
        hints = list(dict.fromkeys(cell.hint for cell in self.cells if cell.hint))
        further = [f"and {len(hints) - _MAX_HINTS} more"] if len(hints) > _MAX_HINTS else []
        return TableCell(self.cells[0].text, hint="; ".join(hints[:_MAX_HINTS] + further))


@dataclass(frozen=True)
class ReportTable:
    """A table with one row per setting; the page lists columns of equal cells above the table.

    Attributes:
        entries: Settings, one per row. A setting consists of all runs that differ only in the seed.
        columns: Columns of differing parameters, of states and of results.
        names: Names of the columns that contain parameters.
        values: For each row, a dict of the values that filters can use, in displayed units.
        more: Number of results without a column, because the table has no room for them.
    """

    entries: Sequence[RunEntry]
    columns: list[TableColumn]
    names: list[str]
    values: list[dict[str, Value]]
    more: int

    @cached_property
    def differing_columns(self) -> list[TableColumn]:
        """Columns whose cells differ."""
        return [column for column in self.columns if not column.is_same]

    @property
    def shared_cells(self) -> list[tuple[str, TableCell]]:
        """Headings and cells of columns with equal cells, and of task parameters of all rows."""
        rows = [plain_parameters(run) for run in self._begun_runs]
        shared = {k: v for k, v in rows[0].items() if all(r.get(k, self) == v for r in rows)}
        task_cells = [
            (title_of(n), _parameter(n, shared[n])) for n in _TASK if shared.get(n) is not None
        ]
        return task_cells + [
            (column.head, column.summary) for column in self.columns if column.is_same
        ]

    @property
    def shared_by(self) -> str:
        """Text that names the rows with the shared values, which jobs that failed early lack."""
        failed_jobs = len(self.entries) - len(self._begun_runs)
        return (
            f"all but {plural(failed_jobs, 'job')} that failed before an experiment began"
            if failed_jobs
            else "all"
        )

    @cached_property
    def _begun_runs(self) -> list[Run]:
        """Runs whose notebook job started an experiment, or all runs if no job started one."""
        runs = [entry.run for entry in self.entries]
        return [
            run for run, is_begun in zip(runs, reached_experiment(runs), strict=True) if is_begun
        ] or runs

    @property
    def has_seeds(self) -> bool:
        """True if a row represents several seeds."""
        return any(entry.metrics.get("repeats", 1) > 1 for entry in self.entries)

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the differing parameters, by which a user can colour and group rows."""
        column_names = {column.name for column in self.differing_columns}
        return [name for name in self.names if name in column_names]

    def filter_data(self) -> dict[str, JSON]:
        """Return the data for the page's filters: values of all rows, and values of each row."""
        rows = self.values
        shared = {k: v for k, v in rows[0].items() if all(r.get(k, self) == v for r in rows)}
        runs: dict[str, JSON] = {
            entry.key: {
                "label": entry.label,
                "color": entry.color,
                "values": {k: v for k, v in row.items() if k not in shared},
            }
            for entry, row in zip(self.entries, rows, strict=True)
        }
        return {"shared": shared, "runs": runs}


_TASK = ("model", "dataset", "strategy", "workers", "network", "epochs", "batch_size", "precision")


def table_of(entries: Sequence[RunEntry]) -> ReportTable:
    """Return the report's table, with one row for each setting in `entries`."""
    parameter_rows = [plain_parameters(entry.run) for entry in entries]
    metric_rows = [key_metrics(entry.run) for entry in entries]
    metric_names = dict.fromkeys((*KEY_METRICS, *(name for row in metric_rows for name in row)))
    measured = [name for name in metric_names if any(name in row for row in metric_rows)]
    names = _names(parameter_rows, (*_FIXED_COLUMNS, *measured))
    differing_names = differing_parameters(
        parameter_rows, reached_experiment([entry.run for entry in entries])
    )
    parameter_names = [name for name in differing_names if name not in _SHOWN_ELSEWHERE]
    columns = [
        _parameter_column(names[name], [row.get(name) for row in parameter_rows])
        for name in parameter_names
    ]
    columns += [
        TableColumn("seeds", "seeds", [_seeds(entry) for entry in entries]),
        TableColumn("state", "state", [_state(entry) for entry in entries]),
        TableColumn("equivalence", "equivalence", [_gate(entry) for entry in entries]),
    ]
    results = [
        _result_column(name, entries, [row.get(name) for row in metric_rows]) for name in measured
    ]
    values = [
        {names[name]: _plain(value) for name, value in row.items() if name in names}
        | _fixed_values(entry)
        | {
            result.name: result.cells[index].filter_value
            for result in results
            if result.name in metric_rows[index]
        }
        for index, (entry, row) in enumerate(zip(entries, parameter_rows, strict=True))
    ]
    columns += results[:_MAX_RESULTS]
    return ReportTable(
        entries, columns, [names[n] for n in parameter_names], values, len(results[_MAX_RESULTS:])
    )


def _names(parameter_rows: Sequence[dict[str, Value]], reserved: Sequence[str]) -> dict[str, str]:
    """Return a unique short name for each parameter, for column headings and filters.

    Args:
        parameter_rows: Parameters of each row of the table.
        reserved: Names that other columns use.
    """
    names = [
        name
        for name in dict.fromkeys(n for row in parameter_rows for n in row)
        if name not in _SHOWN_ELSEWHERE
    ]
    short_names = {}
    for name in names:
        short = shortest_name(name, names)
        if short in reserved:
            short = name if "." in name else f"{name} (parameter)"
        short_names[name] = short
    return short_names


def _fixed_values(entry: RunEntry) -> dict[str, Value]:
    """Return a row's values in the fixed columns: label, state, equivalence check, seeds."""
    words = {"label": entry.label, "state": _state(entry).text, "equivalence": _gate(entry).text}
    return words | {"seeds": int(entry.metrics.get("repeats") or 1)}


def _plain(value: Value) -> Value:
    return scrub(value) if isinstance(value, str) else value


def _parameter_column(name: str, values: Sequence[Value]) -> TableColumn:
    """Return the column of one parameter, with a value for each row."""
    return TableColumn(name, name.replace("_", " "), [_parameter(name, value) for value in values])


def _parameter(name: str, value: Value) -> TableCell:
    text = word(name, value)
    full = scrub(str(value))
    hint = full if value is not None and full != text else ""
    return TableCell(text, float(value) if is_number(value) else None, hint)


def _seeds(entry: RunEntry) -> TableCell:
    count = int(entry.metrics.get("repeats") or 1)
    return TableCell(str(count), count)


def _state(entry: RunEntry) -> TableCell:
    status = entry.run.status
    return TableCell(str(status["state"]), None, scrub(str(status.get("cause") or "")))


def _gate(entry: RunEntry) -> TableCell:
    text = scrub(verdict(entry.run))
    first = text.partition(" (")[0]
    return TableCell({"not applicable": "n/a", "not run": "none"}.get(first, first), None, text)


def _result_column(name: str, entries: Sequence[RunEntry], values: Sequence[Value]) -> TableColumn:
    """Return a column of results in the unit that its heading names; cells may contain text."""
    magnitudes = [abs(float(value)) for value in values if is_number(value)]
    head, factor = _HEADS.get(name) or TITLES.get(name) or name.replace("_", " "), 1.0
    if name == "payload_bytes_per_step":
        power = next((p for p in range(4, 0, -1) if max(magnitudes, default=0) >= 1024**p), 0)
        head, factor = f"payload, {_UNITS[power]} per step", 1 / 1024**power
    # Accuracies above 1 are not converted to percent, because values from `lk.log` may already be
    # in percent.
    elif name.endswith("accuracy") and max(magnitudes, default=0) <= 1:
        head, factor = f"{head}, %", 100.0
    cells = []
    for entry, value in zip(entries, values, strict=True):
        if not is_number(value):
            cells.append(TableCell("—") if value is None else _parameter(name, value))
            continue
        extremes = seed_range(entry.run, name)
        seeds = f"{entry.metrics.get('repeats')} seeds, "
        hint = (
            f"{seeds}{_digits(factor * extremes[0])} to {_digits(factor * extremes[1])}"
            if extremes
            else ""
        )
        cells.append(TableCell(_digits(factor * value), _round(factor * value), hint))
    return TableColumn(name, head, cells)


def _digits(value: float) -> str:
    """Format a number with three or four digits, or as an integer if it is at least 1000."""
    size = abs(value)
    if size >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 99.95 else f"{value:.2f}" if size >= 9.995 else f"{value:#.3g}"


def _round(value: float) -> float:
    """Return a number rounded to six digits, which is enough for sorting and filtering."""
    return float(f"{value:.6g}")
