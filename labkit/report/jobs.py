"""The notebook jobs in which runs lie: what they ran, and the line that runs it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from labkit import store
from labkit.errors import LabkitError
from labkit.privacy import scrub
from labkit.run import Run


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
            executed.setdefault(_name(job), path)
    return dict.fromkeys(executed.values(), whole)


def commands(runs: Sequence[Run]) -> list[str]:
    """The lines that execute the jobs' notebooks again with the same parameters."""
    found = (_command(job) for job in jobs(runs))
    return list(dict.fromkeys(line for line in found if line))


def _command(job: Path) -> str:
    import yaml

    try:
        parameters = yaml.safe_load((job / "params.yaml").read_text()) or {}
    except (OSError, yaml.YAMLError):
        return ""  # a torn job record takes away the command, not the report
    if not isinstance(parameters, dict):
        return ""
    words = ["labkit", "run", _name(job)]
    for name, value in parameters.items():
        words += ["-p", str(name), value if isinstance(value, str) else json.dumps(value)]
    return scrub(shlex.join(words))


def _name(job: Path) -> str:
    """The notebook's path as it was given."""
    try:
        given = store.read_json(job / "status.json").get("notebook")
    except (LabkitError, OSError):
        given = None
    return str(given or f"{job.parent.name}.ipynb")
