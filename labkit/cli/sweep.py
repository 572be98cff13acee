"""`labkit sweep …`: what is asked, checked, run, and said about it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.cli.notebook_options import OfNotebook, Target, complete_assignment, complete_parameter
from labkit.common.errors import InvalidInput
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.jobs.sweep.plan import Plan
    from labkit.records.store import Record

FOLDER = click.Path(path_type=Path)
MLFLOW = "Log live into MLflow: its address, or a file."
TENSORBOARD = "The same for TensorBoard."
LAUNCHER = "slurm: each member is an element of a job array; default: local."
FORCE = "Start more ranks than there are cores and free memory for; all memory is the limit."
# Those of Optuna's that need no further package; a grid is what a sweep without a search runs.
SAMPLERS, PRUNERS = ("tpe", "random", "qmc"), ("median", "halving", "hyperband")
INTERRUPTED = 130  # as shells have it for Ctrl-C


@click.command(cls=OfNotebook)
@click.argument("target", metavar="NOTEBOOK", type=Target())
@click.argument(
    "assignments", metavar="NAME=VALUES...", nargs=-1, shell_complete=complete_assignment
)
@click.option("-f", "file", type=FOLDER, help="Values from a YAML file: lists, ranges, random.")
@click.option(
    "-p",
    "fixed",
    metavar="NAME VALUE",
    nargs=2,
    multiple=True,
    help="One parameter for all.",
    shell_complete=complete_parameter,
)
@click.option("--random", "samples", metavar="N", type=int, help="N combinations at random.")
@click.option("--seed", type=int, default=None, help="Of --random and --search; default 0.")
@click.option("--search", "how", type=click.Choice(["random", "optuna"]), help="Try --trials N.")
@click.option("--trials", metavar="N", type=int, help="Of --search.")
@click.option("--maximize", metavar="NAME", help="A number of the runs, for Optuna: accuracy.")
@click.option("--minimize", metavar="NAME", help="The same, such as test_loss.")
@click.option("--prune", is_flag=True, help="End members early that promise less than others.")
@click.option("--pruner", type=click.Choice(PRUNERS), help="Which; default median.")
@click.option("--sampler", type=click.Choice(SAMPLERS), default="tpe", help="Of Optuna's.")
@click.option("--repeats", type=int, default=None, help="Run each so often, with seeds from seed.")
@click.option("--jobs", default=None, help="Run so many at a time; auto: as many as cores allow.")
@click.option("--launcher", type=click.Choice(["local", "slurm"]), help=LAUNCHER)
@click.option("--slurm", metavar="WORDS", help="Of sbatch for each member: '-N2 -t 10'.")
@click.option("--limit", type=float, default=None, help="Seconds that a member may take.")
@click.option("--resume", is_flag=True, help="Run only what an earlier sweep has not completed.")
@click.option("--name", default=None, help="Of the sweep's folder.")
@click.option("--runs", "root", default="runs", type=FOLDER, help="Folder where all runs are kept.")
@click.option("--mlflow", metavar="ADDRESS", help=MLFLOW)
@click.option("--tensorboard", metavar="FOLDER", type=FOLDER, help=TENSORBOARD)
@click.option("--check", is_flag=True, help="Only check the values; nothing is started.")
@click.option("--force", is_flag=True, help=FORCE)
def sweep(
    target: Path,
    resume: bool,
    name: str | None,
    root: Path,
    mlflow: str | None,
    tensorboard: Path | None,
    check: bool,
    force: bool,
    **given: Any,
) -> None:
    """Run a notebook with many values: name=a,b,c or name=range(1,5), every combination.

    Each combination is a job of its own under runs/NOTEBOOK-sweep/. Ctrl-C leaves a sweep that
    --resume takes up again: give the same command with it, or the sweep's folder as NOTEBOOK.
    """
    from labkit.jobs import estimate
    from labkit.jobs.following import following
    from labkit.jobs.sweep import manifest

    sampler = given.pop("sampler")
    options = _options(given.pop("jobs"), given.pop("limit"))
    options |= _queued(given.pop("launcher"), given.pop("slurm"))
    if (target / manifest.FILE).exists():
        # A record has its values already; others with it would be another sweep.
        if not resume or any(given.values()):
            again = shlex.join(["labkit", "sweep", str(target), "--resume"])
            raise InvalidInput(f"{target} is a sweep: `{again}` goes on")
        folder: Path | None = target
        plan = _recorded(target)
        most = max((member.workers for member in plan.members), default=1)
    else:
        plan, most = _asked(target, sampler=sampler, **given)
        folder = manifest.newest(root, plan) if resume else None
        if folder is not None and plan.search:
            plan = _recorded(folder, target)
    queued = (options if "slurm" in options or not folder else manifest.read(folder)).get("slurm")
    total = plan.search.trials if plan.search else len(plan.members)
    if queued is None:
        estimate.refuse(max(most, _ranks_abreast(plan, options.get("jobs") or 1)), force)
    elif plan.search:
        raise InvalidInput(
            "--launcher slurm submits all members at once, and a search asks for one after the "
            "other: leave out --search, or --launcher"
        )
    if check:
        say(f"{total} members")
        return
    with following(root, mlflow, tensorboard) as follow:
        if folder is None:  # --resume, too: then all is missing
            folder = manifest.create(root, name or f"{target.stem}-sweep", plan)
        follow(folder)
        _run(folder, plan, manifest.read(folder) | options)


def _ranks_abreast(plan: Plan, jobs: int) -> int:
    """Return the most ranks that so many members start, of those whose ranks are known."""
    return sum(sorted(member.workers for member in plan.members if member.known)[-jobs:])


def _queued(launcher: str | None, words: str | None) -> Record:
    """Whether Slurm runs the members, if that is said, and sbatch's words; None: not by Slurm."""
    if launcher is None and words is None:
        return {}
    if launcher != "slurm" and words is not None:
        raise InvalidInput("--slurm are words for --launcher slurm: give both")
    return {"slurm": None if launcher == "local" else words or ""}


def _options(jobs: str | None, limit: float | None) -> Record:
    """Those that are given, checked; "jobs" is None where cores decide."""
    options: Record = {}
    if jobs is not None:
        if jobs != "auto" and not (jobs.isdecimal() and int(jobs) > 0):
            raise InvalidInput(f"--jobs {jobs} is impossible; give auto, or a whole number from 1")
        options["jobs"] = None if jobs == "auto" else int(jobs)
    if limit is not None:
        if not 0 < limit < float("inf"):
            raise InvalidInput(f"--limit {limit:g} is impossible; give seconds above 0")
        options["limit"] = limit
    return options


def _asked(
    notebook: Path,
    assignments: tuple[str, ...],
    file: Path | None,
    fixed: tuple[tuple[str, str], ...],
    samples: int | None,
    seed: int | None,
    repeats: int | None,
    how: str | None,
    trials: int | None,
    maximize: str | None,
    minimize: str | None,
    prune: bool,
    pruner: str | None,
    sampler: str,
) -> tuple[Plan, int]:
    """The plan of a command line, and its most ranks; its values win over the file's."""
    from labkit.jobs.parameters import read_text
    from labkit.jobs.sweep import plan
    from labkit.jobs.sweep.search import Search

    axes, drawn = plan.read_file(read_text(file), str(file)) if file else ({}, {})
    values = dict(fixed)
    # A value that is fixed on the command line wins over the file's list of it.
    axes = {name: axis for name, axis in axes.items() if name not in values}
    axes |= plan.read_assignments(assignments)
    if not axes and repeats is None:
        raise InvalidInput("nothing to sweep over: give name=a,b,c, a file with -f, or --repeats N")
    samples = drawn.get("samples") if samples is None else samples
    seed = drawn.get("seed", 0) if seed is None else seed
    if (how is None) != (trials is None):
        raise InvalidInput("--search and --trials go together: --search optuna --trials 40")
    if how == "optuna":
        if (maximize is None) == (minimize is None):
            raise InvalidInput("--search optuna wants --maximize NAME or --minimize NAME: accuracy")
        if samples is not None or repeats is not None:
            raise InvalidInput("--search optuna takes neither --random nor --repeats")
        metric = maximize or minimize or ""
        how_to_prune = pruner or ("median" if prune else None)
        trials, large = trials or 0, maximize is not None
        wanted = Search(metric, large, trials, how_to_prune, sampler, seed, {}, values)
        return plan.make_search(notebook, axes, wanted)
    if maximize or minimize or prune or pruner:
        raise InvalidInput("--maximize, --minimize, --prune, --pruner are of --search optuna")
    if how == "random" and samples is not None:
        raise InvalidInput("--search random --trials N is --random N: give one of them")
    samples = trials if how == "random" else samples
    asked = plan.SweepSpec(axes, values, samples, seed, 1 if repeats is None else repeats)
    made = plan.make(notebook, asked)
    return made, max(member.workers for member in made.members)


def _recorded(folder: Path, notebook: Path | None = None) -> Plan:
    """The plan that a sweep's folder holds; its notebook lies where the record says, or here."""
    from labkit.jobs.sweep import manifest, plan
    from labkit.jobs.sweep.search import of_record

    known = manifest.read(folder)
    notebook = notebook or Path(str(known.get("notebook")))
    if not notebook.is_file():
        raise InvalidInput(
            f"{folder.name} is of {notebook}, which is not here: go to the folder where it was "
            "started, or give its command again with --resume"
        )
    search = of_record(known["search"]) if known["search"] else None
    return plan.again(notebook, known["members"], search)


def _run(folder: Path, plan: Plan, known: Record) -> None:
    """Run what is missing; exit with 0 if then all members have completed."""
    from labkit.jobs.elements import asked, check_ended, open_elements
    from labkit.jobs.listing import shown
    from labkit.jobs.sweep import manifest
    from labkit.jobs.sweep.array import Array, arrays
    from labkit.jobs.sweep.scheduler import Scheduler
    from labkit.jobs.sweep.screen import Screen
    from labkit.jobs.sweep.trials import Trials
    from labkit.records import registry, store

    # What is done is asked under the lock: another process may just have been at it.
    with manifest.owned(folder), registry.registration(folder):
        manifest.tidy(folder)
        trials = Trials(folder, plan, plan.search) if plan.search else None
        if trials:
            todo, total, done = trials.open, trials.search.trials, trials.done
        else:
            todo = [member for member in plan.members if not manifest.is_done(folder, plan, member)]
            total, done = len(plan.members), len(plan.members) - len(todo)
        say(f"{shown(folder)}: {total} members" + (f", {done} done" if done else ""))
        options = {name: known[name] for name in ("jobs", "limit", "slurm")}
        words = options["slurm"]
        # A Slurm sweep that resumes here may still have array elements in the queue.
        unended = open_elements(folder / member.folder for member in todo) if words is None else {}
        check_ended(unended, (asked(arrays(unended)) if unended else None) or {})
        alone = words is None and options["jobs"] is None
        if alone and any(member.cores is None for member in todo):
            say("no parameter `workers`: one member at a time; --jobs N runs N", err=True)
        manifest.update(folder, state="running", started=store.now(), ended=None, **options)
        screen = Screen(total, done)
        if words is None:
            scheduler = Scheduler(plan, folder, known["jobs"], known["limit"], screen)
            finished = scheduler.run(todo, trials)
        else:
            finished = Array(plan, folder, known["jobs"], words, screen).run(todo)
        # Asked again of the records, rather than counted: a member may have been stopped from
        # elsewhere.
        missing = sum(not manifest.is_done(folder, plan, member) for member in todo)
        if trials:
            missing = total - trials.done
            if best := trials.best():
                say(best)
        state = "completed" if not missing else "failed" if finished else "interrupted"
        manifest.update(folder, state=state, ended=store.now())
    pruned = trials.states["PRUNED"] if trials else 0
    ended = f" ({pruned} pruned)" if pruned else ""
    say(f"{total - missing} of {total} completed{ended}; result: {shown(folder)}")
    if missing:
        place = shlex.quote(str(shown(folder)))
        there = plan.notebook.is_absolute()  # then the record does not say where it lies
        how = "the same command with --resume" if there else f"labkit sweep {place} --resume"
        say(f"what is missing: labkit ls {place}; to run it: {how}", err=True)
        sys.exit(1 if finished else INTERRUPTED)
