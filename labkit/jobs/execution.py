"""Execution of a notebook's cells by papermill's engine, and storage of their outputs."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from labkit.common.files import make_folder, open_file
from labkit.common.privacy import scrub
from labkit.jobs import cells
from labkit.records import store
from labkit.records.executed_notebook import notebook_bytes
from labkit.records.safe_yaml import read_plain_file

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbformat import NotebookNode

    from labkit.jobs.parameters import Known, Values

# The output of a finished cell must arrive within `OUTPUT_LIMIT` seconds. papermill's default limit
# of 4 s aborts notebooks with slow output. If output is still missing after `OUTPUT_LIMIT` seconds,
# the notebook continues with a warning.
OUTPUT_LIMIT = 120
# nbclient continues a notebook after an error in a cell with the tag raises-exception.
MAY_RAISE = "raises-exception"
_KERNEL: dict[str, str] = {"display_name": "Python 3", "language": "python", "name": "python3"}
_SCRIPT = re.compile(r"(?is)(<script\b.*?</script\s*>)")


def execute_cells(
    notebook: Path,
    job: Path,
    manager: AsyncKernelManager | None,
    on_cell_error: Callable[..., Any],
    terminal: Sequence[TextIO],
) -> None:
    """Execute a notebook with the parameters in its job folder, and write output.ipynb into it.

    Args:
        notebook: Path of the notebook file.
        job: Folder of the job.
        manager: Manager of the notebook's kernel.
        on_cell_error: Hook that nbclient calls after an error in a cell.
        terminal: Streams that also receive the output of cells, possibly none. The log of the job
            always receives the output.

    Raises:
        PapermillExecutionError: A cell without the tag raises-exception failed.
    """
    from papermill import execute as papermill
    from papermill.engines import papermill_engines
    from papermill.iorw import load_notebook_node, papermill_io
    from papermill.log import logger
    from papermill.parameterize import parameterize_notebook
    from papermill.translators import papermill_translators

    from labkit.jobs import parameters

    source, output = str(_readable(notebook, job)), str(job / "output.ipynb")
    # The writer `ExecutionRecord` is registered for the output file only. papermill handles all
    # other files in its usual way.
    papermill_io.register(output, ExecutionRecord())
    make_folder(job / "logs", job)
    logger.addFilter(_is_relevant)
    record = load_notebook_node(source)
    if values := read_plain_file(job / "params.yaml"):
        with warnings.catch_warnings():
            # The calling process has already shown all warnings about parameters, so this process
            # ignores them.
            warnings.simplefilter("ignore")
            known = parameters.declared(notebook)
        papermill_translators.register("python3", Translator(known))
        record = parameterize_notebook(record, values, kernel_name="python3", language="python")
    # The interpreter of this process executes the notebook, whatever kernel the notebook names.
    record.metadata["kernelspec"] = {**_KERNEL}
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
            # papermill's progress bar would overwrite the output of cells.
            progress_bar=False,
            stdout_file=Tee(*terminal[:1], log),
            stderr_file=Tee(*terminal[1:], log),
            # papermill saves the output file every 5 s, because other processes read the file while
            # the notebook runs.
            autosave_cell_every=5,
            # papermill passes unknown arguments, such as `km` and `iopub_timeout`, on to nbclient.
            km=manager,
            iopub_timeout=OUTPUT_LIMIT,
            raise_on_iopub_timeout=False,
            on_cell_error=on_cell_error,
        )
    _raise_for_errors(record, output)


def _raise_for_errors(record: NotebookNode, output: str) -> None:
    """Raise the first error of a cell, but ignore cells with the tag raises-exception.

    Raises:
        PapermillExecutionError: A cell without the tag raises-exception failed.
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
    """A papermill translator that writes each parameter as Python source of its declared type."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def codify(self, values: Values, comment: str) -> str:
        """Return the source code of the cell that sets the given parameter values."""
        lines = [f"{name} = {self.known[name].source(value)}" for name, value in values.items()]
        return "\n".join([f"# {comment}", *lines]) + "\n"


class ExecutionRecord:
    """A papermill writer that replaces the notebook atomically and removes this machine's paths."""

    def write(self, text: str, path: str) -> None:
        """Write the present state of the executed notebook."""
        notebook = json.loads(text)
        papermills = notebook["metadata"].get("papermill", {})
        for key in {"input_path", "output_path"} & papermills.keys():
            papermills[key] = Path(papermills[key]).name
        for cell in notebook["cells"]:
            for output in cell.get("outputs", []):
                # In a notebook file, a stream or an error contains its text directly. In a notebook
                # file, a result or a display contains its text in the field "data".
                for words in (output, output.get("data", {})):
                    for key in {"text", "traceback", "evalue", "text/plain"} & words.keys():
                        words[key] = _scrubbed(words[key])
                    if "text/html" in words:
                        words["text/html"] = _scrubbed_html(words["text/html"])
        store.write_atomically(
            Path(path), json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        )

    def pretty_path(self, path: str) -> str:
        """Return the path with which papermill's log names the file."""
        return path


class Tee:
    """A stream that copies text to several streams, such as the terminal and a log file."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = list(streams)

    def write(self, text: str) -> None:
        """Write to all open streams; one may close before the job ends, for example a terminal."""
        for stream in list(self._streams):
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                self._streams.remove(stream)

    def flush(self) -> None:
        """Do nothing, because `write` flushes the streams itself."""


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for papermill's warnings about slow saving, and True otherwise."""
    return not record.getMessage().startswith("Autosave too slow")


def _readable(notebook: Path, job: Path) -> Path:
    """Return a notebook in format 4 and UTF-8: the file itself, or a copy in the job folder."""
    text = cells.text(notebook)
    record = json.loads(text)
    whole = {"metadata": {}, "nbformat": 4, "nbformat_minor": 4} | record
    # papermill uses the entries of the notebook's metadata as mappings and changes them. The code
    # therefore removes metadata entries with the value None.
    whole["metadata"] = {n: value for n, value in whole["metadata"].items() if value is not None}
    if whole == record and text.encode() == notebook_bytes(notebook):
        return notebook
    return store.write_atomically(job / "notebook.ipynb", json.dumps(whole))


def _scrubbed(text: str | list[str]) -> str | list[str]:
    return scrub(text) if isinstance(text, str) else [scrub(line) for line in text]


def _scrubbed_html(text: str | list[str]) -> str:
    """Remove this machine's paths from HTML, except in scripts, where code may look like a path."""
    parts = _SCRIPT.split("".join(text))
    return "".join(part if _SCRIPT.match(part) else scrub(part) for part in parts)
