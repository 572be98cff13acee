"""A form of a notebook's parameters cell: each parameter a widget, a button that runs it."""

from __future__ import annotations

import os
import threading
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.privacy import scrub
from labkit.jobs import parameters
from labkit.jobs.form.field import Field
from labkit.jobs.notebook import Job, JobResult, start
from labkit.records.notebook import read_notebook

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

LOOK_EVERY = 0.5  # seconds
STOP = "Stop notebook"

__all__ = ["Form", "form"]


def form(notebook: Path | str, root: Path | str | None = None) -> Form:
    """A form that runs a notebook with other values, as `labkit run` does, beside the kernel.

    Args:
        notebook: path of an .ipynb file, from here or from where `labkit lab` was started.
        root: folder of all runs; default: where `labkit lab` has them, else `runs`.

    Raises:
        InvalidInput: no such notebook, or its parameters cell is not Python.
    """
    everywhere, path = os.environ.get("LABKIT_RUNS"), Path(notebook)
    # JupyterLab starts a kernel in the folder of its notebook, not where `labkit lab` was typed.
    if everywhere and not path.exists() and (Path(everywhere).parent / path).exists():
        path = Path(everywhere).parent / path
    return Form(path, Path(root or everywhere or "runs"))


class Form:
    """Widgets for the parameters of a notebook, and what runs it; made by `form`.

    Attributes:
        fields: by parameter.
        run, stop, report: buttons.
        result: how the last job ended; None before.
    """

    def __init__(self, notebook: Path, root: Path) -> None:
        import ipywidgets

        from labkit.common.widgets import button

        self.notebook, self.root = notebook, root
        self._known = parameters.declared(notebook)
        self.fields = {name: Field(each, self.check) for name, each in self._known.items()}
        self.run = button("Run notebook", "Execute it in the background", "play", self._start)
        self.stop = button(STOP, "Interrupt the cell that runs", "stop", self._interrupt)
        self.report = button("Write report", "Of the runs of this job", "file", self._report)
        self.stop.disabled = self.report.disabled = True
        self._status, self._links = ipywidgets.HTML(), ipywidgets.Output()
        self.result: JobResult | None = None
        self._job: Job | None = None
        self._thread, self._starting = threading.Thread(), threading.Lock()
        title = ipywidgets.HTML(f"<strong>{escape(notebook.name)}</strong>")
        buttons = ipywidgets.HBox([self.run, self.stop, self.report])
        rows = [field.widget for field in self.fields.values()]
        self.widget = ipywidgets.VBox([title, *rows, buttons, self._status, self._links])
        self.widget.add_class("labkit-form")

    def check(self) -> bool:
        """Show what is wrong with each field, by the rules of `labkit run`; whether nothing is."""
        wrong, values = {}, {}
        for name, field in self.fields.items():
            try:
                values[name] = field.value
            except InvalidInput as error:
                wrong[name] = _line(error)
        if not wrong:
            try:
                parameters.check_possible(parameters.known_values(values))
            except InvalidInput as error:
                wrong[self._culprit(_line(error))] = _line(error)
        for name, field in self.fields.items():
            field.error = wrong.get(name, "")
        return not wrong

    def values(self) -> dict[str, JSON]:
        """The parameters that differ from the notebook's own."""
        given = {name: field.value for name, field in self.fields.items() if field.given}
        return parameters.known_values(given)

    def wait(self) -> JobResult | None:
        """Wait for the end of the job."""
        self._thread.join()
        return self.result

    def __repr__(self) -> str:
        return f"<Form of {self.notebook.name}: {', '.join(self.fields) or 'no parameters'}>"

    def _repr_mimebundle_(self, *args: JSON, **kwargs: JSON) -> dict[str, JSON]:
        return (self.widget._repr_mimebundle_() or {}) | {"text/plain": repr(self)}

    def _culprit(self, message: str) -> str:
        """The field beside which an error about several stands: it is named, or was changed."""
        # Errors of an Experiment begin with the field that they are about: `workers=3 …`.
        named = [name for name in self.fields if message.startswith((f"{name}=", f"{name} "))]
        given = [name for name, field in self.fields.items() if field.given]
        return (named or given or list(self.fields))[-1]

    # --- the job -----------------------------------------------------------------------------

    def _start(self) -> None:
        with self._starting:
            if self._thread.is_alive():  # a second click, from before the button was disabled
                return
            if not self.check():
                self._say("not started: see the fields above")
                return
            self.run.disabled, self.report.disabled = True, True
            self._links.outputs, self._job = (), None
            self._thread = threading.Thread(target=self._execute, name="labkit-form", daemon=True)
            self._thread.start()

    def _execute(self) -> None:
        self._say("checking, and fetching data that are not there yet …")
        try:
            values = parameters.check(self.notebook, self.values(), self._known)
            self._job = start(self.notebook, values, self.root, shown=False)
            self.stop.disabled = False
            self._follow(self._job)
        except Exception as error:  # also a full disk: no job goes on unseen
            self._give_up(error)
        finally:
            self.run.disabled, self.stop.disabled = False, True
            self.stop.description = STOP

    def _give_up(self, error: Exception) -> None:
        if self._job is None:
            self._say(f"not started: {_line(error)}")
        else:
            self._job.interrupt()
            self._say(f"interrupted: {_line(error)}")

    def _follow(self, job: Job) -> None:
        begin = time.monotonic()
        # The kernel's own thread must stay free for clicks: this is the form's.
        while not job.done():
            self._progress(job.path, time.monotonic() - begin)
            time.sleep(LOOK_EVERY)
        self.result = job.result()
        cause = f": {self.result.cause}" if self.result.cause else ""
        self._say(f"{self.result.state}{cause}")
        self._link(job.path / "output.ipynb", "the executed notebook")
        self.report.disabled = False

    def _progress(self, job: Path, elapsed: float) -> None:
        from labkit.common.units import duration_text
        from labkit.common.widgets import meter, status

        done, total = _cells(job)
        share = done / total if total else None
        cell = f"cell {min(done + 1, total)} of {total} · {duration_text(elapsed)}"
        said = cell if total else "starting"
        self._status.value = meter(share, "share of the cells that are done") + status(said)

    def _interrupt(self) -> None:
        if self._job is not None:
            self.stop.description = "Stop at once"  # the second time
            self._job.interrupt()

    def _report(self) -> None:
        from labkit.records.run import load_runs
        from labkit.report import report

        assert self._job is not None  # the button is dead before
        try:
            runs = load_runs(self._job.path)
            self._link(report(runs, self._job.path / "report.html"), "the report")
        except LabkitError as error:
            self._say(f"no report: {_line(error)}")

    def _say(self, text: str) -> None:
        from labkit.common.widgets import status

        self._status.value = status(text)

    def _link(self, path: Path, words: str) -> None:
        """A link that JupyterLab opens; paths are seen from the notebook that shows the form."""
        from IPython.display import HTML

        if path.exists():
            # Relative, so that no folder of this machine stands in a notebook that is saved with
            # its form.
            place = quote(os.path.relpath(path))
            self._links.append_display_data(HTML(f'<a href="{place}">{escape(words)}</a>'))


def _cells(job: Path) -> tuple[int, int]:
    """How many code cells of a job's notebook have ended, of how many."""
    try:
        cells = read_notebook(job / "output.ipynb")["cells"]
    except FileNotFoundError:  # the kernel is starting
        return 0, 0
    # Counted in what the job has written last: papermill saves every few seconds.
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    ended = [c for c in code if c["metadata"].get("papermill", {}).get("status") == "completed"]
    return len(ended), len(code)


def _line(error: Exception) -> str:
    known = isinstance(error, LabkitError)
    text = str(error) if known else scrub(f"{type(error).__name__}: {error}")
    return " ".join(text.split())
