"""`labkit sweep`: plan, validate, run and report a sweep over a notebook's parameters."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.cli.shared_options import (
    NOTIFY,
    OfNotebook,
    Report,
    Target,
    complete_assignment,
    complete_parameter,
    reports,
)
from labkit.common.errors import InvalidInput
from labkit.common.imports import require
from labkit.common.quantities import parse_limit
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.jobs.sweep.sweep_plan import SweepPlan
    from labkit.records.store import Record

FOLDER = click.Path(path_type=Path)
MLFLOW = "Log runs to MLflow while they run, at the address of a server or in a file."
TENSORBOARD = "Write TensorBoard logs to this folder while runs train."
LAUNCHER = (
    "Launcher of the sweep; slurm submits each notebook run as an element of a job array.  "
    "[default: local]"
)
FORCE = "Allow too many ranks for the cores or the free memory; the total memory remains the limit."
# The constants SAMPLERS and PRUNERS name Optuna's samplers and pruners that need no further
# package. Without the option --search, a sweep runs all combinations of the parameter values, or
# random combinations.
SAMPLERS, PRUNERS = ("tpe", "random", "qmc"), ("median", "halving", "hyperband")
INTERRUPTED = 130  # The exit code of shells after Ctrl-C is 130.


@click.command(cls=OfNotebook)
@click.argument("target", metavar="NOTEBOOK", type=Target())
@click.argument(
    "assignments", metavar="NAME=VALUES...", nargs=-1, shell_complete=complete_assignment
)
@click.option(
    "-f",
    "file",
    type=FOLDER,
    help="YAML file with lists, ranges or random distributions of parameter values.",
)
@click.option(
    "-p",
    "fixed",
    metavar="NAME VALUE",
    nargs=2,
    multiple=True,
    help="Set one parameter to the same value in all notebook runs.",
    shell_complete=complete_parameter,
)
@click.option(
    "--zip",
    "zipped",
    metavar="NAME,NAME",
    multiple=True,
    help="Pair the values of these parameters instead of combining all their values.",
)
@click.option(
    "--random", "samples", metavar="N", type=int, help="Run N random combinations of the values."
)
@click.option("--seed", type=int, default=None, help="Seed of --random and --search.  [default: 0]")
@click.option(
    "--search",
    "how",
    type=click.Choice(["random", "optuna"]),
    help="Search the best parameter values in N trials; requires --trials N.",
)
@click.option("--trials", metavar="N", type=int, help="Number of trials of --search.")
@click.option(
    "--maximize",
    metavar="NAME",
    multiple=True,
    help="Metric of the runs that Optuna maximizes, e.g. accuracy.",
)
@click.option(
    "--minimize",
    metavar="NAME",
    multiple=True,
    help="Metric of the runs that Optuna minimizes, e.g. test_loss. --maximize and --minimize may "
    "be repeated, and given together, for several objectives.",
)
@click.option(
    "--enqueue",
    metavar="NAME=VALUE,...",
    multiple=True,
    help="Values of one of the first trials, e.g. a=1,b=2; Optuna chooses missing values.",
)
@click.option("--prune", is_flag=True, help="Stop unpromising trials early, by Optuna's pruner.")
@click.option("--pruner", type=click.Choice(PRUNERS), help="Optuna's pruner.  [default: median]")
@click.option(
    "--sampler",
    type=click.Choice(SAMPLERS),
    default="tpe",
    help="Optuna's sampler.  [default: tpe]",
)
@click.option(
    "--repeats",
    type=int,
    default=None,
    help="Number of runs of each combination of values, with consecutive seeds.",
)
@click.option(
    "--jobs",
    default=None,
    help="Number of notebook runs at the same time; auto means as many as the cores allow.",
)
@click.option("--launcher", type=click.Choice(["local", "slurm"]), help=LAUNCHER)
@click.option(
    "--slurm", metavar="WORDS", help="sbatch options of each notebook run, such as '-N2 -t 10'."
)
@click.option(
    "--limit",
    default=None,
    help="Time limit of each notebook run, in seconds or as text such as 10min.",
)
@click.option(
    "--retries",
    metavar="N",
    type=click.IntRange(min=0),
    help="Execute each failed notebook run up to N more times.  [default: 0]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue an earlier sweep with the notebook runs that are not completed.",
)
@click.option("--name", default=None, help="Name of the sweep's folder.")
@click.option("--runs", "root", default="runs", type=FOLDER, help="Folder that contains all runs.")
@click.option("--mlflow", metavar="ADDRESS", help=MLFLOW)
@click.option("--tensorboard", metavar="FOLDER", type=FOLDER, help=TENSORBOARD)
@click.option("--check", is_flag=True, help="Only check the values; start no run.")
@click.option("--force", is_flag=True, help=FORCE)
@NOTIFY
@reports("the folder of the sweep")
def sweep(
    target: Path,
    resume: bool,
    name: str | None,
    root: Path,
    mlflow: str | None,
    tensorboard: Path | None,
    check: bool,
    force: bool,
    notify: list[str],
    report: Report,
    **values: Any,
) -> None:
    """Run a notebook with every combination of parameter values.

    Give the values of a parameter as name=a,b,c or name=range(1,5). Each combination of values runs
    as a job. With `a=1,2 b=3,4 --zip a,b`, the combinations are a=1, b=3 and a=2, b=4. A job has a
    folder under runs/NOTEBOOK-sweep/. To resume a sweep after Ctrl-C, repeat
    the command with --resume, or run `labkit sweep SWEEP_FOLDER --resume`.

    With --json, the result is an object: `folder` (null with --check), `state`, `total` and
    `completed` numbers of notebook runs, and `members`, a list of objects. Each has `folder`,
    `values`, `repeat`, `state`, `seconds`, `cause`, and first failed `rank`. The list `best` has
    `folder` and `objectives` of the best trials of a search.
    """
    from labkit.jobs import estimate
    from labkit.jobs.notify import notifying
    from labkit.jobs.running import following
    from labkit.jobs.sweep import manifest

    sampler = values.pop("sampler")
    options = _options(values.pop("jobs"), values.pop("limit"), values.pop("retries"))
    options |= _slurm_options(values.pop("launcher"), values.pop("slurm"))
    if (target / manifest.FILE).exists():
        # The record of a sweep contains its parameter values, which a resumed sweep uses again.
        # The command rejects other parameter values for an existing sweep, because they would
        # define another sweep.
        if not resume or any(values.values()):
            again = shlex.join(["labkit", "sweep", str(target), "--resume"])
            raise InvalidInput(
                f"{target} is the folder of a sweep, whose values are fixed; to resume it, "
                f"run `{again}`"
            )
        folder: Path | None = target
        plan = _recorded(target)
        most = max((member.workers for member in plan.members), default=1)
    else:
        plan, most = _plan(target, sampler=sampler, **values)
        folder = manifest.newest(root, plan) if resume else None
        if folder is not None and plan.search:
            plan = _recorded(folder, target)
    queued = (options if "slurm" in options or not folder else manifest.read(folder)).get("slurm")
    total = plan.search.trials if plan.search else len(plan.members)
    if queued is None:
        estimate.refuse(max(most, _concurrent_ranks(plan, options.get("jobs") or 1)), force)
    else:
        _refuse_in_slurm(plan, options)
    if check:
        record: Record = {
            "folder": None,
            "state": "checked",
            "total": total,
            "completed": 0,
            "best": [],
        }
        report.result(f"{total} members", record | {"members": manifest.member_records(plan)})
        return
    require("train")
    if plan.search:
        require("search")
    with (
        notifying(notify, plan.notebook) as notified,
        following(root, mlflow, tensorboard, notified) as follow,
    ):
        if folder is None:  # The option --resume also creates a sweep if no earlier sweep exists.
            folder = manifest.create(root, name or f"{target.stem}-sweep", plan)
        follow(folder)
        _run(folder, plan, manifest.read(folder) | options, report)


def _refuse_in_slurm(plan: SweepPlan, options: Record) -> None:
    if plan.search:
        raise InvalidInput(
            "--launcher slurm submits all notebook runs at once, but --search chooses each trial "
            "from earlier results; remove --search or --launcher"
        )
    if options.get("retries"):
        raise InvalidInput(
            "--launcher slurm submits each notebook run once, so --retries has no effect; remove "
            "--retries, and execute failed notebook runs again with --resume"
        )


def _concurrent_ranks(plan: SweepPlan, jobs: int) -> int:
    """Return the most ranks that `jobs` notebook runs use at a time; unknown ranks count as 0."""
    return sum(sorted(member.workers for member in plan.members if member.known)[-jobs:])


def _slurm_options(launcher: str | None, options: str | None) -> Record:
    """Return the options for sbatch as a record: "slurm" is None for local runs; {} by default."""
    if launcher is None and options is None:
        return {}
    if launcher != "slurm" and options is not None:
        raise InvalidInput("--slurm has no effect without --launcher slurm; give both options")
    return {"slurm": None if launcher == "local" else options or ""}


def _options(jobs: str | None, limit: str | None, retries: int | None) -> Record:
    """Validate the options --jobs and --limit; return a record ("jobs": None means auto)."""
    options: Record = {} if retries is None else {"retries": retries}
    if jobs is not None:
        if jobs != "auto" and not (jobs.isdecimal() and int(jobs) > 0):
            raise InvalidInput(
                f"--jobs {jobs} is impossible; give auto, or a whole number of at least 1"
            )
        options["jobs"] = None if jobs == "auto" else int(jobs)
    if limit is not None:
        options["limit"] = parse_limit(limit, "--limit")
    return options


def _plan(
    notebook: Path,
    assignments: tuple[str, ...],
    file: Path | None,
    fixed: tuple[tuple[str, str], ...],
    zipped: tuple[str, ...],
    samples: int | None,
    seed: int | None,
    repeats: int | None,
    how: str | None,
    trials: int | None,
    maximize: tuple[str, ...],
    minimize: tuple[str, ...],
    enqueue: tuple[str, ...],
    prune: bool,
    pruner: str | None,
    sampler: str,
) -> tuple[SweepPlan, int]:
    """Return the sweep's plan, and the number of ranks of its largest notebook run."""
    from labkit.jobs.parameters import read_text
    from labkit.jobs.sweep import sweep_plan
    from labkit.jobs.sweep.sweep_plan import Search

    axes, drawn, groups = sweep_plan.read_file(read_text(file), str(file)) if file else ({}, {}, [])
    groups += [[name.strip() for name in names.split(",")] for names in zipped]
    values = dict(fixed)
    # A value from the option -p replaces the list of values in the sweep file.
    axes = {name: axis for name, axis in axes.items() if name not in values}
    axes |= sweep_plan.read_assignments(assignments)
    if not axes and repeats is None:
        raise InvalidInput(
            "the sweep has no parameter values; give name=a,b,c, a file with -f, or --repeats N"
        )
    samples = drawn.get("samples") if samples is None else samples
    seed = drawn.get("seed", 0) if seed is None else seed
    if (how is None) != (trials is None):
        raise InvalidInput(
            "--search and --trials must be given together, such as --search optuna --trials 40"
        )
    if how == "optuna":
        if not (maximize or minimize) or len({*maximize, *minimize}) < len(maximize + minimize):
            raise InvalidInput(
                "--search optuna requires --maximize NAME or --minimize NAME, such as --maximize "
                "accuracy, and each name once"
            )
        if samples is not None or repeats is not None:
            raise InvalidInput("--search optuna allows neither --random nor --repeats; remove them")
        how_to_prune = pruner or ("median" if prune else None)
        objectives = dict.fromkeys(maximize, True) | dict.fromkeys(minimize, False)
        enqueued = [sweep_plan.read_trial(text) for text in enqueue]
        search = Search(objectives, trials or 0, how_to_prune, sampler, seed, {}, values, enqueued)
        return sweep_plan.make_search(notebook, axes, search, groups)
    if maximize or minimize or enqueue or prune or pruner:
        raise InvalidInput(
            "--maximize, --minimize, --enqueue, --prune and --pruner have no effect without "
            "--search optuna; add it, or remove them"
        )
    if how == "random" and samples is not None:
        raise InvalidInput(
            "--search random --trials N and --random N mean the same; give only one of them"
        )
    samples = trials if how == "random" else samples
    repeats = 1 if repeats is None else repeats
    spec = sweep_plan.SweepSpec(axes, values, samples, seed, repeats, groups)
    made = sweep_plan.make(notebook, spec)
    return made, max(member.workers for member in made.members)


def _recorded(folder: Path, notebook: Path | None = None) -> SweepPlan:
    """Return the plan that a sweep's folder records, for the recorded or another notebook."""
    from labkit.jobs.sweep import manifest, sweep_plan
    from labkit.jobs.sweep.sweep_plan import of_record

    record = manifest.read(folder)
    notebook = notebook or Path(str(record.get("notebook")))
    if not notebook.is_file():
        raise InvalidInput(
            f"the sweep {folder.name} needs the notebook {notebook}, which does not exist here; "
            "change to the folder where the sweep was started, or repeat the sweep's command "
            "with --resume"
        )
    search = of_record(record["search"]) if record["search"] else None
    return sweep_plan.again(notebook, record["members"], search)


def _run(folder: Path, plan: SweepPlan, record: Record, report: Report) -> None:
    """Execute the uncompleted notebook runs of a sweep; exit with 1 or 130 if any remain."""
    from labkit.jobs.elements import check_ended, open_elements, query_elements
    from labkit.jobs.listing import displayed_path, sweep_members
    from labkit.jobs.sweep import manifest
    from labkit.jobs.sweep.array import Array, arrays
    from labkit.jobs.sweep.progress_screen import SweepScreen
    from labkit.jobs.sweep.scheduler import Scheduler
    from labkit.jobs.sweep.trials import Trials
    from labkit.records import folders, store

    # The code reads the states of the notebook runs under the lock. Another process may execute the
    # same sweep.
    with manifest.owned(folder), folders.registration(folder):
        manifest.tidy(folder)
        trials = Trials(folder, plan, plan.search) if plan.search else None
        best: list[tuple[str, dict[str, float]]] = []
        if trials:
            todo, total, done = trials.open, trials.search.trials, trials.done
        else:
            todo = [member for member in plan.members if not manifest.is_done(folder, plan, member)]
            total, done = len(plan.members), len(plan.members) - len(todo)
        earlier = f", {done} done" if done else ""
        report.details(f"{displayed_path(folder)}: {total} members{earlier}")
        for line in manifest.repeated(folder, plan):
            anew = "; give the command without --resume to search anew" if trials else ""
            report.details(line + anew)
        options = {name: record[name] for name in ("jobs", "limit", "slurm", "retries")}
        words = options["slurm"]
        # An earlier command may have submitted this sweep to Slurm. Tasks of the sweep's Slurm job
        # array may still be queued.
        unended = open_elements(folder / member.folder for member in todo) if words is None else {}
        check_ended(unended, (query_elements(arrays(unended)) if unended else None) or {})
        alone = words is None and options["jobs"] is None
        if alone and any(member.cores is None for member in todo):
            say(
                "the notebook has no parameter `workers`, so notebook runs are executed one "
                "after another; give --jobs N to execute N at the same time",
                err=True,
            )
        manifest.update(folder, state="running", started=store.now(), ended=None, **options)
        screen = SweepScreen(total, done)
        if words is None:
            jobs, limit, retries = options["jobs"], options["limit"], options["retries"]
            scheduler = Scheduler(plan, folder, jobs, limit, screen, retries)
            finished = scheduler.run(todo, trials)
        else:
            finished = Array(plan, folder, record["jobs"], words, screen).run(todo)
        # The records of the notebook runs are read again, because another process may have stopped
        # a run.
        missing = sum(not manifest.has_completed(folder, plan, member) for member in todo)
        if trials:
            missing = total - trials.done
            best = trials.best()
            for name, values in best:
                text = ", ".join(f"{metric} {value:.6g}" for metric, value in values.items())
                report.details(f"best {text}: {name}")
        state = "completed" if not missing else "failed" if finished else "interrupted"
        manifest.update(folder, state=state, ended=store.now())
    pruned = trials.states["PRUNED"] if trials else 0
    ended = f" ({pruned} pruned)" if pruned else ""
    completed, place = total - missing, displayed_path(folder)
    text = f"{completed} of {total} completed{ended}; result: {place}"
    counts = {"folder": place, "state": state, "total": total, "completed": completed}
    counts["best"] = [{"folder": name, "objectives": values} for name, values in best]
    members = sweep_members(folder)
    report.result(place if report.quiet else text, counts | {"members": members})
    if missing:
        place = shlex.quote(place)
        # The record of a sweep contains no absolute notebook path, so the user must repeat the
        # command.
        there = plan.notebook.is_absolute()
        how = "the same command with --resume" if there else f"labkit sweep {place} --resume"
        report.error(
            f"to list the uncompleted notebook runs: labkit ls {place}; to execute them: {how}"
        )
        sys.exit(1 if finished else INTERRUPTED)
