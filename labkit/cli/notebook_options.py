"""What a command knows of the notebook that it is asked for: in its help, and for TAB."""

from __future__ import annotations

import json
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from labkit.common.errors import LabkitError

if TYPE_CHECKING:
    from labkit.jobs.parameters import Parameter

SUFFIXES = (".ipynb", ".py", ".yaml", ".yml")
_ARGUMENTS = "labkit.arguments"


class Target(click.Path):
    """A notebook or experiment; TAB also finds those in notebooks/ by their names."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Notebooks, and folders that may have some."""
        here = sorted(glob(f"{escape(incomplete)}*"))
        folders = [f"{path}/" for path in here if Path(path).is_dir()]
        files = [path for path in here if path.endswith(SUFFIXES)]
        known = [] if "/" in incomplete else sorted(glob(f"notebooks/{escape(incomplete)}*.ipynb"))
        return [CompletionItem(path) for path in [*files, *known, *folders]]


class OfNotebook(click.Command):
    """A command whose help lists the parameters of the notebook that it is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words: help and TAB are asked before they are read."""
        ctx.meta[_ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, and then the parameters."""
        super().format_options(ctx, formatter)
        if known := declared(ctx):
            with formatter.section("Parameters of the notebook, with their defaults"):
                formatter.write_dl([(_said(each), each.help) for each in known.values()])


def declared(ctx: click.Context) -> dict[str, Parameter]:
    """The parameters of the notebook among the words of a command; none where there is none."""
    from labkit.jobs import parameters

    words = ctx.meta.get(_ARGUMENTS, ())
    notebook = next((word for word in words if word.endswith(SUFFIXES[:2])), "")
    return parameters.declared(Path(notebook)) if Path(notebook).is_file() else {}


def complete_parameter(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """For `-p NAME VALUE`: names, then the values that a declaration lists."""
    try:
        known = declared(ctx)
    except LabkitError:
        return []
    last = ctx.meta[_ARGUMENTS][-1]
    if last in known:
        return _items(_choices(known[last]), incomplete)
    return [CompletionItem(n, help=p.help) for n, p in known.items() if n.startswith(incomplete)]


PARAMETER = click.option(
    "-p",
    "parameters",
    metavar="NAME VALUE",
    nargs=2,
    multiple=True,
    help="One parameter.",
    shell_complete=complete_parameter,
)


def complete_assignment(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """For `NAME=VALUES`."""
    try:
        return _items([f"{name}=" for name in declared(ctx)], incomplete)
    except LabkitError:
        return []


def _items(words: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _choices(parameter: Parameter) -> list[str]:
    if parameter.annotation == "bool":
        return ["true", "false"]
    schema = parameter.type.json_schema()
    return [each for each in schema.get("enum", []) if isinstance(each, str)]


def _said(parameter: Parameter) -> str:
    """`workers: int = 2`."""
    from labkit.jobs.parameters import Unknown

    value = parameter.default
    shown = "…" if isinstance(value, Unknown) else json.dumps(value, ensure_ascii=False)
    return f"{parameter.name}: {parameter.annotation} = {shown}"
