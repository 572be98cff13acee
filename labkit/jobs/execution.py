"""A notebook's cells, executed by papermill's engine, and the record of what they show."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from labkit.common.privacy import scrub
from labkit.common.safe_files import make_folder, open_file
from labkit.jobs import cells
from labkit.records import store
from labkit.records.notebook import notebook_bytes
from labkit.records.safe_yaml import read_plain_file

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbformat import NotebookNode

    from labkit.jobs.parameters import Known, Values

# Seconds in which the rest of a cell's output must arrive once the cell has ended: papermill's 4
# kill a notebook whose outputs are still on their way. Past ours it goes on with a warning.
OUTPUT_LIMIT = 120
MAY_RAISE = "raises-exception"  # nbclient's tag of a cell after whose error a notebook goes on
_KERNEL: dict[str, str] = {"display_name": "Python 3", "language": "python", "name": "python3"}
_SCRIPT = re.compile(r"(?is)(<script\b.*?</script\s*>)")


def execute_cells(
    notebook: Path,
    job: Path,
    manager: AsyncKernelManager | None,
    on_cell_error: Callable[..., Any],
    terminal: Sequence[TextIO],
) -> None:
    """Execute a notebook with the parameters of its job's folder, and write output.ipynb there.

    Args:
        notebook: file of the notebook.
        job: the folder.
        manager: of the kernel.
        on_cell_error: hook of nbclient's.
        terminal: streams that show what cells print, if any; the job's log has it, too.

    Raises:
        PapermillExecutionError: a cell has failed that may not.
    """
    from papermill import execute as papermill
    from papermill.engines import papermill_engines
    from papermill.iorw import load_notebook_node, papermill_io
    from papermill.log import logger
    from papermill.parameterize import parameterize_notebook
    from papermill.translators import papermill_translators

    from labkit.jobs import parameters

    source, output = str(_readable(notebook, job)), str(job / "output.ipynb")
    # By the file's own name: all else that papermill reads or writes goes its usual way.
    papermill_io.register(output, Record())
    make_folder(job / "logs", job)
    logger.addFilter(_matters)
    record = load_notebook_node(source)
    if values := read_plain_file(job / "params.yaml"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told before this process was started
            known = parameters.declared(notebook)
        papermill_translators.register("python3", Translator(known))
        record = parameterize_notebook(record, values, kernel_name="python3", language="python")
    record.metadata["kernelspec"] = {**_KERNEL}  # this interpreter, whatever stood there
    record = papermill.prepare_notebook_metadata(record, source, output)
    record = papermill.remove_error_markers(record)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(open_file(job / "logs" / "notebook.log", flags, job), "w") as log:
        papermill_engines.execute_notebook_with_engine(
            None,
            record,
            input_path=source,
            output_path=output,
            kernel_name="python3",
            # Its bar would write over what the notebook's cells print.
            progress_bar=False,
            stdout_file=Tee(*terminal[:1], log),
            stderr_file=Tee(*terminal[1:], log),
            # The form, and who looks at a job that runs, read the notebook while it is executed.
            autosave_cell_every=5,
            # What follows reaches nbclient.
            km=manager,
            iopub_timeout=OUTPUT_LIMIT,
            raise_on_iopub_timeout=False,
            on_cell_error=on_cell_error,
        )
    _raise_for_errors(record, output)


def _raise_for_errors(record: NotebookNode, output: str) -> None:
    """Fail as papermill does, but not for errors that nbclient lets a notebook outlive.

    Raises:
        PapermillExecutionError: of a cell.
    """
    from papermill.execute import raise_for_execution_errors
    from papermill.iorw import write_ipynb

    code = (cell for cell in record.cells if cell.cell_type == "code")
    tolerant = [(cell, cell.outputs) for cell in code if MAY_RAISE in cell.metadata.tags]
    for cell, _ in tolerant:
        cell.outputs = []
    try:
        raise_for_execution_errors(record, output)
    finally:
        for cell, outputs in tolerant:
            cell.outputs = outputs
        write_ipynb(record, output)


class Translator:
    """Writes the cell of given values, each as the notebook declares it; papermill calls it."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def codify(self, values: Values, comment: str) -> str:
        """Return the cell's source."""
        lines = [f"{name} = {self.known[name].source(value)}" for name, value in values.items()]
        return "\n".join([f"# {comment}", *lines]) + "\n"


class Record:
    """Where papermill writes the executed notebook: whole or not at all, naming no machine."""

    def write(self, text: str, path: str) -> None:
        """Write one state of the notebook."""
        notebook = json.loads(text)
        papermills = notebook["metadata"].get("papermill", {})
        for key in {"input_path", "output_path"} & papermills.keys():
            papermills[key] = Path(papermills[key]).name
        for cell in notebook["cells"]:
            for output in cell.get("outputs", []):
                # Streams and errors hold their text themselves, results and displays below "data".
                for words in (output, output.get("data", {})):
                    for key in {"text", "traceback", "evalue", "text/plain"} & words.keys():
                        words[key] = _scrubbed(words[key])
                    if "text/html" in words:
                        words["text/html"] = _scrubbed_html(words["text/html"])
        store.write_atomically(
            Path(path), json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        )

    def pretty_path(self, path: str) -> str:
        """What papermill's log calls the file."""
        return path


class Tee:
    """A stream that writes to several: what shows text in the terminal, what keeps it in a file."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = list(streams)

    def write(self, text: str) -> None:
        """Write to what can still be written to: a terminal may close while the job goes on."""
        for stream in list(self._streams):
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                self._streams.remove(stream)

    def flush(self) -> None:
        """Nothing waits: each write is flushed."""


def _matters(record: logging.LogRecord) -> bool:
    """Leave out papermill's word on saving."""
    return not record.getMessage().startswith("Autosave too slow")


def _readable(notebook: Path, job: Path) -> Path:
    """A notebook of format 4 in UTF-8; made of another one, it is kept with the job."""
    text = cells.text(notebook)
    record = json.loads(text)
    whole = {"metadata": {}, "nbformat": 4, "nbformat_minor": 4} | record
    # papermill writes into these.
    whole["metadata"] = {n: value for n, value in whole["metadata"].items() if value is not None}
    if whole == record and text.encode() == notebook_bytes(notebook):
        return notebook
    return store.write_atomically(job / "notebook.ipynb", json.dumps(whole))


def _scrubbed(text: str | list[str]) -> str | list[str]:
    return scrub(text) if isinstance(text, str) else [scrub(line) for line in text]


def _scrubbed_html(text: str | list[str]) -> str:
    """Scripts stay as they are: much of their code looks like a path."""
    parts = _SCRIPT.split("".join(text))
    return "".join(part if _SCRIPT.match(part) else scrub(part) for part in parts)
