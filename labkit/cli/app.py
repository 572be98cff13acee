"""The `labkit` command with its subcommands. Subcommands import slow modules only when they run, so
that --help stays fast."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit import __version__
from labkit.bench.command import bench
from labkit.cli.calibrate import calibrate
from labkit.cli.docs import docs
from labkit.cli.examples import examples
from labkit.cli.forecast import forecast
from labkit.cli.frameworks import frameworks, tf_config
from labkit.cli.gallery import gallery
from labkit.cli.kubernetes import container, kubernetes
from labkit.cli.prestart import prestart
from labkit.cli.shared_options import (
    NOTIFY,
    PARAMETER,
    OfNotebook,
    Report,
    Target,
    experiment_of,
    place,
    placed,
    reports,
)
from labkit.cli.simulate import simulate
from labkit.cli.sweep import FORCE, INTERRUPTED, MLFLOW, TENSORBOARD, sweep
from labkit.cli.testbed import testbed
from labkit.common.errors import DISK, PATH, InvalidInput, LabkitError, cannot_write
from labkit.common.files import example_files, keep_bytecode
from labkit.common.imports import missing, require
from labkit.common.output import output_option
from labkit.common.renamed import name_today
from labkit.common.terminal import one_line, restart_in_utf8, say
from labkit.records.endings import interruption_text, terminate

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.jobs.listing import Entry
    from labkit.jobs.running import Follow
    from labkit.records.run import Run

FOLDER = click.Path(path_type=Path)
RUNS = click.argument("paths", metavar="RUNS...", nargs=-1, required=True, type=FOLDER)


# The sections of `labkit --help`, and the commands of each.
SECTIONS = {
    "Run": ("run", "sweep", "stop", "new", "examples", "lab"),
    "Look": ("ls", "compare", "report", "gallery", "trace"),
    "Predict": ("simulate", "calibrate", "forecast"),
    "Clusters": ("doctor", "prestart", "testbed", "container", "kubernetes", "tf-config"),
    "Learn and develop": ("docs", "methods", "bench", "frameworks"),
}


class OneLineErrors(click.Group):
    """A command group that prints a LabkitError as one line on stderr, without a traceback."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections, each with the first sentence of its description."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                commands = ((name, self.get_command(ctx, name)) for name in names)
                formatter.write_dl([(n, c.get_short_help_str(65)) for n, c in commands if c])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if today := name_today(args[0], self.list_commands(ctx)):
            ctx.fail(f"No such command {args[0]!r}: its name is now {today!r}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        with warnings.catch_warnings():
            # The command prints each warning on one line without its source location. The source
            # location does not help a command-line user.
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: say(one_line(str(message)), err=True)
            try:
                super().invoke(ctx)
            except click.NoSuchOption as error:
                options = [name for p in _parameters(error.ctx) for name in p.opts]
                today = name_today(error.option_name, options)
                if today:
                    message = f"No such option {error.option_name!r}: its name is now {today!r}."
                    raise click.UsageError(message, error.ctx) from None
                raise
            except LabkitError as error:
                say(f"labkit: {one_line(str(error))}", err=True)
                ctx.exit(2 if isinstance(error, InvalidInput) else 1)
            except ModuleNotFoundError as error:
                if (reason := missing(error)) is None:
                    raise
                say(f"labkit: {reason}", err=True)
                ctx.exit(1)
            except OSError as error:
                if error.errno not in (*DISK, *PATH):
                    raise
                message = f"{error.strerror}: {error.filename or 'a file'}"
                say(f"labkit: {one_line(message)}", err=True)
                ctx.exit(2 if error.errno in PATH else 1)
            except KeyboardInterrupt as error:
                say(f"labkit: {interruption_text(error)}", err=True)
                ctx.exit(INTERRUPTED)


def _parameters(ctx: click.Context | None) -> list[click.Parameter]:
    return ctx.command.get_params(ctx) if ctx else []


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="labkit")
def app() -> None:
    """Run and compare distributed deep learning experiments on MPI ranks."""
    restart_in_utf8()
    # All processes that a command starts inherit the environment variables that `keep_bytecode`
    # sets.
    keep_bytecode()


app.add_command(bench)
app.add_command(calibrate)
app.add_command(container)
app.add_command(docs)
app.add_command(examples)
app.add_command(forecast)
app.add_command(gallery)
app.add_command(kubernetes)
app.add_command(frameworks)
app.add_command(simulate)
app.add_command(sweep)
app.add_command(testbed)
app.add_command(tf_config)
app.add_command(prestart)


@app.command(cls=OfNotebook)
@click.argument("target", type=Target())
@PARAMETER
@click.option(
    "-f",
    "files",
    multiple=True,
    type=FOLDER,
    help="Read the notebook's parameters from a YAML file.",
)
@click.option("-y", "texts", multiple=True, help="Read the notebook's parameters from YAML text.")
@click.option("--runs", "root", default="runs", type=FOLDER, help="Folder that contains all runs.")
@click.option("--mlflow", metavar="ADDRESS", help=MLFLOW)
@click.option("--tensorboard", metavar="FOLDER", type=FOLDER, help=TENSORBOARD)
@click.option("--check", is_flag=True, help="Only check the parameters; start no run.")
@click.option("--force", is_flag=True, help=FORCE)
@click.option("--resume", is_flag=True, help="Resume the newest interrupted run of the notebook.")
@NOTIFY
@placed
@reports("the folder of the result")
def run(
    target: Path,
    parameters: tuple[tuple[str, str], ...],
    files: tuple[Path, ...],
    texts: tuple[str, ...],
    root: Path,
    mlflow: str | None,
    tensorboard: Path | None,
    check: bool,
    force: bool,
    resume: bool,
    notify: list[str],
    report: Report,
    **where: Any,
) -> None:
    """Run a notebook or an experiment's YAML file.

    TARGET is the path of the notebook or the YAML file. The option -p overrides -y, and -y
    overrides -f. If TARGET is a notebook, --help also lists the parameters of the notebook.
    Example: labkit run notebooks/tour.ipynb --help

    With --json, the result is an object: `folder` of the records (null with --check), `state`,
    `cause`, first failed `rank`, and `runs`, a list of objects as in `labkit ls --json`.
    """
    from labkit.jobs.notify import notifying
    from labkit.jobs.parameters import read_text, read_yaml
    from labkit.jobs.running import following

    # Batch queues and system shutdown send SIGTERM to end a process. The command handles SIGTERM
    # like Ctrl-C, so that the record of the run is written.
    signal.signal(signal.SIGTERM, terminate)
    place(**where)
    values: dict[str, JSON] = {}
    for path in files:
        values |= read_yaml(read_text(path), str(path))
    for text in texts:
        values |= read_yaml(text, "-y")
    # The values of the option -p override the options -y and -f. The values of the option -p are
    # therefore added last.
    values |= dict(parameters)
    kind = _run_experiment if target.suffix in (".yaml", ".yml") else _run_notebook
    with notifying(notify, target) as notified:
        followed = following(root, mlflow, tensorboard, notified)
        kind(target, values, root, check, force, resume, followed, report)


@app.command("ls")
@click.argument("folder", default="runs", type=FOLDER)
@reports("names")
def list_runs(folder: Path, report: Report) -> None:
    """List the jobs and runs of a folder.

    The columns are state, duration, accuracy, samples/s, weight verification, and cause of failure.

    With --json, the result is a list of objects: `name` (path below FOLDER), `kind` (sweep, job or
    run), `state`, `seconds`, `accuracy` (from 0 to 1), `samples_per_second`, `equivalence`,
    `cause`, and first failed `rank`. Unknown numbers are null.
    """
    from labkit.jobs import listing

    entries, skipped = listing.jobs_and_runs(folder)
    for line in skipped:
        report.error(line)
    text = listing.table([entry.row for entry in entries]) if entries else f"no runs in {folder}"
    if report.quiet:
        text = "\n".join(entry.name for entry in entries)
    report.result(text, [entry._asdict() for entry in entries])


@app.command()
@click.argument("folder", default="runs", type=FOLDER)
def stop(folder: Path) -> None:
    """Stop the running jobs and sweeps of a folder.

    The command interrupts running notebook cells. Interrupted cells can clean up, and labkit writes
    the records of runs.
    """
    from labkit.jobs.running import stop as stop_all

    remaining = stop_all(folder, say)
    sys.exit(1 if remaining else 0)


@app.command()
@RUNS
@output_option("-o", "output", default="compare.html", show_default=True, help="HTML file.")
@output_option("--csv", "csv", help="Also write all parameters and metrics to a CSV file.")
@output_option(
    "--parquet", "parquet", help="Also write all parameters and metrics to a Parquet file."
)
@click.option("--mlflow", "mlflow", metavar="ADDRESS", help="Also log the runs to MLflow.")
@click.option(
    "--tensorboard",
    "tensorboard",
    type=FOLDER,
    help="Also write the runs as TensorBoard logs to this folder.",
)
@reports("the path of the figure")
def compare(
    paths: tuple[Path, ...],
    output: Path,
    csv: Path | None,
    parquet: Path | None,
    mlflow: str | None,
    tensorboard: Path | None,
    report: Report,
) -> None:
    """Compare runs in a table and in a figure (HTML).

    With --json, the result is an object: `figure`, the path of the figure, and `runs`, a list of
    objects with all parameters and metrics of each run, as in the CSV file. Missing values are
    null.
    """
    from pandas import option_context

    from labkit import figures
    from labkit.figures.kit.canvas import html_page
    from labkit.jobs.listing import displayed_path
    from labkit.records.export import export, export_table, to_mlflow, to_tensorboard
    from labkit.records.provenance import differing_inputs
    from labkit.records.store import write_atomically

    runs = _load(paths)
    with option_context("display.unicode.east_asian_width", True):
        report.details(figures.table(runs).to_string(na_rep=""))
    if inputs := differing_inputs(run.provenance for run in runs):
        report.details(f"different inputs: {inputs}")
    write_atomically(_ready(output), html_page(figures.compare(runs)))
    figure = displayed_path(output)
    # JSON has no NaN, so missing values become None, in columns that may contain None.
    columns = export_table(runs).astype(object)
    rows = columns.where(columns.notna(), None).to_dict("records")
    report.result(figure if report.quiet else f"figure: {figure}", {"figure": figure, "runs": rows})
    for kind, path in ((".csv", csv), (".parquet", parquet)):
        if path is not None:
            report.details(f"table: {displayed_path(export(runs, path, kind))}")
    if mlflow is not None:
        report.details(f"MLflow: {len(to_mlflow(runs, mlflow))} runs in {mlflow}")
    if tensorboard is not None:
        to_tensorboard(runs, tensorboard)
        report.details(f"TensorBoard: tensorboard --logdir {shlex.quote(str(tensorboard))}")


@app.command()
@RUNS
@output_option("-o", "output", default="report.html", show_default=True, help="HTML file.")
@click.option(
    "--notebook",
    type=FOLDER,
    help="Executed notebook that the report includes.  [default: the job's notebook]",
)
def report(paths: tuple[Path, ...], output: Path, notebook: Path | None) -> None:
    """Write a report of runs as one HTML file that opens offline."""
    from labkit.jobs.listing import displayed_path
    from labkit.records.run import load_runs
    from labkit.report import report as write_report

    # If no path contains runs, the report describes the notebook at the given path.
    write_report(load_runs(paths) or paths, _ready(output), notebook)
    say(f"report: {displayed_path(output)}")


@app.command()
@click.argument("path", metavar="RUN", type=FOLDER)
@output_option("-o", "output", default="trace.json", show_default=True, help="Trace file.")
def trace(path: Path, output: Path) -> None:
    """Write a run's timeline as a Chrome trace.

    Open the trace in chrome://tracing or ui.perfetto.dev. All ranks' times in the trace refer to
    one clock. For a pipeline, the trace also contains the simulator's prediction of each step.
    """
    from labkit.common.units import seconds_text
    from labkit.jobs.listing import displayed_path
    from labkit.records.staged_steps import predicted_rows

    runs = _load((path,))
    if len(runs) > 1:
        raise InvalidInput(f"{path} contains {len(runs)} runs; give the folder of a single run")
    run = runs[0]
    predictions = predicted_rows(run)
    say(f"trace: {displayed_path(run.export_trace(_ready(output), predictions))}")
    if worst := max((clock["within_s"] for clock in run.metrics.get("clocks") or []), default=0.0):
        say(
            "the clocks of all ranks differ from the clock of rank 0 by at most "
            f"{seconds_text(worst)}"
        )
    if predictions:
        say("the trace includes the simulator's prediction of each training step")


@app.command()
@click.option(
    "--launcher",
    type=click.Choice(["local", "hosts", "slurm"]),
    default="local",
    show_default=True,
    help="Launcher of ranks whose requirements are checked.",
)
@click.option(
    "--hosts",
    default="",
    help="Hosts with their numbers of ranks, such as a:2,b:2, or a host file; requires "
    "--launcher hosts.",
)
@reports("problems")
def doctor(launcher: str, hosts: str, report: Report) -> None:
    """Check this machine, and print a fix for each problem.

    Each check prints its result on one line. If the result is a problem, its line ends with a
    command that fixes the problem.

    With --json, the result is a list of objects: `state` (ok, note or broken), the description
    `what`, and `fix`, a command or advice, or "".
    """
    from dataclasses import asdict

    from labkit.cli.doctor import checks_of, examine

    findings = []
    for finding in examine(checks_of(launcher, hosts)):
        findings.append(finding)
        shown = not report.quiet or finding.state != "ok"
        report.result(finding.line if shown else "", [asdict(each) for each in findings])
    sys.exit(1 if any(finding.broken for finding in findings) else 0)


@app.command()
@click.argument("name")
@click.option(
    "--model",
    default="mlp",
    show_default=True,
    help="Name of the model, from labkit.models.MODELS.",
)
@click.option(
    "--dataset",
    default="digits",
    show_default=True,
    help="Name of the data set, from labkit.datasets.DATASETS.",
)
@click.option(
    "--strategies",
    default="",
    help="Strategies to compare, e.g. 'AllReduce, {name: Pipeline, schedule: gpipe}'.",
)
def new(name: str, model: str, dataset: str, strategies: str) -> None:
    """Write a notebook NAME.ipynb that compares training strategies."""
    from labkit.jobs.template import new as write_new

    path = write_new(name, model, dataset, strategies)
    say(f"notebook: {path}; run it: {shlex.join(['labkit', 'run', str(path)])}")


@app.command()
@output_option("-o", "output", help="Markdown file to write instead of printing the list.")
@output_option("--map", "grid", help="HTML file to write with a map of all strategies.")
@click.argument("name", default="")
def methods(name: str, output: Path | None, grid: Path | None) -> None:
    """List training methods with papers and parameters.

    With NAME, the command prints only the methods whose names contain NAME.

    The option --map writes an HTML page that opens offline. The page shows the strategies in a
    grid, by architecture, synchronization, parallelism, compression and scheduling. Empty cells of
    the grid are combinations for which no strategy exists.
    """
    from labkit.cli.methods import entries, map_page, page
    from labkit.records.store import write_atomically

    # In a folder without notebooks, the links point to the notebooks that labkit itself has.
    folder = Path("notebooks")
    notebooks = folder if folder.is_dir() else example_files()["tour.ipynb"].parent
    if name and (output or grid):
        raise click.UsageError("NAME prints methods; remove NAME, or remove -o and --map")
    if name:
        say(entries(name, notebooks), nl=False)
        return
    if grid is not None:
        write_atomically(_ready(grid), map_page(notebooks, grid.parent))
    if output is not None:
        write_atomically(_ready(output), page(notebooks, output.parent))
    elif grid is None:
        say(page(notebooks), nl=False)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="[OPTIONS OF JUPYTERLAB]...", nargs=-1, type=click.UNPROCESSED)
def lab(arguments: tuple[str, ...]) -> None:
    """Open JupyterLab in the folder notebooks/.

    Runs and data are stored in the same folders as with `labkit run`. All arguments are passed to
    JupyterLab, for example `labkit lab --no-browser --port 8899`.
    `labkit lab --help-all` lists JupyterLab's options.
    """
    # The messages of kernels are encrypted, so that other users of this machine cannot read the
    # kernels' output.
    require("lab")
    command = [sys.executable, "-P", "-m", "jupyterlab"]
    command.append("--KernelManager.transport_encryption=auto")
    # Templates of nbconvert contain code, so templates of an untrusted folder must not be loaded.
    # With an empty list, nbconvert loads no templates from the current folder.
    command.append("--TemplateExporter.extra_template_basedirs=[]")
    # Untrusted modules in the folder of a notebook must not shadow installed modules.
    command.append("--ServerApp.kernel_spec_manager_class=labkit.cli.kernelspecs.KernelSpecs")
    # A kernel runs in its notebook's folder. The variables LABKIT_RUNS and LABKIT_DATA make a
    # kernel use the same run and data folders as `labkit run`.
    os.environ.setdefault("LABKIT_RUNS", str(Path("runs").resolve()))
    if Path("data").is_dir():
        os.environ.setdefault("LABKIT_DATA", str(Path("data").resolve()))
    if Path("notebooks").is_dir():
        command.append("--LabApp.default_url=/lab/tree/notebooks")
    if os.name == "posix" and os.geteuid() == 0:
        # JupyterLab refuses to run as root without the option --allow-root, and containers often
        # run as root.
        command.append("--allow-root")
    sys.stdout.flush()
    # JupyterLab replaces this process, so that JupyterLab receives Ctrl-C and sets the exit code.
    os.execv(sys.executable, [*command, *arguments])


def _run_notebook(
    notebook: Path,
    overrides: dict[str, JSON],
    root: Path,
    check: bool,
    force: bool,
    resume: bool,
    followed: AbstractContextManager[Follow],
    report: Report,
) -> None:
    from labkit.cluster import early_start
    from labkit.jobs import estimate, parameters
    from labkit.jobs.first_cluster import first_cluster
    from labkit.jobs.listing import displayed_path, run_entry, table
    from labkit.jobs.notebook import execute
    from labkit.records.run import load_runs

    values = parameters.validate_values(notebook, overrides)
    estimate.refuse(estimate.workers_of(notebook, values), force)
    # The command prints the time estimate on stderr, so that pipes receive only results.
    say(estimate.of_notebook(notebook, values, root), err=True)
    if check:
        report.result("", _summary(None, "checked"))
        return
    require("train")
    with followed as follow, early_start.early_engines(first_cluster(notebook, values)):
        job = execute(notebook, values, root, follow, resume, show=not report.quiet)
    entries = [run_entry(run, run.path.name) for run in load_runs(job.path)]
    if entries:
        report.details(table([entry.row for entry in entries]))
    place = displayed_path(job.path)
    text = place if report.quiet else f"result: {place}"
    completed = job.state == "completed"
    summary = _summary(place, job.state, entries, job.cause, job.rank)
    report.result(text if completed else "", summary)
    if completed:
        return
    rank = "" if job.rank is None else f" on rank {job.rank}"
    record = displayed_path(job.path / "output.ipynb")
    message = f"{notebook.name} {job.state}{rank}: {job.cause}; record: {record}"
    report.error(f"labkit: {message}")
    # If a notebook cell raises InvalidInput, the command exits with code 2. An invalid option also
    # causes exit code 2.
    refused = re.match(r"cell In \[\d+\]: InvalidInput: ", job.cause or "")
    sys.exit(INTERRUPTED if job.state == "interrupted" else 2 if refused else 1)


def _run_experiment(
    path: Path,
    overrides: dict[str, JSON],
    root: Path,
    check: bool,
    force: bool,
    resume: bool,
    followed: AbstractContextManager[Follow],
    report: Report,
) -> None:
    from labkit.cluster import RankError
    from labkit.cluster import run as run_here
    from labkit.jobs import estimate
    from labkit.jobs.listing import displayed_path, run_entry, table
    from labkit.records.checkpoints import RESUME_VARIABLE

    experiment = experiment_of(path, overrides)
    estimate.refuse(experiment.ranks, force)
    say(estimate.of_experiment(experiment.to_json(), root, experiment.ranks), err=True)
    if check:
        report.result("", _summary(None, "checked"))
        return
    folder = root / path.stem
    # The variable LABKIT_JOB tells the cluster the folder for its runs, as in a notebook's job.
    os.environ["LABKIT_JOB"] = str(folder.resolve())
    if resume:
        os.environ[RESUME_VARIABLE] = "1"
    try:
        with followed as follow:
            follow(folder)
            result = run_here(experiment)
    except RankError as error:
        kind = InvalidInput if isinstance(error, InvalidInput) else LabkitError
        raise kind(f"{error}; record: {displayed_path(folder)}") from error
    entry = run_entry(result, result.name)
    report.details(table([entry.row]))
    place = displayed_path(result.path)
    text = place if report.quiet else f"result: {place}"
    report.result(text, _summary(place, entry.state, [entry]))


def _summary(
    folder: str | None,
    state: str,
    entries: Sequence[Entry] = (),
    cause: str | None = None,
    rank: int | None = None,
) -> dict[str, Any]:
    """Return the result of `labkit run --json`."""
    runs = [entry._asdict() for entry in entries]
    return {"folder": folder, "state": state, "cause": cause, "rank": rank, "runs": runs}


def _ready(output: Path) -> Path:
    """Create the folder of an output file, and return the file's path."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error) from error
    return output


def _load(paths: tuple[Path, ...]) -> list[Run]:
    from labkit.records.run import load_runs

    runs = load_runs(paths)
    if not runs:
        places = ", ".join(map(str, paths))
        raise LabkitError(
            f"no runs were found in {places}; give run folders, or a folder that contains runs"
        )
    return runs
