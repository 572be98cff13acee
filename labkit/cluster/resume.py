"""Which run is taken up again, and with what it begins."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TypeAlias

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.safe_files import check_folder
from labkit.common.state import decoding
from labkit.experiment import Experiment
from labkit.records import checkpoints, store
from labkit.records.checkpoints import RESUMES, Checkpoint, CheckpointContext, Resume
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


def checked(
    experiment: Experiment, checkpoint: Checkpoint | int | str | None, resume: Resumed = None
) -> Checkpoint | None:
    """What was asked for, refused where a training has no state that could be kept."""
    asked = {"checkpoint": checkpoint, "resume": resume}
    if not (given := {k: v for k, v in asked.items() if v is not None and v is not False}):
        return None
    kind, plays = type(experiment.strategy), experiment.plays
    if plays:
        goes_on = experiment.strategy.replica_cut == 1 and not experiment.faults
    else:
        goes_on = kind.resumable
    if not goes_on:
        said = " and ".join(f"{name}={value!r}" for name, value in given.items())
        why = "in processes of other frameworks, or with messages on their way"
        allowed = ", ".join(name for name, each in STRATEGIES.items() if each.resumable)
        raise InvalidInput(
            f"{said}: {kind.__name__} on clock={experiment.clock!r} trains "
            f"{'by programs with a cut model or planted faults' if plays else why}, which is not "
            f"kept; allowed on clock='wall': {allowed}; on both clocks all that are programs, with "
            "whole replicas and without faults"
        )
    if experiment.repeats > 1 and resume not in (None, False, True):
        raise InvalidInput(
            f"resume={str(resume)!r}: repeats={experiment.repeats} are as many trainings, and a "
            "run is one; give resume=True, or repeats=1"
        )
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    return Checkpoint(every=checkpoint)


def earlier(experiment: Experiment, resume: Resumed) -> Run | None:
    """The run of this very experiment that is to be taken up again, if there is one.

    Args:
        experiment: what is to be run.
        resume: True: the newest that was interrupted or failed, under the folder of all runs;
            None: where a job is run again, the next one of that job, which may have completed.

    Raises:
        UnsafeFile: in its folder is a link, or what else is neither file nor folder.
    """
    job = os.environ.get("LABKIT_JOB") if resume is None and RESUMES in os.environ else None
    root = Path(job or os.environ.get("LABKIT_RUNS", "runs"))
    if not (resume is True or job) or not root.is_dir():
        return None
    wanted = json.loads(store.json_text(experiment.to_json()))
    found = [each for each in scan(root).found if each.experiment == wanted]
    found.sort(key=lambda each: each.status.get("started") or "", reverse=job is None)
    for each in found:
        run = Run(each.path.resolve())
        state = run.status["state"]
        broken = state in ("interrupted", "failed")
        kept = broken and (run.seeds or checkpoints.sealed(run.path))
        next_of_job = (kept or state == "completed") and run.path not in _taken
        if next_of_job if job else kept:
            check_folder(each.path, root)
            if job:
                _taken.add(run.path)
            return run
    return None


def keeping(
    experiment: Experiment, checkpoint: Checkpoint | None, run: Run | None, goes_on: bool
) -> CheckpointContext | None:
    """What ranks are told.

    Args:
        experiment: what is run.
        checkpoint: how often its state is kept.
        run: begin with its newest whole checkpoint; None: begin anew.
        goes_on: its record goes on, too; it may have none yet.

    Raises:
        InvalidInput: there is no such checkpoint, or nothing left to do behind it.
        LabkitError: all are damaged.
    """
    found = checkpoints.newest(run.path.resolve(), same(experiment)) if run else None
    if found is None and run is not None and not goes_on:
        raise InvalidInput(
            f"resume={run.name!r}: that run has no checkpoint; give checkpoint=… to the run that "
            "is to be resumed"
        )
    if found is not None and run is not None and not goes_on:
        with decoding(f"the manifest of resume={run.name!r}"):
            _refuse_unfit(experiment, found, run.name)
    return CheckpointContext(checkpoint, found, goes_on) if checkpoint or found else None


def same(experiment: Experiment) -> checkpoints.Same:
    """Whether the ranks of a checkpoint would go on in the same way with this experiment."""
    wanted: Record = json.loads(json.dumps(experiment.to_json()))

    def alike(manifest: Record) -> bool:
        # Fewer ranks have written it where training had outlived some.
        alone = experiment.clock == "virtual" or manifest["ranks"] == experiment.ranks
        return alone and all(manifest["experiment"].get(n) == wanted.get(n) for n in _SAME)

    return alike


def _refuse_unfit(experiment: Experiment, found: Resume, name: str) -> None:
    if (clock := found.manifest["experiment"]["clock"]) != experiment.clock:
        raise InvalidInput(
            f"resume={name!r} is of clock={clock!r}, whose state is another one than that of "
            f"clock={experiment.clock!r}; resume on the same clock"
        )
    if experiment.plays:
        _refuse_another(experiment, found)
    else:
        _refuse_done(experiment, found)


def _refuse_another(experiment: Experiment, found: Resume) -> None:
    if found.manifest["experiment"] != json.loads(json.dumps(experiment.to_json())):
        raise InvalidInput(
            f"a checkpoint of programs is of all workers, servers and messages of one experiment, "
            f"on its ranks={found.manifest['ranks']}, and this is another experiment; give the "
            "same, or begin anew"
        )


def _refuse_done(experiment: Experiment, found: Resume) -> None:
    epoch, step = found.manifest["position"]
    done = epoch + (step == found.manifest["steps"])
    if done >= experiment.epochs:
        raise InvalidInput(
            f"epochs={experiment.epochs}: the checkpoint has {done} behind it; give more"
        )


def begin(directory: Path, experiment: Experiment, keeping: CheckpointContext | None) -> None:
    """Say in the record what begins, and from where."""
    if keeping is None or (resume := keeping.resume) is None:
        shutil.rmtree(directory / checkpoints.FOLDER, ignore_errors=True)  # halves, if any
        store.start(directory, experiment.to_json())
        return
    before: list[JSON] = []
    if keeping.goes_on:
        before = store.read_json(directory / "status.json").get("resumed") or []
        shutil.rmtree(directory / FOLDER, ignore_errors=True)  # of ranks that were killed
        checkpoints.go_back(directory / checkpoints.FOLDER, resume.step)
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
        UnsafeFile: in its folder is a link, or what else is neither file nor folder.
    """
    run = given if isinstance(given, Run) else Run(Path(given))
    if not (run.path / "experiment.json").exists():
        raise LabkitError(f"resume={str(run.path)!r} is no run: give its folder, or True")
    check_folder(run.path)
    return run
