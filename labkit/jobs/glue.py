"""Values that a notebook has glued into itself, by scrapbook or papermill, as a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.jobs.log import Log, experiment, parameters_of_job
from labkit.records import store
from labkit.records.notebook import read_notebook

SCRAP = "application/scrapbook.scrap."  # `sb.glue`: a record with name and data
RECORD = "application/papermill.record+json"  # `papermill.record`: a name and its value


def keep(job: Path) -> None:
    """Write a run of what the executed notebook of a job has glued, if it has glued anything."""
    cells = read_notebook(job / "output.ipynb")["cells"]
    found = dict(scraps(output for cell in cells for output in cell.get("outputs", [])))
    if not found:
        return
    log = Log(store.new_run_directory(job, "glued"), experiment(*parameters_of_job(job)))
    for name, value in found.items():
        try:
            log.add({name: value})
        except InvalidInput as error:  # scrapbook takes tables, too
            warnings.warn(f"glued, but left out: {error}", stacklevel=2)
    log.end()


def scraps(outputs: Iterator[dict[str, JSON]]) -> Iterator[tuple[str, JSON]]:
    """Names and values that these outputs hold, in their order."""
    for output in outputs:
        data = output.get("data")
        for kind, payload in data.items() if isinstance(data, dict) else ():
            if kind == RECORD and isinstance(payload, dict):
                yield from payload.items()
            elif kind.startswith(SCRAP) and isinstance(payload, dict):
                yield str(payload.get("name")), payload.get("data")
