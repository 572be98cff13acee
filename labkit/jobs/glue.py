"""Values that a notebook recorded with scrapbook or papermill, as a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.jobs.log import RunLog, experiment, parameters_of_job
from labkit.records import store
from labkit.records.executed_notebook import read_notebook

# An output of `sb.glue` contains a name and data. The MIME type of such an output begins with the
# text in `SCRAP`.
SCRAP = "application/scrapbook.scrap."


# Outputs of `papermill.record` have the MIME type application/papermill.record+json.
RECORD = "application/papermill.record+json"


def write_glued_run(job: Path) -> None:
    """Write a run with the values that a job's notebook recorded with scrapbook or papermill."""
    cells = read_notebook(job / "output.ipynb")["cells"]
    glued = dict(scraps(output for cell in cells for output in cell.get("outputs", [])))
    if not glued:
        return
    log = RunLog(store.new_run_directory(job, "glued"), experiment(*parameters_of_job(job)))
    for name, value in glued.items():
        try:
            log.add({name: value})
        except InvalidInput as error:  # scrapbook also records tables, which a run cannot store
            warnings.warn(f"a glued value is left out of the run: {error}", stacklevel=2)
    log.end()


def scraps(outputs: Iterator[dict[str, JSON]]) -> Iterator[tuple[str, JSON]]:
    """Yield (name, value) of each value that scrapbook or papermill recorded in cell outputs."""
    for output in outputs:
        data = output.get("data")
        for kind, payload in data.items() if isinstance(data, dict) else ():
            if kind == RECORD and isinstance(payload, dict):
                yield from payload.items()
            elif kind.startswith(SCRAP) and isinstance(payload, dict):
                yield str(payload.get("name")), payload.get("data")
