"""The command line. Whatever takes long to import is imported by the command that needs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.bench.command import bench
from labkit.cli.calibrate import calibrate
from labkit.cli.experiments import experiment_of
from labkit.cli.forecast import forecast
from labkit.cli.gallery import gallery
from labkit.cli.kubernetes import container, kubernetes
from labkit.cli.notebook_options import PARAMETER, OfNotebook, Target
from labkit.cli.peers import peers
from labkit.cli.placement_options import place, placed
from labkit.cli.simulate import simulate
from labkit.cli.sweep import FORCE, INTERRUPTED, MLFLOW, TENSORBOARD, sweep
from labkit.cli.testbed import testbed
from labkit.cli.tf_config import tf_config
from labkit.cli.warm import warm
from labkit.common.errors import DISK, PATH, InvalidInput, LabkitError, cannot_write
from labkit.common.output import output_option
from labkit.common.paths import keep_bytecode
from labkit.common.terminal import one_line, restart_in_utf8, say
from labkit.records.endings import by_whom, terminate

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.jobs.following import Follow
    from labkit.records.run import Run

FOLDER = click.Path(path_type=Path)
RUNS = click.argument("paths", metavar="RUNS...", nargs=-1, required=True, type=FOLDER)


class OneLineErrors(click.Group):
    """Errors that labkit raises on purpose end in one line on stderr, not in a traceback."""

    def invoke(self, ctx: click.Context) -> None:
        with warnings.catch_warnings():
            # A line for who types commands: where in Python it was said helps nobody there.
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: say(one_line(str(message)), err=True)
            try:
                super().invoke(ctx)
            except LabkitError as error:
                say(f"labkit: {one_line(str(error))}", err=True)
                ctx.exit(2 if isinstance(error, InvalidInput) else 1)
            except OSError as error:
                if error.errno not in (*DISK, *PATH):
                    raise
                told = f"{error.strerror}: {error.filename or 'a file'}"
                say(f"labkit: {one_line(told)}", err=True)
                ctx.exit(2 if error.errno in PATH else 1)
            except KeyboardInterrupt as error:
                say(f"labkit: {by_whom(error)}", err=True)
                ctx.exit(INTERRUPTED)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="labkit")
def app() -> None:
    """Ask questions about distributed deep learning; answer them on real MPI ranks."""
    restart_in_utf8()
    # Here, so that whatever a command starts inherits it: jobs, keepers, engines.
    keep_bytecode()


app.add_command(bench)
app.add_command(calibrate)
app.add_command(container)
app.add_command(forecast)
app.add_command(gallery)
app.add_command(kubernetes)
app.add_command(peers)
app.add_command(simulate)
app.add_command(sweep)
app.add_command(testbed)
app.add_command(tf_config)
app.add_command(warm)


@app.command(cls=OfNotebook)
@click.argument("target", type=Target())
@PARAMETER
@click.option("-f", "files", multiple=True, type=FOLDER, help="Parameters from a YAML file.")
@click.option("-y", "texts", multiple=True, help="Parameters as YAML text.")
@click.option("--runs", "root", default="runs", type=FOLDER, help="Folder where all runs are kept.")
@click.option("--mlflow", metavar="ADDRESS", help=MLFLOW)
@click.option("--tensorboard", metavar="FOLDER", type=FOLDER, help=TENSORBOARD)
@click.option("--check", is_flag=True, help="Only check the parameters; nothing is started.")
@click.option("--force", is_flag=True, help=FORCE)
@click.option("--resume", is_flag=True, help="Go on with the newest run of it that was broken off.")
@placed
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
    **where: Any,
) -> None:
    """Run a notebook, or the experiment of a YAML file, with these parameters.

    Where a parameter is given twice, -p wins over -y, and -y over -f. With a notebook, --help lists
    its parameters: labkit run notebooks/tour.ipynb --help
    """
    from labkit.jobs.following import following
    from labkit.jobs.parameters import read_text, read_yaml

    # A queue, or the system that goes down, asks as a person does: the record is written.
    signal.signal(signal.SIGTERM, terminate)
    place(**where)
    given: dict[str, JSON] = {}
    for path in files:
        given |= read_yaml(read_text(path), str(path))
    for text in texts:
        given |= read_yaml(text, "-y")
    # Last, so that it wins.
    given |= dict(parameters)
    followed = following(root, mlflow, tensorboard)
    if target.suffix in (".yaml", ".yml"):
        _run_experiment(target, given, root, check, force, resume, followed)
    else:
        _run_notebook(target, given, root, check, force, resume, followed)


@app.command("ls")
@click.argument("folder", default="runs", type=FOLDER)
def list_runs(folder: Path) -> None:
    """List jobs and runs: state, duration, accuracy, samples/s, the gate's verdict, cause."""
    from labkit.jobs import listing

    rows, skipped = listing.jobs_and_runs(folder)
    for line in skipped:
        say(line, err=True)
    say(listing.table(rows) if rows else f"no runs in {folder}")


@app.command()
@click.argument("folder", default="runs", type=FOLDER)
def stop(folder: Path) -> None:
    """End the jobs and sweeps of a folder that run; cells clean up, records say so."""
    from labkit.jobs.stop import stop as stop_all

    left = stop_all(folder, say)
    sys.exit(1 if left else 0)


@app.command()
@RUNS
@output_option("-o", "output", default="compare.html", show_default=True)
@output_option("--csv", "csv", help="Also write all parameters and metrics as CSV.")
@output_option("--parquet", "parquet", help="The same as Parquet.")
@click.option("--mlflow", "mlflow", metavar="ADDRESS", help="Also write the runs into MLflow.")
@click.option("--tensorboard", "tensorboard", type=FOLDER, help="The same for TensorBoard.")
def compare(
    paths: tuple[Path, ...],
    output: Path,
    csv: Path | None,
    parquet: Path | None,
    mlflow: str | None,
    tensorboard: Path | None,
) -> None:
    """Print a table of runs side by side, and write their figure as one HTML file."""
    from labkit import figures
    from labkit.figures.kit.canvas import html_page
    from labkit.jobs.listing import shown
    from labkit.records.export import export, to_mlflow, to_tensorboard
    from labkit.records.store import write_atomically

    runs = _load(paths)
    say(figures.table(runs).to_string(na_rep=""))
    write_atomically(_ready(output), html_page(figures.compare(runs)))
    say(f"figure: {shown(output)}")
    for kind, path in ((".csv", csv), (".parquet", parquet)):
        if path is not None:
            say(f"table: {shown(export(runs, path, kind))}")
    if mlflow is not None:
        say(f"MLflow: {len(to_mlflow(runs, mlflow))} runs in {mlflow}")
    if tensorboard is not None:
        to_tensorboard(runs, tensorboard)
        say(f"TensorBoard: uv run tensorboard --logdir {shlex.quote(str(tensorboard))}")


@app.command()
@RUNS
@output_option("-o", "output", default="report.html", show_default=True)
@click.option("--notebook", type=FOLDER, help="The executed notebook to show; or that of the job.")
def report(paths: tuple[Path, ...], output: Path, notebook: Path | None) -> None:
    """Write a report of runs: one HTML file that opens anywhere, without a network."""
    from labkit.jobs.listing import shown
    from labkit.records.run import load_runs
    from labkit.report import report as write_report

    # A notebook without runs has a report, too.
    write_report(load_runs(paths) or paths, _ready(output), notebook)
    say(f"report: {shown(output)}")


@app.command()
@click.argument("path", metavar="RUN", type=FOLDER)
@output_option("-o", "output", default="trace.json", show_default=True)
def trace(path: Path, output: Path) -> None:
    """Write a run's timeline as a trace that chrome://tracing and ui.perfetto.dev open.

    All ranks are on one clock; beside the steps of a pipeline stands what is predicted of them.
    """
    from labkit.common.units import seconds_text
    from labkit.jobs.listing import shown
    from labkit.records.staged_steps import predicted_rows

    runs = _load((path,))
    if len(runs) > 1:
        raise InvalidInput(f"{path} holds {len(runs)} runs: give the folder of one of them")
    run = runs[0]
    beside = predicted_rows(run)
    say(f"trace: {shown(run.export_trace(_ready(output), beside))}")
    if worst := max((each["within_s"] for each in run.metrics.get("clocks") or []), default=0.0):
        say(f"all ranks on rank 0's clock, within {seconds_text(worst)}")
    if beside:
        say("beside each step stands what the simulator predicts of it")


@app.command()
@click.option(
    "--launcher",
    type=click.Choice(["local", "hosts", "slurm"]),
    default="local",
    show_default=True,
    help="Check what ranks need that it starts.",
)
@click.option("--hosts", default="", help="Of --launcher hosts: a:2,b:2 or a host file.")
def doctor(launcher: str, hosts: str) -> None:
    """Check this machine: each line ok, or the fix to paste."""
    from labkit.cli.doctor import checks_of, examine

    broken = False
    for finding in examine(checks_of(launcher, hosts)):
        say(finding.line)
        broken = broken or finding.broken
    sys.exit(1 if broken else 0)


@app.command()
@click.argument("name")
@click.option("--model", default="mlp", show_default=True, help="A name of labkit.models.MODELS.")
@click.option(
    "--dataset", default="digits", show_default=True, help="A name of labkit.datasets.DATASETS."
)
@click.option(
    "--strategies", default="", help="Such as 'AllReduce, {name: Pipeline, schedule: gpipe}'."
)
def new(name: str, model: str, dataset: str, strategies: str) -> None:
    """Write NAME.ipynb, a notebook with parameters that compares strategies."""
    from labkit.jobs.template import new as write_new

    path = write_new(name, model, dataset, strategies)
    say(f"notebook: {path}; run it: {shlex.join(['labkit', 'run', str(path)])}")


@app.command()
@output_option("-o", "output", help="A Markdown file, instead of the terminal.")
@output_option("--map", "grid", help="An HTML file: the map of all strategies.")
def methods(output: Path | None, grid: Path | None) -> None:
    """Every method with its paper, its parameters and the notebooks that try it.

    With --map also, or only, the grid in which strategies stand: architecture, synchronization,
    parallelism, compression, scheduling; it opens offline, and shows where there is no method.
    """
    from labkit.cli.methods import map_page, page
    from labkit.records.store import write_atomically

    if grid is not None:
        write_atomically(_ready(grid), map_page(Path("notebooks"), grid.parent))
    if output is not None:
        write_atomically(_ready(output), page(Path("notebooks"), output.parent))
    elif grid is None:
        say(page(Path("notebooks")), nl=False)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="[OPTIONS OF JUPYTERLAB]...", nargs=-1, type=click.UNPROCESSED)
def lab(arguments: tuple[str, ...]) -> None:
    """Open JupyterLab at notebooks/, with runs and data where `labkit run` has them.

    Further arguments go to JupyterLab: labkit lab --no-browser --port 8899; `--help-all` lists its.
    """
    # Other users of this machine read no outputs of kernels that can encrypt them.
    command = [sys.executable, "-P", "-m", "jupyterlab"]
    command.append("--KernelManager.transport_encryption=auto")
    # Templates of nbconvert are code, and it would look for them in the current folder.
    command.append("--TemplateExporter.extra_template_basedirs=[]")
    # Modules beside a notebook, which may be anybody's, would come before installed ones.
    command.append("--ServerApp.kernel_spec_manager_class=labkit.cli.kernelspecs.KernelSpecs")
    # A kernel works in its notebook's folder; runs and data stay where `labkit run` has them.
    os.environ.setdefault("LABKIT_RUNS", str(Path("runs").resolve()))
    if Path("data").is_dir():
        os.environ.setdefault("LABKIT_DATA", str(Path("data").resolve()))
    if Path("notebooks").is_dir():
        command.append("--LabApp.default_url=/lab/tree/notebooks")
    if os.name == "posix" and os.geteuid() == 0:
        # JupyterLab refuses root without it, and in a container one often is.
        command.append("--allow-root")
    sys.stdout.flush()
    # JupyterLab takes the place of this process: Ctrl-C and its exit code are its own.
    os.execv(sys.executable, [*command, *arguments])


def _run_notebook(
    notebook: Path,
    given: dict[str, JSON],
    root: Path,
    check: bool,
    force: bool,
    resume: bool,
    followed: AbstractContextManager[Follow],
) -> None:
    from labkit.cluster import early_start
    from labkit.jobs import estimate, parameters
    from labkit.jobs.first_cluster import first_cluster
    from labkit.jobs.listing import run_row, shown, table
    from labkit.jobs.notebook import execute
    from labkit.records.run import load_runs

    values = parameters.check(notebook, given)
    estimate.refuse(estimate.workers_of(notebook, values), force)
    # On stderr: who passes the output on wants results only.
    say(estimate.of_notebook(notebook, values, root), err=True)
    if check:
        return
    with followed as follow, early_start.started(first_cluster(notebook, values)):
        job = execute(notebook, values, root, follow, resume)
    found = load_runs(job.path)
    if found:
        say(table([run_row(run, run.path.name) for run in found]))
    if job.state == "completed":
        say(f"result: {shown(job.path)}")
        return
    rank = "" if job.rank is None else f" on rank {job.rank}"
    record = shown(job.path / "output.ipynb")
    said = f"{notebook.name} {job.state}{rank}: {job.cause}; record: {record}"
    say(f"labkit: {said}", err=True)
    # What a cell refused before its cluster started is bad input, too.
    refused = re.match(r"cell In \[\d+\]: InvalidInput: ", job.cause or "")
    sys.exit(INTERRUPTED if job.state == "interrupted" else 2 if refused else 1)


def _run_experiment(
    path: Path,
    given: dict[str, JSON],
    root: Path,
    check: bool,
    force: bool,
    resume: bool,
    followed: AbstractContextManager[Follow],
) -> None:
    from labkit.cluster import RankError
    from labkit.cluster import run as run_here
    from labkit.jobs import estimate
    from labkit.jobs.listing import run_row, shown, table
    from labkit.records.checkpoints import RESUMES

    experiment = experiment_of(path, given)
    estimate.refuse(experiment.ranks, force)
    say(estimate.of_experiment(experiment.to_json(), root, experiment.ranks), err=True)
    if check:
        return
    folder = root / path.stem
    # As in a notebook's job: the variable says where a cluster puts its runs.
    os.environ["LABKIT_JOB"] = str(folder.resolve())
    if resume:
        os.environ[RESUMES] = "1"
    try:
        with followed as follow:
            follow(folder)
            done = run_here(experiment)
    except RankError as error:
        kind = InvalidInput if isinstance(error, InvalidInput) else LabkitError
        raise kind(f"{error}; record: {shown(folder)}") from error
    say(table([run_row(done, done.name)]))
    say(f"result: {shown(done.path)}")


def _ready(output: Path) -> Path:
    """The file that is to be written, in a folder that is there."""
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
        raise LabkitError(f"no runs in {places}: give run folders, or a folder that holds some")
    return runs
