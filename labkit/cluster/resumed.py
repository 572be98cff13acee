"""Which run is taken up again, and with what it begins."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TypeAlias

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.records import checkpoints, store
from labkit.records.checkpoints import RESUMES, Checkpoint, Keeping, Resume
from labkit.records.run import Run
from labkit.records.scan import scan
from labkit.records.store import Record
from labkit.records.stream import FOLDER
from labkit.strategies import STRATEGIES

# Whether to take up what was interrupted, or from which run to begin.
Resumed: TypeAlias = "bool | Run | Path | str | None"
_SAME = (
    *("clock", "model", "model_options", "strategy", "workers"),
    *("optimizer", "precision", "batch_size"),
)
_taken: set[Path] = set()  # runs of this job that this process has taken up, or found completed


def checked(experiment: Experiment, checkpoint: Checkpoint | int | str | None) -> Checkpoint | None:
    """What was asked for, refused where a training has no state that could be kept."""
    if checkpoint is None:
        return None
    strategy = experiment.strategy
    goes_on = strategy.goes_on and not experiment.plays
    if experiment.clock == "virtual":
        goes_on = strategy.replica_cut == 1 and not experiment.faults
    if not goes_on:
        name, known = type(experiment.strategy).__name__, STRATEGIES.items()
        allowed = ", ".join(n for n, kind in known if kind.goes_on)
        what = f"{name} on clock={experiment.clock!r}"
        raise InvalidInput(
            f"checkpoint={checkpoint!r}: {what} trains by programs, in processes of other "
            "frameworks, or with messages on their way from step to step, and what these hold is "
            f"not kept; allowed on clock='wall': {allowed}; on clock='virtual' all that play, with "
            "whole replicas and without faults"
        )
    return checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(every=checkpoint)


def earlier(experiment: Experiment, resume: Resumed) -> Run | None:
    """The newest run of this very experiment to take up again, or that has completed in this job.

    Args:
        experiment: what is to be run.
        resume: True: an interrupted or failed run under the folder of all runs; None: one of this
            job, where it is run again.
    """
    job = os.environ.get("LABKIT_JOB") if RESUMES in os.environ else None
    if resume is not True and (resume is not None or job is None):
        return None
    root = Path(job or os.environ.get("LABKIT_RUNS", "runs"))
    if not root.is_dir():
        return None
    wanted = json.loads(store.json_text(experiment.to_json()))
    found = [each for each in scan(root).found if each.experiment == wanted]
    found.sort(key=lambda each: each.status.get("started") or "", reverse=job is None)
    ends = ("interrupted", "failed", "completed") if job else ("interrupted", "failed")
    for each in found:
        path, state = each.path.resolve(), each.status["state"]
        kept = state == "completed" or Run(path).seeds or checkpoints.sealed(path)
        if state in ends and kept and path not in _taken:
            if job:
                _taken.add(path)
            return Run(path)
    return None


def keeping(
    experiment: Experiment, directory: Path, checkpoint: Checkpoint | None, begin: Run | None
) -> Keeping | None:
    """What ranks are told.

    Args:
        experiment: what is run.
        directory: of the run.
        checkpoint: how often its state is kept.
        begin: a run whose newest whole checkpoint it begins with; None: its own, if it has one.

    Raises:
        InvalidInput: there is no such checkpoint, or nothing left to do behind it.
    """
    folder = directory / checkpoints.FOLDER
    found = checkpoints.newest((begin or Run(directory)).path.resolve(), _same(experiment))
    if found is None:
        if begin is not None:
            notes = f"resume={begin.name!r}: that run has no whole checkpoint"
            raise InvalidInput(f"{notes}; give checkpoint=… to the run that is to be resumed")
        return None if checkpoint is None else Keeping(str(folder), checkpoint)
    if begin is not None:
        checked(experiment, Checkpoint())
        if (clock := found.manifest["experiment"]["clock"]) != experiment.clock:
            raise InvalidInput(
                f"resume={begin.name!r} is of clock={clock!r}, whose state is another one than "
                f"that of clock={experiment.clock!r}; resume on the same clock"
            )
        if experiment.clock == "wall":
            _refuse_done(experiment, found)
    return Keeping(str(folder), checkpoint, found, begin is None)


def _same(experiment: Experiment) -> checkpoints.Same:
    """Whether the ranks of a checkpoint would go on in the same way with this experiment."""
    wanted: Record = json.loads(json.dumps(experiment.to_json()))

    def same(manifest: Record) -> bool:
        return all(manifest["experiment"].get(name) == wanted.get(name) for name in _SAME)

    return same


def _refuse_done(experiment: Experiment, found: Resume) -> None:
    epoch, step = found.manifest["position"]
    done = epoch + (step == found.manifest["steps"])
    if done >= experiment.epochs:
        raise InvalidInput(
            f"epochs={experiment.epochs}: the checkpoint has {done} behind it; give more"
        )


def begin(directory: Path, experiment: Experiment, keeping: Keeping | None) -> None:
    """Say in the record what begins, and from where."""
    resume = keeping.resume if keeping is not None else None
    if resume is None or keeping is None:
        store.start(directory, experiment.to_json())
        return
    before: list[JSON] = []
    if keeping.goes_on:
        before = store.read_json(directory / "status.json").get("resumed") or []
        shutil.rmtree(directory / FOLDER, ignore_errors=True)  # of ranks that were killed
        checkpoints.forget(Path(keeping.folder), after=resume.step)
    else:
        store.start(directory, experiment.to_json())
    told: Record = {"step": resume.step, "at": store.now(), "notes": list(resume.notes)}
    if not keeping.goes_on:
        told["of"] = Path(resume.folder).parents[1].name
    store.mark_running(directory, resumed=[*before, told])


def path_of(given: Run | Path | str) -> Run:
    """The run that is meant.

    Raises:
        LabkitError: there is none.
    """
    run = given if isinstance(given, Run) else Run(Path(given))
    if not (run.path / "experiment.json").exists():
        raise LabkitError(f"resume={str(run.path)!r} is no run: give its folder, or True")
    return run
