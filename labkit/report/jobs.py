"""How runs were made: the notebook jobs in which they lie, and the lines that make them again."""

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
    """The jobs' folders, each once."""
    folders = dict.fromkeys(run.path.resolve().parent for run in runs)
    return [folder for folder in folders if (folder / "params.yaml").exists()]


def notebooks(runs: Sequence[Run]) -> dict[Path, bool]:
    """The executed notebooks to show, each with whether its outputs are shown too.

    Of the one job in which all runs lie, all is shown. Of several, each notebook stands once for
    all of its jobs, so without the outputs of any: the comparison says what they came to.
    """
    found = jobs(runs)
    whole = len(found) == 1 and all(run.path.resolve().parent == found[0] for run in runs)
    executed: dict[str, Path] = {}
    for job in found:
        if (path := job / "output.ipynb").exists():
            # The first job of each notebook stands for all of them.
            executed.setdefault(_name(job), path)
    return dict.fromkeys(executed.values(), whole)


def without_runs(folders: Sequence[Path]) -> list[Path]:
    """The jobs in and below folders, for a report of notebooks that have trained nothing."""
    found = [path.parent for folder in folders for path in sorted(folder.rglob("output.ipynb"))]
    return [job for job in dict.fromkeys(found) if (job / "params.yaml").exists()]


def commands(runs: Sequence[Run]) -> list[str]:
    """The lines that make the runs again: their notebooks', or their experiments'.

    A run that lies in no job has a line of its own, unless a function or arrays are part of it.
    """
    from labkit.experiment import Experiment

    alone = [run for run in runs if not (run.path.resolve().parent / "params.yaml").exists()]
    usual = Experiment().to_json()
    found = [*map(command, jobs(runs)), *(_experiment(run, usual) for run in alone)]
    return list(dict.fromkeys(line for line in found if line))


def _experiment(run: Run, usual: dict[str, JSON]) -> str:
    if "notebook" in run.experiment:  # logged by hand, which no command does again
        return ""
    fields = {k: v for k, v in run.experiment.items() if k not in usual or v != usual[k]}
    # The record has its source or a checksum: from these no experiment can be made.
    if any(_is_own(value) for value in fields.values()):
        return ""
    file = f"{run.name}.yaml"
    # Made without paths before it is quoted, or a quote would go with a path.
    said = shlex.quote(scrub(json.dumps(fields)))
    run_it = shlex.join(["labkit", "run", _no_option(file)])
    # A shell's own echo may read backslashes.
    tell = r"printf '%s\n'" if "\\" in said else "echo"
    return f"{tell} {said} > {shlex.quote(_no_option(file))} && {run_it}"


def _is_own(value: JSON) -> bool:
    """Whether a record tells of something that it does not hold: a function, or arrays."""
    if isinstance(value, dict):
        known = value.keys() & {"callable", "sha256"}
        return bool(known) or any(_is_own(each) for each in value.values())
    return isinstance(value, list) and any(_is_own(each) for each in value)


def command(job: Path) -> str:
    from labkit.common.safe_json import NotPlain
    from labkit.records.safe_yaml import read_plain_file

    try:
        parameters = read_plain_file(job / "params.yaml") or {}
    except NotPlain:
        return ""  # a torn job record takes away the command, not the report
    if not isinstance(parameters, dict):
        return ""
    words = ["labkit", "run", _no_option(_name(job))]
    for name, value in parameters.items():
        words += ["-p", str(name), value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(map(scrub, words))


def _no_option(name: str) -> str:
    """A file's name that no command takes for one of its options."""
    return f"./{name}" if name.startswith("-") else name


def _name(job: Path) -> str:
    """The notebook's path as it was given."""
    try:
        given = store.read_json(job / "status.json").get("notebook")
    except (LabkitError, OSError):
        given = None
    return str(given or f"{job.parent.name}.ipynb")
