"""`labkit bench …`: a table of commands, and what they share: options, tables, lines of JSON.

Each command stands in the module of its benchmark, which is imported when the command runs.
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

AS_JSON = output_option("--json", "file", help="Write rows here, one a line.")
NETWORK = click.option(
    "--network", default=None, help="Emulate this network; default: the machine's own."
)
TIMES = {"median_ms": "median ms", "min_ms": "least", "p90_ms": "p90"}


class CommandTable(click.Group):
    """A group whose commands are imported when they run: its help waits for none of them.

    Args:
        name: of the group.
        modules: by the command's name; each module defines `command`.
        help: of the group.
        more: arguments of `click.Group`.
    """

    def __init__(self, name: str, modules: Mapping[str, str], help: str, **more: Any) -> None:
        super().__init__(name, help=help, **more)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return [*self._modules]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(self._modules[cmd_name]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first line of its docstring."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(path)) for name, path in self._modules.items()])


def _summary(module: str) -> str:
    """Return what a module's command says first, without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None  # for the type checker: it is a file
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
        "transport": "labkit.bench.transports.command",
        "servers": "labkit.bench.servers",
        "averaging": "labkit.bench.averaging",
        "start": "labkit.bench.start",
    },
    "Measure this machine; medians of interleaved repeats, with their spread.",
)


# --- options ---------------------------------------------------------------------------------


def numbers(_: click.Context, __: click.Parameter, text: str | None) -> list[int]:
    """Parse an option's numbers, with commas between them; none where it is left out."""
    try:
        return [int(float(part)) for part in text.split(",")] if text is not None else []
    except (ValueError, OverflowError):  # OverflowError: inf
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2,4") from None


def sizes(_: click.Context, __: click.Parameter, text: str | None) -> list[int]:
    """Parse an option's sizes, with commas between them; none where it is left out."""
    from labkit.common.errors import InvalidInput
    from labkit.common.quantities import parse_bytes

    try:
        return [parse_bytes(part) for part in text.split(",")] if text is not None else []
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from None


def names(_: click.Context, __: click.Parameter, text: str | None) -> list[str]:
    """Parse an option's names, with commas between them; none where it is left out."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def compressors(_: click.Context, __: click.Parameter, text: str | None) -> list[Compressor]:
    """Parse an option's compressors, as YAML has the items of a list."""
    from labkit.common.safe_json import NotPlain
    from labkit.compression import parse
    from labkit.records.safe_yaml import read_plain

    try:
        items = read_plain(f"[{text or ''}]")
    except NotPlain as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    assert isinstance(items, list)  # as brackets say
    return [parse(item) for item in items]


# --- output ----------------------------------------------------------------------------------


def show_rows(rows: Sequence[Row], columns: dict[str, str], file: Path | None) -> None:
    """Print rows as a table, and write them to a file where one is given."""
    say(format_rows(rows, columns))
    write_rows(rows, file)


def format_rows(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """Return a table of some columns, by their names, under these titles."""
    from labkit.jobs.listing import table

    cells = [[format_value(name, row.get(name)) for name in columns] for row in rows]
    return table(cells, list(columns.values()))


def format_value(name: str, value: str | float | None) -> str:
    """Return a value as a table shows it in the column of this name."""
    if value is None or isinstance(value, bool):
        # Loud: a benchmark of a wrong sum is worth nothing.
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, str):
        return value
    if name.startswith("error"):
        return f"{value:+.1%}"
    if isinstance(value, int):
        return str(value)
    # Three figures in both forms; bandwidths are too long without a power of ten.
    return f"{value:.3g}" if value < 1e5 else f"{value:.2e}"


def write_rows(rows: Sequence[Row], file: Path | None) -> None:
    """Write rows to a file where one is given, and say so."""
    if file is None:
        return
    save_rows(rows, file)
    say(f"rows: {file}")


def save_rows(rows: Sequence[Row], file: Path) -> None:
    """Write one object a line, all of them or none."""
    from labkit.records.store import write_atomically

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
