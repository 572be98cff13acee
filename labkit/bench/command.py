"""`labkit bench`: the group of benchmark commands, with shared options, tables and JSON output.

The module of each benchmark defines the benchmark's command and is imported when the command runs.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.common.output import output_option
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.bench.timing import Row
    from labkit.compression import Compressor

AS_JSON = output_option(
    "--json", "file", help="File to which the rows are also written, as JSON lines."
)
NETWORK = click.option(
    "--network", default=None, help="Network to emulate.  [default: the machine's network]"
)
TIMES = {"median_ms": "median ms", "min_ms": "min ms", "p90_ms": "p90 ms"}


class CommandTable(click.Group):
    """A command group that imports a command only when the command runs, so that help is fast.

    Args:
        name: Name of the command group.
        modules: Module name by command name; each module defines a function `command`.
        help: Help text of the group.
        more: Further arguments of `click.Group`.
    """

    def __init__(self, name: str, modules: Mapping[str, str], help: str, **more: Any) -> None:
        super().__init__(name, help=help, **more)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of `modules`."""
        return [*self._modules]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None for an unknown name."""
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(self._modules[cmd_name]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name of each command with the first line of the command's docstring."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(path)) for name, path in self._modules.items()])


def _summary(module: str) -> str:
    """Return the first docstring line of a module's command without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    # The type checker does not know that a module file always has a path.
    assert spec.origin is not None
    (text,) = (
        ast.get_docstring(node)
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "command"
    )
    return (text or "").partition("\n")[0]


bench = CommandTable(
    "bench",
    {
        "collectives": "labkit.bench.collectives",
        "link": "labkit.bench.link",
        "exchange": "labkit.bench.exchange_command",
        "compression": "labkit.bench.compression",
        "pipeline": "labkit.bench.pipeline",
        "tf": "labkit.bench.frameworks",
        "transport": "labkit.bench.transports.transports_command",
        "servers": "labkit.bench.servers",
        "averaging": "labkit.bench.averaging",
        "start": "labkit.bench.start",
    },
    "Run benchmarks on this machine. Results are medians of interleaved repeats, with minimum "
    "and 90th percentile.",
)


# --- options ---------------------------------------------------------------------------------


def numbers(_: click.Context, __: click.Parameter, text: str | None) -> list[int]:
    """Parse an option of comma-separated integers; an absent option is an empty list."""
    try:
        return [int(float(part)) for part in text.split(",")] if text is not None else []
    except (ValueError, OverflowError):  # OverflowError: inf
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,2,4") from None


def sizes(_: click.Context, __: click.Parameter, text: str | None) -> list[int]:
    """Parse an option of comma-separated sizes in bytes; an absent option is an empty list."""
    from labkit.common.errors import InvalidInput
    from labkit.common.quantities import parse_bytes

    try:
        return [parse_bytes(part) for part in text.split(",")] if text is not None else []
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from None


def names(_: click.Context, __: click.Parameter, text: str | None) -> list[str]:
    """Parse an option of comma-separated names; an absent option is an empty list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def compressors(_: click.Context, __: click.Parameter, text: str | None) -> list[Compressor]:
    """Parse an option with a list of compressors, written as the items of a YAML list."""
    from labkit.common.canonical_json import NotPlain
    from labkit.compression import parse
    from labkit.records.safe_yaml import read_plain

    try:
        items = read_plain(f"[{text or ''}]")
    except NotPlain as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    # The function `read_plain` parses a YAML text in brackets as a list.
    assert isinstance(items, list)
    return [parse(item) for item in items]


# --- output ----------------------------------------------------------------------------------


def show_rows(rows: Sequence[Row], columns: dict[str, str], file: Path | None) -> None:
    """Print rows as a table, and write the rows to `file` unless `file` is None."""
    say(format_rows(rows, columns))
    write_rows(rows, file)


def format_rows(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """Return rows as a text table; `columns` is a dictionary of field names and their titles."""
    from labkit.jobs.listing import table

    cells = [[format_value(name, row.get(name)) for name in columns] for row in rows]
    return table(cells, list(columns.values()))


def format_value(name: str, value: str | float | None) -> str:
    """Return the text of a value of the field `name`."""
    if value is None or isinstance(value, bool):
        # The word NO has capitals, so that the user notices a wrong result, whose time is
        # meaningless.
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, str):
        return value
    if name.startswith("error"):
        return f"{value:+.1%}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3g}" if value < 1e5 else f"{value:.2e}"


def write_rows(rows: Sequence[Row], file: Path | None) -> None:
    """Write rows to `file` and print its path, unless `file` is None."""
    if file is None:
        return
    save_rows(rows, file)
    say(f"rows: {file}")


def save_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows to a file as JSON lines, in one atomic step."""
    from labkit.records.store import write_atomically

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
