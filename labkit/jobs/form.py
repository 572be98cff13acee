"""A form for a notebook's parameters cell: one widget per parameter, and a run button."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.privacy import scrub
from labkit.jobs import parameters
from labkit.jobs.notebook import JobResult, NotebookJob, start
from labkit.jobs.parameters import NotebookParameter, Unknown
from labkit.records.executed_notebook import read_notebook

if TYPE_CHECKING:
    import ipywidgets

    from labkit.common.canonical_json import JSON


class Field:
    """The input widget, help text and error line of a parameter.

    Args:
        parameter: Parameter as the notebook declares it.
        changed: Function that is called after each change of the widget's value.

    Attributes:
        input: Widget in which the user changes the parameter.
        widget: Container of all widgets of the field.
    """

    def __init__(self, parameter: NotebookParameter, changed: Callable[[], bool]) -> None:
        import ipywidgets

        self.parameter = parameter
        self.input = _input(parameter)
        # A widget may reformat the notebook's default. A value therefore counts as changed if it
        # differs from the widget's initial value.
        self._initial = self.input.value
        self._error = ipywidgets.HTML()
        # The help text is a comment from the notebook. The form escapes the help text, because it
        # may contain characters of HTML.
        help = ipywidgets.HTML(f"<small>{escape(parameter.help)}</small>")
        self.widget = ipywidgets.VBox([ipywidgets.HBox([self.input, help]), self._error])
        self.input.observe(lambda _: changed(), names="value")

    @property
    def is_changed(self) -> bool:
        """Whether the value differs from the default in the notebook."""
        return bool(self.input.value != self._initial)

    @property
    def error(self) -> str:
        """The error line of the field; empty if the value is valid."""
        return self._text

    @error.setter
    def error(self, text: str) -> None:
        self._text = text
        # The error message has a warning sign and words, because some users cannot see colours.
        self._error.value = f'<span role="alert">⚠ {escape(text)}</span>' if text else ""

    @property
    def value(self) -> JSON | Unknown:
        """The value, converted to the declared type; UNKNOWN if only the kernel can compute it.

        Raises:
            InvalidInput: The value does not have the declared type.
        """
        return (
            self.parameter.convert(self.input.value) if self.is_changed else self.parameter.default
        )

    _text = ""


def _input(parameter: NotebookParameter) -> ipywidgets.DOMWidget:
    """Return the input widget for a parameter's type; most types have a text input."""
    import ipywidgets

    default = parameter.default
    look: dict[str, str | bool | dict[str, str]] = {
        "description": parameter.name,
        "tooltip": parameter.help or parameter.name,
        "style": {"description_width": "12em"},
    }
    if isinstance(default, Unknown):
        return ipywidgets.Text(placeholder="computed by the notebook", **look)
    kind = parameter.type.core_schema
    if kind["type"] == "literal" and default in kind["expected"]:
        return ipywidgets.Dropdown(options=kind["expected"], value=default, **look)
    makers = {
        ("bool", bool): ipywidgets.Checkbox,
        ("int", int): ipywidgets.IntText,
        ("float", float): ipywidgets.FloatText,
        # A default may be an int although the declared type is float: `rate: float = 1`.
        ("float", int): ipywidgets.FloatText,
    }
    make = makers.get((kind["type"], type(default)))
    if make is not None:
        return make(value=default, **look)
    # The form checks a text field only after its input is complete. An incomplete list would show
    # errors during typing.
    look |= {"value": _text(default), "continuous_update": False}
    names = _names(parameter.name)
    return ipywidgets.Combobox(options=names, **look) if names else ipywidgets.Text(**look)


def _names(field: str) -> list[str]:
    """Return the known names for an Experiment field whose values are names, such as `model`."""
    from labkit.datasets import DATASETS
    from labkit.models import MODELS
    from labkit.network.network import PRESETS
    from labkit.strategies import STRATEGIES
    from labkit.strategies.validation import OPTIMIZERS

    names_of_field: dict[str, Iterable[str]] = {
        "model": MODELS,
        "dataset": DATASETS,
        "strategy": STRATEGIES,
        "network": PRESETS,
        "optimizer": OPTIMIZERS,
    }
    return list(names_of_field.get(field, ()))


def _text(value: JSON) -> str:
    """Return a value as a user would write it on a command line."""
    if isinstance(value, str):
        return value
    try:
        return "None" if value is None else json.dumps(value)
    except TypeError:  # JSON cannot represent sets or bytes, so the text is Python source
        return repr(value)


LOOK_EVERY = 0.5  # The form updates the progress display every `LOOK_EVERY` seconds.
STOP = "Stop notebook"

__all__ = ["Form", "parameter_form"]


def parameter_form(notebook: Path | str, root: Path | str | None = None) -> Form:
    """Return a form that sets a notebook's parameters and runs the notebook in the background.

    Args:
        notebook: Path of an .ipynb file, relative to the current folder. The path may also be
            relative to the start folder of `labkit lab`.
        root: Folder of all runs. By default, the folder is the one of `labkit lab`, or `runs`
            without `labkit lab`.

    Raises:
        InvalidInput: The notebook is missing, or its parameters cell is not Python.
    """
    runs_folder, path = os.environ.get("LABKIT_RUNS"), Path(notebook)
    # JupyterLab starts a kernel in the folder of its notebook. `labkit lab` may run in another
    # folder.
    if runs_folder and not path.exists() and (Path(runs_folder).parent / path).exists():
        path = Path(runs_folder).parent / path
    return Form(path, Path(root or runs_folder or "runs"))


class Form:
    """Widgets for a notebook's parameters, and buttons that run the notebook.

    Attributes:
        fields: Fields of the form, by parameter name.
        run, stop, report: Buttons that run the notebook, interrupt it, and write a report on its
            runs.
        result: Result of the last job; None before the first job has ended.
    """

    def __init__(self, notebook: Path, root: Path) -> None:
        import ipywidgets

        from labkit.common.widgets import button

        self.notebook, self.root = notebook, root
        self._known = parameters.declared(notebook)
        self.fields = {
            name: Field(parameter, self.check) for name, parameter in self._known.items()
        }
        self.run = button("Run notebook", "Run the notebook in the background", "play", self._start)
        self.stop = button(STOP, "Interrupt the running cell", "stop", self._interrupt)
        self.report = button("Write report", "Report on the runs of this job", "file", self._report)
        self.stop.disabled = self.report.disabled = True
        self._status, self._links = ipywidgets.HTML(), ipywidgets.Output()
        self.result: JobResult | None = None
        self._job: NotebookJob | None = None
        self._thread, self._starting = threading.Thread(), threading.Lock()
        title = ipywidgets.HTML(f"<strong>{escape(notebook.name)}</strong>")
        buttons = ipywidgets.HBox([self.run, self.stop, self.report])
        rows = [field.widget for field in self.fields.values()]
        self.widget = ipywidgets.VBox([title, *rows, buttons, self._status, self._links])
        self.widget.add_class("labkit-form")

    def check(self) -> bool:
        """Validate all fields like `labkit run`, show errors, and return whether all are valid."""
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
                wrong[self._field_of_error(_line(error))] = _line(error)
        for name, field in self.fields.items():
            field.error = wrong.get(name, "")
        return not wrong

    def values(self) -> dict[str, JSON]:
        """Return the values of parameters that differ from the notebook's defaults."""
        changed = {name: field.value for name, field in self.fields.items() if field.is_changed}
        return parameters.known_values(changed)

    def wait(self) -> JobResult | None:
        """Wait until the job has ended, and return its result."""
        self._thread.join()
        return self.result

    def __repr__(self) -> str:
        return f"<Form of {self.notebook.name}: {', '.join(self.fields) or 'no parameters'}>"

    def _repr_mimebundle_(self, *args: JSON, **kwargs: JSON) -> dict[str, JSON]:
        return (self.widget._repr_mimebundle_() or {}) | {"text/plain": repr(self)}

    def _field_of_error(self, message: str) -> str:
        """Return the field that an error names, else the last changed field, else the last one."""
        # An error of `Experiment` begins with the name of the wrong field, as in `workers=3 …`.
        named_fields = [
            name for name in self.fields if message.startswith((f"{name}=", f"{name} "))
        ]
        changed = [name for name, field in self.fields.items() if field.is_changed]
        return (named_fields or changed or list(self.fields))[-1]

    # --- job ---------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._starting:
            # A second click may arrive before the button becomes disabled.
            if self._thread.is_alive():
                return
            if not self.check():
                self._show_status("not started: see the fields above")
                return
            self.run.disabled, self.report.disabled = True, True
            self._links.outputs, self._job = (), None
            self._thread = threading.Thread(target=self._execute, name="labkit-form", daemon=True)
            self._thread.start()

    def _execute(self) -> None:
        self._show_status("checking parameters, and downloading missing data …")
        try:
            values = parameters.validate_values(self.notebook, self.values(), self._known)
            self._job = start(self.notebook, values, self.root, show=False)
            self.stop.disabled = False
            self._follow(self._job)
        # Any error, for example a full disk, interrupts the job. After an error, the form can no
        # longer show the job's progress.
        except Exception as error:
            self._report_failure(error)
        finally:
            self.run.disabled, self.stop.disabled = False, True
            self.stop.description = STOP

    def _report_failure(self, error: Exception) -> None:
        if self._job is None:
            self._show_status(f"not started: {_line(error)}")
        else:
            self._job.interrupt()
            self._show_status(f"interrupted: {_line(error)}")

    def _follow(self, job: NotebookJob) -> None:
        begin = time.monotonic()
        # The loop runs in a thread of the form, because the kernel's main thread must handle
        # clicks.
        while not job.done():
            self._progress(job.path, time.monotonic() - begin)
            time.sleep(LOOK_EVERY)
        self.result = job.result()
        cause = f": {self.result.cause}" if self.result.cause else ""
        self._show_status(f"{self.result.state}{cause}")
        self._link(job.path / "output.ipynb", "the executed notebook")
        self.report.disabled = False

    def _progress(self, job: Path, elapsed: float) -> None:
        from labkit.common.units import duration_text
        from labkit.common.widgets import meter, status

        done, total = _cells(job)
        share = done / total if total else None
        cell = f"cell {min(done + 1, total)} of {total} · {duration_text(elapsed)}"
        text = cell if total else "starting"
        self._status.value = meter(share, "share of completed cells") + status(text)

    def _interrupt(self) -> None:
        if self._job is not None:
            self.stop.description = "Stop at once"  # the next click on "Stop at once" kills the job
            self._job.interrupt()

    def _report(self) -> None:
        from labkit.records.run import load_runs
        from labkit.report import report

        # The assertion is for the type checker, because the button is disabled until a job has run.
        assert self._job is not None
        try:
            runs = load_runs(self._job.path)
            self._link(report(runs, self._job.path / "report.html"), "the report")
        except LabkitError as error:
            self._show_status(f"no report: {_line(error)}")

    def _show_status(self, text: str) -> None:
        from labkit.common.widgets import status

        self._status.value = status(text)

    def _link(self, path: Path, words: str) -> None:
        """Show a link that opens a file in JupyterLab."""
        from IPython.display import HTML

        if path.exists():
            # The link is relative to the current folder. A saved notebook therefore contains no
            # absolute path of this machine.
            place = quote(os.path.relpath(path))
            self._links.append_display_data(HTML(f'<a href="{place}">{escape(words)}</a>'))


def _cells(job: Path) -> tuple[int, int]:
    """Return the numbers of completed code cells and of all code cells in a job's notebook."""
    try:
        cells = read_notebook(job / "output.ipynb")["cells"]
    except FileNotFoundError:  # While the kernel starts, the output notebook is not saved yet.
        return 0, 0
    # papermill saves the notebook every few seconds, so the counts are those of the last save.
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    ended = [c for c in code if c["metadata"].get("papermill", {}).get("status") == "completed"]
    return len(ended), len(code)


def _line(error: Exception) -> str:
    known = isinstance(error, LabkitError)
    text = str(error) if known else scrub(f"{type(error).__name__}: {error}")
    return " ".join(text.split())
