"""Notebook jobs that produced the runs of a report, and command lines that reproduce runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.records import store
from labkit.records.run import Run


def jobs(runs: Sequence[Run]) -> list[Path]:
    """Return the folders of the notebook jobs that produced `runs`, without duplicates."""
    folders = dict.fromkeys(run.path.resolve().parent for run in runs)
    return [folder for folder in folders if (folder / "params.yaml").exists()]


def notebooks(runs: Sequence[Run]) -> dict[Path, bool]:
    """Return the notebooks that a report shows, each with True if outputs are shown, too.

    If a single notebook job produced all runs, the report shows its notebook with outputs. If
    several jobs produced the runs, each notebook appears once, without outputs. The report itself
    compares the results of all jobs.
    """
    job_folders = jobs(runs)
    whole = len(job_folders) == 1 and all(
        run.path.resolve().parent == job_folders[0] for run in runs
    )
    executed: dict[str, Path] = {}
    for job in job_folders:
        if (path := job / "output.ipynb").exists():
            # If several jobs ran the same notebook, the report shows only the copy of the first
            # job.
            executed.setdefault(_name(job), path)
    return dict.fromkeys(executed.values(), whole)


def jobs_without_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of all notebook jobs in and below `folders`, even without runs."""
    outputs = [path.parent for folder in folders for path in sorted(folder.rglob("output.ipynb"))]
    return [job for job in dict.fromkeys(outputs) if (job / "params.yaml").exists()]


def commands(runs: Sequence[Run]) -> list[str]:
    """Return the command lines that reproduce runs from their notebooks or experiments.

    A run outside of a notebook job has its own command line. There is no command line if the
    experiment contains a function or arrays.
    """
    from labkit.experiment import Experiment

    runs_without_job = [
        run for run in runs if not (run.path.resolve().parent / "params.yaml").exists()
    ]
    defaults = Experiment().to_json()
    lines = [*map(command, jobs(runs)), *(_experiment(run, defaults) for run in runs_without_job)]
    return list(dict.fromkeys(line for line in lines if line))


def _experiment(run: Run, defaults: dict[str, JSON]) -> str:
    # No command reproduces a run that the user only logged with `lk.log`.
    if "notebook" in run.experiment:
        return ""
    fields = {k: v for k, v in run.experiment.items() if k not in defaults or v != defaults[k]}
    # No command reproduces an experiment with functions or arrays, because the record contains only
    # their source or checksums.
    if any(_has_external_parts(value) for value in fields.values()):
        return ""
    file = f"{run.name}.yaml"
    # Private paths are removed before the text is quoted, because a later removal could delete a
    # quotation mark.
    quoted_fields = shlex.quote(scrub(json.dumps(fields)))
    run_command = shlex.join(["labkit", "run", _safe_path(file)])
    # The command `printf` prints backslashes unchanged, but `echo` interprets them in some shells.
    print_command = r"printf '%s\n'" if "\\" in quoted_fields else "echo"
    return f"{print_command} {quoted_fields} > {shlex.quote(_safe_path(file))} && {run_command}"


def _has_external_parts(value: JSON) -> bool:
    """Return whether a record refers to anything outside the record."""
    if isinstance(value, dict):
        markers = value.keys() & {"callable", "sha256"}
        return bool(markers) or any(_has_external_parts(item) for item in value.values())
    return isinstance(value, list) and any(_has_external_parts(item) for item in value)


def command(job: Path) -> str:
    """Return the command line that reruns a notebook job, or "" if its record is unreadable."""
    from labkit.common.canonical_json import NotPlain
    from labkit.records.safe_yaml import read_plain_file

    try:
        parameters = read_plain_file(job / "params.yaml") or {}
    except NotPlain:
        return ""  # The report shows no command if the record of the job's parameters is damaged.
    if not isinstance(parameters, dict):
        return ""
    words = ["labkit", "run", _safe_path(_name(job))]
    for name, value in parameters.items():
        words += ["-p", str(name), value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(map(scrub, words))


def _safe_path(name: str) -> str:
    """Return a file name in a form that commands cannot mistake for an option."""
    return f"./{name}" if name.startswith("-") else name


def _name(job: Path) -> str:
    """Return the path of the notebook that a job executed."""
    try:
        notebook = store.read_json(job / "status.json").get("notebook")
    except (LabkitError, OSError):
        notebook = None
    return str(notebook or f"{job.parent.name}.ipynb")
