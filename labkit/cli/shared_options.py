"""Options that several commands share: notebooks, parameters, output, and placement of ranks."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import wraps
from glob import escape, glob
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
from click.shell_completion import CompletionItem

from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.experiment import Experiment
    from labkit.jobs.parameters import NotebookParameter


SUFFIXES = (".ipynb", ".py", ".md", ".yaml", ".yml")
_ARGUMENTS = "labkit.arguments"


class Target(click.Path):
    """A path of a notebook or experiment; shell completion also offers notebooks/*.ipynb."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return notebooks, experiment files and folders whose paths begin with the typed text."""
        here = sorted(glob(f"{escape(incomplete)}*"))
        folders = [f"{path}/" for path in here if Path(path).is_dir()]
        files = [path for path in here if path.endswith(SUFFIXES)]
        known = [] if "/" in incomplete else sorted(glob(f"notebooks/{escape(incomplete)}*.ipynb"))
        return [CompletionItem(path) for path in [*files, *known, *folders]]


class OfNotebook(click.Command):
    """A command whose help also lists the parameters of the notebook named in its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store unparsed arguments, because help and completion run before Click parses them."""
        ctx.meta[_ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's options, and then the parameters of the notebook."""
        super().format_options(ctx, formatter)
        if known := declared(ctx):
            with formatter.section("Parameters of the notebook, with their defaults"):
                formatter.write_dl([(_declaration(p), p.help) for p in known.values()])


def declared(ctx: click.Context) -> dict[str, NotebookParameter]:
    """Return the parameters of the notebook that the arguments name; {} without notebook."""
    from labkit.jobs import parameters

    words = ctx.meta.get(_ARGUMENTS, ())
    notebook = next((word for word in words if word.endswith(SUFFIXES[:3])), "")
    return parameters.declared(Path(notebook)) if Path(notebook).is_file() else {}


def complete_parameter(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete `-p NAME VALUE`: first the name, then a value that the parameter allows."""
    last = ctx.meta[_ARGUMENTS][-1]
    try:
        known = declared(ctx)
        if last in known:
            return _items(_choices(known[last]), incomplete)
    except LabkitError:  # the notebook or a parameter type is unreadable
        return []
    return [CompletionItem(n, help=p.help) for n, p in known.items() if n.startswith(incomplete)]


PARAMETER = click.option(
    "-p",
    "parameters",
    metavar="NAME VALUE",
    nargs=2,
    multiple=True,
    help="Set one parameter.",
    shell_complete=complete_parameter,
)


def complete_assignment(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a parameter in an argument of the form `NAME=VALUES`."""
    try:
        return _items([f"{name}=" for name in declared(ctx)], incomplete)
    except LabkitError:
        return []


def _items(words: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _choices(parameter: NotebookParameter) -> list[str]:
    if parameter.annotation == "bool":
        return ["true", "false"]
    schema = parameter.type.json_schema()
    return [value for value in schema.get("enum", []) if isinstance(value, str)]


def _declaration(parameter: NotebookParameter) -> str:
    """Return a parameter's declaration as text, such as `workers: int = 2`."""
    from labkit.jobs.parameters import Unknown

    value = parameter.default
    shown = "…" if isinstance(value, Unknown) else json.dumps(value, ensure_ascii=False)
    annotation = f": {parameter.annotation}" if parameter.annotation else ""
    return f"{parameter.name}{annotation} = {shown}"


F = TypeVar("F", bound=Callable[..., Any])


class Report(ExitStack):
    """The output of a command with the options --quiet and --json; a context of the command.

    With --quiet, stderr receives only errors. With --json, stdout receives one JSON value at the
    end of the command, and all other output goes to stderr, also that of child processes.
    """

    def __init__(self, quiet: bool, as_json: bool) -> None:
        super().__init__()
        self.quiet, self.as_json = quiet, as_json
        self._json: str | None = None

    def __enter__(self) -> Self:
        self._stdout, self._stderr = sys.stdout, sys.stderr
        if self.as_json:
            sys.stdout.flush()
            descriptor = os.dup(1)  # Child processes inherit the file descriptor 1 as their stdout.
            self.callback(os.close, descriptor)
            self.callback(os.dup2, descriptor, 1)
            os.dup2(2, 1)
            self.enter_context(redirect_stdout(sys.stderr))
        if self.quiet:
            sink = self.enter_context(open(os.devnull, "w"))
            self.enter_context(redirect_stderr(sink))
            if self.as_json:
                self.enter_context(redirect_stdout(sink))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        suppressed = super().__exit__(kind, error, traceback)
        if self._json is not None:
            say(self._json)
        return bool(suppressed)

    def details(self, text: str) -> None:
        """Print a part of the result that --quiet and --json omit."""
        if not self.quiet and not self.as_json:
            say(text)

    def result(self, text: str, value: Any) -> None:
        """Print the result as text, or at the end of the command as JSON, with null for NaN."""
        if self.as_json:
            self._json = json.dumps(_finite(value), indent=1, allow_nan=False)
        elif text:
            say(text)

    def error(self, text: str) -> None:
        """Print an error on stderr, also with --quiet."""
        with redirect_stderr(self._stderr):
            say(text, err=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reports(result: str) -> Callable[[F], F]:
    """Add --quiet and --json to a command, which receives a `Report` as its argument `report`.

    Args:
        result: What --quiet prints, for the help text.
    """

    def decorate(command: F) -> F:
        @click.option("-q", "--quiet", is_flag=True, help=f"Print only errors and {result}.")
        @click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print the result as one JSON value on stdout; all other output goes to stderr.",
        )
        @wraps(command)
        def reported(*arguments: Any, quiet: bool, as_json: bool, **options: Any) -> Any:
            with Report(quiet, as_json) as report:
                return command(*arguments, report=report, **options)

        return reported  # type: ignore[return-value]

    return decorate


def _notify_words(_: click.Context, __: click.Parameter, command: str | None) -> list[str]:
    from labkit.jobs.notify import command_words

    return [] if command is None else command_words(command)


NOTIFY = click.option(
    "--notify",
    metavar="COMMAND",
    callback=_notify_words,
    help="Execute a command once when the job ends, without a shell. Its environment variables "
    "LABKIT_JOB_STATE, _FOLDER, _NOTEBOOK, _EXIT_CODE and _SUMMARY describe the job.",
)

LAUNCHER = click.option(
    "--launcher",
    type=click.Choice(["local", "hosts", "slurm"]),
    help="Launcher that starts the ranks.  [default: hosts with --hosts; slurm with --nodes "
    "or --slurm; without these, local]",
)
HOSTS = click.option(
    "--hosts",
    metavar="a:2,b:2",
    help="Hosts with their numbers of ranks, such as a:2,b:2, or a host file.",
)
NODES = click.option(
    "--nodes", type=click.IntRange(1), help="Number of nodes to request from Slurm."
)
AGENT = click.option(
    "--agent", metavar="COMMAND", help="Remote shell command to use instead of ssh."
)
SLURM = click.option(
    "--slurm",
    metavar="OPTIONS",
    help="Options that are passed to salloc, such as '--partition=short --time=10'.",
)
FAULT_TOLERANT = click.option(
    "--fault-tolerant",
    is_flag=True,
    help="Let runs continue when ranks fail, as with Cluster(fault_tolerant=True).",
)


def placed(command: F) -> F:
    """Add the options of this module to a command; the command passes them to `place`."""
    for option in (FAULT_TOLERANT, SLURM, AGENT, NODES, HOSTS, LAUNCHER):
        command = option(command)
    return command


def place(
    launcher: str | None,
    hosts: str | None,
    nodes: int | None,
    agent: str | None,
    slurm: str | None,
    fault_tolerant: bool = False,
) -> None:
    """Set environment variables with defaults for all clusters that this process starts.

    Arguments of the class Cluster override these defaults.

    Args:
        launcher: The launcher of ranks: "local", "hosts" or "slurm"; None: infer the launcher from
            the other options.
        hosts: Hosts with their numbers of ranks, such as "a:2,b:2", or the path of a host file.
        nodes: The number of nodes to request from Slurm.
        agent: The remote shell command that replaces ssh.
        slurm: Options for Slurm's command salloc.
        fault_tolerant: Whether clusters survive the failure of some ranks.

    Raises:
        InvalidInput: An option is invalid, or has no effect with the chosen launcher.
    """
    from labkit.cluster.start import TOLERANT, VARIABLES, Start

    if fault_tolerant:
        os.environ[TOLERANT] = "1"
    if not any((launcher, hosts, nodes, agent, slurm)):
        return

    if slurm and not (launcher or hosts or os.environ.get(VARIABLES["launcher"])):
        launcher = "slurm"
    how = Start.from_options(None, launcher=launcher, hosts=hosts, nodes=nodes)
    for option, value, launchers in (
        ("--nodes", nodes, ("slurm",)),
        ("--slurm", slurm, ("slurm",)),
        ("--agent", agent, ("hosts", "slurm")),
    ):
        if value and how.launcher not in launchers:
            raise InvalidInput(
                f"{option} has no effect with --launcher {how.launcher}; give it with "
                f"--launcher {' or '.join(launchers)}"
            )
    listed = ",".join(map(str, how.hosts))
    values = {"hosts": listed, "nodes": str(nodes or ""), "agent": agent, "options": slurm}
    settled = {"launcher": how.launcher} | {
        field: value for field, value in values.items() if value
    }
    os.environ |= {VARIABLES[field]: value for field, value in settled.items()}


def experiment_of(path: Path, overrides: Mapping[str, JSON]) -> Experiment:
    """Return the experiment in a YAML or JSON file, with some fields replaced by `overrides`."""
    from labkit.common.canonical_json import SCHEMA
    from labkit.experiment import Experiment
    from labkit.jobs.parameters import read_text, read_yaml, value_of
    from labkit.records.shape import rename_experiment

    fields = read_yaml(read_text(path), str(path))
    # The file may be the experiment.json of a run, which contains a schema version.
    schema = fields.pop("schema", SCHEMA)
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise InvalidInput(
            f"{path} has the schema version {short(schema)}; this labkit reads versions 1 to "
            f"{SCHEMA}"
        )
    if schema < SCHEMA:
        fields = rename_experiment(fields)
    return Experiment(**fields | {name: value_of(value) for name, value in overrides.items()})


def experiment_named(model: str, overrides: Mapping[str, JSON]) -> Experiment:
    """Return the experiment of a file, or of a named model, with some fields replaced."""
    from labkit.experiment import Experiment
    from labkit.jobs.parameters import value_of

    if Path(model).suffix in (".yaml", ".yml", ".json"):
        return experiment_of(Path(model), overrides)
    return Experiment(model=model, **{name: value_of(value) for name, value in overrides.items()})
