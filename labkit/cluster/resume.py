"""Choice of the run and the checkpoint from which an experiment resumes training."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TypeAlias

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import check_folder
from labkit.common.state import decoding
from labkit.experiment import Experiment
from labkit.records import checkpoints, provenance, store
from labkit.records.checkpoints import RESUME_VARIABLE, Checkpoint, CheckpointContext, Resume
from labkit.records.folders import scan
from labkit.records.run import Run
from labkit.records.store import Record
from labkit.records.stream import FOLDER
from labkit.strategies import STRATEGIES

# `resume=True` selects the newest interrupted or failed run. The argument `resume` may be a Run, a
# path or a text. Training then starts from the newest checkpoint of the run in `resume`.
ResumeFrom: TypeAlias = "bool | Run | Path | str | None"
_SAME = (
    *("clock", "model", "model_options", "strategy", "workers"),
    *("optimizer", "precision", "batch_size"),
)
# `_resumed` contains the runs that `find_resumable` has already returned to this process.
_resumed: set[Path] = set()


def validate_checkpoint(
    experiment: Experiment, checkpoint: Checkpoint | int | str | None, resume: ResumeFrom = None
) -> Checkpoint | None:
    """Return the checkpoint settings; raise InvalidInput if the strategy cannot save its state."""
    options = {"checkpoint": checkpoint, "resume": resume}
    if not (given := {k: v for k, v in options.items() if v is not None and v is not False}):
        return None
    kind, uses_programs = type(experiment.strategy), experiment.uses_programs
    if uses_programs:
        resumable = experiment.strategy.replica_cut == 1 and not experiment.faults
    else:
        resumable = kind.resumable
    if not resumable:
        text = " and ".join(f"{name}={value!r}" for name, value in given.items())
        why = "in processes of other frameworks, or with messages in flight between ranks"
        allowed = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.resumable)
        raise InvalidInput(
            f"{text}: {kind.__name__} on clock={experiment.clock!r} trains "
            f"{'by programs with a split model or injected faults' if uses_programs else why}, "
            f"whose state cannot be saved; allowed on clock='wall': {allowed}; also allowed, on "
            "both clocks: strategies that run as programs, with unsplit models and without faults"
        )
    if experiment.repeats > 1 and resume not in (None, False, True):
        raise InvalidInput(
            f"resume={str(resume)!r} names one run, but repeats={experiment.repeats} trains "
            "several; give resume=True, or repeats=1"
        )
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    return Checkpoint(every=checkpoint)


def find_resumable(experiment: Experiment, resume: ResumeFrom) -> Run | None:
    """Return an earlier run of the same experiment to resume, or None if no run fits.

    Args:
        experiment: The experiment.
        resume: If True, return the newest interrupted or failed run in the folder of all runs.
            If None in a restarted batch job, return the job's next run, even a completed run.

    Raises:
        UnsafeFile: The folder contains a link or a special file.
    """
    job = os.environ.get("LABKIT_JOB") if resume is None and RESUME_VARIABLE in os.environ else None
    root = Path(job) if job else store.runs_folder()
    if not (resume is True or job) or not root.is_dir():
        return None
    wanted = json.loads(store.json_text(experiment.to_json()))
    candidates = [candidate for candidate in scan(root).usable if candidate.experiment == wanted]
    candidates.sort(
        key=lambda candidate: candidate.status.get("started") or "", reverse=job is None
    )
    for candidate in candidates:
        run = Run(candidate.path.resolve())
        state = run.status["state"]
        has_failed = state in ("interrupted", "failed")
        has_state = has_failed and (run.seeds or checkpoints.complete_checkpoints(run.path))
        next_of_job = (has_state or state == "completed") and run.path not in _resumed
        if next_of_job if job else has_state:
            check_folder(candidate.path, root)
            if job and (reasons := _reasons_to_repeat(run)):
                print(f"{run.name} is repeated: {', '.join(reasons)}", file=sys.stderr, flush=True)
                store.set_aside(run.path)
                continue
            if job:
                _resumed.add(run.path)
            return run
    return None


def _reasons_to_repeat(run: Run) -> list[str]:
    """Return what has changed since a run of this process's job read its inputs."""
    parts = (provenance.changes(part.path, cells=True) for part in (run, *run.seeds))
    return [*dict.fromkeys(reason for reasons in parts for reason in reasons)]


def checkpoint_context(
    experiment: Experiment, checkpoint: Checkpoint | None, run: Run | None, goes_on: bool
) -> CheckpointContext | None:
    """Return the checkpoint settings that the ranks receive, or None.

    Args:
        experiment: The experiment.
        checkpoint: Settings for saving checkpoints, such as the interval between them.
        run: Training starts from the newest complete checkpoint of this run, or from the first step
            if None.
        goes_on: Whether training continues the record of an earlier run.

    Raises:
        InvalidInput: The run has no complete checkpoint, or its newest checkpoint has already
            completed all epochs.
        LabkitError: All checkpoints are damaged.
    """
    state = (
        checkpoints.newest_checkpoint(run.path.resolve(), is_compatible(experiment))
        if run
        else None
    )
    if state is None and run is not None and not goes_on:
        raise InvalidInput(
            f"resume={run.name!r}: this run has no checkpoint; give checkpoint=… when you start "
            "a run that you want to resume later"
        )
    if state is not None and run is not None and not goes_on:
        with decoding(f"the checkpoint manifest of resume={run.name!r}"):
            _require_fit(experiment, state, run.name)
    return CheckpointContext(checkpoint, state, goes_on) if checkpoint or state else None


def is_compatible(experiment: Experiment) -> checkpoints.Same:
    """Return a function that checks whether a checkpoint's manifest fits the experiment."""
    wanted: Record = json.loads(json.dumps(experiment.to_json()))

    def matches(manifest: Record) -> bool:
        # A checkpoint has fewer ranks than the experiment if training continued after a rank's
        # death.
        same_ranks = experiment.clock == "virtual" or manifest["ranks"] == experiment.ranks
        return same_ranks and all(manifest["experiment"].get(n) == wanted.get(n) for n in _SAME)

    return matches


def _require_fit(experiment: Experiment, state: Resume, name: str) -> None:
    if (clock := state.manifest["experiment"]["clock"]) != experiment.clock:
        raise InvalidInput(
            f"resume={name!r} was trained on clock={clock!r}, whose checkpoints do not fit "
            f"clock={experiment.clock!r}; resume the run on the same clock"
        )
    if experiment.uses_programs:
        _require_same_experiment(experiment, state)
    else:
        _require_remaining_epochs(experiment, state)


def _require_same_experiment(experiment: Experiment, state: Resume) -> None:
    if state.manifest["experiment"] != json.loads(json.dumps(experiment.to_json())):
        raise InvalidInput(
            "the checkpoint contains all workers, servers and messages of one experiment on "
            f"ranks={state.manifest['ranks']}, and this experiment differs from it; give the "
            "same experiment, or start without resume"
        )


def _require_remaining_epochs(experiment: Experiment, state: Resume) -> None:
    epoch, step = state.manifest["position"]
    completed = epoch + (step == state.manifest["steps"])
    if completed >= experiment.epochs:
        raise InvalidInput(
            f"epochs={experiment.epochs}: the checkpoint has already completed {completed} "
            "epochs; give a larger number of epochs"
        )


def begin_record(
    directory: Path, experiment: Experiment, context: CheckpointContext | None
) -> None:
    """Record the start of the run, and the checkpoint from which the run resumes."""
    if context is None or (resume := context.resume) is None:
        # No checkpoint in the folder is complete, so the folder is removed.
        shutil.rmtree(directory / checkpoints.FOLDER, ignore_errors=True)
        _start(directory, experiment)
        return
    before: list[JSON] = []
    if context.goes_on:
        before = store.read_json(directory / "status.json").get("resumed") or []
        # Killed ranks may have left message files in the run's folder, so the files are removed.
        shutil.rmtree(directory / FOLDER, ignore_errors=True)
        checkpoints.remove_after(directory / checkpoints.FOLDER, resume.step)
    else:
        _start(directory, experiment)
    entry: Record = {"step": resume.step, "at": store.now(), "notes": list(resume.notes)}
    if not context.goes_on:
        entry["of"] = Path(resume.folder).parents[1].name
    store.mark_running(directory, resumed=[*before, entry])


def _start(directory: Path, experiment: Experiment) -> None:
    store.start(directory, experiment.to_json())
    provenance.write(directory, begin=True)


def find_run(run_or_folder: Run | Path | str) -> Run:
    """Return the run to resume, given as a Run object or as the run's folder.

    Raises:
        LabkitError: The folder contains no run.
        UnsafeFile: The folder contains a link or a special file.
    """
    run = run_or_folder if isinstance(run_or_folder, Run) else Run(Path(run_or_folder))
    if not (run.path / "experiment.json").exists():
        raise LabkitError(
            f"resume={str(run.path)!r} is not the folder of a run: give a run, a run's "
            "folder, or True"
        )
    check_folder(run.path)
    return run
